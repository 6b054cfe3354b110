package web

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/internal/lb/web/wire"
)

// Bounds of HTTP/2 connections. How often a client may do what costs the server more than itself: floodLimits.
const (
	// streams may be open at once. Requests that a client has reset may still be ending: there are at most mostRunning with them.
	streams     = 250
	mostRunning = 2 * streams
	// connWindow and streamWindow are how much of bodies is kept here until endpoints take it.
	connWindow   = 1 << 20
	streamWindow = 256 << 10
	// outRoom is how much waits for the client: responses wait for room, so that a client that does not read is waited for.
	outRoom = 64 << 10
	// mostQueued bounds that together with what is never waited for, such as acknowledgements.
	mostQueued = 1 << 20
	// maxFrame is the largest frame either side sends, unless the client allows more, which is not made use of.
	maxFrame = 16 << 10
	// drainGrace is how long requests that were sent before the client heard of the end are still accepted.
	drainGrace = time.Second
	// mostFree is how many streams a connection keeps for its next requests.
	mostFree = 64
	// headerTable is the size of the tables of header fields, unless the client allows less.
	headerTable = 4096
)

// http2Client is a client's connection that speaks HTTP/2. One goroutine reads frames, and one writes what has been queued; requests are
// answered by the server's workers. A lock is enough for the rest: nobody holds it while waiting for the network.
type http2Client struct {
	server   *Server
	nc       net.Conn
	info     Info
	via      *forwarded
	stats    *Stats
	draining context.Context
	watch    watch
	limits   wire.Limits

	// These are of the goroutine that reads.
	in      frameReader
	framer  *http2.Framer // nil: see frames
	decoder *hpack.Decoder
	head    http2Head
	floods  floods
	// waiting are streams whose body may be right behind the head: those that can be answered with the body at hand need less.
	waiting []*http2Stream
	// greeted is set after the client's preface, settled after its settings.
	greeted, settled bool
	ended            func()

	wake    chan struct{} // for the goroutine that writes
	written chan struct{} // is closed when the last such goroutine has ended
	tasks   sync.WaitGroup

	mu   sync.Mutex // guards what follows, and parts of streams
	open map[uint32]*http2Stream
	last uint32 // the highest stream of the client
	// accepted is the highest one that is answered.
	accepted uint32
	closed   *[64]closedStream // see remember
	free     []*http2Stream
	running  int
	// encoder has a table of header fields that the client has, too. table is its size if the client has said one, or -1; resized: the
	// next header announces it.
	encoder *hpack.Encoder // nil: see headers
	table   int64
	resized bool
	// names and values are what endpoints have said: see intern.
	names, values map[string]string
	out           []byte
	spare         []byte
	woken         bool
	writer        bool // there is a goroutine that writes. resting: it is to end, since there is nothing to do
	resting       bool
	writing       int64 // since when the client takes nothing; 0: nothing is being written
	blocked       []*http2Stream
	// window is how much the client takes, initial what it takes of a new stream.
	window, initial int64
	// inflow is how much the client may send, credit what it is to be granted again.
	inflow, credit int64
	// goneAway is when the client was asked to open no more streams. ending: none is accepted. finished: the last one has ended.
	// closing: all that will be sent is queued. dead: nothing can be sent.
	goneAway                        int64
	ending, finished, closing, dead bool
}

// closedStream is remembered for a while, since frames for it may be on their way.
type closedStream struct {
	id    uint32
	reset bool // by this side
}

// serveHTTP2 serves a connection whose client speaks HTTP/2.
func (s *Server) serveHTTP2(ctx context.Context, nc net.Conn, info Info, ended func()) {
	site := info.Site()
	c := &http2Client{
		server: s, nc: nc, info: info, via: newForwarded(&info), stats: s.Stats(site.Listener.Name), draining: ctx, limits: limitsOf(site.Listener),
		in: newFrameReader(nc, info.TLS != nil), wake: make(chan struct{}, 1), written: make(chan struct{}),
		table: -1, window: 65535, initial: 65535, inflow: connWindow, ended: ended,
	}
	c.decoder = hpack.NewDecoder(headerTable, c.head.field)
	c.decoder.SetMaxStringLength(c.limits.Bytes)
	c.watch = watch{server: s, site: info.Site, draining: ctx, client: nc, raw: rawOf(nc), tick: c.tick}
	c.watch.parks, c.watch.resume, c.watch.stopped = c.watch.raw != nil, c.run, c.stopped
	c.stats.HTTP2.Add(1)
	// The preface and the client's settings have the time of a header.
	c.watch.enter(phaseHeader)
	s.watched.add(&c.watch)
	c.mu.Lock()
	c.appendSettings()
	c.signal()
	c.mu.Unlock()
	c.run()
}

