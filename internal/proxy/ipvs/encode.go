package ipvs

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// encoded is a frontend as the kernel is told of it.
type encoded struct {
	*plan.Frontend
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

// book is what is wanted of the kernel, kept from one Apply to the next.
type book struct {
	frontends map[plan.FrontendKey]*encoded
	targets   map[key]*target
	// pools are the servers by mark of a Service's port.
	pools map[plan.PortID][]key
	// uses counts the frontends on an address, endpoints those that lead to one.
	uses, endpoints map[netip.Addr]int
	last            uint32 // mark given out
}

func newBook() *book {
	return &book{
		frontends: map[plan.FrontendKey]*encoded{}, targets: map[key]*target{}, pools: map[plan.PortID][]key{},
		uses: map[netip.Addr]int{}, endpoints: map[netip.Addr]int{},
	}
}

// encodable says why a frontend can't be told to the kernel.
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

// stickyFor is IPVS' idea of affinity: whole seconds, at least one.
func stickyFor(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32(max(1, (d+time.Second-1)/time.Second))
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
func (b *book) put(f *plan.Frontend, onDevice bool, before [plan.Origins]uint32, taken func(key) bool) *encoded {
	e := &encoded{Frontend: f}
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
		t := b.targets[at]
		if t == nil {
			t = &target{users: map[plan.FrontendKey]struct{}{}}
			b.targets[at] = t
		}
		t.pool, t.sticky = r.Pool, stickyFor(f.Affinity)
		t.users[f.FrontendKey] = struct{}{}
		b.count(r.Pool, 1)
	}
	b.frontends[f.FrontendKey] = e
	if f.Addr.IsValid() {
		b.uses[f.Addr]++
	}
	return e
}

// markFor finds the server by mark of a pool: the one that other frontends use already, the one that it had, or a new
// one.
func (b *book) markFor(f *plan.Frontend, p *plan.Pool, before uint32, taken func(key) bool) key {
	for _, at := range b.pools[f.ID] {
		if t := b.targets[at]; t.sticky == stickyFor(f.Affinity) && (t.pool == p || t.pool.Equal(p)) {
			return at
		}
	}
	at := marked(before, f.Family)
	if at.protocol != f.Protocol || b.targets[at] != nil {
		at = b.fresh(f.Family, f.Protocol, taken)
	}
	b.pools[f.ID] = append(b.pools[f.ID], at)
	return at
}

// fresh finds a mark that nothing uses, not even connections that are draining.
func (b *book) fresh(family intent.Family, protocol intent.Protocol, taken func(key) bool) key {
	for {
		b.last = b.last%maxNumber + 1
		at := marked(markOf(protocol, b.last), family)
		if b.targets[at] == nil && !taken(at) {
			return at
		}
	}
}

// drop removes a frontend, and the servers that nobody else uses.
func (b *book) drop(k plan.FrontendKey) *encoded {
	e := b.frontends[k]
	if e == nil {
		return nil
	}
	delete(b.frontends, k)
	for o, at := range e.servers {
		if e.Routes[o].Pool == nil {
			continue
		}
		b.count(e.Routes[o].Pool, -1)
		t := b.targets[at]
		if t == nil {
			continue
		}
		if delete(t.users, k); len(t.users) > 0 {
			continue
		}
		delete(b.targets, at)
		if at.mark != 0 {
			left := slices.DeleteFunc(b.pools[e.ID], func(other key) bool { return other == at })
			if b.pools[e.ID] = left; len(left) == 0 {
				delete(b.pools, e.ID)
			}
		}
	}
	if k.Addr.IsValid() {
		count(b.uses, k.Addr, -1)
	}
	return e
}

func (b *book) count(p *plan.Pool, by int) {
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
