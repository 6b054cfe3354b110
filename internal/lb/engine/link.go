package engine

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
)

// link is a client's connection and the one to its endpoint, both as descriptors that a loop waits for. Whoever sets over is the one who
// does what has to be done at the end.
type link struct {
	conn  *conn
	loop  *loop
	info  *ConnInfo
	cfg   *config.Listener
	pool  *pool
	began time.Time

	mu        sync.Mutex // guards what follows. No lock of the connection is taken under it
	near, far end
	tries     int
	tried     []*balance.Endpoint
	use       *balance.Use
	until     time.Time // when the present attempt to connect has taken too long
	relay     *relay    // once the endpoint is connected: own
	own       relay
	recorded  Record
	watched   bool // the client's descriptor is
	over      bool
	queued    bool // among those that have more to do
}

// end is one of a link's sockets, with the direction in which bytes leave it.
type end struct {
	fd int
	// readable: there may be something to read. closing: the end of what comes has been seen by the kernel. complete: no error comes with that end, and
	// nothing urgent, at which reading stops; so what there is to read is all up to the end. urgent: there was something of the kind.
	readable, closing, complete, urgent bool
	// delays: a small segment waits until those before are acknowledged. sent: something was sent.
	delays, sent bool
	// blocked: it takes no more for now.
	blocked bool
	// ended: there is nothing more to read. passedOn: the other side has heard so.
	ended, passedOn bool
	// What was read and not yet written to the other side: in rest, or held in the pipe. bulk: much comes at once.
	bulk bool
	rest []byte
	pipe *pipe
	held int
}

// outcome is what is to be done when the link's lock is free again.
type outcome struct {
	opened *relay
	over   bool
	broken bool
	refuse string
}

const (
	arrivals = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLPRI
	endings  = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	// turn is how often one direction may read before others have their turn.
	turn = 16
)

// begin takes over a client's descriptor, and begins to connect to an endpoint.
func (c *conn) begin(k *link, fd int, info *ConnInfo, begin time.Time, cfg *config.Listener, p *pool) {
	e := c.listener.engine
	l, err := e.loops.next(&e.waiting)
	if err != nil {
		e.log.Error("connection refused", "listener", cfg.Name, "err", err)
		_ = unix.Close(fd)
		c.fail(info, begin, cfg, endConnect)
		return
	}
	k.conn, k.loop, k.info, k.cfg, k.pool, k.began = c, l, info, cfg, p, begin
	k.near.fd, k.far.fd = fd, -1
	retries := p.Config().Retries
	if retries == 0 {
		retries = config.DefaultRetries
	}
	k.tries = 1 + max(retries, 0)
	c.mu.Lock()
	closed := c.closed
	c.link = k
	c.mu.Unlock()
	if closed {
		k.shut(true)
		return
	}
	k.mu.Lock()
	var out outcome
	if !k.over {
		out = k.connect()
	}
	k.mu.Unlock()
	k.follow(out)
}

// connect tries endpoints until one answers, or can be waited for. The lock is held.
func (k *link) connect() outcome {
	for {
		retry := len(k.tried) > 0
		if len(k.tried) >= k.tries {
			return k.refused(endConnect)
		}
		use, err := k.pool.Pick(balance.Key{Client: k.info.Client.Addr()}, k.tried)
		switch {
		case errors.Is(err, balance.ErrBusy):
			return k.refused(endBusy)
		case err != nil && retry:
			return k.refused(endConnect)
		case err != nil:
			return k.refused(endNone)
		}
		if retry {
			k.pool.Counters.Retries.Add(1)
		}
		k.use = use
		fd, err := startConnect(use.Endpoint.Address)
		if err == nil {
			k.far = end{fd: fd, delays: true}
			timeout := k.pool.Config().ConnectTimeout
			if timeout <= 0 {
				timeout = config.DefaultConnectTimeout
			}
			k.until = time.Now().Add(timeout)
			// Within a machine it is connected already, and that is reported at once, together with what the client has sent.
			if err = k.loop.watch(k, fd, arrivals|unix.EPOLLOUT); err == nil {
				return k.watchClient()
			}
		}
		if out, stop := k.missed(err); stop {
			return out
		}
	}
}

// watchClient has the client's descriptor waited for. The lock is held.
func (k *link) watchClient() outcome {
	if k.watched {
		return outcome{}
	}
	k.watched = true
	if err := k.loop.watch(k, k.near.fd, arrivals); err != nil {
		k.conn.listener.engine.log.Error("connection refused", "listener", k.cfg.Name, "err", os.NewSyscallError("epoll_ctl", err))
		k.use.Done(balance.Abandoned)
		return k.refused(endConnect)
	}
	return outcome{}
}

// missed gives up on an endpoint, and says whether on all. The lock is held.
func (k *link) missed(err error) (outcome, bool) {
	e := k.conn.listener.engine
	k.discard(&k.far, false)
	k.use.Done(balance.ConnectResult(err))
	e.log.Debug("connecting to an endpoint failed", "pool", k.pool.name, "endpoint", k.use.Endpoint.Address, "err", err)
	k.tried = append(k.tried, k.use.Endpoint)
	k.use = nil
	if e.ctx.Err() != nil {
		return k.refused(endStopped), true
	}
	return outcome{}, false
}

func (k *link) refused(why string) outcome {
	k.over = true
	return outcome{refuse: why}
}

