package web

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
)

// Time-outs are kept by one goroutine that looks at every connection from time to time, so that no read or write needs a timer of its own.
const (
	sweepInterval = 250 * time.Millisecond
	// drainIdle is how long a connection of a draining listener may wait for another request: closing it at once would hit requests
	// that are on their way.
	drainIdle = 5 * time.Second
	// leastRate is how many bytes of a body must come a second, on average, once the time for a header has passed.
	leastRate = 256
	// goneGrace is how long a client that has closed its sending side may still wait for the answer: it can't be distinguished
	// from one that has gone.
	goneGrace = time.Second
	// endpointIdle is how long an unused connection to an endpoint is kept.
	endpointIdle = 50 * time.Second
)

// phase is what a connection is doing.
type phase int64

const (
	phaseIdle     phase = iota // waiting for a request
	phaseHeader                // the request's first byte has come
	phaseWaiting               // for the endpoint's answer
	phaseResponse              // passing it on
	phaseTunnel                // after an upgrade
	phaseBusy                  // nothing is waited for

	phaseFired phase = 7 // a time-out was found; why is in the reason. All bits are set, so that it can be put over any other
)

// reason is why the sweeper ended something.
type reason int32

const (
	reasonNone reason = iota
	reasonIdle
	reasonHeader
	reasonBody
	reasonEndpoint
	reasonGone
	reasonStalled
)

// watch is what the sweeper sees of a connection or an HTTP/2 request.
type watch struct {
	server *Server
	// state is the phase in the low 3 bits and the time of its begin, in one word: the sweeper fires only if nothing has changed since it looked.
	state atomic.Int64
	why   atomic.Int32
	// awaited: the next piece of a body is awaited from the client, and not the endpoint that is to take the one before.
	awaited atomic.Bool
	last    atomic.Int64 // when a byte passed, while a response or tunnel is going on
	// bodySince is set while a body is read from the client, bodyBytes what has come of it.
	bodySince, bodyBytes atomic.Int64

	site func() *Site
	// stream is the request of HTTP/2 that this is of; nil for connections. gone: its client has reset it. anyRate: its body may come as
	// slowly as it likes, if it comes.
	stream        *http2Stream
	gone, anyRate atomic.Bool
	// draining is done when no other request is begun.
	draining context.Context
	client   net.Conn // nil for requests of HTTP/2
	raw      syscall.RawConn
	// parks is set for connections that can be parked, and resume is what goes on then, in a new goroutine. place is where it is parked; 0: it is not.
	parks  bool
	resume func()
	// stopped says whether reading was ended by somebody else than the sweeper. nil: nobody does that.
	stopped func() bool
	place   atomic.Uint64
	waiting atomic.Int32
	// mu guards endpoint and call, one of which is interrupted if it takes too long.
	mu       sync.Mutex
	endpoint *endpointConn
	call     *bodyReader // for endpoints that speak HTTP/2
	// tick is called with the time and the idle time-out, both in milliseconds, whenever the sweeper has looked.
	tick func(now, idle int64)
}

type watches struct {
	mu  sync.Mutex
	all map[*watch]struct{}
}

func (w *watches) add(one *watch) {
	w.mu.Lock()
	w.all[one] = struct{}{}
	w.mu.Unlock()
}

func (w *watches) remove(one *watch) {
	w.mu.Lock()
	delete(w.all, one)
	w.mu.Unlock()
}

// now is the time since the server's begin, in milliseconds.
func (s *Server) now() int64 { return s.clock.Load() }

// enter begins a phase. It returns false if a time-out ended the one before.
func (w *watch) enter(p phase) bool {
	old := w.state.Swap(w.server.now()<<3 | int64(p))
	return phase(old&7) != phaseFired
}

// nextPiece reads on in the request's body.
func (x *exchange) nextPiece() ([]byte, error) {
	x.watch.awaited.Store(true)
	defer x.watch.awaited.Store(false)
	return x.body.Next(true)
}

