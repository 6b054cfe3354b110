package engine

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
)

// listener is a listening socket, and what is done with its connections.
type listener struct {
	engine *Engine
	socket *net.TCPListener
	state  atomic.Pointer[listenerState]

	counters listenerCounters

	mu      sync.Mutex
	clients map[netip.Addr]int // connections, by what clientOf says
	// plain is the socket again, for connections that package net need not know of.
	plain    *os.File
	closed   bool
	acceptor acceptor // of the goroutine that accepts
}

// listenerState is a listener's configuration: never changed, only replaced.
type listenerState struct {
	cfg   *config.Listener
	site  any // what Options.Site made of it
	tls   *tls.Config
	certs []*certificate // what tls was made of
	idle  time.Duration
	// generation is the same as long as the listener speaks the same protocols.
	generation *generation
}

type listenerCounters struct {
	total, overLimit, overClientLimit, handshakeFailures, headerFailures, idleTimeouts, refused atomic.Uint64
	active                                                                                      atomic.Int64
	bytesIn, bytesOut                                                                           atomic.Uint64
}

func newListener(e *Engine, socket *net.TCPListener, state *listenerState, pools map[string]*pool) *listener {
	l := &listener{engine: e, socket: socket, clients: map[netip.Addr]int{}}
	l.set(state, pools)
	return l
}

// newState makes a configuration usable. What of the state before can be used on, is: with its TLS configuration clients can resume sessions.
func (e *Engine) newState(was *listenerState, cfg *config.Listener) (*listenerState, error) {
	s := &listenerState{cfg: cfg, idle: cfg.IdleTimeout}
	if s.idle <= 0 {
		s.idle = config.DefaultIdleTimeout
	}
	if e.options.Site != nil && cfg.Protocol.Parsed() {
		s.site = e.options.Site(cfg)
	}
	if !cfg.Protocol.Encrypted() {
		return s, nil
	}
	var err error
	if s.certs, err = e.certs.named(cfg.TLS.Certificates); err != nil {
		return nil, err
	}
	if was != nil && was.tls != nil && was.cfg.Protocol == cfg.Protocol && reflect.DeepEqual(was.cfg.TLS, cfg.TLS) && same(was.certs, s.certs) {
		s.tls = was.tls
		return s, nil
	}
	s.tls, err = listenerTLS(cfg, s.certs)
	return s, err
}

// listen opens a listening socket, or takes the one that another process gave.
func (e *Engine) listen(address netip.AddrPort) (*net.TCPListener, error) {
	if f := e.inherited[address]; f != nil {
		delete(e.inherited, address)
		socket, err := net.FileListener(f)
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("use the inherited socket of %v: %w", address, err)
		}
		l, ok := socket.(*net.TCPListener)
		if !ok {
			_ = socket.Close()
			return nil, fmt.Errorf("the inherited socket of %v is not one of TCP", address)
		}
		return l, nil
	}
	// Peers that are gone without closing are found by the idle timeout.
	lc := net.ListenConfig{KeepAlive: -1}
	lc.SetMultipathTCP(false)
	if e.options.Transparent {
		lc.Control = transparent
	}
	socket, err := lc.Listen(e.ctx, "tcp", address.String())
	switch {
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return nil, fmt.Errorf("listen at %v: no interface has this address, and the process may not bind others", address)
	case errors.Is(err, unix.EPERM):
		return nil, fmt.Errorf("listen at %v: it needs the capability NET_ADMIN: %w", address, err)
	case err != nil:
		return nil, err
	}
	return socket.(*net.TCPListener), nil
}

// transparent lets a socket have an address that no interface has.
func transparent(network, _ string, raw syscall.RawConn) error {
	var err error
	control := raw.Control(func(fd uintptr) {
		if network == "tcp6" {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
		} else {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		}
	})
	return errors.Join(control, os.NewSyscallError("setsockopt", err))
}

// If accepting fails, which it does if the process has no descriptors left, it is tried again after acceptPause, and after twice as long each time up to
// mostAcceptPause. Of all listeners' failures one is logged in acceptWarning.
const (
	acceptPause     = 50 * time.Millisecond
	mostAcceptPause = time.Second
	acceptWarning   = time.Minute
)

