package web

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"math"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
	"portal/internal/lb/engine"
	"portal/internal/lb/web/wire"
)

// maxIdle bounds the unused connections to one endpoint.
const maxIdle = 512

// endpointConns are the connections to one endpoint that nobody uses at present.
type endpointConns struct {
	server   *Server
	endpoint *balance.Endpoint

	mu    sync.Mutex
	cfg   *config.Pool
	tls   *tls.Config
	idle  []*endpointConn // the last was used last
	http2 []*http2Conn
	// dialing is the next of http2; nil: none is being made.
	dialing *dialing
	// forgotten: the server no longer has this set; nothing may be put into it.
	forgotten bool
}

// endpointConn is one connection that speaks HTTP/1.
type endpointConn struct {
	nc    net.Conn
	owner *endpointConns
	cfg   *config.Pool // what it was made by
	src   wire.Source
	res   wire.Response
	body  wire.Body
	// reused is set if it has carried a request before.
	reused bool
	// private connections began with a PROXY header: they are their client's alone.
	private bool
	since   int64
	probe   func(fd uintptr)
	raw     syscall.RawConn
	pending bool
}

var errBusy = errors.New("the endpoint has as many connections as allowed")

func (s *Server) connsOf(e *balance.Endpoint, cfg *config.Pool) (*endpointConns, error) {
	for {
		value, ok := s.conns.Load(e)
		if !ok {
			value, _ = s.conns.LoadOrStore(e, &endpointConns{server: s, endpoint: e})
		}
		c := value.(*endpointConns)
		c.mu.Lock()
		if c.forgotten {
			c.mu.Unlock()
			s.conns.CompareAndDelete(e, c)
			continue
		}
		err := c.update(cfg)
		c.mu.Unlock()
		return c, err
	}
}

// forget gives the set up if nobody uses the endpoint. A request under way would put its connection where nobody looks for it, if the
// endpoint has returned by then.
func (c *endpointConns) forget() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgotten = c.endpoint.Active() == 0 && c.endpoint.OpenConnections() == 0
	return c.forgotten
}

func (c *endpointConns) config() *config.Pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cfg
}

// update takes up a changed configuration: connections that were made in another way are not used again. The caller holds mu.
func (c *endpointConns) update(cfg *config.Pool) error {
	if c.cfg == cfg {
		return nil
	}
	if c.cfg != nil && sameDialing(c.cfg, cfg) {
		c.cfg = cfg
		return nil
	}
	conf, err := clientTLS(cfg)
	if err != nil {
		return err
	}
	for _, one := range c.idle {
		one.close()
	}
	for _, one := range c.http2 {
		one.retire()
	}
	c.idle, c.http2, c.cfg, c.tls = nil, nil, cfg, conf
	return nil
}

func sameDialing(a, b *config.Pool) bool {
	if a.Protocol != b.Protocol || a.ProxyProtocol != b.ProxyProtocol || (a.TLS == nil) != (b.TLS == nil) {
		return false
	}
	return a.TLS == nil || bytes.Equal(a.TLS.CA, b.TLS.CA) && a.TLS.ServerName == b.TLS.ServerName
}

// clientTLS is how endpoints of a pool are connected to; nil: without TLS.
func clientTLS(cfg *config.Pool) (*tls.Config, error) {
	conf, err := engine.EndpointTLS(cfg)
	if conf == nil || err != nil {
		return nil, err
	}
	conf = conf.Clone()
	conf.NextProtos = []string{"http/1.1"}
	if cfg.Protocol == config.H2 {
		conf.NextProtos = []string{"h2"}
	}
	return conf, nil
}

// take returns an unused connection, or nil.
func (c *endpointConns) take() *endpointConn {
	for {
		c.mu.Lock()
		n := len(c.idle)
		if n == 0 {
			c.mu.Unlock()
			return nil
		}
		one := c.idle[n-1]
		c.idle[n-1] = nil
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		if one.clean() {
			one.reused = true
			one.src.Buf = takeBuffer()
			return one
		}
		one.close()
	}
}

// clean says whether nothing has come since the last response: neither the end of the connection, nor bytes that would be taken for the
// answer to the next request.
func (e *endpointConn) clean() bool {
	if e.raw == nil {
		return true
	}
	e.pending = true
	if err := e.raw.Control(e.probe); err != nil {
		return false
	}
	return !e.pending
}

