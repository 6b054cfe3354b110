// Package controllers runs the control loops that turn what users asked for into the objects that nodes read: Endpoints
// and EndpointSlices first of all. It talks to an API server and to nothing else, beside any number of other writers.
package controllers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/csr"
)

// Config is how the controllers run. Only REST has no default.
type Config struct {
	// REST is how the API server is reached. It isn't changed. Its rate limits are not used: the API server's own flow
	// control limits the load.
	REST *rest.Config
	// As, if not nil, is how a controller reaches the API server with an account of its own: the one that Kubernetes' controller
	// of the same task has in kube-system, with its default roles. REST then only fills caches, and holds the Lease.
	As func(account string) *rest.Config

	// MaxEndpointsPerSlice bounds an EndpointSlice made for a selector (100; at most 1000), and
	// MaxEndpointsPerSubset what is mirrored of a hand-made subset (1000).
	MaxEndpointsPerSlice  int
	MaxEndpointsPerSubset int

	// ClusterCIDRs are split into the nodes' Pod ranges; at most one of a family, none turns that off. The mask sizes
	// are those of a node's range (24 and 64).
	ClusterCIDRs                               []netip.Prefix
	NodeCIDRMaskSizeIPv4, NodeCIDRMaskSizeIPv6 int
	// ServiceCIDRs are never assigned to nodes.
	ServiceCIDRs []netip.Prefix

	// NodeGracePeriod is how long a node may go without renewing its Lease (50 s), NodeMonitorPeriod how often that is checked (5 s).
	NodeGracePeriod, NodeMonitorPeriod time.Duration
	// FinishedPods is how many finished Pods are kept (12500); negative: all.
	FinishedPods int

	// Authority signs certificates; nil: certificate requests are not signed. CertificateLife is how long a certificate is valid
	// whose request doesn't ask for less (a year).
	Authority       csr.Authority
	CertificateLife time.Duration
	// ServerHosts are the names and addresses of the API server, which no node's certificate may have; nil: only those that the API has are
	// known.
	ServerHosts func() []string

	// SliceWorkers and EndpointsWorkers are how many Services are synced at a time (16 and 2). Slices are what
	// proxies read, so at a start with many Services they come first.
	SliceWorkers, EndpointsWorkers int

	// RootCA is what verifies the API server's certificate, in PEM, as Pods get it; it may change. Nil: what REST says.
	RootCA func() []byte

	// Own are further controllers, of the caller's, by name. They run if they are selected.
	Own map[string]func(context.Context) error

	// Clock is the wall clock if nil.
	Clock clock.WithTicker

	// Ready, if not nil, is called once: when every cache has synced and work begins.
	Ready func()

	// Health, if not nil, learns how the requests of the informers fare.
	Health *Health

	// elected, if not nil, is closed when this process may write; until then it only fills its caches.
	elected <-chan struct{}
}

func (c Config) complete() (Config, error) {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.MaxEndpointsPerSlice, 100)
	def(&c.MaxEndpointsPerSubset, 1000)
	def(&c.NodeCIDRMaskSizeIPv4, 24)
	def(&c.NodeCIDRMaskSizeIPv6, 64)
	def(&c.FinishedPods, 12500)
	def(&c.SliceWorkers, 16)
	def(&c.EndpointsWorkers, 2)
	if c.NodeGracePeriod == 0 {
		c.NodeGracePeriod = 50 * time.Second
	}
	if c.CertificateLife == 0 {
		c.CertificateLife = 365 * 24 * time.Hour
	}
	if c.NodeMonitorPeriod == 0 {
		c.NodeMonitorPeriod = 5 * time.Second
	}
	if c.Clock == nil {
		c.Clock = clock.RealClock{}
	}
	if c.REST == nil {
		return c, errors.New("controllers need a configuration of the API server")
	}
	for _, limit := range []struct {
		name  string
		value int
	}{{"endpoints per slice", c.MaxEndpointsPerSlice}, {"endpoints per mirrored subset", c.MaxEndpointsPerSubset}} {
		if limit.value < 1 || limit.value > 1000 {
			return c, fmt.Errorf("%d %s: it must be from 1 to 1000", limit.value, limit.name)
		}
	}
	return c, nil
}

// Validate says what is wrong with a configuration, before anything is started.
func (c Config) Validate() error {
	c, err := c.complete()
	if err != nil {
		return err
	}
	_, err = c.ranges()
	return err
}

// rootCA is RootCA, or what the way to the API server says.
func (c Config) rootCA() func() []byte {
	if c.RootCA != nil {
		return c.RootCA
	}
	return func() []byte {
		if c.REST.CAFile == "" {
			return c.REST.CAData
		}
		data, err := os.ReadFile(c.REST.CAFile)
		if err != nil {
			return nil // it is read again
		}
		return data
	}
}

// Run runs the selected controllers until ctx ends, and returns when all it started has ended. An error means that it
// could not begin, or that a controller ended before its time.
func Run(ctx context.Context, cfg Config, selection Selection) error {
	return startOver(ctx, &cfg, func() error { return run(ctx, cfg, selection) })
}

func run(ctx context.Context, cfg Config, selection Selection) error {
	cfg, err := cfg.complete()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	shared, err := newShared(ctx, cfg, stop)
	if err != nil {
		return err
	}
	defer shared.close()
	running, err := construct(shared, selection)
	if err != nil {
		return err
	}
	var done sync.WaitGroup
	defer done.Wait()
	defer stop(nil)
	if len(running) == 0 {
		if cfg.waitElected(ctx) {
			ready(cfg)
		}
		<-ctx.Done()
		return failure(ctx)
	}
	if err := shared.start(ctx, &done); err != nil {
		return err
	}
	if !cache.WaitForCacheSync(ctx.Done(), shared.synced()...) {
		return failure(ctx)
	}
	klog.FromContext(ctx).V(1).Info("caches synced", "controllers", selection.String())
	for _, r := range running {
		if l, ok := r.(interface{ Listed() }); ok {
			l.Listed()
		}
	}
	if !cfg.waitElected(ctx) {
		return failure(ctx)
	}
	for name, r := range running {
		done.Go(func() {
			if err := r.Run(ctx); err != nil && ctx.Err() == nil {
				stop(fmt.Errorf("controller %s: %w", name, err))
			}
		})
	}
	ready(cfg)
	<-ctx.Done()
	return failure(ctx)
}

// construct makes the selected controllers.
func construct(shared *shared, selection Selection) (map[string]runner, error) {
	running := map[string]runner{}
	for _, c := range registry {
		if !selection.Has(c.name) {
			continue
		}
		made, err := c.make(shared)
		if err != nil {
			return nil, fmt.Errorf("controller %s: %w", c.name, err)
		}
		running[c.name] = made
	}
	for name, run := range shared.cfg.Own {
		if selection.Has(name) {
			running[name] = runFunc(run)
		}
	}
	return running, nil
}

// failure is why a context ended, or nil if somebody asked for it.
func failure(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, context.Canceled) || errors.Is(cause, context.DeadlineExceeded) {
		return nil
	}
	return cause
}

// waitElected waits until this process may write; false if ctx ends before.
func (c *Config) waitElected(ctx context.Context) bool {
	if c.elected == nil {
		return true
	}
	select {
	case <-c.elected:
		return true
	case <-ctx.Done():
		return false
	}
}

func ready(cfg Config) {
	if cfg.Ready != nil {
		cfg.Ready()
	}
}
