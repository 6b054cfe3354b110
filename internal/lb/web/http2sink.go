package web

import (
	"strconv"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/internal/lb/web/wire"
)

// A stream is the sink of its own exchange: it queues the response in HTTP/2. Nothing waits for the client but for room in the queue and
// for the client's windows.

// await waits until something can be queued; data needs the client's permission too. The lock is held, but not while waiting.
func (st *http2Stream) await(data bool) error {
	c := st.c
	for {
		switch {
		case st.gone || c.dead:
			return errCancelled
		case st.stalled:
			return errStalled
		case len(c.out) >= outRoom || data && c.window <= 0:
			if !st.blocked {
				st.blocked = true
				c.blocked = append(c.blocked, st)
			}
		case data && st.window <= 0:
		default:
			return nil
		}
		c.signal()
		st.changed.Wait()
	}
}

// headers queues fields; last: the stream ends with them. The lock is held.
func (st *http2Stream) headers(fields func(), last bool) {
	c := st.c
	begin := len(c.out)
	c.appendFrame(http2.FrameHeaders, 0, st.id, 0)
	fields()
	var flags http2.Flags
	if last {
		flags = http2.FlagHeadersEndStream
		st.finishQueued()
	}
	length := len(c.out) - begin - frameHeader
	if length <= maxFrame {
		putFrame(c.out[begin:], length, flags|http2.FlagHeadersEndHeaders)
		return
	}
	// The rest goes into frames of its own.
	block := append([]byte(nil), c.out[begin+frameHeader+maxFrame:]...)
	putFrame(c.out[begin:], maxFrame, flags)
	c.out = c.out[:begin+frameHeader+maxFrame]
	for len(block) > 0 {
		n := min(len(block), maxFrame)
		flags := http2.Flags(0)
		if n == len(block) {
			flags = http2.FlagContinuationEndHeaders
		}
		c.appendFrame(http2.FrameContinuation, flags, st.id, n)
		c.out = append(c.out, block[:n]...)
		block = block[n:]
	}
}

const frameHeader = 9

// putFrame completes the header of a frame.
func putFrame(b []byte, length int, flags http2.Flags) {
	b[0], b[1], b[2], b[4] = byte(length>>16), byte(length>>8), byte(length), byte(flags)
}

// finishQueued notes that all of the response is queued: the client may open another stream as soon as it has read it.
func (st *http2Stream) finishQueued() {
	st.done = true
	if st.ended && !st.gone {
		st.c.remove(st, false)
	}
}

func (c *http2Client) encode(name, value string) {
	c.resized = false
	_ = c.headers().WriteField(hpack.HeaderField{Name: name, Value: value}) // it can't fail
}

func (c *http2Client) encodeFields(fields []wire.Field) {
	for i := range fields {
		if f := &fields[i]; !f.Dropped && !f.Known.Hop() {
			c.encode(c.lower(f.Name), c.intern(f.Value))
		}
	}
}

// Endpoints say the same again and again: their words are kept as strings, as far as they are few and short.
const (
	mostInterned = 64
	longInterned = 48
)

func (c *http2Client) intern(b []byte) string {
	if s, ok := c.values[string(b)]; ok {
		return s
	}
	s := string(b)
	if len(s) <= longInterned {
		if c.values == nil || len(c.values) >= mostInterned {
			c.values = make(map[string]string, 16)
		}
		c.values[s] = s
	}
	return s
}

// lower is a field's name as HTTP/2 spells it.
func (c *http2Client) lower(name []byte) string {
	if s, ok := c.names[string(name)]; ok {
		return s
	}
	s := wire.ToLower(name)
	if len(s) <= longInterned {
		if c.names == nil || len(c.names) >= mostInterned {
			c.names = make(map[string]string, 16)
		}
		c.names[string(name)] = s
	}
	return s
}

func (st *http2Stream) interim(res *wire.Response) error {
	if res.Status == 101 || res.Status == 100 && !st.req.Continue {
		return nil
	}
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := st.await(false); err != nil {
		return err
	}
	st.headers(func() {
		c.encode(":status", strconv.Itoa(res.Status))
		c.encodeFields(res.Fields)
	}, false)
	c.signal()
	return nil
}

func (st *http2Stream) head(res *wire.Response, length int64, bodiless bool) error {
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := st.await(false); err != nil {
		return err
	}
	st.length, st.sent = length, 0
	st.headers(func() {
		var number [20]byte
		c.encode(":status", c.intern(strconv.AppendInt(number[:0], int64(res.Status), 10)))
		c.encodeFields(res.Fields)
		if st.x.cookie != "" {
			c.encode("set-cookie", st.x.cookie)
		}
		if length >= 0 && (!bodiless || res.HasLength && res.Status != 204) {
			c.encode("content-length", c.intern(strconv.AppendInt(number[:0], length, 10)))
		}
	}, bodiless || length == 0)
	return nil
}

func (st *http2Stream) data(p []byte) error {
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(p) > 0 {
		if err := st.await(true); err != nil {
			return err
		}
		n := min(int64(len(p)), maxFrame, st.window, c.window)
		st.window -= n
		c.window -= n
		st.sent += n
		var flags http2.Flags
		if st.length >= 0 && st.sent == st.length {
			flags = http2.FlagDataEndStream
			st.finishQueued()
		}
		c.appendFrame(http2.FrameData, flags, st.id, int(n))
		c.out = append(c.out, p[:n]...)
		p = p[n:]
		st.watch.progress()
	}
	return nil
}

func (st *http2Stream) flush() error {
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	c.signal()
	if st.gone || c.dead {
		return errCancelled
	}
	return nil
}

func (st *http2Stream) end(trailer []wire.Field) error {
	c := st.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if !st.done {
		if err := st.await(false); err != nil {
			return err
		}
		if len(trailer) > 0 {
			st.headers(func() { c.encodeFields(trailer) }, true)
		} else {
			c.appendFrame(http2.FrameData, http2.FlagDataEndStream, st.id, 0)
			st.finishQueued()
		}
	}
	c.signal()
	return nil
}
