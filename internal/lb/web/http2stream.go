package web

import (
	"context"
	"errors"
	"io"
	"sync"

	"golang.org/x/net/http2"

	"portal/internal/lb/web/wire"
)

// http2Stream is a request of an HTTP/2 connection: the body of its exchange, and the sink of the response. A stream that ended well is
// used for another request of the same connection.
type http2Stream struct {
	c       *http2Client
	id      uint32
	x       exchange
	req     wire.Request
	watch   watch
	refused *wire.Error
	ready   bool // it waits for more of its body before it is begun

	// The rest is guarded by the connection's lock.
	changed sync.Cond
	// The body: declared is its length, -1 if that is not known; received came, taken was passed on.
	declared, received, taken, most int64
	incoming, piece                 []byte
	trailers                        []wire.Field
	inflow, credit                  int64
	ended                           bool // nothing more comes
	interrupted                     bool

	// The response: length is a number, or wire.Chunked.
	window, length, sent int64
	done                 bool // all of it is queued
	blocked              bool // it is among those that wait for the client
	stalled              bool // it has waited for too long
	// gone: one side has reset it.
	gone bool
	ctx  context.Context
	stop context.CancelFunc
}

var (
	errCancelled = errors.New("the stream was reset")
	errStalled   = errors.New("the client takes nothing")
)

func isHTTP2(s sink) bool {
	_, is := s.(*http2Stream)
	return is
}

// take returns a stream for a new request. The lock is held.
func (c *http2Client) take(id uint32) *http2Stream {
	var st *http2Stream
	if n := len(c.free); n > 0 {
		st = c.free[n-1]
		c.free[n-1] = nil
		c.free = c.free[:n-1]
	} else {
		st = &http2Stream{c: c}
		st.changed.L = &c.mu
		st.watch.server, st.watch.site, st.watch.draining, st.watch.stream = c.server, c.info.Site, c.draining, st
		st.watch.enter(phaseBusy)
		st.x = exchange{server: c.server, watch: &st.watch, info: &c.info, req: &st.req, sink: st, via: c.via}
		c.server.watched.add(&st.watch)
	}
	st.id, st.ready, st.refused = id, true, nil
	st.received, st.taken, st.incoming, st.piece, st.trailers = 0, 0, nil, nil, nil
	st.inflow, st.credit, st.ended, st.interrupted = streamWindow, 0, false, false
	st.window, st.length, st.sent, st.done, st.stalled = c.initial, 0, 0, false, false
	if c.open == nil {
		c.open = map[uint32]*http2Stream{}
	}
	c.open[id] = st
	c.running++
	return st
}

// remove takes a stream out of those that frames can be for; reset: it was ended here. The lock is held.
func (c *http2Client) remove(st *http2Stream, reset bool) {
	delete(c.open, st.id)
	c.remember(st.id, reset)
}

// forget ends a stream before its time; reset: it was ended here. cancel follows, without the lock, which is held here.
func (st *http2Stream) forget(reset bool) {
	st.gone = true
	st.c.remove(st, reset)
	st.changed.Broadcast()
}

// cancel ends what is done for a stream that is gone. It is called by the goroutine that reads.
func (st *http2Stream) cancel() {
	c := st.c
	if st.ready {
		c.unwait(st)
		c.server.watched.remove(&st.watch)
		c.mu.Lock()
		c.grant(int64(len(st.incoming)))
		c.running--
		c.settle()
		c.mu.Unlock()
		return
	}
	c.mu.Lock()
	stop := st.stop
	c.mu.Unlock()
	if stop != nil {
		stop()
	}
	st.watch.abandon()
}

// settle notes that a connection has no requests. The lock is held.
func (c *http2Client) settle() {
	if c.running == 0 && !c.finished {
		c.watch.enter(phaseIdle)
		c.finishIfIdle()
	}
}

func (c *http2Client) unwait(st *http2Stream) {
	for i, one := range c.waiting {
		if one == st {
			last := len(c.waiting) - 1
			c.waiting[i], c.waiting[last] = c.waiting[last], nil
			c.waiting = c.waiting[:last]
			return
		}
	}
}

// startWaiting begins the requests of which no more comes for now.
func (c *http2Client) startWaiting() {
	for len(c.waiting) > 0 {
		c.start(c.waiting[len(c.waiting)-1])
	}
}

// start has a request answered. It is called by the goroutine that reads.
func (c *http2Client) start(st *http2Stream) {
	c.unwait(st)
	x := &st.x
	site := c.info.Site()
	st.watch.renew()
	x.out = nil
	x.reset()
	x.site, x.stats, x.ctx, x.log.proto = site, c.stats, nil, "HTTP/2.0"
	x.isHead = string(st.req.Method) == "HEAD"
	c.mu.Lock()
	st.ready = false
	st.most = bodyLimit(site.Listener)
	st.begin()
	c.mu.Unlock()
	c.tasks.Add(1)
	c.server.workers.start(st)
}

