package conntrack

import (
	"maps"
	"net/netip"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	// handshake is how long a flow may wait for its answer after its endpoint has left the rules. Then the client sends its SYN again,
	// which follows the flow of the first one for as long as the kernel remembers it.
	handshake = time.Second
	// between is the least time between two passes over such flows. The endpoints of a dead node leave within a moment, not at once.
	between = 250 * time.Millisecond
)

// departures are the endpoints that have left a TCP frontend lately.
type departures struct {
	front *plan.Frontend // as it was acknowledged last
	// came is when the frontend, or its first endpoint, came: no flow from before leads to an endpoint. Zero: long ago.
	came time.Time
	left map[netip.AddrPort]time.Time
}

// leave notes that an endpoint has left. After a start there are many frontends, and none has been left.
func (d *departures) leave(e netip.AddrPort, at time.Time) {
	if d.left == nil {
		d.left = map[netip.AddrPort]time.Time{}
	}
	d.left[e] = at
}

// comes notes a frontend that was not there, led nowhere, or was another Service's.
func (c *Cleaner) comes(f *plan.Frontend, now time.Time) {
	c.tcp[f.FrontendKey] = &departures{front: f, came: now}
	c.earliest = earlier(c.earliest, now)
	if c.newer != nil {
		c.newer[f.FrontendKey] = f
	}
}

// noteTCP notes which endpoints the TCP frontends of a Service have lost.
func (c *Cleaner) noteTCP(old, next *plan.Service, snap *plan.Snapshot, now time.Time) (some bool) {
	for _, f := range next.Frontends {
		if f.Protocol != intent.TCP || !snap.Holds(f) {
			continue
		}
		was := old.Frontend(f.FrontendKey)
		if was == f {
			continue
		}
		if was == nil || was.Kind != f.Kind || !was.Forwards() && f.Forwards() {
			c.comes(f, now)
			some = true
			continue
		}
		if c.newer != nil {
			c.newer[f.FrontendKey] = f
		}
		d := c.tcp[f.FrontendKey]
		if d != nil {
			d.changed(f)
		}
		for _, e := range lost(was, f) {
			if d == nil {
				d = &departures{front: f}
				c.tcp[f.FrontendKey] = d
			}
			d.leave(e, now)
			some = true
		}
	}
	if some && c.earliest.IsZero() {
		c.earliest = now
	}
	return some
}

// lost are the endpoints that a frontend led to and no longer does.
func lost(was, now *plan.Frontend) (out []netip.AddrPort) {
	var last [2]*plan.Pool
	for o := range was.Routes {
		p, q := was.Routes[o].Pool, now.Routes[o].Pool
		if p == nil || p == q || last == [2]*plan.Pool{p, q} {
			continue
		}
		last = [2]*plan.Pool{p, q}
		var still []plan.Endpoint
		if q != nil {
			still = q.Endpoints
		}
		// Both are in order.
		for _, e := range p.Endpoints {
			for len(still) > 0 && still[0].Addr.Compare(e.Addr) < 0 {
				still = still[1:]
			}
			if (len(still) == 0 || still[0].Addr != e.Addr) && !now.LeadsTo(e.Addr) {
				out = append(out, e.Addr)
			}
		}
	}
	return out
}

// due takes out the departures that are long enough ago, and says when there will be others; zero: there are none.
func (c *Cleaner) due(now time.Time) (out map[plan.FrontendKey]*departures, next time.Time) {
	if c.earliest.IsZero() {
		return nil, time.Time{}
	}
	if next = later(c.earliest.Add(handshake), c.passed.Add(between)); now.Before(next) {
		return nil, next
	}
	out = map[plan.FrontendKey]*departures{}
	c.earliest = time.Time{}
	for k, d := range c.tcp {
		ripe, rest := d.split(now.Add(-handshake))
		if ripe != nil {
			out[k] = ripe
		}
		if rest == nil {
			delete(c.tcp, k)
			continue
		}
		c.tcp[k] = rest
		c.earliest = earlier(c.earliest, rest.first())
	}
	if len(c.tcp) == 0 {
		c.tcp = map[plan.FrontendKey]*departures{} // one that was emptied would keep its room
		return out, time.Time{}
	}
	return out, later(c.earliest.Add(handshake), now.Add(between))
}

// split parts what happened until a time from what did later; nil: nothing.
func (d *departures) split(until time.Time) (ripe, rest *departures) {
	switch {
	case d.first().After(until):
		return nil, d
	case len(d.left) == 0:
		return d, nil
	}
	ripe, rest = &departures{front: d.front}, &departures{front: d.front}
	side := func(t time.Time) *departures {
		if t.After(until) {
			return rest
		}
		return ripe
	}
	if !d.came.IsZero() {
		side(d.came).came = d.came
	}
	for e, t := range d.left {
		side(t).leave(e, t)
	}
	if rest.came.IsZero() && len(rest.left) == 0 {
		rest = nil
	}
	return ripe, rest
}

// first is when the first of them happened.
func (d *departures) first() time.Time {
	t := d.came
	for _, at := range d.left {
		t = earlier(t, at)
	}
	return t
}

// stale says whether a flow that nobody has answered will never be.
func (d *departures) stale(from netip.AddrPort) bool {
	_, left := d.left[from]
	return (left || !d.came.IsZero()) && !d.front.LeadsTo(from)
}

// putBackTCP notes again what a pass of a family failed to look at.
func (c *Cleaner) putBackTCP(family intent.Family, list map[plan.FrontendKey]*departures) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, d := range list {
		if k.Family != family {
			continue
		}
		c.earliest = earlier(c.earliest, d.first())
		if f := c.newer[k]; f != nil {
			d.changed(f)
		}
		if now := c.tcp[k]; now != nil {
			d.came = earlier(d.came, now.came)
			for e, t := range now.left {
				d.leave(e, t)
			}
		}
		c.tcp[k] = d
	}
}

// changed notes what the frontend has become. An endpoint may be back.
func (d *departures) changed(f *plan.Frontend) {
	d.front = f
	maps.DeleteFunc(d.left, func(e netip.AddrPort, _ time.Time) bool { return f.LeadsTo(e) })
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// earlier is the one of two times that comes first; zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
