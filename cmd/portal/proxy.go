package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"

	"portal/internal/hostnet"
	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/plan"
	"portal/internal/proxy"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/conntrack"
	"portal/internal/proxy/foreign"
	"portal/internal/proxy/healthcheck"
	"portal/internal/proxy/ipvs"
	"portal/internal/proxy/userspace"
	"portal/internal/reports"
)

// proxyOptions are the flags of portal proxy, as they were given or a configuration file has them.
type proxyOptions struct {
	config, kubeconfig, master string
	hostname, bindAddress      string
	mode                       string
	clusterCIDR                string
	detectLocal                string
	bridge, interfacePrefix    string
	nodePortAddresses          []string
	masqueradeAll              bool
	masqueradeBit              int
	localhostNodePorts         bool
	proxyName                  string
	minSync                    time.Duration
	modeMinSync                map[string]*time.Duration // by mode
	ipvs                       ipvs.Options
	userspace                  userspace.Options
	metrics, healthz           string
	profiling                  bool
	cleanup, cleanupForeign    bool
	configureSysctls           bool
	sysctls                    hostnet.Configured
	conntrack                  conntrack.Limits
	report                     bool
	join                       joinOptions
	logs                       logOptions
}

func newProxyCommand() *cobra.Command {
	var o proxyOptions
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Lead traffic to Services on this node: a drop-in for kube-proxy",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.flags(cmd)
	return cmd
}

// defaultProxyOptions are what the flags say when none is given.
func defaultProxyOptions() proxyOptions {
	var o proxyOptions
	o.flags(&cobra.Command{})
	return o
}

func (o *proxyOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.config, "config", "", "a KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1) that sets what no flag does")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.master, "master", "", "the API server's URL, instead of the kubeconfig's")
	o.join.addFlags(f, identity.Proxy)
	f.StringVar(&o.hostname, "hostname-override", "", "the name of this machine's Node; default: its host name")
	f.StringVar(&o.bindAddress, "bind-address", "", "the node's primary address, if it is not what the Node object says")
	f.StringVar(&o.mode, "proxy-mode", "auto", "auto, "+strings.Join(proxyModeNames(), ", "))
	f.StringVar(&o.clusterCIDR, "cluster-cidr", "", "the prefixes of Pods' addresses, one of each family: what comes from elsewhere has its source rewritten on the way to cluster IPs")
	f.StringVar(&o.detectLocal, "detect-local-mode", "", "by what Pods' traffic is known: ClusterCIDR (default), NodeCIDR, BridgeInterface, InterfaceNamePrefix")
	f.StringVar(&o.bridge, "pod-bridge-interface", "", "the bridge of this node's Pods, for BridgeInterface")
	f.StringVar(&o.interfacePrefix, "pod-interface-name-prefix", "", "how the names of Pods' interfaces begin, for InterfaceNamePrefix")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, "where node ports are served: prefixes, primary, localhost, all; default: primary in mode nftables, else all")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "rewrite the source of all that goes to cluster IPs")
	f.IntVar(&o.masqueradeBit, "iptables-masquerade-bit", markBit, "the bit of packets' marks that says that the source is to be rewritten")
	f.BoolVar(&o.localhostNodePorts, "iptables-localhost-nodeports", true, "serve node ports on 127.0.0.1, in mode iptables")
	f.StringVar(&o.proxyName, "service-proxy-name", "", "look after Services with this value of the label service.kubernetes.io/service-proxy-name, instead of those without it")
	f.DurationVar(&o.minSync, "min-sync-period", 0, "the least time between two changes of the kernel's tables; 0: at once")
	o.modeMinSync = map[string]*time.Duration{}
	for _, mode := range proxyModeNames() {
		o.modeMinSync[mode] = f.Duration(minSyncFlag(mode), 0, "the same, in mode "+mode)
	}
	f.StringVar(&o.ipvs.Scheduler, "ipvs-scheduler", "rr", "how IPVS chooses among endpoints: rr, wrr, lc, wlc, sh, dh, mh, sed, nq, lblc, lblcr")
	f.BoolVar(&o.ipvs.StrictARP, "ipvs-strict-arp", false, "answer ARP requests for addresses of the interface they come in by only")
	f.DurationVar(&o.ipvs.TCPTimeout, "ipvs-tcp-timeout", 0, "after how long IPVS forgets an idle TCP connection; 0: as it is")
	f.DurationVar(&o.ipvs.TCPFinTimeout, "ipvs-tcpfin-timeout", 0, "the same, after a FIN; 0: as it is")
	f.DurationVar(&o.ipvs.UDPTimeout, "ipvs-udp-timeout", 0, "the same, of UDP; 0: as it is")
	f.Var(&o.userspace.Source, "userspace-client", "what endpoints see of a client in mode userspace: hide (this node's address), preserve (the client's, on this node's endpoints), announce (by the PROXY protocol, version 2)")
	f.StringVar(&o.metrics, "metrics-bind-address", "127.0.0.1:10249", "address:port of /metrics, /state and /proxyMode; empty: none")
	f.StringVar(&o.healthz, "healthz-bind-address", "0.0.0.0:10256", "address:port of /healthz and /livez; empty: none")
	f.BoolVar(&o.profiling, "profiling", false, "serve Go's profiles at /debug/pprof beside the metrics")
	f.BoolVar(&o.cleanup, "cleanup", false, "remove everything that any mode left in the kernel, and exit")
	f.BoolVar(&o.cleanupForeign, "cleanup-foreign", false, "remove everything that kube-proxy left in the kernel, in any of its modes, and exit")
	f.BoolVar(&o.configureSysctls, "configure-sysctls", false, "turn on forwarding and make a strict rp_filter loose where packets to Services are lost otherwise; they stay so when the proxy ends")
	conntrackFlags(f, &o.conntrack)
	reportFlag(f, &o.report)
	o.logs.addFlags(f)
	for name, def := range ignoredProxyFlags {
		f.String(name, def, "accepted for kube-proxy's sake; has no effect")
		_ = f.MarkHidden(name)
	}
}

