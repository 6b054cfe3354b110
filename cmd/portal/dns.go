package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"portal/internal/dns/corefile"
	"portal/internal/dns/forward"
	"portal/internal/dns/server"
	"portal/internal/dns/zone"
	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/reports"
)

// dnsOptions are the flags of portal dns, as they were given.
type dnsOptions struct {
	kubeconfig, context   string
	listen                []string
	listenFlag            string // by which the addresses were chosen
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
	fallthroughs          []string
	autopath              bool
	search                []string
	cacheSize             int
	noPrefetch            bool
	stale                 time.Duration
	allowRecursion        []string
	reverse               []string           // zones of addresses, of a Corefile; nil: all
	forwards              []corefile.Forward // of a Corefile, in place of upstreams
	refused               []string           // zones of a Corefile
	hosts                 []corefile.Hosts
	maxWaiting            int
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
	hostname              string
	report                bool
	node                  string // the Node that is reported for; empty: none
	join                  joinOptions
	logs                  logOptions
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
	o.listenFlag = "listen"
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.context, "context", "", "context of the kubeconfig")
	o.join.addFlags(f, identity.DNS)
	f.StringVar(&o.hostname, "hostname-override", "", "the name of this machine's Node, for its report and its certificate; default: its host name")
	f.StringSliceVar(&o.listen, "listen", []string{":53"}, "address:port to serve UDP and TCP on; may be repeated")
	f.StringSliceVar(&o.listenTLS, "listen-tls", nil, "address:port to serve DNS over TLS on")
	f.StringSliceVar(&o.listenHTTP, "listen-https", nil, "address:port to serve DNS over HTTPS on, at /dns-query")
	f.StringVar(&o.tlsCert, "tls-cert", "", "PEM file of the certificate for TLS and HTTPS")
	f.StringVar(&o.tlsKey, "tls-key", "", "PEM file of the certificate's key")
	f.StringSliceVar(&o.zones, "zone", []string{"cluster.local"}, "domain of the cluster; may be repeated")
	f.IntVar(&o.ttl, "ttl", 30, "TTL of the cluster's records in seconds, 0 to 3600")
	f.StringVar(&o.pods, "pods", "insecure", "names made of Pods' addresses: insecure, verified or disabled")
	f.StringSliceVar(&o.namespaces, "namespaces", nil, "serve only these namespaces")
	f.StringVar(&o.selector, "labels", "", "serve only Services that match this label selector")
	f.StringVar(&o.nsSelector, "namespace-labels", "", "serve only namespaces that match this label selector")
	f.BoolVar(&o.endpointPodNames, "endpoint-pod-names", false, "name endpoints without a hostname after their Pod")
	f.BoolVar(&o.noEndpoints, "no-endpoints", false, "serve no names of endpoints, and no headless Services")
	f.BoolVar(&o.ignoreEmpty, "ignore-empty-service", false, "serve no names of Services without a ready endpoint")
	f.StringSliceVar(&o.upstreams, "upstream", []string{"/etc/resolv.conf"}, "servers to forward other names to: [udp|tcp|tls://]ADDRESS[:PORT][#NAME], a file like resolv.conf, or none")
	f.StringSliceVar(&o.fallthroughs, "fallthrough", []string{"in-addr.arpa", "ip6.arpa"}, "zones whose missing names are forwarded")
	f.BoolVar(&o.autopath, "autopath", false, "resolve a Pod's whole search path at its first query; needs --pods verified")
	f.StringSliceVar(&o.search, "search", nil, "further domains of the search path, for --autopath")
	f.IntVar(&o.cacheSize, "cache-size", forward.Defaults().Entries, "entries of the cache of forwarded names; 0: no cache")
	f.BoolVar(&o.noPrefetch, "no-prefetch", false, "do not refresh popular entries of the cache before they expire")
	f.DurationVar(&o.stale, "serve-stale", forward.Defaults().Stale, "how long expired entries of the cache may be served while no upstream responds")
	f.StringSliceVar(&o.allowRecursion, "allow-recursion", []string{"private"}, "networks whose clients may resolve other names: prefixes, private (this machine, private networks and the cluster's), or any")
	f.StringSliceVar(&o.allowTransfer, "allow-transfer", nil, "networks that may transfer zones; default: none")
	f.IntVar(&o.rateLimit, "rate-limit", 0, "identical responses a second to a network over UDP; 0: no limit")
	f.IntVar(&o.maxUDPSize, "max-udp-size", 0, "longest response over UDP in bytes, 512 to 65507 (default: 1232, and on loopback what the client accepts)")
	f.IntVar(&o.maxTCP, "max-connections", 2000, "most TCP and TLS connections at a time")
	f.IntVar(&o.sockets, "sockets", 0, "UDP sockets for each address; 0: one for each processor, and at least 8")
	f.BoolVar(&o.logQueries, "log-queries", false, "write a line for each response")
	f.StringVar(&o.metrics, "metrics-bind-address", "127.0.0.1:9153", "address:port to serve /metrics, /health and /ready on; empty: none")
	f.StringVar(&o.health, "health-bind-address", "", "second address:port to serve /health on")
	f.StringVar(&o.ready, "ready-bind-address", "", "second address:port to serve /ready on")
	reportFlag(f, &o.report)
	o.logs.addFlags(f)
	f.StringVar(&o.corefile, "corefile", "", "Corefile to take settings from that no flag gives")
}

