package balance

import (
	"math"
	"slices"
	"sync/atomic"

	"portal/internal/lb/config"
	"portal/internal/shortage"
)

// Result is how a connection or request went, as far as it says something about the endpoint.
type Result int

// The results.
const (
	// OK ends a row of failures.
	OK Result = iota
	// ConnectFailed: refused, timed out, or no TLS handshake.
	ConnectFailed
	// Failed: the endpoint broke off before it answered, or answered 502, 503 or 504.
	Failed
	// Abandoned says nothing: the client left first, for example.
	Abandoned
)

// ConnectResult is the result of a connection that failed to be made. That this process or machine has no descriptors or memory for it says
// nothing about the endpoint.
func ConnectResult(err error) Result {
	if shortage.Is(err) {
		return Abandoned
	}
	return ConnectFailed
}

// Use is one connection or request at an endpoint.
type Use struct {
	Endpoint *Endpoint
	pool     *Pool
	done     atomic.Bool
}

// Succeeded ends a row of failures while the use goes on: for connections that last.
func (u *Use) Succeeded() { u.Endpoint.failures.Store(0) }

// Done ends the use. Only the first call counts.
func (u *Use) Done(r Result) {
	if u.done.Swap(true) {
		return
	}
	u.Endpoint.active.Add(-1)
	switch r {
	case OK:
		if u.Endpoint.failures.Load() != 0 {
			u.Endpoint.failures.Store(0)
		}
	case ConnectFailed:
		u.Endpoint.Counters.ConnectFailures.Add(1)
		u.pool.failed(u.Endpoint)
	case Failed:
		u.Endpoint.Counters.Failures.Add(1)
		u.pool.failed(u.Endpoint)
	}
}

// Pick chooses an endpoint that is none of not, and counts a connection or request to it as begun until Done. Those who try again after a
// failure give the endpoints that failed.
func (p *Pool) Pick(k Key, not []*Endpoint) (*Use, error) {
	t := p.current()
	e, busy := p.pick(t, k, not)
	if e == nil {
		if busy {
			p.Counters.Busy.Add(1)
			return nil, ErrBusy
		}
		p.Counters.NoEndpoint.Add(1)
		return nil, ErrNoEndpoint
	}
	return &Use{Endpoint: e, pool: p}, nil
}

func (p *Pool) pick(t *table, k Key, not []*Endpoint) (*Endpoint, bool) {
	sticky := t.cfg.Affinity > 0 && k.Client.IsValid() && affine(t.cfg.Policy.Kind)
	if sticky {
		e := p.sticky.get(k.Client, p.now(), t.cfg.Affinity)
		if e != nil && e.Usable() && !slices.Contains(not, e) && e.acquire(t.limit) {
			return e, false
		}
	}
	groups := [2]*group{&t.preferred, &t.usable}
	busy := false
	for i, g := range groups {
		if i == 1 && len(g.endpoints) == len(t.preferred.endpoints) {
			break
		}
		// Another may take an endpoint's last place between the choice and its acquisition: choose again.
		for range len(g.endpoints) + 1 {
			e, full := p.choose(t, g, k, not)
			busy = busy || full
			if e == nil {
				break
			}
			if !e.acquire(t.limit) {
				busy = true
				continue
			}
			switch {
			case sticky:
				p.sticky.set(k.Client, e, p.now(), t.cfg.Affinity)
			case t.cfg.Policy.Kind == config.Leader && e != g.endpoints[0] && slices.Contains(not, g.endpoints[0]):
				p.replaceLeader(g.endpoints[0], e)
			}
			return e, false
		}
	}
	return nil, busy
}

// affine says whether a policy leaves a choice that affinity can narrow.
func affine(kind config.PolicyKind) bool {
	switch kind {
	case config.Leader, config.Shard, config.ConsistentHash:
		return false
	}
	return true
}

