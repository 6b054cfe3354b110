package web

import (
	"net"

	"portal/internal/lb/balance"
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
	early := c.src.Buffered()
	go func() {
		defer close(toEndpoint)
		c.pass(e.nc, c.nc, early, c.src.Buf)
	}()
	c.pass(c.nc, e.nc, e.src.Buffered(), e.src.Buf)
	<-toEndpoint
}

// pass copies until one side ends; then the other side is half closed. After a failure both are interrupted.
func (c *conn) pass(to, from net.Conn, early, buf []byte) {
	if len(early) > 0 {
		if _, err := to.Write(early); err != nil {
			from.SetDeadline(past)
			return
		}
	}
	for {
		n, err := from.Read(buf)
		if n > 0 {
			c.watch.progress()
			if _, err := to.Write(buf[:n]); err != nil {
				from.SetDeadline(past)
				return
			}
		}
		if err != nil {
			break
		}
	}
	if half, ok := to.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
		to.SetDeadline(past)
	}
}
