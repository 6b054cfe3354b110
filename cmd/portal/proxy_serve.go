package main

import (
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"portal/internal/proxy"
)

// listen opens the addresses of metrics and health.
func (o *proxyOptions) listen(p *proxy.Proxy, health *proxy.Health, registry *prometheus.Registry) (out []*statusServer, err error) {
	metrics, healthz := http.NewServeMux(), http.NewServeMux()
	metrics.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	metrics.HandleFunc("/state", p.ServeState)
	metrics.HandleFunc("/proxyMode", p.ServeMode)
	metrics.Handle("/healthz", health)
	metrics.Handle("/livez", health)
	if o.profiling {
		metrics.HandleFunc("/debug/pprof/", pprof.Index)
		metrics.HandleFunc("/debug/pprof/profile", pprof.Profile)
		metrics.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		metrics.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	healthz.Handle("/healthz", health)
	healthz.Handle("/livez", health)
	for _, s := range []struct {
		flag, address string
		mux           *http.ServeMux
	}{{"metrics-bind-address", o.metrics, metrics}, {"healthz-bind-address", o.healthz, healthz}} {
		if s.address == "" {
			continue
		}
		l, err := net.Listen("tcp", s.address)
		if err != nil {
			for _, open := range out {
				open.l.Close()
			}
			return nil, proxyPortHint(s.flag, err)
		}
		out = append(out, &statusServer{l, &http.Server{Handler: s.mux, ReadHeaderTimeout: 5 * time.Second}})
	}
	return out, nil
}
