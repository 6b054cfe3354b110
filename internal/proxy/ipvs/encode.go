package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"portal/internal/plan"
)

// encoded is a frontend as it is programmed.
type encoded struct {
	*plan.Frontend
	// led: its address is not on our device, and packets to it must be led to IPVS.
	led bool
	// servers are the virtual servers that packets of each origin go to; no server where the verdict is another.
	servers [plan.Origins]key
}

// marks are what rules must put on packets of each origin so that IPVS finds the server: 0 where it finds it by address.
func (e *encoded) marks() (out [plan.Origins]uint32) {
	for o, at := range e.servers {
		out[o] = at.mark
	}
	return out
}

// desired is what is wanted of the kernel, kept from one Apply to the next.
type desired struct {
	frontends map[plan.FrontendKey]*encoded
	targets   map[key]*target
	// pools are the servers by mark of a Service's port.
	pools map[plan.PortID][]key
	// programmed are the elements that rules have for a pool with affinity.
	programmed map[key]map[element]bool
	// slots are those that endpoints of a pool had before.
	slots map[key]map[netip.AddrPort]uint32
	// endpoints counts the routes that lead to one.
	endpoints map[netip.Addr]int
	last      uint32 // number given out
}

func newDesired() *desired {
	return &desired{
		programmed: map[key]map[element]bool{}, slots: map[key]map[netip.AddrPort]uint32{},
		frontends: map[plan.FrontendKey]*encoded{}, targets: map[key]*target{}, pools: map[plan.PortID][]key{},
		endpoints: map[netip.Addr]int{},
	}
}

// encodable says why a frontend can't be programmed.
func encodable(f *plan.Frontend) error {
	if f.Sources != nil && !f.Addr.IsValid() {
		return errors.New("source ranges of a node port are not known to the IPVS mode")
	}
	for _, r := range f.Routes {
		if r.Verdict == plan.Forward && (r.Pool == nil || len(r.Pool.Endpoints) == 0) {
			return errors.New("a route without endpoints")
		}
	}
	return nil
}

// byAddress says whether a frontend gets a virtual server of its own address: it must be on our device (by which we know
// our servers), without affinity (which holds for all frontends of a port together) and with one pool for all.
func byAddress(f *plan.Frontend, onDevice bool) bool {
	if !f.Addr.IsValid() || !onDevice || f.Affinity > 0 {
		return false
	}
	var one *plan.Pool
	for _, r := range f.Routes {
		if r.Pool == nil {
			continue
		}
		if one != nil && one != r.Pool && !one.Equal(r.Pool) {
			return false
		}
		one = r.Pool
	}
	return true
}

// put adds a frontend. Its marks are, if possible, those that it had before: living connections and clients with
// affinity are known by them. taken says whether a mark is still in use for something else.
func (b *desired) put(f *plan.Frontend, onDevice bool, before [plan.Origins]uint32, taken func(key) bool) *encoded {
	e := &encoded{Frontend: f, led: f.Addr.IsValid() && !onDevice}
	own := byAddress(f, onDevice)
	for o, r := range f.Routes {
		if r.Pool == nil {
			continue
		}
		at := key{family: f.Family, addr: f.Addr, protocol: f.Protocol, port: f.Port}
		if !own {
			at = b.markFor(f, r.Pool, before[o], taken)
		}
		e.servers[o] = at
		t := b.target(at, r.Pool, f)
		if t.affinity = f.Affinity; f.Affinity > 0 {
			b.seat(at, t)
			for _, endpoint := range r.Pool.Endpoints {
				if slot := t.slots[endpoint.Addr]; slot != 0 {
					b.target(marked(at.mark|slot, at.family), &plan.Pool{ID: r.Pool.ID, Endpoints: []plan.Endpoint{endpoint}}, f)
				}
			}
		}
		b.count(r.Pool, 1)
	}
	b.frontends[f.FrontendKey] = e
	return e
}

