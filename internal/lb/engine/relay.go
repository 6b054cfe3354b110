package engine

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/lb/balance"
)

// relay is what is counted and recorded of the bytes that pass between a client and an endpoint.
type relay struct {
	conn   *conn
	pool   *pool
	use    *balance.Use
	record *Record // nil: nobody is interested
	// open are the directions that go on, if each has a goroutine.
	open              atomic.Int32
	bytesIn, bytesOut atomic.Uint64
}

// copyStats count where bytes went.
type copyStats struct {
	spliced, copied atomic.Uint64
}

// bufferSize is what one round copies. If that much comes at once, the next rounds go through a pipe and are not copied.
// They do until a round brings less than leastSplice, which is cheaper to copy.
const (
	bufferSize  = 16 << 10
	leastSplice = 4 << 10
)

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

// start begins to pass bytes of which at least one side is encrypted; others are passed by links. It does not wait for the end. endpoint
// is nil if raw needs no encryption.
func (r *relay) start(client, endpoint net.Conn, raw stream) {
	r.open.Store(2)
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
