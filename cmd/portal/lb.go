package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/rest"

	"portal/internal/controllers"
	"portal/internal/identity"
	"portal/internal/instance"
	"portal/internal/lb"
	"portal/internal/lb/announce"
	"portal/internal/lb/bgp"
	"portal/internal/lb/controller"
	"portal/internal/lb/pool"
	"portal/internal/reports"
)

// lbOptions are the flags of `portal lb`.
type lbOptions struct {
	kubeconfig, context string
	hostname            string
	balancers           balancerOptions
	report              bool
	class               string
	onlyClass           bool
	leases              string
	cleanup             bool
	join                joinOptions
	logs                logOptions
}

// balancerOptions are the flags of all commands that run a load balancer; prefix is what their names begin with.
type balancerOptions struct {
	prefix     string
	pools      []string
	announce   []string
	interfaces []string
	balancingOptions
	peers    []string
	onStop   string
	l2OnStop string
	// metrics is where metrics are served; empty: nowhere.
	metrics string
}

const (
	announceL2   = "l2"
	announceBGP  = "bgp"
	announceNone = "none"

	onStopWithdraw = "withdraw"
	onStopKeep     = "keep"
	onStopRelease  = "release"

	// balancerRetry is how long a balancer beside other parts stays down after it failed.
	balancerRetry = 5 * time.Second
)

func (o *balancerOptions) addFlags(f *pflag.FlagSet, prefix, without string) {
	o.prefix = prefix
	f.StringArrayVar(&o.pools, prefix+"pool", nil, "addresses for Services of type LoadBalancer: [NAME=]RANGE,…[;internal][;manual][;namespaces=A,…][;namespace-selector=S][;service-selector=S], "+
		"where a RANGE is an address, a prefix or FIRST-LAST; may be repeated"+without)
	f.StringSliceVar(&o.announce, prefix+"announce", []string{announceL2}, "how packets to these addresses come to this machine: l2 (it answers ARP and neighbour discovery for those that are its own), "+
		"bgp (it announces those that it may serve to routers), l2,bgp or none")
	f.StringSliceVar(&o.interfaces, prefix+"interface", nil, "interfaces to announce addresses on; default: those of the address's network, or of the default route")
	o.balancingOptions.addFlags(f, prefix)
	f.StringArrayVar(&o.peers, prefix+"bgp-peer", nil, "a router to announce addresses to by BGP: ADDRESS[;as=N][;local-as=N][;port=N][;password-file=FILE][;multihop=N][;node-selector=S]"+
		"[;hold-time=9s][;source=ADDRESS][;graceful-restart=120s][;bfd[=300ms]]; may be repeated; more are in the ConfigMap "+lb.Namespace+"/"+lb.PoolsName)
	f.StringVar(&o.onStop, prefix+"bgp-on-stop", onStopWithdraw, "what becomes of routes at routers when this process is stopped: withdraw; or keep: they stay until graceful-restart ends, for a process that follows")
	f.StringVar(&o.l2OnStop, prefix+"l2-on-stop", onStopKeep, "what becomes of addresses that this machine answers for when this process is stopped: keep (they stay for "+stopGrace.String()+" for a process that follows here, unless the machine "+
		"shuts down or its Node is cordoned) or release (other nodes take over at once)")
}

// announces says whether addresses are announced in a way.
func (o *balancerOptions) announces(way string) bool { return slices.Contains(o.announce, way) }

// balances says whether this machine ends connections.
func (o *balancerOptions) balances() bool { return o.on(!o.announces(announceNone)) }

// read checks the flags, naming the one that is wrong.
func (o *balancerOptions) read() (pool.Set, error) {
	if _, err := o.readPeers(); err != nil {
		return nil, err
	}
	var set pool.Set
	for _, text := range o.pools {
		p, err := pool.ParseFlag(text)
		if err != nil {
			return nil, fmt.Errorf("--%spool %q: %w", o.prefix, text, err)
		}
		set = append(set, p)
	}
	if err := set.Validate(); err != nil {
		return nil, fmt.Errorf("--%spool: %w", o.prefix, err)
	}
	for _, way := range o.announce {
		if way != announceL2 && way != announceBGP && way != announceNone {
			return nil, fmt.Errorf("--%sannounce: %q is not one of l2, bgp, none", o.prefix, way)
		}
	}
	switch {
	case len(o.announce) == 0 || o.announces(announceNone) && len(o.announce) > 1:
		return nil, fmt.Errorf("--%sannounce: %q is not one of l2, bgp, l2,bgp, none", o.prefix, strings.Join(o.announce, ","))
	case !o.announces(announceL2) && len(o.interfaces) > 0:
		return nil, fmt.Errorf("--%sinterface: needs --%sannounce l2", o.prefix, o.prefix)
	case !o.announces(announceBGP) && len(o.peers) > 0:
		return nil, fmt.Errorf("--%sbgp-peer: needs --%sannounce bgp", o.prefix, o.prefix)
	case o.l2OnStop != onStopKeep && o.l2OnStop != onStopRelease:
		return nil, fmt.Errorf("--%sl2-on-stop: %q is not one of keep, release", o.prefix, o.l2OnStop)
	case o.onStop != onStopWithdraw && o.onStop != onStopKeep:
		return nil, fmt.Errorf("--%sbgp-on-stop: %q is not one of withdraw, keep", o.prefix, o.onStop)
	}
	return set, o.validate(o.prefix)
}

