package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"portal/internal/instance"
	"portal/internal/plan"
	"portal/internal/proxy/conntrack"
)

// partOptions are the flags of the commands that run a proxy, DNS and a load balancer on this machine beside something else: portal up and
// portal node.
type partOptions struct {
	dns               string
	proxy             string
	nodePortAddresses []string
	configureSysctls  bool
	healthz           string
	// Where metrics are served; empty: nowhere.
	proxyMetrics, dnsMetrics string
	conntrack                conntrack.Limits
	balancers                balancerOptions
	report                   bool
	// dnsShare and proxyShare: of so many file descriptors one is for DNS, and for connections to Services in the proxy mode userspace; 0: all are.
	dnsShare, proxyShare int
	// balancing ends when the balancer has ended: it announces nothing any more.
	balancing sync.WaitGroup
}

func (o *partOptions) addFlags(f *pflag.FlagSet, dnsAuto, sysctls string) {
	f.StringVar(&o.dns, "dns", "auto", "ADDRESS:PORT to serve DNS at; none; or auto: "+dnsAuto)
	f.StringVar(&o.proxy, "proxy-mode", "auto", "proxy mode: none, auto, "+strings.Join(proxyModeNames(), ", "))
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", []string{"all"},
		"addresses that node ports are served at: prefixes, primary (the node's own), localhost, all")
	f.BoolVar(&o.configureSysctls, "configure-sysctls", false, sysctls)
	f.StringVar(&o.proxyMetrics, "proxy-metrics-bind-address", "127.0.0.1:10249", "address:port of the proxy's /metrics, /state and /proxyMode; empty: none")
	f.StringVar(&o.dnsMetrics, "dns-metrics-bind-address", "127.0.0.1:9153", "address:port of DNS' /metrics, /health and /ready; empty: none")
	reportFlag(f, &o.report)
	o.balancers.addFlags(f, "load-balancer-", "; without one, no load balancer runs here")
	f.StringVar(&o.balancers.metrics, "load-balancer-metrics-bind-address", "127.0.0.1:10261", "address:port of the load balancer's /metrics, /health and /ready; empty: none")
}

// validate checks the flags before anything is started.
func (o *partOptions) validate() error {
	if o.dns != "auto" && o.dns != "none" {
		if _, err := addrPorts([]string{o.dns}); err != nil {
			return fmt.Errorf("--dns: %w, auto or none", err)
		}
	}
	if o.proxy != "none" && !knownMode(o.proxy) {
		return fmt.Errorf("--proxy-mode: %q is not one of none, auto, %s", o.proxy, strings.Join(proxyModeNames(), ", "))
	}
	if _, err := plan.ParseNodePortAddresses(o.nodePortAddresses); err != nil {
		return fmt.Errorf("--nodeport-addresses: %w", err)
	}
	if _, err := o.balancers.read(); err != nil {
		return err
	}
	if err := o.balancers.mayAnnounce(); err != nil {
		return err
	}
	for _, a := range []struct {
		flag, port string
		address    *string
	}{
		{"proxy-healthz-bind-address", "10256", &o.healthz}, {"proxy-metrics-bind-address", "10249", &o.proxyMetrics},
		{"dns-metrics-bind-address", "9153", &o.dnsMetrics}, {"load-balancer-metrics-bind-address", "10261", &o.balancers.metrics},
	} {
		if err := completeAddress(a.address, a.port); err != nil {
			return fmt.Errorf("--%s: %w", a.flag, err)
		}
	}
	return nil
}

// parts says which parts this process may run: one proxy and one DNS server for each network namespace.
type parts struct {
	locks   []*instance.Lock
	noProxy string // why there is no proxy
	noVIP   string // why DNS can't be where clients expect it
}

func (p *parts) release() {
	for _, l := range p.locks {
		l.Release()
	}
}

// handover is how long to wait for an earlier process that is about to end.
const handover = 5 * time.Second

// reported is the Node that parts report for; empty: they don't.
func (o *partOptions) reported(node string) string {
	if !o.report {
		return ""
	}
	return node
}

// claim decides which parts to run. It fails if one can't run that was asked for by name.
func (o *partOptions) claim(ctx context.Context, waiting func(instance.Holder)) (_ *parts, err error) {
	p := &parts{}
	defer func() {
		if err != nil {
			p.release()
		}
	}()
	rights, deadline := mayAdminister(), time.Now().Add(handover)
	lock := func(name string) error {
		if rights != nil {
			return rights
		}
		l, err := instance.Acquire(ctx, name, time.Until(deadline), waiting)
		if err == nil {
			p.locks = append(p.locks, l)
		}
		return err
	}
	switch o.proxy {
	case "none":
		p.noProxy = "none"
	case "auto":
		err = lock(instance.Proxy)
		if err != nil {
			p.noProxy = "none: " + short(err)
		}
	default:
		if err = lock(instance.Proxy); err != nil {
			return nil, usageError{fmt.Errorf("--proxy-mode %s: %w", o.proxy, err)}
		}
	}
	if o.dns == "auto" {
		if err = lock(instance.DNS); err != nil {
			p.noVIP = short(err)
		}
	}
	return p, ctx.Err()
}

// short says in a few words why a part can't run.
func short(err error) string {
	var held *instance.HeldError
	if errors.As(err, &held) {
		return fmt.Sprintf("%v has it in this network namespace", held.Holder)
	}
	return "needs root"
}

// serveNames serves DNS at addresses, of one device or of any, until the context ends, and reports for a Node if one is named. It calls
// open when it answers.
func (p *partOptions) serveNames(ctx context.Context, cmd *cobra.Command, log *slog.Logger, config *rest.Config, node, zone string, listen []netip.AddrPort, device string, open func()) error {
	o := defaultDNSOptions()
	o.metrics = p.dnsMetrics
	o.listen, o.listenFlag, o.zones, o.node = nil, "dns", []string{zone}, node
	for _, a := range listen {
		o.listen = append(o.listen, a.String())
	}
	options, err := o.serverOptions(cmd.OutOrStdout(), log)
	if err != nil && strings.HasPrefix(err.Error(), "--upstream") { // a machine without a resolver of its own
		o.upstreams = []string{"none"}
		options, err = o.serverOptions(cmd.OutOrStdout(), log)
	}
	if err != nil {
		return err
	}
	options.Device, options.FileShare = device, p.dnsShare
	return o.serve(ctx, cmd, log, config, options, open, func() {})
}