// run handles frames until the connection ends or is parked. Then it goes on with another run.
func (c *http2Client) run() {
	err := c.read()
	if err == errPark {
		return
	}
	// The time-outs of reading have done their work; those of writing go on.
	c.watch.enter(phaseBusy)
	c.end(err)
	c.server.watched.remove(&c.watch)
	c.stats.HTTP2.Add(-1)
	c.ended()
}

// http2Out is where the encoder of headers writes. The lock is held.
type http2Out http2Client

func (o *http2Out) Write(p []byte) (int, error) {
	o.out = append(o.out, p...)
	return len(p), nil
}

// errGraceful ends a connection that has nothing more to do.
var errGraceful = errors.New("no more requests")

// read handles frames until the connection ends or is parked, and says why it does.
func (c *http2Client) read() error {
	if !c.greeted {
		if err := c.greet(); err != nil {
			return err
		}
	}
	for {
		err := c.wait()
		if err == nil {
			err = c.readFrame()
		}
		var stream http2.StreamError
		switch {
		case err == nil:
		case err == errPark:
			if c.park() {
				return err
			}
		case errors.As(err, &stream):
			if err := c.resetStream(stream.StreamID, stream.Code); err != nil {
				return err
			}
		case c.isFinished():
			return errGraceful
		default:
			return err
		}
	}
}

// greet reads the client's preface.
func (c *http2Client) greet() error {
	var preface [len(wire.Preface)]byte
	if _, err := io.ReadFull(&c.in, preface[:]); err != nil {
		return err
	}
	if string(preface[:]) != wire.Preface {
		return http2.ConnectionError(http2.ErrCodeProtocol)
	}
	c.greeted = true
	return nil
}

// wait waits for the next frame to begin, unless something of it has come already. It returns errPark if that took long.
func (c *http2Client) wait() error {
	if c.hasFrame() {
		return nil
	}
	c.startWaiting()
	c.in.rest()
	if len(c.in.buffered()) > 0 {
		return nil
	}
	c.watch.beginWait()
	return c.watch.endWait(c.in.fill())
}

// readFrame handles a frame. The first one has the client's settings.
func (c *http2Client) readFrame() error {
	frame, err := c.frames().ReadFrame()
	if err != nil {
		return err
	}
	if !c.settled {
		c.settled = true
		if settings, is := frame.(*http2.SettingsFrame); !is || settings.IsAck() {
			return http2.ConnectionError(http2.ErrCodeProtocol)
		}
		if !c.watch.enter(phaseIdle) {
			return errGraceful
		}
	}
	return c.handle(frame)
}

// park parks the connection, unless it is to end or has something to do.
func (c *http2Client) park() bool {
	c.framer, c.head = nil, http2Head{}
	c.mu.Lock()
	parked := !c.dead && !c.finished && c.running == 0 && c.watch.claim()
	c.mu.Unlock()
	return parked && c.watch.arm()
}

// stopped says whether stopReading was called.
func (c *http2Client) stopped() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead || c.finished
}

// stopReading ends the goroutine that reads.
func (c *http2Client) stopReading() {
	c.nc.SetReadDeadline(past)
	c.watch.unpark()
}

// hasFrame says whether a whole frame has come already. If not, nobody knows when it will, and no request may wait for it.
func (c *http2Client) hasFrame() bool {
	there := c.in.buffered()
	return len(there) >= frameHeader && len(there) >= frameHeader+int(there[0])<<16+int(there[1])<<8+int(there[2])
}

func (c *http2Client) isFinished() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.finished
}