// begin looks at the body. The lock is held.
func (st *http2Stream) begin() {
	x, q := &st.x, &st.req
	if st.ended && st.received == 0 && len(st.trailers) == 0 {
		// There is none, and the endpoint should not expect one.
		if q.Length < 0 {
			q.Length, q.HasLength = 0, true
		}
		return
	}
	x.body = st
	switch {
	case st.refused != nil:
	case st.most >= 0 && max(st.declared, st.received) > st.most:
		st.refused = &wire.Error{Status: 413, Reason: "the body is too large"}
	case st.ended && len(st.trailers) == 0 && st.received <= bufferSize:
		// All of it is here: it goes with the head, and can be sent again.
		st.piece, st.incoming = st.incoming, nil
		st.taken = st.received
		x.small = st.piece
		q.Length, q.HasLength = st.received, true
	}
}

// run answers the request.
func (st *http2Stream) run() {
	x := &st.x
	x.out = takeBuffer()[:0]
	if refused := st.refused; refused != nil {
		x.beginLog()
		x.answer(refused.Status, refused.Reason)
		x.endLog()
	} else {
		x.serve()
	}
	if x.mine != nil {
		x.mine.close()
		x.mine = nil
	}
	giveBuffer(x.out)
	x.out = nil
	st.finish()
}

// finish ends the stream, and gives back what it used.
func (st *http2Stream) finish() {
	c := st.c
	fired := phase(st.watch.state.Swap(c.server.now()<<3|int64(phaseBusy))&7) == phaseFired
	c.mu.Lock()
	if !st.gone && c.open[st.id] == st {
		switch {
		case !st.done:
			c.appendReset(st.id, http2.ErrCodeInternal)
		case !st.ended:
			// The rest of the body is of no use.
			c.appendReset(st.id, http2.ErrCodeNo)
		}
		c.remove(st, !st.done || !st.ended)
		c.signal()
	}
	c.grant(int64(len(st.incoming) + len(st.piece)))
	giveBuffer(st.incoming)
	giveBuffer(st.piece)
	st.incoming, st.piece = nil, nil
	stop := st.stop
	st.ctx, st.stop = nil, nil
	again := !st.gone && !fired && len(c.free) < mostFree && !c.finished
	if again {
		c.free = append(c.free, st)
	}
	c.running--
	c.settle()
	c.mu.Unlock()
	if stop != nil {
		stop()
	}
	if !again {
		c.server.watched.remove(&st.watch)
	}
	c.tasks.Done()
}

// context ends when the client resets the stream. Most requests need none.
func (st *http2Stream) context() context.Context {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	if st.ctx == nil {
		st.ctx, st.stop = context.WithCancel(context.Background())
		if st.gone {
			st.stop()
		}
	}
	return st.ctx
}

// interruptBy is called when a time-out has fired.
func (st *http2Stream) interruptBy(why reason) {
	if why != reasonStalled && why != reasonGone {
		return
	}
	st.c.mu.Lock()
	st.stalled = true
	st.changed.Broadcast()
	st.c.mu.Unlock()
}

// Next is the next piece of the body.
func (st *http2Stream) Next(wait bool) ([]byte, error) {
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	st.consumed()
	for {
		switch {
		case len(st.incoming) > 0:
			st.piece, st.incoming = st.incoming, st.piece
			st.taken += int64(len(st.piece))
			if st.most >= 0 && st.taken > st.most {
				return nil, &wire.Error{Status: 413, Reason: "the body is too large"}
			}
			return st.piece, nil
		case st.ended:
			return nil, io.EOF
		case st.gone || st.interrupted || c.dead:
			return nil, errCancelled
		case !wait:
			return nil, wire.ErrWouldRead
		}
		st.changed.Wait()
	}
}

// consumed lets the client send as much as was passed on. The lock is held.
func (st *http2Stream) consumed() {
	n := int64(len(st.piece))
	if n == 0 {
		return
	}
	st.piece = st.piece[:0]
	st.c.grant(n)
	if st.credit += n; st.credit >= streamWindow/4 && !st.ended && !st.gone {
		st.c.appendWindowUpdate(st.id, st.credit)
		st.inflow += st.credit
		st.credit = 0
		st.c.signal()
	}
}

// Done says whether all of the body was taken.
func (st *http2Stream) Done() bool {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	return len(st.incoming) == 0 && (st.ended || st.declared >= 0 && st.taken == st.declared)
}

// Total is what was taken of the body.
func (st *http2Stream) Total() int64 {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	return st.taken
}

func (st *http2Stream) trailer() []wire.Field {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	return st.trailers
}

func (st *http2Stream) interrupt() {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	st.interrupted = true
	st.changed.Broadcast()
}
