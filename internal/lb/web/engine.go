package web

import (
	"context"
	"net"
	"net/netip"
	"slices"

	"portal/internal/lb/accesslog"
	"portal/internal/lb/config"
	"portal/internal/lb/engine"
	"portal/internal/lb/route"
)

// Site compiles a listener's configuration: it is the engine's Options.Site.
func (s *Server) Site(l *config.Listener) any { return s.newSite(l) }

// Applied notes which listeners there are, for metrics: it is the engine's Options.Applied.
func (s *Server) Applied(all []*config.Listener) {
	was := *s.listeners.Load()
	now := make(map[string]*config.Listener, len(all))
	for _, l := range all {
		if l.Protocol.Parsed() {
			now[l.Name] = l
		}
	}
	s.listeners.Store(&now)
	for name := range was {
		if now[name] == nil {
			s.Forget(name)
		}
	}
}

// newSite compiles a listener's routes. One that is wrong does not keep the others from working.
func (s *Server) newSite(l *config.Listener) *Site {
	routes := l.Routes
	for {
		table, err := route.Compile(routes)
		if err == nil {
			return &Site{Listener: l, Routes: table}
		}
		if s.options.Refused != nil {
			s.options.Refused(l, err)
		}
		routes = slices.DeleteFunc(slices.Clone(routes), func(r config.Route) bool {
			_, err := route.Compile([]config.Route{r})
			return err != nil
		})
	}
}

// Record is the access log's record of a connection that was passed on: for the engine's Options.Record.
func Record(r *engine.Record) *accesslog.Record {
	out := &accesslog.Record{
		Time: r.Begin, Listener: r.Listener.Name, Owner: r.Listener.Owner, Tags: r.Listener.Tags, Client: r.Client, Endpoint: r.Endpoint,
		RequestTime: -1, EndpointTime: -1, ResponseTime: -1, Duration: r.Duration, Received: int64(r.BytesIn), Sent: int64(r.BytesOut),
	}
	if r.Listener.AccessLog != nil {
		out.Balancer = r.Listener.AccessLog.Balancer
	}
	if r.Endpoint.IsValid() {
		// For connections ELB measures the way to the endpoint alone.
		out.RequestTime, out.EndpointTime, out.ResponseTime = r.Connect, 0, 0
	}
	if r.TLS != nil {
		out.TLSVersion, out.TLSSuite = r.TLS.Version, r.TLS.CipherSuite
	}
	return out
}

// Web serves a connection: it is the engine's Options.Web.
func (s *Server) Web(ctx context.Context, c net.Conn, info *engine.ConnInfo, ended func()) {
	l := info.Listener()
	s.Serve(ctx, c, Info{
		Site: func() *Site { return info.Site().(*Site) },
		Pool: info.Pool, Client: info.Client, Local: info.Local, TLS: info.TLS,
		// A PROXY header says whose fields these are; they are believed if that is a proxy, too.
		Trusted: slices.ContainsFunc(l.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(info.Client.Addr()) }),
	}, ended)
}