// target notes a frontend's wish for a server.
func (b *desired) target(at key, p *plan.Pool, f *plan.Frontend) *target {
	t := b.targets[at]
	if t == nil {
		t = &target{pool: p, users: map[plan.FrontendKey]struct{}{}}
		b.targets[at] = t
	}
	t.users[f.FrontendKey] = struct{}{}
	return t
}

// seat gives each endpoint of a pool with affinity a slot, the one it had if it can.
func (b *desired) seat(at key, t *target) {
	if t.slots != nil {
		return
	}
	before := b.slots[at]
	taken := map[uint32]bool{}
	t.slots = map[netip.AddrPort]uint32{}
	for _, e := range t.pool.Endpoints {
		if slot := before[e.Addr]; slot != 0 {
			t.slots[e.Addr], taken[slot] = slot, true
		}
	}
	// Slots of endpoints that left are used last: their clients shall not all go to one that comes.
	next := uint32(1)
	for _, slot := range before {
		next = max(next, slot+1)
	}
	for _, e := range t.pool.Endpoints {
		if t.slots[e.Addr] != 0 || len(t.slots) == maxSlot {
			continue
		}
		for next > maxSlot || taken[next] {
			next = next%maxSlot + 1
		}
		t.slots[e.Addr], taken[next] = next, true
	}
	b.slots[at] = t.slots
}

// serversOf are those of a frontend: its pools', and their endpoints' where clients stay with them.
func (b *desired) serversOf(e *encoded) (out []key) {
	for o, at := range e.servers {
		if e.Routes[o].Pool == nil || slices.Contains(out, at) {
			continue
		}
		out = append(out, at)
		if t := b.targets[at]; t != nil {
			for _, slot := range t.slots {
				out = append(out, marked(at.mark|slot, at.family))
			}
		}
	}
	return out
}

// markFor finds the server by mark of a pool: the one that other frontends use already, the one that it had, or a new
// one.
func (b *desired) markFor(f *plan.Frontend, p *plan.Pool, before uint32, taken func(key) bool) key {
	for _, at := range b.pools[f.ID] {
		if t := b.targets[at]; t.affinity == f.Affinity && (t.pool == p || t.pool.Equal(p)) {
			return at
		}
	}
	at := marked(before, f.Family)
	if at.protocol != f.Protocol || sticky(before) != (f.Affinity > 0) || b.targets[at] != nil {
		at = b.fresh(f, taken)
	}
	b.pools[f.ID] = append(b.pools[f.ID], at)
	return at
}

// fresh finds a mark that nothing uses, not even connections that are draining.
func (b *desired) fresh(f *plan.Frontend, taken func(key) bool) key {
	for {
		b.last = b.last%maxNumber(f.Affinity > 0) + 1
		at := marked(markOf(f.Protocol, f.Affinity > 0, b.last), f.Family)
		if b.targets[at] == nil && !taken(at) {
			return at
		}
	}
}

// drop removes a frontend, and the servers that noIPVS else uses.
func (b *desired) drop(k plan.FrontendKey) {
	e := b.frontends[k]
	delete(b.frontends, k)
	for _, r := range e.Routes {
		if r.Pool != nil {
			b.count(r.Pool, -1)
		}
	}
	for _, at := range b.serversOf(e) {
		t := b.targets[at]
		if delete(t.users, k); len(t.users) > 0 {
			continue
		}
		delete(b.targets, at)
		left := slices.DeleteFunc(b.pools[e.ID], func(other key) bool { return other == at })
		if b.pools[e.ID] = left; len(left) == 0 {
			delete(b.pools, e.ID)
		}
	}
}

func (b *desired) count(p *plan.Pool, by int) {
	for _, e := range p.Endpoints {
		count(b.endpoints, e.Addr.Addr(), by)
	}
}

func count(m map[netip.Addr]int, a netip.Addr, by int) {
	if m[a] += by; m[a] <= 0 {
		delete(m, a)
	}
}

// refused are the frontends that lead to a server.
func (t *target) refuse(out map[plan.FrontendKey]error, at key, err error) {
	for k := range t.users {
		out[k] = fmt.Errorf("virtual server %v: %w", at, err)
	}
}
