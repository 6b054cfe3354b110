package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/server"
	"portal/internal/up"
)

const (
	// fallbackDNS is where DNS listens for those who may not lend addresses to the machine.
	fallbackDNS = "127.0.0.1:10053"
	upZone      = "cluster.local"
)

// upDNS is the DNS server of `portal up`.
type upDNS struct {
	listen []netip.AddrPort
	// at are the addresses that clients use; none: those of listen.
	at       []netip.Addr
	lent     []netip.Addr
	takeBack func() error
	// resolvConf is a file that programs can use in place of /etc/resolv.conf; empty where the port is not 53.
	resolvConf string
	note       string
}

// prepareDNS makes the kube-dns Service and decides where to listen: where the flag says; or at the Service's own
// addresses, lent to lo; or on loopback where that is not allowed. Where a proxy leads traffic it needs an endpoint to lead
// it to, which can't be a cluster IP: then further addresses are lent for that.
func (o *upOptions) prepareDNS(ctx context.Context, config *rest.Config, info server.Info, led bool) (*upDNS, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	ranges, err := serviceRanges(ctx, client)
	if err != nil {
		return nil, err
	}
	virtual, err := up.KubeDNS(ctx, client, ranges, 53)
	if err != nil {
		return nil, err
	}
	d := &upDNS{at: virtual, takeBack: func() error { return nil }}
	var endpoints []netip.Addr
	switch {
	case o.dns != "auto":
		d.listen, err = addrPorts([]string{o.dns})
		d.at = nil
	case up.CanLend():
		if led {
			endpoints = up.EndpointAddrs(virtual)
		}
		d.lent = append(endpoints, virtual...)
		if d.takeBack, err = up.Lend(d.lent); err != nil {
			return nil, err
		}
		for _, a := range d.lent {
			d.listen = append(d.listen, netip.AddrPortFrom(a, 53))
		}
	default:
		d.listen = []netip.AddrPort{netip.MustParseAddrPort(fallbackDNS)}
		d.note, d.at = "without root, at loopback instead of "+virtual[0].String(), nil
	}
	if err == nil {
		err = up.DNSEndpoints(ctx, client, endpoints, 53)
	}
	if err != nil {
		return nil, errors.Join(err, d.takeBack())
	}
	if d.listen[0].Port() == 53 {
		servers := d.at
		if servers == nil {
			servers = []netip.Addr{d.listen[0].Addr()}
		}
		d.resolvConf = filepath.Join(info.DataDir, "resolv.conf")
		err = os.WriteFile(d.resolvConf, []byte(up.ResolvConf(servers, metav1.NamespaceDefault, upZone)), 0o644)
	}
	return d, err
}

// serviceRanges are those that the cluster was made with.
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

// run serves until the context ends, and then gives back what was lent. It calls open when it listens.
func (d *upDNS) run(ctx context.Context, cmd *cobra.Command, config *rest.Config, open func()) (err error) {
	defer func() {
		if e := d.takeBack(); err == nil {
			err = e
		}
	}()
	o := defaultDNSOptions()
	o.listen = nil
	for _, a := range d.listen {
		o.listen = append(o.listen, a.String())
	}
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	options, err := o.serverOptions(cmd.OutOrStdout(), log)
	if err != nil && strings.HasPrefix(err.Error(), "--upstream") { // a machine without a resolver of its own
		o.upstreams = []string{"none"}
		options, err = o.serverOptions(cmd.OutOrStdout(), log)
	}
	if err != nil {
		return err
	}
	if len(d.lent) > 0 {
		options.Device = "lo"
	}
	return o.serve(ctx, cmd, log, config, options, open)
}

// lines are what a person should know about it.
func (d *upDNS) lines() (where, try string) {
	var at []string
	for _, a := range d.at {
		at = append(at, a.String())
	}
	if len(at) == 0 {
		at = []string{d.listen[0].String()}
	}
	where = strings.Join(at, ", ")
	if d.note != "" {
		where += " (" + d.note + ")"
	}
	if d.resolvConf == "" {
		a := d.listen[0]
		return where, fmt.Sprintf("  dig @%s -p %d kubernetes.default.svc.%s\n", a.Addr(), a.Port(), upZone)
	}
	return where, fmt.Sprintf("  sudo unshare --mount sh -c 'mount --bind %s /etc/resolv.conf && exec \"${SHELL:-sh}\"'   # a shell that uses it\n", d.resolvConf)
}
