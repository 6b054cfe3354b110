package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// statusServer answers /metrics, /health and /ready.
type statusServer struct {
	l net.Listener
	s *http.Server
}

func newStatusServer(addr string, registry prometheus.Gatherer, ready func() bool) (*statusServer, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	// What can be had is shown: a balancing process that is being replaced must not hide what this one counts.
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
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