// progress notes that bytes pass.
func (w *watch) progress() { w.last.Store(w.server.now()) }

// beginBody notes that a body is read from the client from now on.
func (w *watch) beginBody(anyRate bool) {
	w.progress()
	w.bodyBytes.Store(0)
	w.anyRate.Store(anyRate)
	w.bodySince.Store(max(w.server.now(), 1))
}

func (w *watch) reason() reason { return reason(w.why.Load()) }

func (w *watch) setEndpoint(e *endpointConn) {
	w.mu.Lock()
	w.endpoint = e
	w.mu.Unlock()
}

func (w *watch) setCall(b *bodyReader) {
	w.mu.Lock()
	w.call = b
	w.mu.Unlock()
}

// past is a deadline that is over.
var past = time.Unix(1, 0)

// fire ends what w waits for, if that is still what it was when the sweeper looked.
func (w *watch) fire(seen int64, why reason) {
	w.why.Store(int32(why))
	if !w.state.CompareAndSwap(seen, seen|int64(phaseFired)) {
		w.why.Store(int32(reasonNone))
		return
	}
	w.interrupt(why)
}

// abandon ends what w waits for, since its client has gone. What is not waited for yet is found by the sweeper.
func (w *watch) abandon() {
	w.gone.Store(true)
	for {
		seen := w.state.Load()
		if p := phase(seen & 7); p != phaseWaiting && p != phaseResponse {
			return
		}
		w.why.Store(int32(reasonGone))
		if w.state.CompareAndSwap(seen, seen|int64(phaseFired)) {
			w.interrupt(reasonGone)
			return
		}
	}
}

// renew forgets what was of the request before.
func (w *watch) renew() {
	w.why.Store(int32(reasonNone))
	w.gone.Store(false)
	w.bodySince.Store(0)
	w.enter(phaseBusy)
}

