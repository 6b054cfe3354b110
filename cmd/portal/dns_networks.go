package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/dns/server"
)

// networksInterval is how often the cluster's networks are read again at most.
const networksInterval = time.Minute

// learnNetworks lets this machine's addresses and the cluster's networks use recursion: at start, and again when a client that
// is in none of them was refused. In most clusters they are private networks, which need none of this.
func learnNetworks(ctx context.Context, config *rest.Config, s *server.Server, log *slog.Logger) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		log.Warn("the cluster's networks are not known", "err", err)
		return
	}
	warned := false
	known := networks{}
	for {
		err := known.read(ctx, client)
		if ctx.Err() != nil {
			return
		}
		if err != nil && !warned {
			warned = true
			log.Info("can't read the cluster's networks; Pods and nodes with public addresses need --allow-recursion to resolve other names", "err", err)
		}
		s.AllowClusterNetworks(known.list())
		select {
		case <-ctx.Done():
			return
		case <-time.After(networksInterval):
		}
		select {
		case <-ctx.Done():
			return
		case <-s.RecursionRefused():
		}
	}
}

// networks are the addresses of this machine, the ranges of Services, and the ranges and addresses of nodes.
type networks struct{ local, services, nodes []netip.Prefix }

func (n *networks) list() []netip.Prefix { return slices.Concat(n.local, n.services, n.nodes) }

// read reads them again. What can't be read stays as it was; an API without ServiceCIDRs is no error.
func (n *networks) read(ctx context.Context, client kubernetes.Interface) error {
	add := func(out []netip.Prefix, texts ...string) []netip.Prefix {
		for _, s := range texts {
			if p, err := netip.ParsePrefix(s); err == nil {
				out = append(out, p)
			} else if a, err := netip.ParseAddr(s); err == nil {
				out = append(out, netip.PrefixFrom(a, a.BitLen()))
			}
		}
		return out
	}
	if local, err := net.InterfaceAddrs(); err == nil {
		n.local = nil
		for _, a := range local {
			if a, ok := a.(*net.IPNet); ok {
				n.local = add(n.local, a.IP.String())
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, networksInterval)
	defer cancel()
	cached := metav1.ListOptions{ResourceVersion: "0"}
	var errs []error
	if ranges, err := client.NetworkingV1().ServiceCIDRs().List(ctx, cached); err == nil {
		n.services = nil
		for _, r := range ranges.Items {
			n.services = add(n.services, r.Spec.CIDRs...)
		}
	} else if !apierrors.IsNotFound(err) {
		errs = append(errs, err)
	}
	if nodes, err := client.CoreV1().Nodes().List(ctx, cached); err == nil {
		n.nodes = nil
		for _, o := range nodes.Items {
			n.nodes = add(add(n.nodes, o.Spec.PodCIDRs...), o.Spec.PodCIDR)
			for _, a := range o.Status.Addresses {
				n.nodes = add(n.nodes, a.Address)
			}
		}
	} else {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