// markBit is the bit that modes mark packets with unless told otherwise, as kube-proxy does.
const markBit = 14

// ignoredProxyFlags are kube-proxy's that mean nothing here: this proxy follows changes and checks on its own.
var ignoredProxyFlags = map[string]string{
	"iptables-sync-period": "", "ipvs-sync-period": "", "nftables-sync-period": "", "config-sync-period": "", "kube-api-burst": "", "kube-api-qps": "",
	"kube-api-content-type": "", "oom-score-adj": "", "feature-gates": "", "bind-address-hard-fail": "", "logging-format": "",
	"ipvs-exclude-cidrs": "",
}

// fewEndpoints is how many a Service may have to be kept packed: thousands of Services have few, and few have thousands.
const fewEndpoints = 64

// conntrackFlags are about how the kernel tracks flows, for all that runs a proxy.
func conntrackFlags(f *pflag.FlagSet, l *conntrack.Limits) {
	f.IntVar(&l.MaxPerCore, "conntrack-max-per-core", 0, "flows the kernel may track, for each processor; 0: as it is")
	f.IntVar(&l.Min, "conntrack-min", 0, "flows the kernel may track at least, if conntrack-max-per-core is given")
	f.DurationVar(&l.TCPEstablished, "conntrack-tcp-timeout-established", 0, "how long an idle TCP connection is tracked; 0: as it is")
	f.DurationVar(&l.TCPCloseWait, "conntrack-tcp-timeout-close-wait", 0, "how long a half-closed TCP connection is tracked; 0: as it is")
	f.BoolVar(&l.TCPLiberal, "conntrack-tcp-be-liberal", false, "track TCP packets outside the window")
	f.DurationVar(&l.UDP, "conntrack-udp-timeout", 0, "how long an unanswered UDP flow is tracked; 0: as it is")
	f.DurationVar(&l.UDPStream, "conntrack-udp-timeout-stream", 0, "how long an answered UDP flow is tracked; 0: as it is")
}

// run turns flags into a proxy and runs it until a signal.
func (o *proxyOptions) run(cmd *cobra.Command) error {
	if o.config != "" {
		if err := o.readConfig(cmd.Flags()); err != nil {
			return usageError{fmt.Errorf("--config %s: %w", o.config, err)}
		}
	}
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
	if err != nil {
		return usageError{err}
	}
	config, err := o.proxyConfig()
	if err != nil {
		return usageError{err}
	}
	if err := o.join.validate(map[string]string{"kubeconfig": o.kubeconfig, "master": o.master}); err != nil {
		return usageError{err}
	}
	if err := mayAdminister(); err != nil {
		return err
	}
	modes := proxyModes(o)
	if o.cleanup {
		return proxy.Cleanup(cmd.Context(), modes)
	}
	if o.cleanupForeign {
		return cleanupForeign(cmd)
	}
	api, renew, err := o.api(cmd.Context(), log, config.Node)
	if err != nil {
		return err
	}
	lock, err := instance.Acquire(cmd.Context(), instance.Proxy, instance.DefaultPatience, func(h instance.Holder) {
		log.Info("another proxy runs in this network namespace, waiting for it to end", "holder", h.String(), "upTo", instance.DefaultPatience)
	})
	if err != nil {
		return err
	}
	defer lock.Release()
	collectAt(garbage)
	return o.serve(cmd.Context(), log, config, modes, api, func(ctx context.Context, p *proxy.Proxy) {
		var renewing sync.WaitGroup
		defer renewing.Wait()
		renewing.Go(func() { renew(ctx) })
		trimMemory(ctx, p.Synced)
		p.Cluster.Pack(fewEndpoints)
		collectAt(25) // from here on little changes at a time
	})
}

