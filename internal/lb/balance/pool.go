// Package balance chooses which endpoint of a pool gets a connection or request: policies, affinity, zones, health, outlier ejection,
// slow start and limits. It opens no connection and knows no protocol; those who do report back how it went.
package balance

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/lb/config"
)

// Errors of Pick.
var (
	// ErrNoEndpoint: the pool has none, or none that was not tried already.
	ErrNoEndpoint = errors.New("no endpoint")
	// ErrBusy: every endpoint has as many connections or requests as it may have.
	ErrBusy = errors.New("every endpoint has as many connections or requests as allowed")
)

// Key is what is known about a connection or request before its endpoint is chosen.
type Key struct {
	Client netip.Addr
	// Hash is the value of the header field or cookie that the policy names. The client's address is hashed where it is empty.
	Hash string
}

// Pool chooses among endpoints. All methods may be called at the same time.
type Pool struct {
	now    func() time.Time
	random func() uint64 // tests give their own

	// Counters are for metrics.
	Counters PoolCounters

	table atomic.Pointer[table]
	turn  atomic.Uint64 // round robin: the next one of equals

	mu        sync.Mutex // guards what follows and all changes of table
	cfg       *config.Pool
	zone      string
	endpoints []*Endpoint // in the order of their names and addresses
	leaving   map[identity]*Endpoint
	leader    *Endpoint
	onLeave   []func(*Endpoint)
	smooth    sync.Mutex // guards Endpoint.current
	sticky    affinity
}

// PoolCounters count what belongs to no endpoint.
type PoolCounters struct {
	NoEndpoint, Busy, Retries atomic.Uint64
}

// table is what Pick reads: it is never changed, only replaced.
type table struct {
	cfg   *config.Pool
	limit int64
	// preferred are usable endpoints of this machine's zone, usable those of all zones. Where none is usable both hold every endpoint.
	preferred, usable group
	// until is when the table is stale because an ejection ends or a slow start goes on; zero: never.
	until time.Time
}

// group is a list of endpoints with their weights.
type group struct {
	endpoints []*Endpoint
	weights   []float64
	total     float64
	equal     bool // all weights are the same
}

// New makes a pool. zone is this machine's.
func New(cfg *config.Pool, zone string, now func() time.Time) *Pool {
	p := &Pool{now: now, random: rand.Uint64, leaving: map[identity]*Endpoint{}}
	p.Update(cfg, zone)
	return p
}

// OnLeave calls f with every endpoint that leaves the pool from now on. f must not call the pool.
func (p *Pool) OnLeave(f func(*Endpoint)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.onLeave = append(p.onLeave, f)
}

// Update replaces the configuration. Endpoints that stay keep their state, also if they had left and come back before all of their
// connections ended. A nil configuration is a pool without endpoints.
func (p *Pool) Update(cfg *config.Pool, zone string) {
	if cfg == nil {
		cfg = &config.Pool{}
	}
	now := p.now()
	p.mu.Lock()
	first := p.cfg == nil
	p.cfg, p.zone = cfg, zone
	was := make(map[identity]*Endpoint, len(p.endpoints))
	for _, e := range p.endpoints {
		was[e.identity()] = e
	}
	endpoints := make([]*Endpoint, 0, len(cfg.Endpoints))
	seen := make(map[netip.AddrPort]bool, len(cfg.Endpoints))
	for i := range cfg.Endpoints {
		c := &cfg.Endpoints[i]
		if seen[c.Address] {
			continue
		}
		seen[c.Address] = true
		id := identity{c.Address, c.Name}
		e := was[id]
		if e == nil {
			if e = p.leaving[id]; e != nil {
				// What was known of it is old; only its connections are still there.
				e.left.Store(0)
				e.unhealthy.Store(false)
				e.failures.Store(0)
				e.ejectedUntil, e.ejections = time.Time{}, 0
			} else {
				e = &Endpoint{Address: c.Address, hash: hashAddress(c.Address)}
			}
			delete(p.leaving, id)
			if !first {
				e.since = now
			}
		}
		delete(was, id)
		e.info.Store(c)
		endpoints = append(endpoints, e)
	}
	slices.SortFunc(endpoints, compareEndpoints)
	p.endpoints = endpoints
	var gone []*Endpoint
	for _, e := range was {
		e.left.Store(now.UnixNano())
		p.leaving[e.identity()] = e
		gone = append(gone, e)
	}
	for id, e := range p.leaving {
		if e.active.Load() == 0 {
			delete(p.leaving, id)
		}
	}
	p.limitEjections(now)
	p.build(now)
	leave := p.onLeave
	p.mu.Unlock()
	for _, e := range gone {
		for _, f := range leave {
			f(e)
		}
	}
}

// Config is the configuration in force.
func (p *Pool) Config() *config.Pool { return p.table.Load().cfg }

// Endpoints are those of the configuration, in the order of their names.
func (p *Pool) Endpoints() []*Endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.endpoints)
}

// Leader is the endpoint that has everything under the policy Leader, or nil.
func (p *Pool) Leader() *Endpoint {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cfg.Policy.Kind != config.Leader {
		return nil
	}
	return p.leader
}

