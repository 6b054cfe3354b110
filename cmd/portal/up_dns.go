package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/identity"
	"portal/internal/server"
	"portal/internal/up"
)

const (
	// fallbackDNS is where DNS listens if no addresses can be added to this machine.
	fallbackDNS = "127.0.0.1:10053"
	upZone      = "cluster.local"
)

// upDNS is the DNS server of `portal up`.
type upDNS struct {
	listen []netip.AddrPort
	// virtual are the cluster IPs that clients use; empty if they use the addresses of listen.
	virtual []netip.Addr
	// endpoints are the addresses behind the cluster IPs that the proxy forwards to; empty without a proxy.
	endpoints []netip.Addr
	remove    func() error // the temporary addresses of lo
	temporary bool         // there are some
	// resolvConf is a file that programs can use in place of /etc/resolv.conf; empty if the port is not 53.
	resolvConf string
	note       string
	serve      func(ctx context.Context, cmd *cobra.Command, log *slog.Logger, config *rest.Config, node, zone string, listen []netip.AddrPort, device string, open func()) error
	// keep reconciles kube-dns until its context ends.
	keep func(context.Context)
}

// findDNS is about the server that the node runs where its Pods reach it: it creates the kube-dns Service, and the controllers make the
// node an endpoint.
func findDNS(ctx context.Context, info server.Info) (*upDNS, error) {
	client, err := kubernetes.NewForConfig(info.As(identity.Up))
	if err != nil {
		return nil, err
	}
	ranges, err := serviceRanges(ctx, client)
	if err != nil {
		return nil, err
	}
	d := &upDNS{}
	if d.virtual, err = up.KubeDNS(ctx, client, ranges); err != nil {
		return nil, err
	}
	// An earlier run without Pods may have left some of its own.
	if err := up.DNSEndpoints(ctx, client, nil); err != nil {
		return nil, err
	}
	return d, d.writeResolvConf(info.DataDir, d.virtual)
}

func (d *upDNS) writeResolvConf(dir string, servers []netip.Addr) error {
	d.resolvConf = filepath.Join(dir, "resolv.conf")
	return writeChanged(d.resolvConf, up.ResolvConf(servers, metav1.NamespaceDefault, upZone))
}

// prepareDNS creates the kube-dns Service and decides where to listen: where the flag says; or at the Service's cluster IPs,
// added to lo; or, if those can't be had for the reason in noVIP, on loopback. A proxy needs endpoints to forward to, which
// can't be cluster IPs: for these, more addresses are added to lo.
func (o *upOptions) prepareDNS(ctx context.Context, info server.Info, noVIP string, proxied bool) (*upDNS, error) {
	client, err := kubernetes.NewForConfig(info.As(identity.Up))
	if err != nil {
		return nil, err
	}
	ranges, err := serviceRanges(ctx, client)
	if err != nil {
		return nil, err
	}
	virtual, err := up.KubeDNS(ctx, client, ranges)
	if err != nil {
		return nil, err
	}
	d := &upDNS{remove: func() error { return nil }, serve: o.parts.serveNames}
	switch {
	case o.parts.dns != "auto":
		d.listen, err = addrPorts([]string{o.parts.dns})
	case noVIP != "":
		d.listen = []netip.AddrPort{netip.MustParseAddrPort(fallbackDNS)}
		d.note = fmt.Sprintf("instead of %s: %s", virtual[0], noVIP)
	default:
		d.virtual, d.temporary = virtual, true
		if proxied {
			d.endpoints = up.EndpointAddrs(virtual)
		}
		addrs := slices.Concat(d.endpoints, virtual)
		if d.remove, err = up.AddAddresses(addrs); err != nil {
			return nil, err
		}
		for _, a := range addrs {
			d.listen = append(d.listen, netip.AddrPortFrom(a, 53))
		}
	}
	if err == nil {
		err = up.DNSEndpoints(ctx, client, d.endpoints)
	}
	if err == nil && d.listen[0].Port() == 53 {
		servers := d.virtual
		if servers == nil {
			servers = []netip.Addr{d.listen[0].Addr()}
		}
		err = d.writeResolvConf(info.DataDir, servers)
	}
	if err != nil {
		return nil, errors.Join(err, d.remove())
	}
	d.keep = func(ctx context.Context) { up.KeepDNS(ctx, client, virtual, d.endpoints) }
	return d, nil
}

// serviceRanges are the cluster's own: those of the default ServiceCIDR.
func serviceRanges(ctx context.Context, client kubernetes.Interface) ([]netip.Prefix, error) {
	cidr, err := client.NetworkingV1().ServiceCIDRs().Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, text := range cidr.Spec.CIDRs {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// run serves until the context ends, and then removes the temporary addresses. It calls open when it listens.
func (d *upDNS) run(ctx context.Context, cmd *cobra.Command, log *slog.Logger, config *rest.Config, node string, open func()) (err error) {
	defer func() {
		if e := d.remove(); err == nil {
			err = e
		}
	}()
	ctx, stop := context.WithCancel(ctx)
	var keeping sync.WaitGroup
	defer keeping.Wait()
	defer stop()
	keeping.Go(func() { d.keep(ctx) })
	device := ""
	if d.temporary {
		device = "lo"
	}
	return d.serve(ctx, cmd, log, config, node, upZone, d.listen, device, open)
}

// String is where clients find it.
func (d *upDNS) String() string {
	var at []string
	for _, a := range d.virtual {
		at = append(at, a.String())
	}
	if len(at) == 0 && len(d.listen) > 0 {
		at = []string{d.listen[0].String()}
	}
	where := strings.Join(at, ", ")
	if d.note != "" {
		where += " (" + d.note + ")"
	}
	return where
}
