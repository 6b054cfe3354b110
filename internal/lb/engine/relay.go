package engine

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/balance"
)

// relay passes bytes both ways between a client and an endpoint.
type relay struct {
	conn   *conn
	pool   *pool
	use    *balance.Use
	record *Record // nil: nobody is interested
	// open are the directions that go on.
	open              atomic.Int32
	bytesIn, bytesOut atomic.Uint64
	halves            [2]half
}

// copyStats count where bytes went.
type copyStats struct {
	spliced, copied atomic.Uint64
}

// half is one direction. Idle ones hold no buffer: that is what most connections are most of the time.
type half struct {
	relay   *relay
	inbound bool // from the client
	to      stream
	source  syscall.RawConn
	sink    syscall.RawConn
	bulk    bool // much comes at once: it is worth a pipe
	buf     *[]byte
	pipe    *pipe
	have    int // bytes in buf or pipe
	sent    int // of buf
	problem error
}

// bufferSize is what one round copies. If that much comes at once, the next rounds go through a pipe and are not copied.
// They do until a round brings less than leastSplice, which is cheaper to copy.
const (
	bufferSize  = 16 << 10
	leastSplice = 4 << 10
)

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// start begins to pass bytes. It does not wait for the end. endpoint is nil if raw needs no encryption.
func (r *relay) start(client, endpoint net.Conn, raw stream) {
	r.open.Store(2)
	if client == net.Conn(r.conn.raw) && endpoint == nil {
		a, err := r.conn.raw.SyscallConn()
		b, err2 := raw.SyscallConn()
		if err != nil || err2 != nil {
			r.conn.close(endReset, true)
			r.finished()
			return
		}
		r.halves[0] = half{relay: r, inbound: true, to: raw, source: a, sink: b}
		r.halves[1] = half{relay: r, to: r.conn.raw, source: b, sink: a}
		go r.halves[0].run()
		go r.halves[1].run()
		return
	}
	var other duplex = endpoint
	if endpoint == nil {
		other = raw.(duplex)
	}
	go r.copy(other, client, true)
	go r.copy(client, other, false)
}

// duplex is what encrypted bytes are copied from and to.
type duplex interface {
	io.Reader
	io.Writer
}

// ended is called once by each direction.
func (r *relay) ended(err error) {
	if err != nil {
		r.conn.close(endReset, true)
	}
	if r.open.Add(-1) == 0 {
		r.finished()
	}
}

// finished is the end of the connection.
func (r *relay) finished() {
	r.conn.close("", false)
	r.use.Done(balance.OK)
	if r.record != nil {
		r.record.Duration = time.Since(r.record.Begin)
		r.record.BytesIn, r.record.BytesOut = r.bytesIn.Load(), r.bytesOut.Load()
		r.record.End = r.conn.why()
		r.conn.listener.engine.options.Record(r.record)
	}
	r.conn.finish()
}

// passed counts bytes.
func (r *relay) passed(n int, inbound bool) {
	r.conn.last.Store(time.Now().UnixNano())
	if inbound {
		r.bytesIn.Add(uint64(n))
		r.use.Endpoint.Counters.BytesIn.Add(uint64(n))
		r.conn.listener.counters.bytesIn.Add(uint64(n))
	} else {
		r.bytesOut.Add(uint64(n))
		r.use.Endpoint.Counters.BytesOut.Add(uint64(n))
		r.conn.listener.counters.bytesOut.Add(uint64(n))
	}
}

// run passes bytes until the source has no more.
func (h *half) run() {
	read, write := h.read, h.write // one allocation each, not one for each round
	err := h.loop(read, write)
	h.release()
	// After the last direction both sides are closed anyway.
	if err == nil && h.relay.open.Load() > 1 && h.to.CloseWrite() != nil {
		err = io.ErrClosedPipe
	}
	h.relay.ended(err)
}

func (h *half) loop(read, write func(uintptr) bool) error {
	stats := &h.relay.conn.listener.engine.copied
	for {
		h.have, h.sent, h.problem = 0, 0, nil
		if err := h.source.Read(read); err != nil {
			return err
		}
		if h.problem != nil {
			return h.problem
		}
		if h.have == 0 {
			return nil
		}
		n := h.have
		// What has been read is on its way: a slow receiver is no idle connection, so it counts now and when it has been sent.
		h.relay.conn.last.Store(time.Now().UnixNano())
		if err := h.sink.Write(write); err != nil {
			return err
		}
		if h.problem != nil {
			return h.problem
		}
		if h.pipe != nil {
			stats.spliced.Add(uint64(n))
		} else {
			stats.copied.Add(uint64(n))
		}
		h.release()
		h.bulk = n >= bufferSize || h.bulk && n >= leastSplice
		h.relay.passed(n, h.inbound)
	}
}

// read takes what is there. It says false if nothing is, and is called again when something may be.
func (h *half) read(fd uintptr) bool {
	if h.bulk {
		if h.pipe = takePipe(); h.pipe != nil {
			return h.spliceIn(int(fd))
		}
	}
	h.buf = buffers.Get().(*[]byte)
	for {
		n, err := unix.Read(int(fd), *h.buf)
		switch err {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			h.release()
			return false
		}
		h.have, h.problem = max(n, 0), err
		return true
	}
}

func (h *half) spliceIn(fd int) bool {
	for {
		n, err := unix.Splice(fd, nil, h.pipe.w, nil, pipeSize, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		switch err {
		case unix.EINTR:
			continue
		case unix.EAGAIN:
			h.release()
			return false
		}
		h.have, h.problem = int(max(n, 0)), err
		return true
	}
}

// write sends what was read. It says false if the receiver takes no more for now.
func (h *half) write(fd uintptr) bool {
	for h.have > 0 {
		var n int
		var err error
		if h.pipe != nil {
			var moved int64
			moved, err = unix.Splice(h.pipe.r, nil, int(fd), nil, h.have, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
			n = int(moved)
		} else {
			n, err = unix.Write(int(fd), (*h.buf)[h.sent:h.sent+h.have])
		}
		switch err {
		case nil:
			h.have -= n
			h.sent += n
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			h.problem = err
			return true
		}
	}
	return true
}

// release gives back what a round needed.
func (h *half) release() {
	if h.buf != nil {
		buffers.Put(h.buf)
		h.buf = nil
	}
	if h.pipe != nil {
		if h.have > 0 {
			h.pipe.close() // bytes of a connection that is gone are in it
		} else {
			givePipe(h.pipe)
		}
		h.pipe = nil
	}
}

// idleBuffer is what a direction over TLS holds while it waits.
const idleBuffer = 1 << 10

// copy passes bytes where at least one side is encrypted.
func (r *relay) copy(to, from duplex, inbound bool) {
	stats := &r.conn.listener.engine.copied
	small := make([]byte, idleBuffer)
	buf := small
	var big *[]byte
	var err error
	for err == nil {
		var n int
		n, err = from.Read(buf)
		if n > 0 {
			r.conn.last.Store(time.Now().UnixNano())
			if _, err2 := to.Write(buf[:n]); err2 != nil {
				err = err2
				break
			}
			stats.copied.Add(uint64(n))
			r.passed(n, inbound)
		}
		switch {
		case n == len(small) && big == nil:
			big = buffers.Get().(*[]byte)
			buf = *big
		case n < len(small) && big != nil:
			buffers.Put(big)
			big, buf = nil, small
		}
	}
	if big != nil {
		buffers.Put(big)
	}
	if errors.Is(err, io.EOF) {
		err = nil
		if side, ok := to.(interface{ CloseWrite() error }); ok {
			err = side.CloseWrite()
		}
	}
	r.ended(err)
}
