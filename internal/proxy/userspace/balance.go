package userspace

import (
	"container/list"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"portal/internal/plan"
)

// frontend is a plan.Frontend with the turn of its pools.
type frontend struct {
	*plan.Frontend
	port  uint64 // the hash of its port
	turns [plan.Origins]*atomic.Uint32
}

func newFrontend(f *plan.Frontend) *frontend {
	out := &frontend{Frontend: f, port: hashOf(f.ID)}
	for o := range f.Routes {
		if o > 0 && f.Routes[o].Pool == f.Routes[o-1].Pool {
			out.turns[o] = out.turns[o-1]
			continue
		}
		out.turns[o] = &atomic.Uint32{}
		out.turns[o].Store(rand.Uint32N(1 << 16))
	}
	return out
}

// directory is who answers where.
type directory struct {
	mu    sync.RWMutex
	known map[plan.FrontendKey]*frontend
}

// find returns who answers at an address: the address' own frontend, or a node port.
func (d *directory) find(k plan.FrontendKey) *frontend {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if f := d.known[k]; f != nil {
		return f
	}
	k.Addr = netip.Addr{}
	return d.known[k]
}

func (d *directory) set(list []*plan.Frontend) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, f := range list {
		d.known[f.FrontendKey] = newFrontend(f)
	}
}

// keep removes what is not wanted.
func (d *directory) keep(wanted func(plan.FrontendKey) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k := range d.known {
		if !wanted(k) {
			delete(d.known, k)
		}
	}
}

func (d *directory) remove(keys []plan.FrontendKey) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, k := range keys {
		delete(d.known, k)
	}
}

// memory remembers clients' endpoints, and endpoints that did not answer.
type memory struct {
	now  func() time.Time
	shun time.Duration

	mu     sync.Mutex
	sticky map[client]*list.Element     // of *stuck
	recent *list.List                   // the same, those that connected last in front
	most   int                          // how many there may be
	dirty  bool                         // sticky has changed since it was saved
	silent map[netip.AddrPort]time.Time // until when
	anyBad atomic.Bool                  // so that a healthy cluster needs no lock
}

// client is an address that has connected to a Service's port.
type client struct {
	port uint64
	addr netip.Addr
}

type stuck struct {
	client   client
	endpoint netip.AddrPort
	until    time.Time
}

func newMemory(shun time.Duration) *memory {
	return &memory{
		now: time.Now, shun: shun, sticky: map[client]*list.Element{}, recent: list.New(), most: affinityLimit / 2,
		silent: map[netip.AddrPort]time.Time{},
	}
}

// order lists a route's endpoints as they are to be tried: the client's own, then the others in turn, and last those that
// did not answer lately. out is what it is written into.
func (m *memory) order(out []plan.Endpoint, f *frontend, o plan.Origin, from netip.Addr) []plan.Endpoint {
	all := f.Routes[o].Pool.Endpoints
	first := int(f.turns[o].Add(1)) % len(all)
	out = append(append(out, all[first:]...), all[:first]...)
	if f.Affinity == 0 && !m.anyBad.Load() {
		return out
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	var own *stuck
	if at := m.sticky[client{f.port, from}]; at != nil && f.Affinity > 0 {
		own = at.Value.(*stuck)
	}
	has := own != nil && now.Before(own.until)
	rank := func(e plan.Endpoint) int {
		switch {
		case now.Before(m.silent[e.Addr]):
			return 2
		case has && e.Addr == own.endpoint:
			return 0
		}
		return 1
	}
	slices.SortStableFunc(out, func(a, b plan.Endpoint) int { return rank(a) - rank(b) })
	return out
}

// answered remembers which endpoint a client has.
func (m *memory) answered(f *frontend, from netip.Addr, endpoint netip.AddrPort) {
	if f.Affinity == 0 && !m.anyBad.Load() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.silent, endpoint)
	if f.Affinity > 0 {
		m.stick(&stuck{client{f.port, from}, endpoint, m.now().Add(f.Affinity)})
		m.dirty = true
	}
}

// stick remembers a client, and no longer the one whose last connection is the oldest if there are too many. m.mu is locked.
func (m *memory) stick(s *stuck) {
	if at := m.sticky[s.client]; at != nil {
		at.Value = s
		m.recent.MoveToFront(at)
		return
	}
	if len(m.sticky) >= m.most {
		m.unstick(m.recent.Back())
	}
	m.sticky[s.client] = m.recent.PushFront(s)
}

func (m *memory) unstick(at *list.Element) {
	delete(m.sticky, at.Value.(*stuck).client)
	m.recent.Remove(at)
}

// failed remembers that an endpoint did not answer.
func (m *memory) failed(endpoint netip.AddrPort) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.silent[endpoint] = m.now().Add(m.shun)
	m.anyBad.Store(true)
}

// forget lets go of what is over.
func (m *memory) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.now()
	for _, at := range m.sticky {
		if !now.Before(at.Value.(*stuck).until) {
			m.unstick(at)
		}
	}
	for k, until := range m.silent {
		if !now.Before(until) {
			delete(m.silent, k)
		}
	}
	m.anyBad.Store(len(m.silent) > 0)
}

// restore takes over what an earlier process knew of clients.
func (m *memory) restore(found []*stuck) {
	slices.SortFunc(found, func(a, b *stuck) int { return a.until.Compare(b.until) })
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range found {
		m.stick(s)
	}
}

// changed returns what is known of clients, nil if it was returned before.
func (m *memory) changed() []*stuck {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.dirty {
		return nil
	}
	m.dirty = false
	out := make([]*stuck, 0, len(m.sticky))
	for at := m.recent.Front(); at != nil; at = at.Next() {
		out = append(out, at.Value.(*stuck))
	}
	return out
}

// setChanged makes changed return everything again, since what was saved is lost.
func (m *memory) setChanged() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dirty = len(m.sticky) > 0
}