// choose returns an endpoint of the group, or nil and whether one was passed over because it has as much as it may have.
func (p *Pool) choose(t *table, g *group, k Key, not []*Endpoint) (*Endpoint, bool) {
	if len(g.endpoints) == 0 {
		return nil, false
	}
	f := filter{not: not, limit: t.limit}
	var e *Endpoint
	switch t.cfg.Policy.Kind {
	case config.Leader:
		e = f.first(g, 0)
		if e != nil && e != g.endpoints[0] && !slices.Contains(not, g.endpoints[0]) {
			e = nil // The leader has as much as it may have: no other one helps out.
		}
	case config.Shard:
		f.usable = true
		e = f.first(g, int(hashKey(t, k)%uint64(len(g.endpoints))))
	case config.ConsistentHash:
		e = f.rendezvous(g, hashKey(t, k))
	case config.Random:
		e = f.first(g, g.random(p.random()))
	case config.LeastRequest:
		e = f.lesser(g, g.random(p.random()), g.random(p.random()))
	case config.LeastConnections:
		e = f.least(g, int(p.turn.Add(1)%uint64(len(g.endpoints))))
	default:
		if g.equal {
			e = f.first(g, int(p.turn.Add(1)%uint64(len(g.endpoints))))
		} else {
			p.smooth.Lock()
			e = f.smooth(g)
			p.smooth.Unlock()
		}
	}
	return e, f.full
}

func hashKey(t *table, k Key) uint64 {
	if k.Hash != "" && t.cfg.Policy.Hash != config.HashClient {
		return hashString(k.Hash)
	}
	return hashAddr(k.Client)
}

// filter passes over endpoints that were tried and those that have as much as they may have.
type filter struct {
	not    []*Endpoint
	limit  int64
	usable bool // the group has endpoints that are not
	full   bool // one was passed over for the limit
}

func (f *filter) takes(e *Endpoint) bool {
	if len(f.not) > 0 && slices.Contains(f.not, e) {
		return false
	}
	if f.usable && !e.usable.Load() {
		return false
	}
	if f.limit > 0 && e.active.Load() >= f.limit {
		f.full = true
		return false
	}
	return true
}

// first is the first one from an index on, around the end.
func (f *filter) first(g *group, from int) *Endpoint {
	for i := range g.endpoints {
		if e := g.endpoints[(from+i)%len(g.endpoints)]; f.takes(e) {
			return e
		}
	}
	return nil
}

// least is the one with the fewest uses for its weight; of equals the first from an index on.
func (f *filter) least(g *group, from int) *Endpoint {
	var best *Endpoint
	var load float64
	for i := range g.endpoints {
		at := (from + i) % len(g.endpoints)
		e := g.endpoints[at]
		if l := float64(e.active.Load()+1) / g.weights[at]; (best == nil || l < load) && f.takes(e) {
			best, load = e, l
		}
	}
	return best
}

// lesser is that of two with fewer uses for its weight.
func (f *filter) lesser(g *group, a, b int) *Endpoint {
	if a == b {
		b = (b + 1) % len(g.endpoints)
	}
	if float64(g.endpoints[b].active.Load())*g.weights[a] < float64(g.endpoints[a].active.Load())*g.weights[b] {
		a, b = b, a
	}
	if e := g.endpoints[a]; f.takes(e) {
		return e
	}
	return f.first(g, b)
}

// rendezvous is the one with the highest score for a key: without one endpoint, only its own keys move.
func (f *filter) rendezvous(g *group, key uint64) *Endpoint {
	var best *Endpoint
	if g.equal {
		var high uint64
		for _, e := range g.endpoints {
			if s := mix(key ^ e.hash); (best == nil || s > high) && f.takes(e) {
				best, high = e, s
			}
		}
		return best
	}
	high := 0.0
	for i, e := range g.endpoints {
		// With u even in (0,1), the share of those for which -w/ln(u) is highest is the weight's.
		u := (float64(mix(key^e.hash)>>11) + 0.5) / (1 << 53)
		if s := -g.weights[i] / math.Log(u); (best == nil || s > high) && f.takes(e) {
			best, high = e, s
		}
	}
	return best
}

// smooth spreads the turns of a heavy endpoint evenly between those of the others: each gains its weight at every turn, and the
// one that has most is chosen and pays the sum.
func (f *filter) smooth(g *group) *Endpoint {
	var best *Endpoint
	sum := 0.0
	for i, e := range g.endpoints {
		if !f.takes(e) {
			continue
		}
		e.current += g.weights[i]
		sum += g.weights[i]
		if best == nil || e.current > best.current {
			best = e
		}
	}
	if best != nil {
		best.current -= sum
	}
	return best
}

// random is an index, by weight.
func (g *group) random(r uint64) int {
	if g.equal {
		return int(r % uint64(len(g.endpoints)))
	}
	at := float64(r>>11) / (1 << 53) * g.total
	for i, w := range g.weights {
		if at -= w; at < 0 {
			return i
		}
	}
	return len(g.weights) - 1
}