// run turns flags into a server and runs it until a signal.
func (o *dnsOptions) run(cmd *cobra.Command) error {
	if o.corefile != "" {
		if err := o.readCorefile(cmd); err != nil {
			return usageError{fmt.Errorf("--corefile: %w", err)}
		}
	}
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
	if err != nil {
		return usageError{err}
	}
	options, err := o.serverOptions(cmd.OutOrStdout(), log)
	if err != nil {
		return usageError{err}
	}
	if err := o.join.validate(map[string]string{"kubeconfig": o.kubeconfig, "context": o.context}); err != nil {
		return usageError{err}
	}
	if o.report {
		if o.node, err = machineName(o.hostname); err != nil {
			return usageError{fmt.Errorf("--hostname-override: %w", err)}
		}
	}
	collectAt(garbage)
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	config, renew, err := o.config(ctx, log)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var renewing sync.WaitGroup
	defer renewing.Wait()
	defer cancel()
	renewing.Go(func() { renew(ctx) })
	return o.serve(ctx, cmd, log, config, options, func() {}, func() {
		collectAt(25) // from here on little changes at a time, and answers allocate nothing
	})
}

// serve runs until the context ends. It calls open when it answers, and listed when the first lists are in and their garbage is gone.
func (o *dnsOptions) serve(ctx context.Context, cmd *cobra.Command, log *slog.Logger, config *rest.Config, options server.Options, open, listed func()) error {
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
		return usageError{fmt.Errorf("%w%s", err, portHint(err, o.listenFlag, slices.Concat(options.Listen, options.ListenTLS, options.ListenHTTPS)))}
	}
	w, err := watch.New(cluster, watch.Options{
		Config: config, Sources: sources, ServiceSelector: o.selector, NamespaceSelector: o.nsSelector,
		OnChange: func(st watch.Status) {
			s.APIStatus(st.Source.String(), st.Connected, st.Since)
			switch {
			case st.Connected:
				log.Info("watching the API", "resource", st.Source.String())
			case st.Listed:
				log.Warn("watch failed, serving the last known state", "resource", st.Source.String(), "err", st.Err)
			default:
				log.Warn("list failed, retrying", "resource", st.Source.String(), "err", st.Err)
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
	// open is called when names resolve, or after a while when the server only listens.
	wg.Go(func() {
		for end := time.Now().Add(5 * time.Second); !s.Ready() && time.Now().Before(end) && wait(ctx, 10*time.Millisecond); {
		}
		open()
	})
	for _, h := range status {
		wg.Go(func() { h.run(ctx) })
	}
	wg.Go(func() { w.Run(ctx) })
	startReport(ctx, o.node != "", log, config, o.node, reports.DNS, followerReport(s.Ready, strings.Join(options.Zone.Zones, " "), w.Revision), &wg)
	if options.AllowPrivate && (options.Forward != nil || len(options.Stubs) > 0) {
		wg.Go(func() { learnNetworks(ctx, config, s, log) })
	}
	wg.Go(func() {
		trimMemory(ctx, s.Ready)
		listed()
	})
	log.Info("serving DNS", "addresses", fmt.Sprint(s.Addrs()), "zones", strings.Join(options.Zone.Zones, " "), "forwarding", o.forwardingText(), "recursion", strings.Join(o.allowRecursion, " "))
	return s.Run(ctx)
}

// status opens the listeners of metrics and health. The default port of metrics may be taken; one given by flag may not.
func (o *dnsOptions) status(s *server.Server, cmd *cobra.Command, log *slog.Logger) ([]*statusServer, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if err := s.Register(registry); err != nil {
		return nil, err
	}
	var out []*statusServer
	for i, a := range []string{o.metrics, o.health, o.ready} {
		if a == "" {
			continue
		}
		h, err := newStatusServer(a, registry, s.Ready)
		if err != nil && i == 0 && !cmd.Flags().Changed("metrics-bind-address") {
			log.Warn("metrics not served: the port is in use", "address", a)
			continue
		}
		if err != nil {
			for _, h := range out {
				h.l.Close()
			}
			return nil, usageError{fmt.Errorf("--%s: %w", [...]string{"metrics-bind-address", "health-bind-address", "ready-bind-address"}[i], err)}
		}
		out = append(out, h)
	}
	return out, nil
}

// portHint says what to do about an address that can't be listened at.
func portHint(err error, flag string, listen []netip.AddrPort) string {
	switch {
	case strings.Contains(err.Error(), "permission denied"):
		return " (ports below 1024 need root or CAP_NET_BIND_SERVICE; or choose another with --" + flag + ")"
	case errors.Is(err, syscall.EADDRINUSE):
		who := "another program has it"
		for _, a := range listen {
			if h, found := instance.ListenerAt(a.String()); found {
				who = h.String() + " has it"
			}
		}
		return " (" + who + "; choose another with --" + flag + ")"
	}
	return ""
}

// config finds the API: by joining, at an address from a Corefile, or as all commands do. The function keeps the credentials
// valid until its context ends.
func (o *dnsOptions) config(ctx context.Context, log *slog.Logger) (*rest.Config, func(context.Context), error) {
	if o.join.given() {
		machine, err := machineName(o.hostname)
		if err != nil {
			return nil, nil, usageError{fmt.Errorf("--hostname-override: %w", err)}
		}
		return o.join.join(ctx, machine, log)
	}
	forever := func(context.Context) {}
	if o.endpoint != "" && o.kubeconfig == "" {
		return &rest.Config{Host: o.endpoint}, forever, nil
	}
	config, err := apiConfigFor(o.kubeconfig, o.context)
	if err != nil {
		return nil, nil, usageError{orJoin(err)}
	}
	return config, forever, nil
}
