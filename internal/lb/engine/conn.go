package engine

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
)

// Record is what became of a connection.
type Record struct {
	Listener *config.Listener
	Pool     string
	// Client and Local are the connection's ends, or what a trusted PROXY header says. Endpoint is not valid if none was reached.
	Client, Local, Endpoint netip.AddrPort
	Begin                   time.Time
	// Connect is how long it took until an endpoint was connected, Duration how long the connection lasted.
	Connect, Duration time.Duration
	// BytesIn came from the client, BytesOut went to it.
	BytesIn, BytesOut uint64
	TLS               *tls.ConnectionState
	// End says why the connection ended; empty: one of its ends closed it.
	End string
}

// Why connections end that neither end closed, as records and metrics say it.
const (
	endIdle      = "idle timeout"
	endDrained   = "endpoint left"
	endChanged   = "listener changed"
	endStopped   = "balancer stopped"
	endReset     = "reset"
	endHandshake = "tls handshake failed"
	endHeader    = "bad proxy header"
	endNone      = "no endpoint"
	endBusy      = "endpoints busy"
	endConnect   = "endpoints unreachable"
)

// conn is a client's connection.
type conn struct {
	listener   *listener
	generation *generation
	raw        *net.TCPConn // nil if the descriptor is a link's
	client     netip.AddrPort
	counted    netip.Addr // whose connection it counts as: the peer's, whatever a PROXY header says
	last       atomic.Int64

	// Those of passed connections.
	relay *relay

	mu       sync.Mutex // guards what follows
	link     *link
	endpoint stream
	end      string
	closed   bool

	shard      *shard
	next, prev *conn
}

// serve does everything up to the point where bytes pass both ways. Then it returns, so that the stack which that needed is free.
func (c *conn) serve(state *listenerState) {
	cfg := state.cfg
	info := &ConnInfo{
		Client: c.client, Local: localOf(c.raw),
		Listener: func() *config.Listener { return c.generation.state.Load().cfg }, Site: func() any { return c.generation.state.Load().site },
	}
	timeout := cfg.Limits.HeaderTimeout
	if timeout <= 0 {
		timeout = config.DefaultHeaderTimeout
	}
	begin := time.Now()
	if slices.ContainsFunc(cfg.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(c.client.Addr()) }) {
		header, err := readProxyHeader(c.raw, min(timeout, quietProxy))
		if err != nil {
			c.listener.counters.headerFailures.Add(1)
			c.fail(info, begin, cfg, endHeader)
			return
		}
		if header != nil {
			info.Client, info.Local, info.Proxied = header.source, header.destination, true
		}
	}
	var client net.Conn = c.raw
	if state.tls != nil {
		wrapped := tls.Server(c.raw, state.tls)
		_ = c.raw.SetDeadline(time.Now().Add(timeout))
		if err := wrapped.Handshake(); err != nil {
			c.listener.counters.handshakeFailures.Add(1)
			c.fail(info, begin, cfg, endHandshake)
			return
		}
		_ = c.raw.SetDeadline(time.Time{})
		s := wrapped.ConnectionState()
		info.TLS, client = &s, wrapped
	}
	if cfg.Protocol.Parsed() {
		if state.tls != nil {
			// A handshake needs a large stack, and waiting for requests a small one: this goroutine is for the next handshake.
			c.listener.engine.waiting.Go(func() { c.web(client, info) })
			return
		}
		c.web(client, info)
		return
	}
	c.pass(client, info, begin, cfg)
}

// quietProxy is how long a trusted proxy that says nothing is waited for: its client may wait for the server to speak first.
const quietProxy = 3 * time.Second

// web has requests read.
func (c *conn) web(client net.Conn, info *ConnInfo) {
	e := c.listener.engine
	info.Pool = e.Pool
	info.EndpointTLS = func(name string) (*tls.Config, error) {
		p := (*e.pools.Load())[name]
		if p == nil {
			return nil, fmt.Errorf("pool %q: there is none of this name", name)
		}
		return p.dial.Load().tls, p.dial.Load().err
	}
	e.options.Web(c.generation.web, client, info, func() {
		_ = client.Close()
		c.finish()
	})
}

// pass finds an endpoint, and lets bytes pass.
func (c *conn) pass(client net.Conn, info *ConnInfo, begin time.Time, cfg *config.Listener) {
	e := c.listener.engine
	p := (*e.pools.Load())[cfg.Pool]
	if p == nil {
		c.fail(info, begin, cfg, endNone)
		return
	}
	if client == net.Conn(c.raw) && p.plain() {
		c.passPlain(info, begin, cfg, p)
		return
	}
	use, endpoint, raw, why := c.connect(p, info)
	if use == nil {
		c.fail(info, begin, cfg, why)
		return
	}
	r := &relay{conn: c, pool: p, use: use}
	if e.options.Record != nil {
		r.record = &Record{
			Listener: cfg, Pool: cfg.Pool, Client: info.Client, Local: info.Local, Endpoint: use.Endpoint.Address,
			Begin: begin, Connect: time.Since(begin), TLS: info.TLS,
		}
	}
	if !c.setEndpoint(raw, r) {
		r.finished()
		return
	}
	r.start(client, endpoint, raw)
}

// plain says whether bytes are passed to the pool's endpoints as they are.
func (p *pool) plain() bool {
	how := p.dial.Load()
	return how.tls == nil && how.err == nil
}

