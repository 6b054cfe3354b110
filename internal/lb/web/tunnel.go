package web

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"portal/internal/lb/balance"
	"portal/internal/lb/web/wire"
)

// runTunnel passes bytes both ways after an upgrade, until both sides have ended or one has failed.
func (c *conn) runTunnel() {
	e := c.x.tunnel
	use := c.x.use
	c.x.stats.Upgrades.Add(1)
	defer func() {
		c.watch.setEndpoint(nil)
		e.close()
		use.Done(balance.OK)
	}()
	c.watch.setEndpoint(e)
	c.watch.progress()
	if !c.watch.enter(phaseTunnel) {
		return
	}
	toEndpoint := make(chan struct{})
	go func() {
		defer close(toEndpoint)
		c.pass(e.nc, c.nc, &c.src)
	}()
	giveBuffer(c.out)
	giveBuffer(c.x.out)
	c.out, c.x.out = nil, nil
	c.pass(c.nc, e.nc, &e.src)
	<-toEndpoint
}

// pass copies until one side ends; then the other side is half closed. After a failure both are interrupted. What was read before is in the source.
func (c *conn) pass(to, from net.Conn, early *wire.Source) {
	var err error
	if piece := early.Buffered(); len(piece) > 0 {
		_, err = to.Write(piece)
	}
	giveBuffer(early.Buf)
	early.Buf, early.R, early.W = nil, 0, 0
	if err != nil {
		from.SetDeadline(past)
		return
	}
	in := tunnelReader{from: from}
	if tcp, plain := from.(*net.TCPConn); plain {
		in.raw, _ = tcp.SyscallConn()
	}
	for {
		piece, err := in.next()
		if len(piece) > 0 {
			c.watch.progress()
			if _, err := to.Write(piece); err != nil {
				in.release()
				from.SetDeadline(past)
				return
			}
		}
		if err != nil {
			break
		}
	}
	in.release()
	if half, ok := to.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		to.SetDeadline(past)
	}
}

// tunnelReader reads from one end of a tunnel. Tunnels are idle most of the time, and hold no buffer then; over TLS, a small one.
type tunnelReader struct {
	from  net.Conn
	raw   syscall.RawConn // nil: over TLS
	buf   []byte
	n     int
	err   error
	more  bool // what came last filled the small one
	small [512]byte
}

// next returns what comes next, which is good until the next call.
func (r *tunnelReader) next() ([]byte, error) {
	r.release()
	switch {
	case r.raw != nil:
		if err := r.raw.Read(r.readable); err != nil {
			return nil, err
		}
		return r.buf[:r.n], r.err
	case r.more:
		r.buf = takeBuffer()
		n, err := r.from.Read(r.buf)
		r.more = n >= len(r.small)
		return r.buf[:n], err
	}
	n, err := r.from.Read(r.small[:])
	r.more = n == len(r.small)
	return r.small[:n], err
}

func (r *tunnelReader) readable(fd uintptr) bool {
	r.buf = takeBuffer()
	if r.n, r.err = readNow(fd, r.buf); r.err == unix.EAGAIN {
		r.release()
		return false
	}
	return true
}

func (r *tunnelReader) release() {
	giveBuffer(r.buf)
	r.buf = nil
}