// api is how the API is reached: with a kubeconfig, or by joining. The function keeps the credentials valid until its context
// ends.
func (o *proxyOptions) api(ctx context.Context, log *slog.Logger, node string) (*rest.Config, func(context.Context), error) {
	if o.join.given() {
		return o.join.join(ctx, node, log)
	}
	api, err := apiConfigAt(o.master, o.kubeconfig)
	if err != nil {
		return nil, nil, usageError{orJoin(err)}
	}
	return api, func(context.Context) {}, nil
}

// serve runs the proxy, what it follows and who follows it, and beside it a function that gets to know the proxy.
func (o *proxyOptions) serve(ctx context.Context, log *slog.Logger, config proxy.Config, modes []backend.Mode, api *rest.Config,
	beside func(context.Context, *proxy.Proxy),
) error {
	sources := []intent.Source{intent.Services, intent.EndpointSlices, intent.Nodes, intent.ServiceCIDRs}
	cluster := intent.NewCluster(sources...)
	api, dialed := watch.RememberDialed(api)
	w, err := watch.New(cluster, watch.Options{
		Config: api, Sources: sources, Node: config.Node, ServiceSelector: serviceSelector(config.ProxyName),
		SliceSelector: "!service.kubernetes.io/headless", OnChange: tellAPI(log, api.Host),
	})
	if err != nil {
		return err
	}
	health := &proxy.Health{Node: func() *intent.Node { return cluster.Node(config.Node) }, Listed: cluster.Complete}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	checks := healthcheck.New(log, health.Serving)
	flows := conntrack.New(conntrack.Kernel{}, log, conntrack.Metrics(registry))
	options := proxy.Options{
		Cluster: cluster, Config: config, Modes: modes, Mode: o.mode, Local: hostnet.Interfaces{}, Flows: flows, Checks: checks, Health: health,
		API: dialed, Network: hostnet.Check, Foreign: foreign.Find, Log: log,
	}
	if o.configureSysctls {
		options.Sysctls = &o.sysctls
	}
	p := proxy.New(options)
	if err := p.Register(registry); err != nil {
		return err
	}
	servers, err := o.listen(p, health, registry)
	if err != nil {
		return err
	}
	for _, err := range o.conntrack.Apply() {
		log.Warn("a limit of the kernel's flow tracking could not be set", "err", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, s := range servers {
		wg.Go(func() { _ = s.run(ctx) })
	}
	wg.Go(func() { w.Run(ctx) })
	wg.Go(func() { checks.Run(ctx) })
	wg.Go(func() { flows.Run(ctx) })
	wg.Go(func() { beside(ctx, p) })
	startReport(ctx, o.report, log, api, config.Node, reports.Proxy, proxyReport(p, w), &wg)
	return p.Run(ctx)
}

// cleanupForeign removes kube-proxy's rules and says what they were.
func cleanupForeign(cmd *cobra.Command) error {
	removed, err := foreign.Remove(cmd.Context())
	for _, l := range removed {
		fmt.Fprintf(cmd.OutOrStdout(), "removed %v\n", l)
	}
	if err == nil && len(removed) == 0 {
		fmt.Fprintln(cmd.OutOrStdout(), "kube-proxy left nothing here")
	}
	return err
}

// mayAdminister says, before anything else fails for it, that this takes rights over the network.
func mayAdminister() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err == nil && data[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("the proxy changes this machine's network: run it as root, or with the capability NET_ADMIN")
	}
	return nil
}

// proxyConfig checks the flags, naming the one that is wrong.
func (o *proxyOptions) proxyConfig() (c proxy.Config, err error) {
	check := func(flag string, e error) {
		if e != nil && err == nil {
			err = fmt.Errorf("--%s: %w", flag, e)
		}
	}
	var e error
	if c.Node, e = machineName(o.hostname); e != nil {
		check("hostname-override", e)
	}
	if o.bindAddress != "" {
		c.NodeAddr, e = netip.ParseAddr(o.bindAddress)
		check("bind-address", e)
	}
	if !knownMode(o.mode) {
		check("proxy-mode", fmt.Errorf("%q is not one of auto, %s", o.mode, strings.Join(proxyModeNames(), ", ")))
	}
	c.ClusterCIDRs, e = prefixesOfFamilies(o.clusterCIDR)
	check("cluster-cidr", e)
	c.DetectLocal, e = o.detect()
	check("detect-local-mode", e)
	c.NodePorts, e = plan.ParseNodePortAddresses(o.nodePortAddresses)
	check("nodeport-addresses", e)
	check("ipvs-scheduler", o.ipvs.Validate())
	if o.masqueradeBit < 0 || o.masqueradeBit > 31 {
		check("iptables-masquerade-bit", fmt.Errorf("%d is not from 0 to 31", o.masqueradeBit))
	}
	c.MinSync = map[string]time.Duration{}
	for mode, d := range o.modeMinSync {
		check(minSyncFlag(mode), notNegative(*d))
		c.MinSync[mode] = max(o.minSync, *d)
	}
	check("min-sync-period", notNegative(o.minSync))
	for flag, address := range map[string]*string{"metrics-bind-address": &o.metrics, "healthz-bind-address": &o.healthz} {
		check(flag, completeAddress(address, map[string]string{"metrics-bind-address": "10249", "healthz-bind-address": "10256"}[flag]))
	}
	c.Bridge, c.InterfacePrefix, c.MasqueradeAll = o.bridge, o.interfacePrefix, o.masqueradeAll
	c.LocalhostNodePorts, c.ProxyName, c.Families = o.localhostNodePorts, o.proxyName, kernelFamilies()
	return c, err
}

// minSyncFlag is the name of a mode's own --min-sync-period.
func minSyncFlag(mode string) string { return mode + "-min-sync-period" }

func notNegative(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("%v is less than nothing", d)
	}
	return nil
}

