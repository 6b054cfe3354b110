package engine

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"portal/internal/lb/config"
)

// generation is what the connections of a listener have in common that were accepted while it spoke the same protocols. When these change, clients have to
// connect again: over connections from before, they would go on with what the listener speaks no more.
type generation struct {
	speaks protocols
	// web ends when requests on open connections are to be the last ones.
	web     context.Context
	stopWeb context.CancelFunc
	// state is the listener's last one in this generation: what its connections go by.
	state atomic.Pointer[listenerState]
	// until is when what is left of its connections is closed, in ns; 0: it is the present generation.
	until atomic.Int64
}

// protocols are what a connection began with, on both sides. Certificates, TLS versions and cipher suites are not among them: they are for new connections.
type protocols struct {
	client  config.Protocol
	proxies string
	// Of listeners that pass bytes: connections to endpoints whose requests are read are others than those of clients.
	endpoint      config.Protocol
	proxyProtocol int
}

func protocolsOf(cfg *config.Listener, pools map[string]*pool) protocols {
	out := protocols{client: cfg.Protocol}
	if cfg.Protocol.Parsed() {
		out.proxies = fmt.Sprint(cfg.TrustedProxies) // whose X-Forwarded fields are believed, too
		return out
	}
	if len(cfg.TrustedProxies) > 0 {
		out.proxies = "some"
	}
	if p := pools[cfg.Pool]; p != nil {
		out.endpoint, out.proxyProtocol = p.Config().Protocol, p.Config().ProxyProtocol
	}
	return out
}

// set makes a state the present one. If that speaks other protocols, connections from before are to end.
func (l *listener) set(s *listenerState, pools map[string]*pool) {
	speaks, was := protocolsOf(s.cfg, pools), l.state.Load()
	if was != nil && was.generation.speaks == speaks {
		s.generation = was.generation
	} else {
		s.generation = &generation{speaks: speaks}
		s.generation.web, s.generation.stopWeb = context.WithCancel(l.engine.ctx)
	}
	s.generation.state.Store(s)
	l.state.Store(s)
	if was != nil && was.generation != s.generation {
		l.end(was.generation, pools)
	}
}

// end asks for the end of a generation's connections. Those that go on are closed when their draining time is over.
func (l *listener) end(g *generation, pools map[string]*pool) {
	cfg := g.state.Load().cfg
	if !g.until.CompareAndSwap(0, time.Now().Add(drainingOf(cfg, pools)).UnixNano()) {
		return
	}
	g.stopWeb()
	l.engine.log.Info("listener speaks another protocol, draining its connections", "listener", cfg.Name, "was", cfg.Protocol, "connections", l.counters.active.Load())
}

// drainingOf is how long connections of a listener may last that is to have none any more. A request has the time that it has anyway.
func drainingOf(cfg *config.Listener, pools map[string]*pool) time.Duration {
	if !cfg.Protocol.Parsed() {
		return drainingOfPool(cfg.Pool, pools)
	}
	longest := cfg.Limits.RequestTimeout
	if longest <= 0 {
		longest = config.DefaultRequestTimeout
	}
	for i := range cfg.Routes {
		if name := cfg.Routes[i].Pool; name != "" {
			longest = max(longest, drainingOfPool(name, pools))
		}
	}
	return longest
}

func drainingOfPool(name string, pools map[string]*pool) time.Duration {
	if p := pools[name]; p != nil {
		return draining(p.Config())
	}
	return config.DefaultDraining
}