func (w *watch) interrupt(why reason) {
	if w.client != nil {
		switch why {
		case reasonIdle, reasonHeader, reasonBody:
			w.client.SetReadDeadline(past)
		case reasonStalled, reasonGone:
			w.client.SetDeadline(past)
		}
		w.unpark()
	}
	if why == reasonIdle || why == reasonHeader {
		return
	}
	if w.stream != nil {
		w.stream.interruptBy(why)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.endpoint != nil {
		w.endpoint.nc.SetDeadline(past)
	}
	if w.call != nil {
		w.call.abort()
	}
}

// sweep looks at everything once.
func (s *Server) sweep() {
	now := time.Since(s.began).Milliseconds()
	s.clock.Store(now)
	s.watched.mu.Lock()
	all := s.swept[:0]
	for w := range s.watched.all {
		all = append(all, w)
	}
	s.watched.mu.Unlock()
	for _, w := range all {
		w.check(now)
	}
	clear(all)
	s.swept = all
	if cap(all) > 4*len(all)+1024 {
		s.swept = nil
	}
	s.workers.trim()
	s.conns.Range(func(key, value any) bool {
		conns := value.(*endpointConns)
		left := !conns.endpoint.LeftAt().IsZero()
		conns.closeIdle(now-endpointIdle.Milliseconds(), left)
		if left && conns.forget() {
			s.conns.CompareAndDelete(key, value)
		}
		return true
	})
}

// check looks for time-outs of one.
func (w *watch) check(now int64) {
	listener := w.site().Listener
	seen := w.state.Load()
	since := now - seen>>3
	idle := orDefault(listener.IdleTimeout, config.DefaultIdleTimeout).Milliseconds()
	header := orDefault(listener.Limits.HeaderTimeout, config.DefaultHeaderTimeout).Milliseconds()
	if w.tick != nil {
		w.tick(now, idle)
	}
	switch phase(seen & 7) {
	case phaseIdle:
		switch {
		case since > idle || w.drains() && since > w.server.drainIdle:
			w.fire(seen, reasonIdle)
		case since > w.server.parkAfter:
			w.rest()
		}
	case phaseHeader:
		if since > header {
			w.fire(seen, reasonHeader)
		}
	case phaseWaiting:
		limit := orDefault(listener.Limits.RequestTimeout, config.DefaultRequestTimeout).Milliseconds()
		switch {
		case w.bodyLate(now, idle, header) && w.awaited.Load():
			w.fire(seen, reasonBody)
		case w.bodyLate(now, idle, header):
			w.fire(seen, reasonEndpoint)
		case w.bodySince.Load() == 0 && since > limit:
			w.fire(seen, reasonEndpoint)
		case w.bodySince.Load() != 0 && w.anyRate.Load() && w.endpointLeft():
			// A call of gRPC that streams to its endpoint has no other end.
			w.fire(seen, reasonEndpoint)
		case since > w.grace() && w.clientGone():
			w.fire(seen, reasonGone)
		}
	case phaseResponse, phaseTunnel:
		switch {
		case min(since, now-w.last.Load()) > idle:
			w.fire(seen, reasonStalled)
		case phase(seen&7) == phaseResponse && since > w.grace() && w.clientGone():
			w.fire(seen, reasonGone)
		case w.endpointLeft():
			w.fire(seen, reasonStalled)
		}
	case phaseFired:
		// Who waits for an endpoint may really be writing to the client, who takes nothing: interim answers come before the response.
		if most := orDefault(listener.Limits.RequestTimeout, config.DefaultRequestTimeout).Milliseconds(); w.client != nil && since > max(most, idle, header)+idle {
			w.client.SetDeadline(past)
		}
	}
}

// bodyLate says whether a body that an answer waits for comes, or is taken, too slowly. Once the answer has begun both may take their time: they are
// perhaps a conversation.
func (w *watch) bodyLate(now, idle, header int64) bool {
	begun := w.bodySince.Load()
	if begun == 0 {
		return false
	}
	if now-w.last.Load() > idle {
		return true
	}
	took := now - begun
	return took > header && !w.anyRate.Load() && w.bodyBytes.Load() < (took-header)*leastRate/1000
}

func (w *watch) drains() bool { return w.draining.Err() != nil }

// endpointLeft says whether the endpoint has left its pool for longer than connections to it may last.
func (w *watch) endpointLeft() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	var owner *endpointConns
	switch {
	case w.endpoint != nil:
		owner = w.endpoint.owner
	case w.call != nil:
		owner = w.call.owner
	}
	if owner == nil {
		return false
	}
	left := owner.endpoint.LeftAt()
	if left.IsZero() {
		return false
	}
	draining := owner.config().Draining
	if draining == 0 {
		draining = config.DefaultDraining
	}
	return time.Since(left) > draining
}

// grace is how long a client that seems to have gone may still wait.
func (w *watch) grace() int64 {
	if w.stream != nil {
		return 0 // a cancelled request is no guess
	}
	return goneGrace.Milliseconds()
}

// clientGone says whether the client has closed its end. One that closes only its sending side counts as gone, as with nginx.
func (w *watch) clientGone() bool {
	if w.stream != nil {
		return w.gone.Load()
	}
	if w.raw == nil {
		return false
	}
	gone := false
	w.raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(poll, 0)
		gone = err == nil && n > 0 && poll[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone
}

// rawOf returns the descriptor below a connection, or nil.
func rawOf(nc net.Conn) syscall.RawConn {
	for {
		switch c := nc.(type) {
		case syscall.Conn:
			raw, err := c.SyscallConn()
			if err != nil {
				return nil
			}
			return raw
		case interface{ NetConn() net.Conn }:
			nc = c.NetConn()
		default:
			return nil
		}
	}
}

// refresh begins the time of a phase anew, if it is the present one.
func (w *watch) refresh(p phase) {
	for {
		seen := w.state.Load()
		if phase(seen&7) != p || w.state.CompareAndSwap(seen, w.server.now()<<3|int64(p)) {
			return
		}
	}
}
