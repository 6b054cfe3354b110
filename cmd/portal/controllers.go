package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/workqueue" // the queues' own metrics

	"portal/internal/controllers"
	"portal/internal/pki"
)

// controllersOptions are the flags of `portal controllers`.
type controllersOptions struct {
	kubeconfig, server, metricsAddress string
	controllers, clusterCIDRs          []string
	config                             controllers.Config
	logs                               logOptions

	signing  pki.FileSigner
	elect    bool
	election controllers.Election
}

func newControllersCommand() *cobra.Command {
	o := controllersOptions{election: controllers.DefaultElection()}
	cmd := &cobra.Command{
		Use:   "controllers",
		Short: "Run the controllers alone, against any Kubernetes API server",
		Long: `Run the controllers alone: Endpoints and EndpointSlices of Services, the life cycle of namespaces and nodes,
certificate requests, ServiceAccounts, and garbage collection. Several can run: one is elected
leader, and a standby takes over when it is gone.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	o.logs.addFlags(f)
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.server, "master", "", "the API server's URL, instead of the kubeconfig's")
	f.StringSliceVar(&o.controllers, "controllers", []string{"*"}, fmt.Sprintf("which to run, of %v: * is all, none is none, -name leaves one out", controllers.Names()))
	f.StringSliceVar(&o.clusterCIDRs, "cluster-cidr", nil, "ranges of the Pods' addresses, split among the nodes: at most one IPv4 and one IPv6; none: nodes get no Pod CIDRs")
	f.IntVar(&o.config.NodeCIDRMaskSizeIPv4, "node-cidr-mask-size-ipv4", 24, "prefix length of a node's IPv4 part of --cluster-cidr")
	f.IntVar(&o.config.NodeCIDRMaskSizeIPv6, "node-cidr-mask-size-ipv6", 64, "prefix length of a node's IPv6 part of --cluster-cidr")
	f.IntVar(&o.config.MaxEndpointsPerSlice, "max-endpoints-per-slice", 100, "endpoints in one EndpointSlice at most, up to 1000")
	f.IntVar(&o.config.MaxEndpointsPerSubset, "mirroring-max-endpoints-per-subset", 1000, "addresses of a subset of hand-made Endpoints that are mirrored at most")
	f.IntVar(&o.config.SliceWorkers, "concurrent-service-endpoint-syncs", 16, "Services whose EndpointSlices are synced at a time")
	f.IntVar(&o.config.EndpointsWorkers, "concurrent-endpoint-syncs", 2, "Services whose Endpoints are synced at a time")
	f.DurationVar(&o.config.NodeGracePeriod, "node-monitor-grace-period", 50*time.Second, "how long a node may go without renewing its Lease before it counts as lost")
	f.DurationVar(&o.config.NodeMonitorPeriod, "node-monitor-period", 5*time.Second, "how often the nodes' Leases are checked")
	f.IntVar(&o.config.FinishedPods, "terminated-pod-gc-threshold", 12500, "finished Pods that are kept; more are deleted, the oldest first; negative keeps all")
	f.StringVar(&o.signing.CertFile, "cluster-signing-cert-file", "", "certificate of the CA that signs certificate requests; none: they are not signed here")
	f.StringVar(&o.signing.KeyFile, "cluster-signing-key-file", "", "its key")
	f.DurationVar(&o.config.CertificateLife, "cluster-signing-duration", 365*24*time.Hour, "how long a signed certificate is valid, unless its request asks for less")
	f.StringVar(&o.metricsAddress, "metrics-bind-address", "", "host:port of /metrics and /healthz; empty: not served")
	f.BoolVar(&o.elect, "leader-elect", true, "elect a leader with a Lease before running")
	f.StringVar(&o.election.Namespace, "leader-elect-resource-namespace", o.election.Namespace, "namespace of that Lease")
	f.StringVar(&o.election.Name, "leader-elect-resource-name", o.election.Name, "name of that Lease")
	f.DurationVar(&o.election.Lease, "leader-elect-lease-duration", o.election.Lease, "how long standbys wait for a leader that doesn't renew its Lease")
	f.DurationVar(&o.election.Renew, "leader-elect-renew-deadline", o.election.Renew, "how long a leader tries to renew its Lease before it gives up")
	f.DurationVar(&o.election.Retry, "leader-elect-retry-period", o.election.Retry, "how long leader and standbys wait between two tries")
	return cmd
}

// complete turns what was typed into what is run. Its errors are the user's.
func (o *controllersOptions) complete() (controllers.Selection, error) {
	selection, err := controllers.ParseSelection(o.controllers)
	if err != nil {
		return selection, err
	}
	for _, text := range o.clusterCIDRs {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return selection, fmt.Errorf("--cluster-cidr %q: must be a range like 10.244.0.0/16", text)
		}
		o.config.ClusterCIDRs = append(o.config.ClusterCIDRs, prefix)
	}
	if err := o.completeSigning(); err != nil {
		return selection, err
	}
	if err := o.election.Validate(); err != nil {
		return selection, err
	}
	if o.config.REST, err = apiConfigAt(o.server, o.kubeconfig); err != nil {
		return selection, err
	}
	compressUnlessHere(o.config.REST)
	o.config.RootCA = o.rootCA
	return selection, o.config.Validate()
}

// completeSigning checks the CA that was given, if one was.
func (o *controllersOptions) completeSigning() error {
	if (o.signing.CertFile == "") != (o.signing.KeyFile == "") {
		return errors.New("--cluster-signing-cert-file and --cluster-signing-key-file: one needs the other")
	}
	if o.config.CertificateLife < 10*time.Minute {
		return fmt.Errorf("--cluster-signing-duration %s: must be at least 10m", o.config.CertificateLife)
	}
	if o.signing.CertFile == "" {
		return nil
	}
	if err := o.signing.Check(); err != nil {
		return fmt.Errorf("--cluster-signing-cert-file and --cluster-signing-key-file: %w", err)
	}
	o.config.Authority = o.signing
	return nil
}

// rootCA is the CA that the kubeconfig has now: a server that rotates its CA writes it anew.
func (o *controllersOptions) rootCA() []byte {
	config, err := apiConfigAt(o.server, o.kubeconfig)
	if err != nil || rest.LoadTLSFiles(config) != nil {
		return nil // it is read again
	}
	return config.CAData
}

func (o *controllersOptions) run(ctx context.Context, stderr io.Writer) error {
	if _, err := o.logs.setup(ctx, stderr, slog.LevelInfo); err != nil {
		return usageError{err}
	}
	selection, err := o.complete()
	if err != nil {
		return usageError{err}
	}
	collectAt(garbage)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if o.metricsAddress != "" {
		o.config.Health = &controllers.Health{}
		ended, err := serveMetrics(ctx, o.metricsAddress, o.config.Health)
		if err != nil {
			return usageError{fmt.Errorf("--metrics-bind-address %s: %w", o.metricsAddress, err)}
		}
		defer func() { stop(); <-ended }()
	}
	if !o.elect {
		return controllers.Run(ctx, o.config, selection)
	}
	if o.election.Identity, err = controllers.NewIdentity(); err != nil {
		return err
	}
	return controllers.Lead(ctx, o.config, selection, o.election)
}

func serveMetrics(ctx context.Context, address string, health http.Handler) (ended <-chan struct{}, err error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", legacyregistry.Handler())
	mux.Handle("/healthz", health)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	context.AfterFunc(ctx, func() { server.Close() })
	return done, nil
}
