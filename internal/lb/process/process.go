// Package process is what the balancing process consists of: the engine, HTTP on the connections that it accepts, and access logs. It brings these
// together, and decides how often garbage is collected.
package process

import (
	"context"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/lb/accesslog"
	"portal/internal/lb/config"
	"portal/internal/lb/engine"
	"portal/internal/lb/web"
)

// Parts are those beside the engine.
type Parts struct {
	web  *web.Server
	logs *accesslog.Logs
}

// New makes the parts.
func New(log *slog.Logger) *Parts {
	logs := accesslog.New(accesslog.Options{Failed: func(balancer, url string, err error) {
		log.Error("access log not written, retrying", "balancer", balancer, "bucket", url, "err", err)
	}})
	return &Parts{logs: logs, web: web.New(web.Options{Log: logs.Write, Refused: func(l *config.Listener, err error) {
		log.Error("route left out", "listener", l.Name, "err", err)
	}})}
}

// Run does what has to be done beside connections, until ctx ends. Then access logs are written as far as there are any.
func (p *Parts) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { p.web.Run(ctx) })
	wg.Go(func() { p.logs.Run(ctx) })
	wg.Go(func() { collect(ctx) })
	wg.Wait()
}

// Collectors are for the parts' metrics.
func (p *Parts) Collectors() []prometheus.Collector { return []prometheus.Collector{p.web, p.logs} }

// Into puts the parts into an engine's options.
func (p *Parts) Into(o *engine.Options) {
	o.Web, o.Site, o.Applied, o.Record = p.web.Web, p.web.Site, p.web.Applied, p.record
}

// record logs a connection that was passed on as bytes.
func (p *Parts) record(r *engine.Record) {
	if r.Listener.AccessLog != nil {
		p.logs.Write(r.Listener, web.Record(r))
	}
}