// end tells the client why, if there is something to tell, and waits until nothing is left.
func (c *http2Client) end(err error) {
	var code http2.ConnectionError
	c.mu.Lock()
	switch {
	case err == errGraceful || c.watch.reason() == reasonIdle:
		c.appendGoAway(c.accepted, http2.ErrCodeNo)
	case errors.As(err, &code):
		c.appendGoAway(c.accepted, http2.ErrCode(code))
	case errors.Is(err, http2.ErrFrameTooLarge):
		c.appendGoAway(c.accepted, http2.ErrCodeFrameSize)
	default:
		c.dead = true
	}
	lost := make([]*http2Stream, 0, len(c.open))
	for _, st := range c.open {
		st.forget(false)
		lost = append(lost, st)
	}
	c.ending, c.finished, c.closing = true, true, true
	dead := c.dead
	c.unblock()
	c.signal()
	c.mu.Unlock()
	for _, st := range lost {
		st.cancel()
	}
	if !dead {
		c.nc.SetWriteDeadline(time.Now().Add(drainGrace))
		<-c.written
		c.linger()
	}
	c.nc.Close()
	<-c.written
	c.tasks.Wait()
	c.mu.Lock()
	free := c.free
	c.free = nil
	c.mu.Unlock()
	for _, st := range free {
		c.server.watched.remove(&st.watch)
	}
}

// linger lets the client read what was said last: closing while its frames are unread would take that away from it.
func (c *http2Client) linger() {
	half, ok := c.nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	c.nc.SetReadDeadline(time.Now().Add(drainGrace))
	_, _ = io.CopyN(io.Discard, &c.in, lingerBytes)
}

// signal has what is queued written. The lock is held.
func (c *http2Client) signal() {
	if c.woken {
		return
	}
	c.woken = true
	c.wake <- struct{}{}
	if !c.writer {
		c.writer = true
		go c.write()
	}
}

// write writes what is queued, until that is finished or the connection rests.
func (c *http2Client) write() {
	for range c.wake {
		// Others that are ready to run may have something to say too: one write for all of it costs much less than one for each.
		runtime.Gosched()
		c.mu.Lock()
		c.woken = false
		for len(c.out) > 0 && !c.dead {
			full := c.out
			c.out, c.spare = c.spare[:0], nil
			c.unblock()
			c.writing = max(c.server.now(), 1)
			c.mu.Unlock()
			err := c.writeAll(full)
			c.mu.Lock()
			c.writing = 0
			if err != nil {
				c.dead = true
			}
			c.spare = full[:0]
		}
		// An idle connection is small.
		if c.running == 0 || cap(c.out)+cap(c.spare) > 4*outRoom {
			giveBuffer(c.out)
			giveBuffer(c.spare)
			c.out, c.spare = nil, nil
		}
		dead, closing := c.dead, c.closing
		if dead {
			c.out = nil
			c.unblock()
		}
		rest := c.resting && !c.woken && !closing
		if c.resting = false; rest {
			c.writer = false
		}
		c.mu.Unlock()
		if dead {
			c.stopReading()
		}
		if closing {
			close(c.written)
			return
		}
		if rest {
			return
		}
	}
}

func (c *http2Client) writeAll(p []byte) error {
	for len(p) > 0 {
		n, err := c.nc.Write(p[:min(len(p), maxFrame)])
		if err != nil {
			return err
		}
		if p = p[n:]; len(p) > 0 {
			c.mu.Lock()
			c.writing = max(c.server.now(), 1)
			c.mu.Unlock()
		}
	}
	return nil
}

// unblock wakes those who wait for the client. The lock is held.
func (c *http2Client) unblock() {
	for i, st := range c.blocked {
		st.blocked = false
		st.changed.Broadcast()
		c.blocked[i] = nil
	}
	c.blocked = c.blocked[:0]
}

// tick is called by the sweeper: it finds clients that take nothing, and lets those of a draining listener go.
func (c *http2Client) tick(now, idle int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writing != 0 && now-c.writing > idle {
		c.dead = true
		c.nc.SetDeadline(past)
		c.watch.unpark()
		return
	}
	c.rest(now)
	switch {
	case c.dead || c.finished || c.draining.Err() == nil:
	case c.goneAway == 0:
		// The client may have sent requests before it hears of it: this one only asks for no more.
		c.goneAway = max(now, 1)
		c.appendGoAway(1<<31-1, http2.ErrCodeNo)
		c.signal()
	case !c.ending && now-c.goneAway >= drainGrace.Milliseconds():
		c.ending = true
		c.appendGoAway(c.accepted, http2.ErrCodeNo)
		c.signal()
		c.finishIfIdle()
	}
}

// finishIfIdle ends a connection that takes no new requests after its last one. The lock is held.
func (c *http2Client) finishIfIdle() {
	if c.ending && !c.finished && len(c.open) == 0 && c.running == 0 {
		c.finished = true
		c.stopReading()
	}
}
