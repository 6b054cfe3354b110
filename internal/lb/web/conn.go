package web

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/web/wire"
)

// conn is a client's connection that speaks HTTP/1.
type conn struct {
	server *Server
	nc     net.Conn
	info   Info
	watch  watch
	src    wire.Source
	req    wire.Request
	body   clientBody
	x      exchange
	out    []byte

	// For waiting without a buffer.
	raw      syscall.RawConn
	readable func(fd uintptr) bool
	readErr  error

	// How the response under way is framed.
	chunked bool
	sent    int64

	// idle is set while a request is waited for, also by others; begun after the first one has come.
	idle, begun bool
	ended       func()
}

func newConn(ctx context.Context, s *Server, nc net.Conn, info Info, ended func()) *conn {
	c := &conn{server: s, nc: nc, info: info, ended: ended}
	c.src.From = nc
	c.watch = watch{server: s, site: info.Site, draining: ctx, client: nc, raw: rawOf(nc)}
	if _, plain := nc.(*net.TCPConn); plain {
		c.raw = c.watch.raw
		c.readable = c.onReadable
	}
	c.watch.parks, c.watch.resume = c.watch.raw != nil, c.run
	c.body.c = c
	c.x = exchange{server: s, watch: &c.watch, info: &c.info, req: &c.req, sink: c, via: newForwarded(&info), ctx: context.Background()}
	c.watch.enter(phaseIdle)
	s.watched.add(&c.watch)
	return c
}

// run answers requests until the connection ends or is parked. Then it goes on with another run.
func (c *conn) run() {
	http2, parked := c.serve()
	if parked {
		return
	}
	c.release()
	if http2 != nil {
		c.server.serveHTTP2(c.watch.draining, http2, c.info, c.ended)
		return
	}
	c.nc.Close()
	c.ended()
}

// serve answers requests until the connection ends or is parked. It returns a connection if the client turns out to speak HTTP/2.
func (c *conn) serve() (http2 net.Conn, parked bool) {
	for {
		if len(c.src.Buffered()) == 0 {
			if !c.idle {
				c.giveBuffers()
				c.watch.enter(phaseIdle)
				c.idle = true
			}
			switch err := c.wait(); {
			case err == errPark:
				if c.watch.park() {
					return nil, true
				}
				continue
			case err != nil:
				return nil, false
			}
		}
		c.idle = false
		first := !c.begun
		c.begun = true
		c.watch.enter(phaseHeader)
		site := c.info.Site()
		c.x.reset()
		c.x.site, c.x.stats = site, c.server.Stats(site.Listener.Name)
		ok, prior := c.readRequest(first)
		if prior {
			return &prefixed{Conn: c.nc, head: bytes.Clone(c.src.Buffered())}, false
		}
		if !ok {
			c.linger()
			return nil, false
		}
		c.watch.enter(phaseBusy)
		c.watch.why.Store(int32(reasonNone)) // of the request before
		c.x.closing = !c.req.KeepAlive || c.watch.drains()
		c.x.serve()
		switch {
		case c.x.tunnel != nil:
			c.runTunnel()
			return nil, false
		case c.x.broken:
			c.reset()
			return nil, false
		case c.x.closing:
			if c.x.body != nil && !c.x.body.Done() || len(c.src.Buffered()) > 0 {
				c.linger()
			}
			return nil, false
		}
	}
}

func (c *conn) release() {
	c.server.watched.remove(&c.watch)
	if c.x.mine != nil {
		c.x.mine.close()
	}
	giveBuffer(c.src.Buf)
	c.src.Buf = nil
	giveBuffer(c.out)
	c.out = nil
	giveBuffer(c.x.out)
	c.x.out = nil
}

// giveBuffers keeps an idle connection small.
func (c *conn) giveBuffers() {
	if c.src.Buf == nil {
		return
	}
	giveBuffer(c.src.Buf)
	c.src.Buf, c.src.R, c.src.W = nil, 0, 0
	giveBuffer(c.out)
	c.out = nil
	giveBuffer(c.x.out)
	c.x.out = nil
}

func (c *conn) takeBuffers() {
	c.src.Buf = takeBuffer()
	c.out = takeBuffer()[:0]
	c.x.out = takeBuffer()[:0]
}

// wait waits for the first bytes of a request. It returns errPark if that took long.
func (c *conn) wait() error {
	c.watch.beginWait()
	return c.watch.endWait(c.receive())
}

// receive waits without a buffer if the kernel can be asked directly.
func (c *conn) receive() error {
	if c.raw != nil {
		c.readErr = nil
		if err := c.raw.Read(c.readable); err != nil {
			return err
		}
		return c.readErr
	}
	// The first byte alone: the rest of what TLS has decrypted is read when there is a buffer.
	var one [1]byte
	n, err := c.nc.Read(one[:])
	if n == 0 {
		return err
	}
	c.takeBuffers()
	c.src.Buf[0], c.src.W = one[0], 1
	return nil
}

