package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/dns/forward"
	"portal/internal/dns/server"
	"portal/internal/dns/zone"
	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/startup"
)

// dnsOptions are the flags of portal dns, as they were given.
type dnsOptions struct {
	kubeconfig, context   string
	listen                []string
	listenTLS, listenHTTP []string
	tlsCert, tlsKey       string
	zones                 []string
	ttl                   int
	pods                  string
	namespaces            []string
	selector, nsSelector  string
	endpointPodNames      bool
	noEndpoints           bool
	ignoreEmpty           bool
	upstreams             []string
	beyond                []string
	autopath              bool
	search                []string
	cacheSize             int
	noPrefetch            bool
	stale                 time.Duration
	allowRecursion        []string
	allowTransfer         []string
	rateLimit             int
	maxUDPSize            int
	maxTCP                int
	sockets               int
	logQueries            bool
	metrics               string
	health, ready         string
	corefile              string
	endpoint              string
	alone                 bool // the process does nothing else
}

func newDNSCommand() *cobra.Command {
	var o dnsOptions
	cmd := &cobra.Command{
		Use:   "dns",
		Short: "Serve the names of Services: a drop-in for CoreDNS' kubernetes plugin",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.flags(cmd)
	return cmd
}

// defaultDNSOptions are what the flags say when none is given.
func defaultDNSOptions() dnsOptions {
	var o dnsOptions
	o.flags(&cobra.Command{})
	return o
}

func (o *dnsOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "the API's kubeconfig; default as for kubectl, or the Pod's own account")
	f.StringVar(&o.context, "context", "", "the context of the kubeconfig")
	f.StringSliceVar(&o.listen, "listen", []string{":53"}, "address:port for UDP and TCP; may be given more than once")
	f.StringSliceVar(&o.listenTLS, "listen-tls", nil, "address:port for DNS over TLS")
	f.StringSliceVar(&o.listenHTTP, "listen-https", nil, "address:port for DNS over HTTPS, at /dns-query")
	f.StringVar(&o.tlsCert, "tls-cert", "", "the certificate for TLS and HTTPS, a PEM file")
	f.StringVar(&o.tlsKey, "tls-key", "", "the certificate's key")
	f.StringSliceVar(&o.zones, "zone", []string{"cluster.local"}, "the cluster's domain; may be given more than once")
	f.IntVar(&o.ttl, "ttl", 30, "seconds that answers about the cluster hold, 0 to 3600")
	f.StringVar(&o.pods, "pods", "insecure", "names of pods' addresses: insecure, verified or disabled")
	f.StringSliceVar(&o.namespaces, "namespaces", nil, "show only these namespaces")
	f.StringVar(&o.selector, "labels", "", "show only Services that match this label selector")
	f.StringVar(&o.nsSelector, "namespace-labels", "", "show only namespaces that match this label selector")
	f.BoolVar(&o.endpointPodNames, "endpoint-pod-names", false, "name endpoints without a hostname after their Pod")
	f.BoolVar(&o.noEndpoints, "no-endpoints", false, "no names of endpoints, and no headless Services")
	f.BoolVar(&o.ignoreEmpty, "ignore-empty-service", false, "deny Services without a ready endpoint")
	f.StringSliceVar(&o.upstreams, "upstream", []string{"/etc/resolv.conf"}, "whom to ask for other names: [udp|tcp|tls://]ADDRESS[:PORT][#NAME], a file like resolv.conf, or none")
	f.StringSliceVar(&o.beyond, "fallthrough", []string{"in-addr.arpa", "ip6.arpa"}, "zones whose missing names are asked for upstream")
	f.BoolVar(&o.autopath, "autopath", false, "answer a Pod's whole search path at its first question; needs --pods verified")
	f.StringSliceVar(&o.search, "search", nil, "further domains of the search path, for --autopath")
	f.IntVar(&o.cacheSize, "cache-size", forward.Defaults().Entries, "answers of upstreams to keep; 0: none")
	f.BoolVar(&o.noPrefetch, "no-prefetch", false, "let popular answers expire before they are asked for again")
	f.DurationVar(&o.stale, "serve-stale", forward.Defaults().Stale, "how long an expired answer may be given while no upstream answers")
	f.StringSliceVar(&o.allowRecursion, "allow-recursion", nil, "prefixes from which other names may be asked for; default: anywhere")
	f.StringSliceVar(&o.allowTransfer, "allow-transfer", nil, "prefixes to which zones may be transferred; default: nowhere")
	f.IntVar(&o.rateLimit, "rate-limit", 0, "like responses a second to a network over UDP; 0: no limit")
	f.IntVar(&o.maxUDPSize, "max-udp-size", 65507, "the longest response over UDP, 512 to 65507")
	f.IntVar(&o.maxTCP, "max-connections", 2000, "connections at a time")
	f.IntVar(&o.sockets, "sockets", 0, "UDP sockets for each address; 0: one a processor")
	f.BoolVar(&o.logQueries, "log-queries", false, "write a line for each answer")
	f.StringVar(&o.metrics, "metrics-bind-address", "127.0.0.1:9153", "address:port of /metrics, /health and /ready; empty: none")
	f.StringVar(&o.health, "health-bind-address", "", "a second address:port of /health")
	f.StringVar(&o.ready, "ready-bind-address", "", "a second address:port of /ready")
	f.StringVar(&o.corefile, "corefile", "", "a Corefile whose kubernetes block, and what is around it, sets what no flag does")
}