// progress looks what became of the attempt to connect. The lock is held.
func (k *link) progress(events uint32) outcome {
	k.far.note(events)
	if events&(unix.EPOLLERR|unix.EPOLLHUP) == 0 {
		if events&unix.EPOLLOUT == 0 {
			return outcome{} // not yet
		}
		return k.open()
	}
	code, err := unix.GetsockoptInt(k.far.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code == 0 {
		return outcome{} // not yet
	}
	if err == nil {
		err = unix.Errno(code)
	}
	if out, stop := k.missed(os.NewSyscallError("connect", err)); stop {
		return out
	}
	return k.connect()
}

// expire ends an attempt to connect that has taken too long, and begins the next.
func (k *link) expire(now time.Time) {
	k.mu.Lock()
	var out outcome
	if !k.over && k.relay == nil && !k.until.IsZero() && now.After(k.until) {
		var stop bool
		if out, stop = k.missed(os.ErrDeadlineExceeded); !stop {
			out = k.connect()
		}
	}
	k.mu.Unlock()
	k.follow(out)
}

// open begins to pass bytes: the endpoint is connected. The lock is held.
func (k *link) open() outcome {
	k.use.Succeeded()
	r := &k.own
	r.conn, r.pool, r.use = k.conn, k.pool, k.use
	if k.conn.listener.engine.options.Record != nil {
		r.record = &k.recorded
		k.recorded = Record{
			Listener: k.cfg, Pool: k.cfg.Pool, Client: k.info.Client, Local: k.info.Local, Endpoint: k.use.Endpoint.Address,
			Begin: k.began, Connect: time.Since(k.began), TLS: k.info.TLS,
		}
	}
	k.relay = r
	if version := k.pool.Config().ProxyProtocol; version > 0 {
		k.far.prompt()
		// A new socket has room for it.
		if _, err := unix.Write(k.far.fd, AppendProxyHeader(nil, version, k.info.Client, k.info.Local)); err != nil {
			k.over = true
			return outcome{opened: r, over: true, broken: true}
		}
	}
	// What either has sent was reported already.
	out := k.pump()
	out.opened = r
	return out
}

// event goes on after something has happened: at a descriptor, or -1 if there is just more to do. Only the loop calls it.
func (k *link) event(fd int, events uint32) {
	k.mu.Lock()
	var out outcome
	if fd < 0 {
		k.queued = false
	}
	switch {
	case k.over:
	case fd >= 0 && fd == k.far.fd && k.relay == nil:
		out = k.progress(events)
	default:
		switch {
		case fd < 0:
		case fd == k.near.fd:
			k.near.note(events)
		case fd == k.far.fd:
			k.far.note(events)
		}
		if k.relay != nil {
			out = k.pump()
		}
	}
	k.mu.Unlock()
	k.follow(out)
}

func (s *end) note(events uint32) {
	s.readable = s.readable || events&(unix.EPOLLIN|endings) != 0
	s.closing = s.closing || events&endings != 0
	s.urgent = s.urgent || events&unix.EPOLLPRI != 0
	s.complete = (s.complete || events&unix.EPOLLRDHUP != 0) && events&unix.EPOLLERR == 0 && !s.urgent
	if events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.blocked = false
	}
}

// follow does what needs locks of others.
func (k *link) follow(out outcome) {
	c := k.conn
	if out.opened != nil {
		c.mu.Lock()
		c.relay = out.opened
		c.mu.Unlock()
	}
	switch {
	case out.refuse != "":
		c.fail(k.info, k.began, k.cfg, out.refuse)
	case out.over:
		if out.broken {
			c.close(endReset, true)
		}
		k.relay.finished()
	}
}

// shut closes both ends: it is what closing the connection does.
func (k *link) shut(hard bool) {
	k.mu.Lock()
	was := k.over
	k.over = true
	k.discard(&k.near, hard)
	k.discard(&k.far, hard)
	k.mu.Unlock()
	if !was {
		go k.end() // whoever closes holds the connection's lock
	}
}

// end is what is left to do for a link that was closed from outside.
func (k *link) end() {
	if k.relay != nil {
		k.relay.finished()
		return
	}
	if k.use != nil {
		k.use.Done(balance.Abandoned)
	}
	k.conn.fail(k.info, k.began, k.cfg, endStopped)
}

// discard closes a descriptor. The lock is held.
func (k *link) discard(s *end, hard bool) {
	if s.fd < 0 {
		return
	}
	if hard {
		_ = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	k.loop.forget(s.fd)
	closeSocket(s.fd)
	s.fd, s.rest = -1, nil
	if s.pipe != nil {
		s.pipe.close() // bytes of a connection that is gone may be in it
		s.pipe = nil
		s.hold(-s.held)
	}
}

// pump passes bytes both ways, as far as that goes without waiting. The lock is held.
func (k *link) pump() outcome {
	if !k.move(&k.near, &k.far, true) || !k.move(&k.far, &k.near, false) {
		k.over = true
		return outcome{over: true, broken: true}
	}
	if k.near.passedOn && k.far.passedOn {
		k.over = true
		return outcome{over: true}
	}
	return outcome{}
}

// move passes what leaves one end to the other; false: that can't go on. No more is read than the other end takes.
func (k *link) move(from, to *end, inbound bool) bool {
	for range turn {
		var err error
		switch {
		case from.held > 0 || len(from.rest) > 0:
			if to.blocked {
				return true
			}
			err = k.drain(from, to, inbound)
		case from.ended:
			// Where both directions have ended, closing says so.
			if !from.passedOn && !to.ended {
				err = shutdownWrite(to.fd)
			}
			from.passedOn = true
			return err == nil || err == unix.ENOTCONN
		case !from.readable:
			return true
		case from.bulk:
			err = k.fill(from)
		default:
			err = k.pass(from, to, inbound)
		}
		if err != nil {
			return false
		}
	}
	if !k.queued {
		k.queued = true
		k.loop.again = append(k.loop.again, k)
	}
	return true
}