// readPeers checks the flags of BGP.
func (o *balancerOptions) readPeers() (out []bgp.Peer, err error) {
	for _, text := range o.peers {
		p, err := bgp.ParseFlag(text)
		if err != nil {
			return nil, fmt.Errorf("--%sbgp-peer %q: %w", o.prefix, text, err)
		}
		out = append(out, p)
	}
	if err := bgp.Validate(out); err != nil {
		return nil, fmt.Errorf("--%sbgp-peer: %w", o.prefix, err)
	}
	return out, nil
}

func newLBCommand() *cobra.Command {
	var o lbOptions
	cmd := &cobra.Command{
		Use:   "lb",
		Short: "Give Services of type LoadBalancer an address, and announce it to the network",
		Long: `Give Services of type LoadBalancer addresses from pools, and announce these on the network. Run it on every node that a proxy
(portal proxy or kube-proxy) runs on: one of them, the leader, gives addresses. For each address one of them answers, or, by BGP, all that may
serve it announce it to routers.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.context, "context", "", "context of the kubeconfig")
	o.join.addFlags(f, identity.LB)
	f.StringVar(&o.hostname, "hostname-override", "", "the name of this machine's Node; default: its host name")
	o.balancers.addFlags(f, "", "; more are in the ConfigMap "+lb.Namespace+"/"+lb.PoolsName)
	f.StringVar(&o.class, "load-balancer-class", controller.DefaultClass, "spec.loadBalancerClass of the Services to serve")
	f.BoolVar(&o.onlyClass, "only-class", false, "leave Services without a class to others")
	f.StringVar(&o.leases, "lease-namespace", lb.Namespace, "namespace of the Leases by which processes elect a leader and see each other; all processes need the same")
	f.StringVar(&o.balancers.metrics, "metrics-bind-address", "127.0.0.1:10261", "address:port of /metrics, /health and /ready; empty: none")
	f.StringVar(&o.balancers.dir, "run-dir", "", "folder of the balancing process (default: "+o.balancers.folder()+")")
	reportFlag(f, &o.report)
	f.BoolVar(&o.cleanup, "cleanup", false, "remove what leads packets to the balancing process on this machine, stop that process, and exit")
	o.logs.addFlags(f)
	cmd.AddCommand(newLBPoliciesCommand(), newLBWorkerCommand(), newLBStandInCommand())
	return cmd
}

func (o *lbOptions) run(cmd *cobra.Command) error {
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
	if err != nil {
		return usageError{err}
	}
	if o.cleanup {
		return o.balancers.cleanUp(cmd.Context(), log)
	}
	options, err := o.options(log)
	if err != nil {
		return usageError{err}
	}
	if err := o.join.validate(map[string]string{"kubeconfig": o.kubeconfig, "context": o.context}); err != nil {
		return usageError{err}
	}
	ctx, cancel := context.WithCancel(cmd.Context())
	defer cancel()
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	if o.join.given() {
		config, renew, err := o.join.join(ctx, options.Node, log)
		if err != nil {
			return err
		}
		options.Config = config
		beside.Go(func() { renew(ctx) })
	} else if options.Config, err = apiConfigFor(o.kubeconfig, o.context); err != nil {
		return usageError{orJoin(err)}
	}
	collectAt(garbage)
	return serveBalancer(ctx, options, &o.balancers, o.report, nil)
}

// options checks the flags, naming the one that is wrong.
func (o *lbOptions) options(log *slog.Logger) (out lb.Options, err error) {
	if out.Pools, err = o.balancers.read(); err != nil {
		return out, err
	}
	if err := o.balancers.mayAnnounce(); err != nil {
		return out, err
	}
	if out.Node, err = machineName(o.hostname); err == nil {
		err = identity.ValidMachine(out.Node)
	}
	if err != nil {
		return out, fmt.Errorf("--hostname-override: %w", err)
	}
	if problems := validation.IsQualifiedName(o.class); len(problems) > 0 {
		return out, fmt.Errorf("--load-balancer-class: %q can't be a class: %s", o.class, problems[0])
	}
	if problems := validation.IsDNS1123Label(o.leases); len(problems) > 0 {
		return out, fmt.Errorf("--lease-namespace: %q can't be a namespace: %s", o.leases, problems[0])
	}
	if err := completeAddress(&o.balancers.metrics, "10261"); err != nil {
		return out, fmt.Errorf("--metrics-bind-address: %w", err)
	}
	out.Class, out.Unclassed, out.Leases, out.Log = o.class, !o.onlyClass, o.leases, log
	o.balancers.apply(&out)
	return out, nil
}

func (o *balancerOptions) apply(out *lb.Options) {
	out.Layer2, out.Interfaces, out.Times = o.announces(announceL2), o.interfaces, announce.DefaultTimes
	out.BGP, out.KeepOnStop = o.announces(announceBGP), o.onStop == onStopKeep
	out.Peers, _ = o.readPeers() // validated
}

// mayAnnounce says what is missing to announce addresses, if that is wanted.
func (o *balancerOptions) mayAnnounce() error {
	if len(o.pools) == 0 && o.prefix != "" || mayAdminister() == nil {
		return nil
	}
	switch {
	case o.announces(announceL2):
		return fmt.Errorf("to announce addresses, run this as root or with the capabilities NET_RAW and NET_ADMIN; or give --%sannounce none", o.prefix)
	case o.balances():
		return fmt.Errorf("to balance connections, run this as root or with the capability NET_ADMIN; or give --%sbalancing off", o.prefix)
	}
	return nil
}

// serveBalancer runs a balancer, and serves its metrics at an address if there is one. unserved, if not nil, is called instead of
// failing if another program has that address.
func serveBalancer(ctx context.Context, options lb.Options, balancers *balancerOptions, report bool, unserved func(error)) error {
	if options.Layer2 || options.BGP || balancers.balances() {
		lock, err := instance.Acquire(ctx, instance.LB, instance.DefaultPatience, func(h instance.Holder) {
			options.Log.Info("another load balancer announces addresses in this network namespace, waiting for it to end", "holder", h.String(), "upTo", instance.DefaultPatience)
		})
		if err != nil {
			return err
		}
		defer lock.Release()
	}
	var err error
	if options.Identity, err = controllers.NewIdentity(); err != nil {
		return err
	}
	var gatherers prometheus.Gatherers
	if balancers.balances() {
		balancing, metrics, stop, err := balancers.start(options.Log)
		if err != nil {
			return err
		}
		defer stop()
		options.Balancing = balancing
		gatherers = append(gatherers, metrics)
	}
	options.Stop = balancers.stop(ctx, options.Log)
	b, err := lb.New(options)
	if err != nil {
		return err
	}
	if metrics := balancers.metrics; metrics != "" {
		registry := prometheus.NewRegistry()
		registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), b)
		status, err := newStatusServer(metrics, append(gatherers, registry), b.Ready)
		switch {
		case err == nil:
			serving, stop := context.WithCancel(ctx)
			var wg sync.WaitGroup
			defer wg.Wait()
			defer stop()
			wg.Go(func() { _ = status.run(serving) })
		case unserved != nil && errors.Is(err, syscall.EADDRINUSE):
			unserved(err)
		default:
			return usageError{fmt.Errorf("--%smetrics-bind-address: %w", balancers.prefix, err)}
		}
	}
	reporting, stop := context.WithCancel(ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer stop()
	startReport(reporting, report, options.Log, options.Config, options.Node, reports.LB, balancerReport(b, balancers.announceMode()), &beside)
	return b.Run(ctx)
}

// startBalancer runs a balancer beside other parts of this machine, and starts it again if it fails.
func (o *partOptions) startBalancer(ctx context.Context, log *slog.Logger, node string, config *rest.Config, beside *sync.WaitGroup) {
	if len(o.balancers.pools) == 0 {
		return
	}
	options := lb.Options{Config: config, Node: node, Class: controller.DefaultClass, Unclassed: true, Log: log}
	options.Pools, _ = o.balancers.read() // validated
	o.balancers.apply(&options)
	o.balancing.Add(1)
	beside.Go(func() {
		defer o.balancing.Done()
		for wait(ctx, 0) {
			err := serveBalancer(ctx, options, &o.balancers, o.report, func(err error) {
				// Traffic is what matters.
				log.Warn("metrics of the load balancer are not served", "err", err)
			})
			if ctx.Err() != nil {
				return
			}
			log.Error("the load balancer stopped, retrying", "err", err)
			wait(ctx, balancerRetry)
		}
	})
}