// run turns flags into a server and runs it until a signal.
func (o *dnsOptions) run(cmd *cobra.Command) error {
	if o.corefile != "" {
		if err := o.readCorefile(cmd); err != nil {
			return usageError{fmt.Errorf("--corefile: %w", err)}
		}
	}
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
	options, err := o.serverOptions(cmd.OutOrStdout(), log)
	if err != nil {
		return usageError{err}
	}
	config, err := o.config()
	if err != nil {
		return usageError{err}
	}
	// The heap is records that live long, and answers allocate nothing; collecting sooner costs little.
	startup.Collect(20)
	o.alone = true
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return o.serve(ctx, cmd, log, config, options, func() {})
}

// serve runs until the context ends. It calls open when every socket is.
func (o *dnsOptions) serve(ctx context.Context, cmd *cobra.Command, log *slog.Logger, config *rest.Config, options server.Options, open func()) error {
	sources := []intent.Source{intent.Services, intent.EndpointSlices, intent.Namespaces}
	if o.noEndpoints {
		sources = []intent.Source{intent.Services, intent.Namespaces}
	}
	if options.Zone.Pods == zone.PodsVerified {
		sources = append(sources, intent.Pods)
	}
	cluster := intent.NewPackedCluster(sources...)
	s, err := server.New(cluster, options)
	if err != nil {
		return usageError{fmt.Errorf("%w%s", err, portHint(err))}
	}
	w, err := watch.New(cluster, watch.Options{
		Config: config, Sources: sources, ServiceSelector: o.selector, NamespaceSelector: o.nsSelector,
		OnChange: func(st watch.Status) {
			s.APIStatus(st.Source.String(), st.Connected, st.Since)
			if st.Connected {
				log.Info("watching the API", "resource", st.Source.String())
			} else {
				log.Warn("the API is away; serving the last known state", "resource", st.Source.String(), "err", st.Err)
			}
		},
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	status, err := o.status(s, cmd, log)
	if err != nil {
		return err
	}
	open()
	for _, h := range status {
		wg.Go(func() { h.run(ctx) })
	}
	wg.Go(func() { w.Run(ctx) })
	if o.alone {
		wg.Go(func() { trimMemory(ctx, s.Ready); keepTrimmed(ctx) })
	}
	log.Info("serving DNS", "addresses", fmt.Sprint(s.Addrs()), "zones", strings.Join(options.Zone.Zones, " "), "upstreams", strings.Join(o.upstreams, " "))
	return s.Run(ctx)
}

// status opens the listeners of metrics and health. Only a port that was asked for by name must be free.
func (o *dnsOptions) status(s *server.Server, cmd *cobra.Command, log *slog.Logger) ([]*statusServer, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if err := s.Register(registry); err != nil {
		return nil, err
	}
	var out []*statusServer
	for _, a := range []string{o.metrics, o.health, o.ready} {
		if a == "" {
			continue
		}
		h, err := newStatusServer(a, registry, s.Ready)
		if err != nil && a == o.metrics && !cmd.Flags().Changed("metrics-bind-address") {
			log.Warn("no metrics: another program has the port", "address", a)
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, h)
	}
	return out, nil
}

func portHint(err error) string {
	switch {
	case strings.Contains(err.Error(), "permission denied"):
		return " (ports below 1024 need root or CAP_NET_BIND_SERVICE; or choose another with --listen)"
	case strings.Contains(err.Error(), "address already in use"):
		return " (another program has it; choose another with --listen)"
	}
	return ""
}

// serverOptions checks the flags, naming the one that is wrong.
func (o *dnsOptions) serverOptions(stdout io.Writer, log *slog.Logger) (out server.Options, err error) {
	check := func(flag string, e error) {
		if e != nil && err == nil {
			err = fmt.Errorf("--%s: %w", flag, e)
		}
	}
	within := func(flag string, v, least, most int) {
		if v < least || v > most {
			check(flag, fmt.Errorf("%d is not from %d to %d", v, least, most))
		}
	}
	within("ttl", o.ttl, 0, 3600)
	within("max-udp-size", o.maxUDPSize, 512, 65507)
	within("max-connections", o.maxTCP, 1, 1<<20)
	within("rate-limit", o.rateLimit, 0, 1<<20)
	within("sockets", o.sockets, 0, 256)
	within("cache-size", o.cacheSize, 0, 1<<24)
	switch o.pods {
	case "insecure", "verified", "disabled":
	default:
		check("pods", fmt.Errorf("%q is not one of insecure, verified, disabled", o.pods))
	}
	if o.autopath && o.pods != "verified" {
		check("autopath", fmt.Errorf("needs --pods verified, to know the namespace of who asks"))
	}
	out = server.Options{
		Zone: zone.Options{
			Zones: o.zones, TTL: uint32(o.ttl), Pods: zone.PodMode(o.pods), Namespaces: o.namespaces,
			EndpointPodNames: o.endpointPodNames, NoEndpoints: o.noEndpoints, IgnoreEmpty: o.ignoreEmpty,
		},
		Fallthrough: o.beyond, Autopath: o.autopath, Search: o.search, RateLimit: o.rateLimit,
		MaxUDPSize: o.maxUDPSize, MaxTCPConns: o.maxTCP, Sockets: o.sockets, Log: log,
	}
	if len(o.listen) == 0 {
		check("listen", fmt.Errorf("no address"))
	}
	var e error
	out.Listen, e = addrPorts(o.listen)
	check("listen", e)
	out.ListenTLS, e = addrPorts(o.listenTLS)
	check("listen-tls", e)
	out.ListenHTTPS, e = addrPorts(o.listenHTTP)
	check("listen-https", e)
	out.AllowRecursion, e = parsePrefixes(o.allowRecursion)
	check("allow-recursion", e)
	out.AllowTransfer, e = parsePrefixes(o.allowTransfer)
	check("allow-transfer", e)
	if len(o.listenTLS)+len(o.listenHTTP) > 0 {
		pair, e := tls.LoadX509KeyPair(o.tlsCert, o.tlsKey)
		check("tls-cert", e)
		out.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	out.Forward, e = o.forwarder(out.Listen, log)
	check("upstream", e)
	out.Zone.Servers = serverAddrs(out.Listen)
	if o.logQueries {
		out.QueryLog = stdout
	}
	return out, err
}

func (o *dnsOptions) forwarder(listen []netip.AddrPort, log *slog.Logger) (*forward.Forwarder, error) {
	if len(o.upstreams) == 0 || len(o.upstreams) == 1 && o.upstreams[0] == "none" {
		return nil, nil
	}
	f := forward.Defaults()
	f.Entries, f.Stale, f.Prefetch = o.cacheSize, o.stale, !o.noPrefetch
	for _, s := range o.upstreams {
		list, err := forward.ParseUpstream(s)
		if err != nil {
			return nil, err
		}
		for _, u := range list {
			if isOwn(u.Addr, listen) {
				log.Warn("left out an upstream that is this server itself", "address", u.Addr.String())
				continue
			}
			f.Upstreams = append(f.Upstreams, u)
		}
	}
	if len(f.Upstreams) == 0 {
		return nil, fmt.Errorf("no server is left to ask; give one, or none")
	}
	return forward.New(f), nil
}

// isOwn says whether a question to an address would come back to us.
func isOwn(a netip.AddrPort, listen []netip.AddrPort) bool {
	for _, l := range listen {
		if a == l || l.Addr().IsUnspecified() && a.Port() == l.Port() && a.Addr().IsLoopback() {
			return true
		}
	}
	return false
}

// serverAddrs are the addresses under which others know this server.
func serverAddrs(listen []netip.AddrPort) []netip.Addr {
	var out []netip.Addr
	for _, l := range listen {
		if !l.Addr().IsUnspecified() {
			if !l.Addr().IsLoopback() {
				out = append(out, l.Addr())
			}
			continue
		}
		addrs, _ := net.InterfaceAddrs()
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err == nil && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
				out = append(out, p.Addr())
			}
		}
	}
	return out
}

// addrPorts reads address:port, where no address means all.
func addrPorts(list []string) ([]netip.AddrPort, error) {
	var out []netip.AddrPort
	for _, s := range list {
		if strings.HasPrefix(s, ":") {
			s = anyAddress() + s
		}
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			return nil, fmt.Errorf("%q is not ADDRESS:PORT", s)
		}
		out = append(out, a)
	}
	return out, nil
}

