package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/bootstrap"
	"portal/internal/clusterdns"
	"portal/internal/identity"
	"portal/internal/pki"
)

func (l *Lab) startNodes(ctx context.Context) error {
	hash, err := l.authority()
	if err != nil {
		return err
	}
	token, err := bootstrap.NewToken()
	if err != nil {
		return err
	}
	secret := bootstrap.NewSecret(token, bootstrap.Grant{Expires: time.Now().Add(l.StartTimeout), Groups: []string{identity.Node.BootstrapGroup()}, Description: "nodes of the lab " + l.Name})
	if err := l.waitFor(ctx, serverName, func() error {
		_, err := l.API.CoreV1().Secrets(metav1.NamespaceSystem).Create(ctx, secret, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}); err != nil {
		return err
	}
	file := filepath.Join(l.Dir, "token")
	if err := errors.Join(os.WriteFile(file, []byte(token.String()), 0o600), l.allowBalancers(ctx)); err != nil {
		return err
	}
	for i := range l.Nodes {
		name := nodeName(i + 1)
		if err := l.machines[name].run(l.Log(name), l.nodeArgs(name, i, file, hash)...); err != nil {
			return err
		}
	}
	for i := range l.Nodes {
		name := nodeName(i + 1)
		began := time.Now()
		if err := l.waitFor(ctx, name, func() error { return l.nodeReady(ctx, name) }); err != nil {
			return err
		}
		l.Progress(name, time.Since(began))
	}
	if err := l.waitFor(ctx, serverName, func() error { return l.dnsReady(ctx) }); err != nil {
		return err
	}
	return l.routes(ctx)
}

// authority is the hash of the server's CA.
func (l *Lab) authority() (string, error) {
	certs, err := pki.ParseCertificates(l.Config.CAData)
	if err != nil {
		return "", fmt.Errorf("the server's kubeconfig: %w", err)
	}
	return bootstrap.Hash(certs[0]), nil
}

func (l *Lab) nodeArgs(name string, index int, token, hash string) []string {
	var ips []string
	for _, a := range inside.host(firstNodeHost + index + 1) {
		ips = append(ips, a.String())
	}
	args := []string{
		l.Portal, "node", "--server", "https://" + serverAddress(), "--token-file", token, "--ca-hash", hash, "--name", name,
		"--node-ip", strings.Join(ips, ","), "--data-dir", NodeDir(l.Dir, name), "--cgroup-root", cgroupRoot(l.Name) + "/" + name, "--hide", l.Dir,
	}
	if l.ProxyMode != "" {
		args = append(args, "--proxy-mode", l.ProxyMode)
	}
	for _, p := range l.BalancerPools {
		args = append(args, "--load-balancer-pool", p)
	}
	if l.Zones > 0 {
		args = append(args, "--zone", "zone-"+strconv.Itoa(index%l.Zones+1))
	}
	if l.ImageMap != "" {
		path, err := filepath.Abs(l.ImageMap)
		if err != nil {
			path = l.ImageMap
		}
		args = append(args, "--image-map", path)
	}
	return append(args, l.NodeArgs...)
}

func (l *Lab) nodeReady(ctx context.Context, name string) error {
	node, err := l.API.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return nil
		}
	}
	return errors.New("the Node is not ready")
}

// dnsReady: all nodes that serve names are endpoints of kube-dns.
func (l *Lab) dnsReady(ctx context.Context) error {
	if slices.Contains(l.NodeArgs, "--dns=none") {
		return nil
	}
	list, err := l.API.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem).List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + clusterdns.ServiceName})
	if err != nil {
		return err
	}
	served := map[string]bool{}
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			if e.NodeName != nil {
				served[*e.NodeName] = true
			}
		}
	}
	if len(served) < l.Nodes {
		return fmt.Errorf("DNS is served by %v", slices.Sorted(maps.Keys(served)))
	}
	return nil
}

// routes has the server reach Pods, as it would if it were on a node.
func (l *Lab) routes(ctx context.Context) error {
	list, err := l.API.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	return l.Server.in(func(h *netlink.Handle) error {
		for _, node := range list.Items {
			for _, text := range node.Spec.PodCIDRs {
				to, err := netip.ParsePrefix(text)
				if err != nil {
					return err
				}
				for _, a := range node.Status.Addresses {
					via, err := netip.ParseAddr(a.Address)
					if err != nil || via.Is4() != to.Addr().Is4() {
						continue
					}
					if err := route(h, to, via); err != nil {
						return err
					}
				}
			}
		}
		return nil
	})
}
