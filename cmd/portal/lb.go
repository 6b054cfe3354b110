package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
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
	"portal/internal/lb/controller"
	"portal/internal/lb/pool"
)

// lbOptions are the flags of `portal lb`.
type lbOptions struct {
	kubeconfig, context string
	hostname            string
	balancers           balancerOptions
	class               string
	onlyClass           bool
	metrics             string
	join                joinOptions
	logs                logOptions
}

// balancerOptions are the flags of all commands that run a load balancer; prefix is what their names begin with.
type balancerOptions struct {
	prefix     string
	pools      []string
	announce   string
	interfaces []string
}

const (
	announceL2   = "l2"
	announceNone = "none"

	// balancerRetry is how long a balancer beside other parts stays down after it failed.
	balancerRetry = 5 * time.Second
)

func (o *balancerOptions) addFlags(f *pflag.FlagSet, prefix, without string) {
	o.prefix = prefix
	f.StringArrayVar(&o.pools, prefix+"pool", nil, "addresses for Services of type LoadBalancer: [NAME=]RANGE,…[;internal][;manual][;namespaces=A,…][;namespace-selector=S][;service-selector=S], "+
		"where a RANGE is an address, a prefix or FIRST-LAST; may be repeated"+without)
	f.StringVar(&o.announce, prefix+"announce", announceL2, "how packets to these addresses come to this machine: l2 (it answers ARP and neighbour discovery for those that are its own) or none")
	f.StringSliceVar(&o.interfaces, prefix+"interface", nil, "interfaces to announce addresses on; default: those of the address's network, or of the default route")
}

// read checks the flags, naming the one that is wrong.
func (o *balancerOptions) read() (pool.Set, error) {
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
	switch {
	case o.announce == "bgp":
		return nil, fmt.Errorf("--%sannounce bgp: this version has no BGP; l2 or none", o.prefix)
	case o.announce != announceL2 && o.announce != announceNone:
		return nil, fmt.Errorf("--%sannounce: %q is not one of l2, none", o.prefix, o.announce)
	case o.announce == announceNone && len(o.interfaces) > 0:
		return nil, fmt.Errorf("--%sinterface: needs --%sannounce l2", o.prefix, o.prefix)
	}
	return set, nil
}

func newLBCommand() *cobra.Command {
	var o lbOptions
	cmd := &cobra.Command{
		Use:   "lb",
		Short: "Give Services of type LoadBalancer an address, and announce it to the network",
		Long: `Give Services of type LoadBalancer addresses from pools, and announce these on the network. Run it on every node that a proxy
(portal proxy or kube-proxy) runs on: one of them, the leader, gives addresses, and for each address one of them answers.`,
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
	f.StringVar(&o.metrics, "metrics-bind-address", "127.0.0.1:10261", "address:port of /metrics, /health and /ready; empty: none")
	o.logs.addFlags(f)
	return cmd
}

func (o *lbOptions) run(cmd *cobra.Command) error {
	log, err := o.logs.setup(cmd.Context(), cmd.ErrOrStderr(), slog.LevelInfo)
	if err != nil {
		return usageError{err}
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
		return usageError{err}
	}
	collectAt(garbage)
	return serveBalancer(ctx, options, o.metrics)
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
	if o.metrics != "" {
		if err := completeAddress(&o.metrics, "10261"); err != nil {
			return out, fmt.Errorf("--metrics-bind-address: %w", err)
		}
	}
	out.Class, out.Unclassed, out.Log = o.class, !o.onlyClass, log
	o.balancers.apply(&out)
	return out, nil
}

func (o *balancerOptions) apply(out *lb.Options) {
	out.Layer2, out.Interfaces, out.Times = o.announce == announceL2, o.interfaces, announce.DefaultTimes
}

// mayAnnounce says what is missing to announce addresses, if that is wanted.
func (o *balancerOptions) mayAnnounce() error {
	if len(o.pools) == 0 && o.prefix != "" || o.announce != announceL2 || mayAdminister() == nil {
		return nil
	}
	return fmt.Errorf("to announce addresses, run this as root or with the capabilities NET_RAW and NET_ADMIN; or give --%sannounce none", o.prefix)
}

// serveBalancer runs a balancer, and serves its metrics at an address if there is one.
func serveBalancer(ctx context.Context, options lb.Options, metrics string) error {
	if options.Layer2 {
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
	b, err := lb.New(options)
	if err != nil {
		return err
	}
	if metrics != "" {
		registry := prometheus.NewRegistry()
		registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), b)
		status, err := newStatusServer(metrics, registry, b.Ready)
		if err != nil {
			return usageError{fmt.Errorf("--metrics-bind-address: %w", err)}
		}
		serving, stop := context.WithCancel(ctx)
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop()
		wg.Go(func() { _ = status.run(serving) })
	}
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
	beside.Go(func() {
		for wait(ctx, 0) {
			err := serveBalancer(ctx, options, "")
			if ctx.Err() != nil {
				return
			}
			log.Error("the load balancer stopped, retrying", "err", err)
			wait(ctx, balancerRetry)
		}
	})
}