// anyAddress is IPv6's wildcard, which takes IPv4 as well, where the kernel has IPv6.
func anyAddress() string {
	if fd, err := syscall.Socket(syscall.AF_INET6, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0); err == nil {
		syscall.Close(fd)
		return "[::]"
	}
	return "0.0.0.0"
}

func parsePrefixes(list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, fmt.Errorf("%q is neither an address nor a prefix", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// config finds the API: an address from a Corefile, or as apiConfig does.
func (o *dnsOptions) config() (*rest.Config, error) {
	if o.endpoint != "" && o.kubeconfig == "" {
		return &rest.Config{Host: o.endpoint}, nil
	}
	return apiConfigFor(o.kubeconfig, o.context)
}

// apiConfig finds the API as kubectl does: a file given, $KUBECONFIG, ~/.kube/config; else a Pod's own account.
func apiConfig(kubeconfig string) (*rest.Config, error) { return apiConfigFor(kubeconfig, "") }

func apiConfigFor(kubeconfig, context string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	if kubeconfig != "" {
		if _, err := os.Stat(kubeconfig); err != nil {
			return nil, fmt.Errorf("--kubeconfig: %w", err)
		}
		rules.ExplicitPath = kubeconfig
	}
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context}).ClientConfig()
	if err != nil {
		if kubeconfig == "" {
			return nil, fmt.Errorf("no API server known: give --kubeconfig, or set KUBECONFIG")
		}
		if clientcmd.IsEmptyConfig(err) {
			err = errors.New("it names no API server: give one's kubeconfig, such as DATA-DIR/admin.kubeconfig of a portal server")
		}
		return nil, fmt.Errorf("--kubeconfig %s: %w", kubeconfig, err)
	}
	if err := usable(config); err != nil {
		return nil, fmt.Errorf("--kubeconfig %s: %w", cmp.Or(kubeconfig, "(as for kubectl)"), err)
	}
	return config, nil
}

// usable says what is wrong with an API server's address or certificates, while it is known where they are from.
func usable(config *rest.Config) error {
	if _, _, err := rest.DefaultServerUrlFor(config); err != nil {
		return err
	}
	_, err := rest.TransportFor(config)
	return err
}