func (c *conn) onReadable(fd uintptr) bool {
	if c.src.Buf == nil {
		c.takeBuffers()
	}
	n, err := readNow(fd, c.src.Buf)
	if err == unix.EAGAIN {
		c.giveBuffers()
		return false
	}
	c.src.R, c.src.W, c.readErr = 0, n, err
	return true
}

// readNow reads what is there; EAGAIN: nothing.
func readNow(fd uintptr, buf []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), buf)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

// readRequest reads a head. After a refusal it has answered already, and returns false.
func (c *conn) readRequest(first bool) (ok, prior bool) {
	limits := limitsOf(c.x.site.Listener)
	c.req.Reset()
	for {
		data := c.src.Buffered()
		if first && len(data) >= 4 && string(data[:4]) == wire.Preface[:4] {
			if bytes.HasPrefix(data, []byte(wire.Preface)) {
				return false, true
			}
			if !bytes.HasPrefix([]byte(wire.Preface), data) {
				c.refuse(&wire.Error{Status: 400, Reason: "neither HTTP/1 nor HTTP/2"})
				return false, false
			}
		} else if len(data) > 0 {
			n, failed := c.req.Parse(data, limits)
			if failed != nil {
				c.refuse(failed)
				return false, false
			}
			if n > 0 {
				c.src.R += n
				return c.prepareBody(limits), false
			}
		}
		switch err := c.src.Fill(); {
		case err == nil:
		case err == io.ErrShortBuffer:
			grown := make([]byte, max(limits.Bytes, bufferSize)+bufferSize)
			copy(grown, data)
			giveBuffer(c.src.Buf)
			c.src.Buf, c.src.R, c.src.W = grown, 0, len(data)
		case c.watch.reason() == reasonHeader:
			c.refuse(&wire.Error{Status: 408, Reason: "the header took too long"})
			return false, false
		case err == io.EOF && len(data) > 0:
			c.refuse(&wire.Error{Status: 400, Reason: "the header is incomplete"})
			return false, false
		default:
			return false, false
		}
	}
}

// prepareBody looks at what follows the head.
func (c *conn) prepareBody(limits wire.Limits) bool {
	most := bodyLimit(c.x.site.Listener)
	if most >= 0 && c.req.Length > most {
		c.refuse(&wire.Error{Status: 413, Reason: "the body is too large"})
		return false
	}
	if c.req.Length == 0 {
		return true
	}
	c.body.Reset(&c.src, c.req.Length, most, limits)
	c.x.body = &c.body
	if c.body.Whole() {
		c.x.small, _ = c.body.Next(false)
	}
	return true
}

// refuse answers a request that can't be understood.
func (c *conn) refuse(why *wire.Error) {
	c.watch.enter(phaseBusy)
	c.x.closing = true
	c.x.isHead = string(c.req.Method) == "HEAD"
	c.x.beginLog()
	c.x.answer(why.Status, why.Reason)
	c.x.endLog()
}

// lingering bounds how long and how much is read from a client that was answered and should go.
const (
	lingerTime  = 5 * time.Second
	lingerBytes = 16 << 20
)

// linger closes so that the client gets the answer: closing while its bytes are unread would make the kernel reset the connection, and
// the answer might be lost.
func (c *conn) linger() {
	c.watch.enter(phaseBusy)
	half, ok := c.nc.(interface{ CloseWrite() error })
	if !ok || half.CloseWrite() != nil {
		return
	}
	if c.src.Buf == nil {
		return
	}
	c.nc.SetReadDeadline(time.Now().Add(lingerTime))
	for n := 0; n < lingerBytes; {
		got, err := c.nc.Read(c.src.Buf)
		if err != nil {
			return
		}
		n += got
	}
}

// reset closes so that the client sees that the response is not complete: over TLS, that no end is announced.
func (c *conn) reset() {
	if !c.x.started {
		return
	}
	below := c.nc
	if secured, ok := below.(*tls.Conn); ok {
		below = secured.NetConn()
	}
	if tcp, ok := below.(*net.TCPConn); ok {
		tcp.SetLinger(0)
		tcp.Close()
	}
}

// clientBody is the body of a request in HTTP/1.
type clientBody struct {
	wire.Body
	c *conn
}

func (b *clientBody) trailer() []wire.Field { return b.Trailer }

func (b *clientBody) interrupt() { b.c.nc.SetReadDeadline(past) }

// prefixed is a connection of which something was read already.
type prefixed struct {
	net.Conn
	head []byte
}

func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.head) > 0 {
		n := copy(b, p.head)
		p.head = p.head[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

// CloseWrite ends what is sent.
func (p *prefixed) CloseWrite() error {
	half, ok := p.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// NetConn is what is below.
func (p *prefixed) NetConn() net.Conn { return p.Conn }