// accept runs until the socket is closed.
func (l *listener) accept() {
	for pause := acceptPause; ; {
		err := l.acceptOne()
		switch {
		case err == nil:
			pause = acceptPause
		case errors.Is(err, net.ErrClosed):
			return
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		default:
			l.counters.refused.Add(1)
			if l.engine.warnsOfAccept() {
				l.engine.log.Warn("accepting a connection failed, retrying", "listener", l.state.Load().cfg.Name, "err", err, "in", pause)
			}
			select {
			case <-l.engine.ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, mostAcceptPause)
		}
	}
}

// warnsOfAccept says whether a listener that can't accept is to say so, and not another one has lately.
func (e *Engine) warnsOfAccept() bool {
	now := time.Now().UnixNano()
	last := e.acceptWarned.Load()
	return (last == 0 || now-last >= int64(acceptWarning)) && e.acceptWarned.CompareAndSwap(last, now)
}

// acceptOne takes one connection in the way that its listener needs.
func (l *listener) acceptOne() error {
	if !l.state.Load().passes() {
		raw, err := l.socket.AcceptTCP()
		if err == nil {
			l.begin(raw)
		}
		return err
	}
	fd, from, err := l.acceptPlain()
	if err != nil {
		return err
	}
	state := l.state.Load()
	if p := (*l.engine.pools.Load())[state.cfg.Pool]; state.passes() && p != nil && p.plain() {
		l.beginPlain(fd, from, state, p)
		return nil
	}
	// It is to be encrypted on one side.
	f := os.NewFile(uintptr(fd), "client")
	c, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		return err
	}
	l.begin(c.(*net.TCPConn))
	return nil
}

// passes says whether what clients send is passed on as it is, from the first byte.
func (s *listenerState) passes() bool {
	return s.cfg.Protocol == config.TCP && len(s.cfg.TrustedProxies) == 0
}

// closeSocket stops accepting.
func (l *listener) closeSocket() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	_ = l.socket.Close()
	if l.plain != nil {
		_ = l.plain.Close()
	}
}

// begin admits a connection if there is room, and serves it.
func (l *listener) begin(raw *net.TCPConn) {
	state := l.state.Load()
	from, _ := raw.RemoteAddr().(*net.TCPAddr)
	c := &conn{listener: l, generation: state.generation, raw: raw, client: unmapped(from.AddrPort())}
	c.last.Store(time.Now().UnixNano())
	if !l.admit(c, state.cfg.Limits) {
		reset(raw)
		return
	}
	l.counters.total.Add(1)
	l.engine.conns.add(c)
	e := l.engine
	e.setups.do(e.ctx, &e.waiting, func() { c.serve(state) })
}

// admit counts a connection, unless there are too many already.
func (l *listener) admit(c *conn, limits config.Limits) bool {
	most, mostOfClient := limits.Connections, limits.ClientConnections
	if most <= 0 {
		most = config.DefaultConnections
	}
	if mostOfClient <= 0 {
		mostOfClient = config.DefaultClientConnections
	}
	if l.counters.active.Add(1) > int64(most) {
		l.counters.active.Add(-1)
		l.counters.overLimit.Add(1)
		return false
	}
	client := clientOf(c.client.Addr())
	l.mu.Lock()
	n := l.clients[client]
	if n < mostOfClient {
		l.clients[client] = n + 1
	}
	l.mu.Unlock()
	if n >= mostOfClient {
		l.counters.active.Add(-1)
		l.counters.overClientLimit.Add(1)
		return false
	}
	c.counted = client
	return true
}

// clientBits is how much of an IPv6 address tells clients apart: whoever has one address of a network of 64 bits can have all others. Of link-local
// addresses, which all have the same 64 bits, the whole counts.
const clientBits = 64

// clientOf is whom a connection from an address counts for.
func clientOf(from netip.Addr) netip.Addr {
	if from.Is4() || from.IsLinkLocalUnicast() {
		return from
	}
	network, err := from.Prefix(clientBits)
	if err != nil {
		return from
	}
	return network.Addr()
}

// ended makes room again.
func (l *listener) ended(c *conn) {
	l.mu.Lock()
	if n := l.clients[c.counted]; n > 1 {
		l.clients[c.counted] = n - 1
	} else {
		delete(l.clients, c.counted)
	}
	l.mu.Unlock()
	l.counters.active.Add(-1)
}

// stop accepts no more, and asks for the end of connections with requests. Others end when their endpoints have left the pool.
func (l *listener) stop() {
	l.state.Load().generation.stopWeb() // first, so that whoever sees that nobody is accepted any more gets its answer as the last one
	l.closeSocket()
}

// reset closes a connection so that the peer sees that it failed.
func reset(c stream) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
