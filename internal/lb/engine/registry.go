package engine

import (
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/lb/config"
)

// shards is how many locks the connections share.
const shards = 16

// registry is all connections, for sweeping and closing.
type registry struct {
	count  atomic.Int64
	turn   atomic.Uint32
	shards [shards]shard

	mu    sync.Mutex
	waits chan struct{}
}

type shard struct {
	mu    sync.Mutex
	first *conn
}

func (r *registry) add(c *conn) {
	s := &r.shards[r.turn.Add(1)%shards]
	r.count.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	c.shard, c.next = s, s.first
	if s.first != nil {
		s.first.prev = c
	}
	s.first = c
}

func (r *registry) remove(c *conn) {
	s := c.shard
	s.mu.Lock()
	if c.prev != nil {
		c.prev.next = c.next
	} else {
		s.first = c.next
	}
	if c.next != nil {
		c.next.prev = c.prev
	}
	s.mu.Unlock()
	if r.count.Add(-1) == 0 {
		r.mu.Lock()
		if r.waits != nil {
			close(r.waits)
			r.waits = nil
		}
		r.mu.Unlock()
	}
}

// changed is closed the next time that there are no connections; it is closed already if there are none.
func (r *registry) changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waits == nil {
		r.waits = make(chan struct{})
	}
	out := r.waits
	if r.count.Load() == 0 {
		close(r.waits)
		r.waits = nil
	}
	return out
}

// each calls f with every connection. f must not block.
func (r *registry) each(f func(*conn)) {
	for i := range r.shards {
		s := &r.shards[i]
		s.mu.Lock()
		for c := s.first; c != nil; c = c.next {
			f(c)
		}
		s.mu.Unlock()
	}
}

// closeAll closes all connections, and waits until nothing serves them.
func (r *registry) closeAll() {
	var all []*conn
	r.each(func(c *conn) { all = append(all, c) })
	for _, c := range all {
		c.close(endStopped, false)
	}
	for r.count.Load() > 0 {
		<-r.changed()
	}
}

// sweepInterval is how exact idle timeouts and draining are. One look at all connections is cheaper than a timer for each, which
// would have to be set again with every packet.
const sweepInterval = 250 * time.Millisecond

// sweep closes connections that are idle, or whose endpoint left or listener changed long enough ago.
func (e *Engine) sweep() {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
		if e.conns.count.Load() == 0 {
			continue
		}
		now := time.Now()
		// Closing waits for who reads at the moment, so it is not done under the locks of each.
		var due []*conn
		var connecting []*link
		e.conns.each(func(c *conn) {
			if c.due(now) != "" {
				due = append(due, c)
			} else if k := c.connecting(); k != nil {
				connecting = append(connecting, k)
			}
		})
		for _, k := range connecting {
			k.expire(now)
		}
		for _, c := range due {
			why := c.due(now)
			if why == endIdle {
				c.listener.counters.idleTimeouts.Add(1)
			}
			if why != "" {
				c.close(why, false)
			}
		}
	}
}

// connecting is the connection's link, as long as that has no endpoint.
func (c *conn) connecting() *link {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.relay != nil || c.closed {
		return nil
	}
	return c.link
}

// due says why the connection's time has come, if it has. The idle times and endpoints of those with requests are looked after by who reads these.
func (c *conn) due(now time.Time) string {
	c.mu.Lock()
	r, closed := c.relay, c.closed
	c.mu.Unlock()
	if closed {
		return ""
	}
	if until := c.generation.until.Load(); until != 0 && now.UnixNano() >= until {
		return endChanged
	}
	if r == nil {
		return ""
	}
	if now.UnixNano()-c.last.Load() >= int64(c.listener.state.Load().idle) {
		return endIdle
	}
	if left := r.use.Endpoint.LeftAt(); !left.IsZero() && !now.Before(left.Add(draining(r.pool.Config()))) {
		return endDrained
	}
	return ""
}

func draining(cfg *config.Pool) time.Duration {
	switch {
	case cfg.Draining < 0:
		return 0
	case cfg.Draining == 0:
		return config.DefaultDraining
	}
	return cfg.Draining
}