// passPlain lets bytes pass that are encrypted on neither side.
func (c *conn) passPlain(info *ConnInfo, begin time.Time, cfg *config.Listener, p *pool) {
	raw, err := c.raw.SyscallConn()
	fd := -1
	if err == nil {
		var failed error
		err = raw.Control(func(was uintptr) { fd, failed = unix.FcntlInt(was, unix.F_DUPFD_CLOEXEC, 0) })
		err = errors.Join(err, failed)
	}
	if err != nil {
		c.fail(info, begin, cfg, endConnect)
		return
	}
	c.mu.Lock()
	_ = c.raw.Close()
	c.raw = nil
	c.mu.Unlock()
	c.begin(&link{}, fd, info, begin, cfg, p)
}

// connect tries endpoints, one after the other.
func (c *conn) connect(p *pool, info *ConnInfo) (*balance.Use, net.Conn, stream, string) {
	cfg := p.Config()
	tries := 1 + cfg.Retries
	if cfg.Retries == 0 {
		tries = 1 + config.DefaultRetries
	}
	var tried []*balance.Endpoint
	for i := 0; i < max(tries, 1); i++ {
		use, err := p.Pick(balance.Key{Client: info.Client.Addr()}, tried)
		switch {
		case errors.Is(err, balance.ErrBusy):
			return nil, nil, nil, endBusy
		case err != nil && len(tried) > 0:
			return nil, nil, nil, endConnect
		case err != nil:
			return nil, nil, nil, endNone
		}
		if i > 0 {
			p.Counters.Retries.Add(1)
		}
		endpoint, raw, err := p.open(c.listener.engine.ctx, use.Endpoint, info)
		if err == nil {
			use.Succeeded()
			return use, endpoint, raw, ""
		}
		use.Done(balance.ConnectResult(err))
		c.listener.engine.log.Debug("connecting to an endpoint failed", "pool", p.name, "endpoint", use.Endpoint.Address, "err", err)
		if c.listener.engine.ctx.Err() != nil {
			return nil, nil, nil, endStopped
		}
		tried = append(tried, use.Endpoint)
	}
	return nil, nil, nil, endConnect
}

// open connects to an endpoint, up to the point where bytes can be sent. The net.Conn is set where they are encrypted.
func (p *pool) open(ctx context.Context, e *balance.Endpoint, info *ConnInfo) (net.Conn, stream, error) {
	cfg, how := p.Config(), p.dial.Load()
	if how.err != nil {
		return nil, nil, how.err
	}
	timeout := cfg.ConnectTimeout
	if timeout <= 0 {
		timeout = config.DefaultConnectTimeout
	}
	until := time.Now().Add(timeout)
	raw, err := dial(ctx, e.Address, until, how.tls != nil)
	if err != nil {
		return nil, nil, err
	}
	if cfg.ProxyProtocol > 0 {
		if _, err = raw.Write(AppendProxyHeader(nil, cfg.ProxyProtocol, info.Client, info.Local)); err != nil {
			_ = raw.Close()
			return nil, nil, err
		}
	}
	if how.tls == nil {
		return nil, raw, nil
	}
	plain := raw.(*net.TCPConn)
	wrapped := tls.Client(plain, how.tls)
	_ = plain.SetDeadline(until)
	if err := wrapped.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, nil, err
	}
	_ = plain.SetDeadline(time.Time{})
	return wrapped, raw, nil
}

// dial opens a connection. TLS wants a net.Conn, which is a *net.TCPConn then.
func dial(ctx context.Context, to netip.AddrPort, until time.Time, encrypted bool) (stream, error) {
	if !encrypted && to.Addr().Zone() == "" {
		return connect(ctx, to, until)
	}
	d := net.Dialer{Deadline: until, KeepAlive: -1}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// setEndpoint notes the other side, unless the connection has been closed meanwhile.
func (c *conn) setEndpoint(raw stream, r *relay) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = raw.Close()
		c.relay = r
		return false
	}
	c.endpoint, c.relay = raw, r
	return true
}

// fail ends a connection that got no endpoint.
func (c *conn) fail(info *ConnInfo, begin time.Time, cfg *config.Listener, why string) {
	c.close(why, true)
	if e := c.listener.engine; e.options.Record != nil && !cfg.Protocol.Parsed() {
		e.options.Record(&Record{
			Listener: cfg, Pool: cfg.Pool, Client: info.Client, Local: info.Local, Begin: begin, Duration: time.Since(begin), TLS: info.TLS, End: c.why(),
		})
	}
	c.finish()
}

// close ends both sides. The first reason counts. hard lets the peers see that something failed.
func (c *conn) close(why string, hard bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed, c.end = true, why
	if c.link != nil {
		c.link.shut(hard)
	}
	if c.raw != nil {
		closeStream(c.raw, hard)
	}
	if c.endpoint != nil {
		closeStream(c.endpoint, hard)
	}
}

func closeStream(s stream, hard bool) {
	if hard {
		reset(s)
		return
	}
	_ = s.Close()
}

func (c *conn) why() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.end
}

// finish forgets the connection.
func (c *conn) finish() {
	c.close("", false)
	c.listener.ended(c)
	c.listener.engine.conns.remove(c)
}

func localOf(c *net.TCPConn) netip.AddrPort {
	a, _ := c.LocalAddr().(*net.TCPAddr)
	return unmapped(a.AddrPort())
}