func (o *proxyOptions) detect() (proxy.DetectLocal, error) {
	switch mode := proxy.DetectLocal(o.detectLocal); mode {
	case "", proxy.DetectClusterCIDR:
		return proxy.DetectClusterCIDR, nil
	case proxy.DetectNodeCIDR:
		return mode, nil
	case proxy.DetectBridgeInterface:
		if o.bridge == "" {
			return mode, errors.New("BridgeInterface needs --pod-bridge-interface")
		}
		return mode, nil
	case proxy.DetectInterfacePrefix:
		if o.interfacePrefix == "" {
			return mode, errors.New("InterfaceNamePrefix needs --pod-interface-name-prefix")
		}
		return mode, nil
	}
	return "", fmt.Errorf("%q is not one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix", o.detectLocal)
}

// prefixesOfFamilies reads at most one prefix of each family, separated by a comma.
func prefixesOfFamilies(s string) ([]netip.Prefix, error) {
	if s == "" {
		return nil, nil
	}
	out, err := parsePrefixes(strings.Split(s, ","))
	if err != nil {
		return nil, err
	}
	if len(out) > 2 || len(out) == 2 && out[0].Addr().Is4() == out[1].Addr().Is4() {
		return nil, fmt.Errorf("%q has more than one prefix of a family", s)
	}
	return out, nil
}

// completeAddress adds a missing port, as kube-proxy does.
func completeAddress(address *string, port string) error {
	if *address == "" {
		return nil
	}
	if a, err := netip.ParseAddr(strings.Trim(*address, "[]")); err == nil {
		*address = net.JoinHostPort(a.String(), port)
	}
	list, err := addrPorts([]string{*address})
	if err == nil {
		*address = list[0].String()
	}
	return err
}

// kernelFamilies are the families that this machine's kernel has turned on.
func kernelFamilies() []intent.Family {
	out := []intent.Family{intent.IPv4}
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		return out
	}
	if off, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6"); err == nil && strings.TrimSpace(string(off)) == "1" {
		return out
	}
	return append(out, intent.IPv6)
}

// proxyPortHint says what to do about an address that can't be listened at.
func proxyPortHint(flag string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%w: another program has it, perhaps a kube-proxy; end it, or choose another with --%s", err, flag)
	}
	return fmt.Errorf("%w: choose another with --%s", err, flag)
}
