package forward

import (
	"context"
	"net"
	"slices"
	"time"
)

const (
	maxIdle = 8
	// idleFor is how long a connection is kept for the next query: address translation and firewalls on the way forget it
	// sooner or later, and don't say so.
	idleFor = 10 * time.Second
)

// idleConn is a connection that waits for the next query.
type idleConn struct {
	net.Conn
	since time.Time
}

func (u *upstream) takeIdle() net.Conn {
	u.expireIdle(time.Now())
	u.mu.Lock()
	defer u.mu.Unlock()
	n := len(u.idle)
	if n == 0 {
		return nil
	}
	c := u.idle[n-1].Conn
	u.idle = slices.Delete(u.idle, n-1, n)
	return c
}

func (u *upstream) putIdle(c net.Conn) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.idle) >= maxIdle {
		c.Close()
		return
	}
	u.idle = append(u.idle, idleConn{c, time.Now()})
}

// expireIdle closes connections that have waited for too long.
func (u *upstream) expireIdle(now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.idle = slices.DeleteFunc(u.idle, func(c idleConn) bool {
		old := now.Sub(c.since) >= idleFor
		if old {
			c.Close()
		}
		return old
	})
}

// closeIdle closes all of them.
func (u *upstream) closeIdle() { u.expireIdle(time.Now().Add(idleFor)) }

// halfway returns a context with half of the time that is left.
func halfway(ctx context.Context) (context.Context, context.CancelFunc) {
	if end, ok := ctx.Deadline(); ok {
		return context.WithTimeout(ctx, time.Until(end)/2)
	}
	return context.WithCancel(ctx)
}
