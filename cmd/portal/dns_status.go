package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"portal/internal/dns/corefile"
)

// statusServer answers /metrics, /health and /ready.
type statusServer struct {
	l net.Listener
	s *http.Server
}

func newStatusServer(addr string, registry *prometheus.Registry, ready func() bool) (*statusServer, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "OK") })
	mux.HandleFunc("/ready", func(w http.ResponseWriter, _ *http.Request) {
		if !ready() {
			http.Error(w, "kubernetes", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, "OK")
	})
	return &statusServer{l, &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}}, nil
}

func (h *statusServer) run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { h.s.Close() })
	defer stop()
	if err := h.s.Serve(h.l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// readCorefile sets what a Corefile says and no flag does.
func (o *dnsOptions) readCorefile(cmd *cobra.Command) error {
	raw, err := os.ReadFile(o.corefile)
	if err != nil {
		return err
	}
	c, err := corefile.Parse(string(raw))
	if err != nil {
		return fmt.Errorf("%s: %w", o.corefile, err)
	}
	given := func(flag string) bool { return cmd.Flags().Changed(flag) }
	set := func(flag string, when bool, apply func()) {
		if when && !given(flag) {
			apply()
		}
	}
	port := "53"
	if c.Port != 0 {
		port = fmt.Sprint(c.Port)
	}
	set("listen", true, func() {
		o.listen = []string{":" + port}
		if len(c.Bind) > 0 {
			o.listen = nil
			for _, b := range c.Bind {
				o.listen = append(o.listen, net.JoinHostPort(b, port))
			}
		}
	})
	set("zone", true, func() { o.zones = c.Zones })
	set("ttl", true, func() {
		o.ttl = 5 // the plugin's own default
		if c.TTL >= 0 {
			o.ttl = c.TTL
		}
	})
	set("pods", true, func() { o.pods = c.Pods })
	set("kubeconfig", c.Kubeconfig != "", func() { o.kubeconfig, o.context = c.Kubeconfig, c.Context })
	o.endpoint = c.Endpoint
	set("namespaces", len(c.Namespaces) > 0, func() { o.namespaces = c.Namespaces })
	set("labels", c.Labels != "", func() { o.selector = c.Labels })
	set("namespace-labels", c.NamespaceLabels != "", func() { o.nsSelector = c.NamespaceLabels })
	set("endpoint-pod-names", c.EndpointPodNames, func() { o.endpointPodNames = true })
	set("no-endpoints", c.NoEndpoints, func() { o.noEndpoints = true })
	set("ignore-empty-service", c.IgnoreEmpty, func() { o.ignoreEmpty = true })
	set("fallthrough", true, func() {
		o.beyond = c.Fallthrough
		if c.HasFallthrough && len(c.Fallthrough) == 0 {
			o.beyond = []string{"."}
		}
	})
	set("upstream", true, func() {
		o.upstreams = []string{"none"}
		if len(c.Upstreams) > 0 {
			o.upstreams = c.Upstreams
		}
	})
	set("cache-size", !c.Cache, func() { o.cacheSize = 0 })
	set("autopath", c.Autopath, func() { o.autopath = true })
	set("log-queries", c.Log, func() { o.logQueries = true })
	set("health-bind-address", c.Health != "", func() { o.health = c.Health })
	set("ready-bind-address", c.Ready != "", func() { o.ready = c.Ready })
	set("metrics-bind-address", c.Prometheus != "", func() { o.metrics = c.Prometheus })
	set("allow-transfer", len(c.TransferTo) > 0, func() {
		o.allowTransfer = nil
		for _, t := range c.TransferTo {
			if t == "*" {
				o.allowTransfer = append(o.allowTransfer, "0.0.0.0/0", "::/0")
			} else {
				o.allowTransfer = append(o.allowTransfer, strings.TrimSuffix(t, ":53"))
			}
		}
	})
	return nil
}