// SetLeader makes an endpoint the leader: for a pool that takes over from another one. An address that is no endpoint is ignored.
func (p *Pool) SetLeader(addr netip.AddrPort) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.find(addr); e != nil {
		p.leader = e
		p.build(p.now())
	}
}

// SetHealth says what checks found. An endpoint is healthy until something else is said.
func (p *Pool) SetHealth(addr netip.AddrPort, healthy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.find(addr)
	if e == nil || e.unhealthy.Load() == !healthy {
		return
	}
	e.unhealthy.Store(!healthy)
	now := p.now()
	if healthy {
		e.since = now
	}
	p.build(now)
}

func (p *Pool) find(addr netip.AddrPort) *Endpoint {
	for _, e := range p.endpoints {
		if e.Address == addr {
			return e
		}
	}
	return nil
}

// current is the table as of now.
func (p *Pool) current() *table {
	t := p.table.Load()
	if t.until.IsZero() {
		return t
	}
	now := p.now()
	if now.Before(t.until) {
		return t
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t = p.table.Load(); !t.until.IsZero() && !now.Before(t.until) {
		p.build(now)
	}
	return p.table.Load()
}

// slowStartSteps is how many times a starting endpoint's weight changes; slowStartLeast is what it begins with.
const (
	slowStartSteps = 20
	slowStartLeast = 0.1
)

// build makes the table anew. The caller holds mu.
func (p *Pool) build(now time.Time) {
	t := &table{cfg: p.cfg, limit: int64(p.cfg.EndpointConnections)}
	if p.cfg.Protocol.Parsed() {
		t.limit = int64(p.cfg.EndpointRequests)
	}
	sooner := func(at time.Time) {
		if t.until.IsZero() || at.Before(t.until) {
			t.until = at
		}
	}
	var all, usable, near group
	for _, e := range p.endpoints {
		e.marked = false
		weight := float64(max(e.info.Load().Weight, 0))
		switch {
		case e.info.Load().Weight < 0:
			continue
		case weight == 0:
			weight = 1
		}
		if p.cfg.Policy.Kind == config.Leader || p.cfg.Policy.Kind == config.Shard {
			weight = 1
		} else if took := now.Sub(e.since); p.cfg.SlowStart > 0 && !e.since.IsZero() && took < p.cfg.SlowStart && p.cfg.Policy.Kind != config.ConsistentHash {
			weight *= max(slowStartLeast, float64(took)/float64(p.cfg.SlowStart))
			sooner(now.Add(max(p.cfg.SlowStart/slowStartSteps, time.Millisecond)))
		}
		all.add(e, weight)
		if until := e.ejectedUntil; now.Before(until) {
			sooner(until)
			continue
		}
		e.ejected.Store(false)
		if e.unhealthy.Load() {
			continue
		}
		e.marked = true
		usable.add(e, weight)
		if p.cfg.PreferZone && p.zone != "" && e.info.Load().Zone == p.zone {
			near.add(e, weight)
		}
	}
	open := len(usable.endpoints) == 0
	switch {
	case open:
		// Checks can be wrong about all at once, for example if their path is; endpoints are ready, or the API would not have them here.
		t.usable, t.preferred = all, all
	case len(near.endpoints) == 0 || p.everywhere():
		t.usable, t.preferred = usable, usable
	default:
		t.usable, t.preferred = usable, near
	}
	switch p.cfg.Policy.Kind {
	case config.Leader:
		p.elect(&t.usable)
		t.preferred = t.usable
	case config.Shard:
		// An endpoint that can't be used keeps its number: the next one stands in, and no other key moves.
		t.usable, t.preferred = all, all
	}
	for _, e := range p.endpoints {
		e.usable.Store(e.marked || open && e.info.Load().Weight >= 0)
	}
	p.table.Store(t)
}

// everywhere says whether all machines must choose the same endpoint, so that zones don't count.
func (p *Pool) everywhere() bool {
	switch p.cfg.Policy.Kind {
	case config.Leader, config.Shard, config.ConsistentHash:
		return true
	}
	return false
}

// elect keeps the leader if it is usable, or makes the next in order the leader; and puts it first.
func (p *Pool) elect(g *group) {
	if len(g.endpoints) == 0 {
		p.leader = nil
		return
	}
	at := slices.Index(g.endpoints, p.leader)
	if at < 0 {
		at = 0
		if p.leader != nil {
			// The one after the lost leader, so that an endpoint that fails again and again is not chosen each time.
			at = slices.IndexFunc(g.endpoints, func(e *Endpoint) bool { return compareEndpoints(e, p.leader) > 0 })
			at = max(at, 0)
		}
		p.leader = g.endpoints[at]
	}
	g.endpoints = append(slices.Clone(g.endpoints[at:]), g.endpoints[:at]...)
}

// replaceLeader makes another endpoint the leader if lost still is.
func (p *Pool) replaceLeader(lost, next *Endpoint) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.leader == lost && slices.Contains(p.endpoints, next) {
		p.leader = next
		p.build(p.now())
	}
}

func (g *group) add(e *Endpoint, weight float64) {
	g.equal = len(g.endpoints) == 0 || g.equal && weight == g.weights[0]
	g.endpoints = append(g.endpoints, e)
	g.weights = append(g.weights, weight)
	g.total += weight
}
