package web

import (
	"net"
	"slices"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// restAfter is how long a connection without requests keeps what it needs for the next one.
const restAfter = time.Second

// rest makes a connection small that has had no request for a while: what it keeps for the next one is given back, and the goroutine that writes ends. The
// lock is held.
func (c *http2Client) rest(now int64) {
	seen := c.watch.state.Load()
	if c.running > 0 || c.closing || c.dead || len(c.out) > 0 || c.woken || phase(seen&7) != phaseIdle || now-seen>>3 < c.server.restAfter {
		return
	}
	for i, st := range c.free {
		c.server.watched.remove(&st.watch)
		c.free[i] = nil
	}
	c.free, c.names, c.values, c.open = nil, nil, nil, nil
	if !c.resized {
		c.encoder = nil
	}
	if c.closed != nil && !slices.ContainsFunc(c.closed[:], func(s closedStream) bool { return s.reset }) {
		c.closed = nil // the client knows that they have ended
	}
	if c.writer {
		c.resting = true
		c.signal()
	}
}

// remember notes that a stream was closed; reset: by this side. The lock is held.
func (c *http2Client) remember(id uint32, reset bool) {
	if c.closed == nil {
		c.closed = new([len(c.closed)]closedStream)
	}
	c.closed[id>>1%uint32(len(c.closed))] = closedStream{id, reset}
}

// remembered is what is known of a stream that was closed, or of another one. The lock is held.
func (c *http2Client) remembered(id uint32) closedStream {
	if c.closed == nil {
		return closedStream{}
	}
	return c.closed[id>>1%uint32(len(c.closed))]
}

// headers is what encodes headers. A new one does not know what the client's table has, and makes no use of it; what it adds is the
// newest there, by which fields are numbered. The lock is held.
func (c *http2Client) headers() *hpack.Encoder {
	if c.encoder != nil {
		return c.encoder
	}
	c.encoder = hpack.NewEncoder((*http2Out)(c))
	if c.table >= 0 {
		c.encoder.SetMaxDynamicTableSize(uint32(c.table))
	}
	return c.encoder
}

// frames is what reads frames: a new one after the connection was parked.
func (c *http2Client) frames() *http2.Framer {
	if c.framer == nil {
		c.framer = http2.NewFramer(nil, &c.in)
		c.framer.SetReuseFrames()
		c.framer.SetMaxReadFrameSize(maxFrame)
	}
	return c.framer
}

// frameReader reads ahead, but has no buffer while it waits for the first byte of a frame. Without TLS it keeps a small one: reading the first byte alone
// would cost a system call.
type frameReader struct {
	from net.Conn
	keep bool
	buf  []byte
	r, w int
	one  [1]byte
}

// keptBuffer is the size of a buffer that is kept.
const keptBuffer = 4 << 10

func newFrameReader(from net.Conn, secure bool) frameReader {
	if secure {
		return frameReader{from: from}
	}
	return frameReader{from: from, keep: true, buf: make([]byte, keptBuffer)}
}

// buffered is what was read ahead.
func (f *frameReader) buffered() []byte { return f.buf[f.r:f.w] }

// rest gives the buffer back if there is nothing in it.
func (f *frameReader) rest() {
	if f.buf != nil && f.r == f.w && !f.keep {
		giveBuffer(f.buf)
		f.buf, f.r, f.w = nil, 0, 0
	}
}

// Read is like that of bufio.Reader.
func (f *frameReader) Read(p []byte) (int, error) {
	if f.r == f.w {
		if f.buf != nil && len(p) >= len(f.buf) {
			return f.from.Read(p)
		}
		if err := f.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, f.buf[f.r:f.w])
	f.r += n
	return n, nil
}

func (f *frameReader) fill() error {
	into := f.buf
	if into == nil {
		into = f.one[:]
	}
	n, err := f.from.Read(into)
	if n == 0 {
		return err
	}
	if f.buf == nil {
		// The rest of what TLS has decrypted is read with the buffer.
		f.buf = takeBuffer()
		f.buf[0] = f.one[0]
	}
	f.r, f.w = 0, n
	return nil
}
