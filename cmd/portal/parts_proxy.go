package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/client-go/rest"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/node"
	"portal/internal/node/runtime/shim"
	"portal/internal/nodereport"
	"portal/internal/proxy"
	"portal/internal/proxy/foreign"
	"portal/internal/top"
)

// partProxy is the service proxy of `portal up` and `portal node`.
type partProxy struct {
	mode string
	note string // why there is none
}

// runningProxy is this process's proxy, for the parts beside it; nil while there is none.
type runningProxy struct{ atomic.Pointer[proxy.Proxy] }

// drained says whether this machine sends no new connections of a Service to endpoints at these addresses.
func (r *runningProxy) drained(service intent.Key, addrs []netip.Addr) bool {
	p := r.Load()
	return p == nil || p.Drained(service, addrs)
}

// nodeState is what a node reports about itself when it is asked.
func nodeState(o node.Options, running *runningProxy, may *parts, balancers *balancingOptions) http.Handler {
	return nodereport.Source{
		Node: o.Name, PodsDir: filepath.Join(o.DataDir, "pods"), PIDFile: shim.PIDFile, Proxy: running.Load, NoProxy: may.noProxy, Zone: o.ClusterDomain,
		Unhealthy: balancers.unhealthy, Foreign: foreign.Find,
	}
}

// nodeTraffic counts what goes through Services on this machine, while somebody asks, until ctx ends.
func nodeTraffic(ctx context.Context, running *runningProxy, beside *sync.WaitGroup) http.Handler {
	source := func() *intent.Cluster {
		if p := running.Load(); p != nil {
			return p.Cluster
		}
		return nil
	}
	local := func() ([]netip.Addr, error) {
		have, err := hostnet.Interfaces{}.List()
		return have.Local, err
	}
	s := top.NewServer(source, local)
	beside.Go(func() { s.Run(ctx) })
	return s
}

// firstSync is how long `portal up` waits for the proxy before it says that it is up.
const firstSync = 10 * time.Second

// proxySettings are what the two commands do differently.
type proxySettings struct {
	node string // its name
	// By what this node's Pods are known: the prefixes of all Pods, or their bridge.
	clusterCIDR, bridge string
	api                 *rest.Config
	// running gets the proxy as soon as there is one.
	running *runningProxy
	// temporary has rules and settings removed at the end.
	temporary bool
}

// startProxy runs the proxy on this machine. Its failure leaves the rest running.
func (o *partOptions) startProxy(ctx context.Context, log *slog.Logger, s proxySettings, beside *sync.WaitGroup) partProxy {
	options := defaultProxyOptions()
	options.mode, options.healthz, options.metrics, options.hostname = o.proxy, o.healthz, o.proxyMetrics, s.node
	options.conntrack, options.report = o.conntrack, o.report
	options.clusterCIDR = s.clusterCIDR
	if s.bridge != "" {
		options.detectLocal, options.bridge = string(proxy.DetectBridgeInterface), s.bridge
	}
	options.nodePortAddresses, options.configureSysctls = o.nodePortAddresses, o.configureSysctls
	options.userspace.FileShare = o.proxyShare
	config, err := options.proxyConfig()
	if err != nil {
		return partProxy{note: "none: " + err.Error()}
	}
	modes := proxyModes(&options)
	synced, ended := make(chan string, 1), make(chan error, 1)
	report := func(ctx context.Context, p *proxy.Proxy) {
		s.running.Store(p)
		for !p.Synced() && wait(ctx, 10*time.Millisecond) {
		}
		synced <- p.State().Mode
	}
	beside.Go(func() {
		err := options.serve(ctx, log, config, modes, s.api, report)
		if errors.Is(err, syscall.EADDRINUSE) && ctx.Err() == nil {
			// Another program has a port; traffic is what matters.
			log.Warn("metrics and health of the proxy are not served", "err", err)
			options.metrics, options.healthz = "", ""
			err = options.serve(ctx, log, config, modes, s.api, report)
		}
		if s.temporary {
			// No rules and settings are left behind: the machine is as it was before. They go when packets come here no longer.
			o.balancing.Wait()
			cleanup, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			err = errors.Join(err, proxy.Cleanup(cleanup, modes), options.sysctls.Restore())
		}
		ended <- err
	})
	mode := "not ready yet"
	select {
	case mode = <-synced:
	case <-time.After(firstSync):
	case err := <-ended:
		return partProxy{note: fmt.Sprintf("none: %v", err)}
	}
	beside.Go(func() {
		if err := <-ended; err != nil && !stopped(ctx, err) {
			log.Error("the proxy stopped", "err", err)
		}
	})
	return partProxy{mode: mode}
}

func (p partProxy) String() string {
	if p.note != "" {
		return p.note
	}
	return p.mode
}
