// Package web serves HTTP on connections that the engine accepted: it reads requests, finds their route, chooses an endpoint, and passes
// request and response on while they come. HTTP/1 and HTTP/2 are served by strict loops of its own; the frames, the compression of
// headers and the client for endpoints that speak HTTP/2 are those of golang.org/x/net/http2. It opens no listener, ends no TLS, and
// knows nothing of Kubernetes.
package web

import (
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/lb/accesslog"
	"portal/internal/lb/balance"
	"portal/internal/lb/config"
	"portal/internal/lb/route"
	"portal/internal/lb/web/wire"
)

// Site is what a listener serves at present. It is replaced as a whole, and a connection's next request sees the new one.
type Site struct {
	Listener *config.Listener
	Routes   *route.Table
}

// Info is what is known of a connection.
type Info struct {
	// Site returns the present one, and Pool one of its pools, or nil; both must be cheap.
	Site func() *Site
	Pool func(name string) *balance.Pool
	// Client and Local are the two ends, as a PROXY header has them if there was one.
	Client, Local netip.AddrPort
	// Trusted is set if the peer is a proxy whose X-Forwarded fields are believed.
	Trusted bool
	// TLS is set after a handshake.
	TLS *tls.ConnectionState
}

// Options are what a Server needs from outside. All are optional.
type Options struct {
	// Log is given every request of listeners that have an access log.
	Log func(*config.Listener, *accesslog.Record)
	// Refused is called with what is wrong with a route; such routes are left out.
	Refused func(*config.Listener, error)
	// Dial connects to an endpoint.
	Dial func(ctx context.Context, to netip.AddrPort) (net.Conn, error)
}

// Server serves connections. Endpoints' connections are shared by all that it serves.
type Server struct {
	options Options
	// clock is in milliseconds, and as exact as the sweeper is frequent.
	clock   atomic.Int64
	began   time.Time
	watched watches
	swept   []*watch // memory for the next sweep
	parking parking
	// These are the constants of the same names, the last three in milliseconds. Tests make them shorter.
	sweepInterval                   time.Duration
	parkAfter, restAfter, drainIdle int64
	workers                         workers
	conns                           sync.Map // *balance.Endpoint → *endpointConns
	stats                           sync.Map // listener's name → *Stats
	// listeners are by name.
	listeners atomic.Pointer[map[string]*config.Listener]
}

// New makes a server. Time-outs hold while Run runs.
func New(options Options) *Server {
	if options.Dial == nil {
		options.Dial = dial
	}
	s := &Server{options: options, began: time.Now(),
		sweepInterval: sweepInterval, parkAfter: parkAfter.Milliseconds(), restAfter: restAfter.Milliseconds(), drainIdle: drainIdle.Milliseconds()}
	s.watched.all = map[*watch]struct{}{}
	s.listeners.Store(&map[string]*config.Listener{})
	return s
}

// Run enforces time-outs and closes connections to endpoints that nobody uses, until ctx ends.
func (s *Server) Run(ctx context.Context) {
	ticker := time.NewTicker(s.sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			s.workers.stop()
			s.parking.close()
			s.conns.Range(func(_, value any) bool {
				value.(*endpointConns).close()
				return true
			})
			return
		case <-ticker.C:
			s.sweep()
		}
	}
}

// Stats count the requests of a listener.
type Stats struct {
	// Requests are by the first digit of their status; 0: the client left before there was one.
	Requests [6]atomic.Uint64
	// Retries are attempts at another endpoint or connection, Upgrades connections that speak something else now.
	Retries, Upgrades atomic.Uint64
	// Active are requests under way, HTTP2 connections that speak HTTP/2.
	Active, HTTP2 atomic.Int64
}

// Stats are those of the listener with this name.
func (s *Server) Stats(listener string) *Stats {
	if stats, ok := s.stats.Load(listener); ok {
		return stats.(*Stats)
	}
	stats, _ := s.stats.LoadOrStore(listener, &Stats{})
	return stats.(*Stats)
}

// Forget drops the counters of a listener that is gone.
func (s *Server) Forget(listener string) { s.stats.Delete(listener) }

// Serve serves one connection until it ends, closes it, and calls ended. It returns before that if the connection has been idle for some time: then others
// wait for it. When ctx ends, a request that is under way is finished and no other is begun; to end at once, the connection is closed by
// whoever has it.
func (s *Server) Serve(ctx context.Context, nc net.Conn, info Info, ended func()) {
	if info.TLS != nil && info.TLS.NegotiatedProtocol == "h2" {
		s.serveHTTP2(ctx, nc, info, ended)
		return
	}
	newConn(ctx, s, nc, info, ended).run()
}

func limitsOf(l *config.Listener) wire.Limits {
	limits := wire.Limits{Bytes: l.Limits.HeaderBytes, Fields: wire.DefaultFields}
	if limits.Bytes <= 0 {
		limits.Bytes = config.DefaultHeaderBytes
	}
	return limits
}

func bodyLimit(l *config.Listener) int64 {
	if l.Limits.BodyBytes == 0 {
		return config.DefaultBodyBytes
	}
	return l.Limits.BodyBytes
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d <= 0 {
		return otherwise
	}
	return d
}

// bufferSize holds a usual head with its body. Buffers are taken when something comes, and given back when a connection is idle.
const bufferSize = 16 << 10

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

func takeBuffer() []byte { return buffers.Get().(*[bufferSize]byte)[:] }

func giveBuffer(b []byte) {
	if cap(b) == bufferSize {
		buffers.Put((*[bufferSize]byte)(b[:bufferSize]))
	}
}