func (e *endpointConn) peek(fd uintptr) {
	var one [1]byte
	_, _, err := unix.Recvfrom(int(fd), one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	e.pending = err != unix.EAGAIN
}

// reached says whether the endpoint's machine has acknowledged any of a request, of which n bytes were sent at least. If the connection had been
// closed before, it would not have.
func (e *endpointConn) reached(n int) bool {
	if e.raw == nil {
		return false
	}
	unacknowledged := n
	_ = e.raw.Control(func(fd uintptr) {
		if queued, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err == nil {
			unacknowledged = queued
		}
	})
	return unacknowledged < n
}

// put keeps a connection for the next request.
func (c *endpointConns) put(e *endpointConn) {
	giveBuffer(e.src.Buf)
	e.src.Buf, e.src.R, e.src.W = nil, 0, 0
	e.since = c.server.now()
	c.mu.Lock()
	keep := len(c.idle) < maxIdle && sameDialing(c.cfg, e.cfg) && c.endpoint.LeftAt().IsZero()
	if keep {
		c.idle = append(c.idle, e)
	}
	c.mu.Unlock()
	if !keep {
		e.close()
	}
}

// closeIdle closes connections that are unused since before a time, or all that are unused. Those in use stay: an endpoint that left may
// return, and goes on with them then. It returns whether none is left.
func (c *endpointConns) closeIdle(before int64, all bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if all {
		before = math.MaxInt64
	}
	n := 0
	for n < len(c.idle) && c.idle[n].since < before {
		c.idle[n].close()
		n++
	}
	if n > 0 {
		kept := copy(c.idle, c.idle[n:])
		clear(c.idle[kept:])
		c.idle = c.idle[:kept]
	}
	c.http2 = slices.DeleteFunc(c.http2, func(one *http2Conn) bool {
		over := one.unused(before)
		if over {
			one.retire()
		}
		return over
	})
	return len(c.idle) == 0 && len(c.http2) == 0
}

// close closes what is unused, and lets the rest end with its requests.
func (c *endpointConns) close() {
	c.closeIdle(0, true)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.http2 {
		one.retire()
	}
	c.http2 = nil
}

func (e *endpointConn) close() {
	e.nc.Close()
	giveBuffer(e.src.Buf)
	e.src.Buf = nil
	if e.owner != nil {
		e.owner.endpoint.Close()
		e.owner = nil
	}
}

func dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	// Unused connections are closed before keep-alive packets would be due: no system calls for these.
	d := net.Dialer{KeepAlive: -1}
	return d.DialTCP(ctx, "tcp", netip.AddrPort{}, to)
}

// connect makes a connection, with PROXY header and TLS as the pool has it.
func (c *endpointConns) connect(ctx context.Context, cfg *config.Pool, info *Info) (net.Conn, error) {
	if !c.endpoint.Open(cfg.EndpointConnections) {
		return nil, errBusy
	}
	ctx, cancel := context.WithTimeout(ctx, orDefault(cfg.ConnectTimeout, config.DefaultConnectTimeout))
	defer cancel()
	nc, err := c.server.options.Dial(ctx, c.endpoint.Address)
	if err != nil {
		c.endpoint.Close()
		return nil, err
	}
	if err := c.begin(ctx, &nc, cfg, info); err != nil {
		nc.Close()
		c.endpoint.Close()
		return nil, err
	}
	return nc, nil
}

func (c *endpointConns) begin(ctx context.Context, nc *net.Conn, cfg *config.Pool, info *Info) error {
	if cfg.ProxyProtocol != 0 {
		if _, err := (*nc).Write(engine.AppendProxyHeader(nil, cfg.ProxyProtocol, info.Client, info.Local)); err != nil {
			return err
		}
	}
	c.mu.Lock()
	conf := c.tls
	c.mu.Unlock()
	if conf == nil {
		return nil
	}
	secured := tls.Client(*nc, conf)
	if err := secured.HandshakeContext(ctx); err != nil {
		return err
	}
	*nc = secured
	return nil
}

// dial makes a connection for HTTP/1.
func (c *endpointConns) dial(ctx context.Context, cfg *config.Pool, info *Info) (*endpointConn, error) {
	nc, err := c.connect(ctx, cfg, info)
	if err != nil {
		return nil, err
	}
	e := &endpointConn{nc: nc, owner: c, cfg: cfg, raw: rawOf(nc), private: cfg.ProxyProtocol != 0}
	e.probe = e.peek
	e.src.From = nc
	e.src.Buf = takeBuffer()
	return e, nil
}
