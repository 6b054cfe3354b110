package nftables

import (
	"bytes"
	"net/netip"
	"slices"

	"portal/internal/plan"
)

// A frontend changes in two steps: all that go or change leave first, so that a pool whose frontends all move on to
// another is free when that one comes, and only the difference between the two is written. settle must follow the last.
// The owner is whom to blame when the kernel refuses.

// stay is what a frontend had.
type stay struct {
	record
	shape shape
}

// leave takes a frontend's references away.
func (t *table) leave(f *plan.Frontend, owner int) *stay {
	s, n := t.shapeOf(f)
	had := &stay{record{t.shapes[s].id, n}, s}
	t.release(f, s, n, owner)
	return had
}

// enter writes a frontend that comes, changes or goes; had is what leave returned for old.
func (t *table) enter(b *batch, old *plan.Frontend, had *stay, new *plan.Frontend, owner int) {
	var was, is *record
	var like *shape
	if had != nil {
		was, like = &had.record, &had.shape
	}
	if new != nil {
		at := t.place(new, like, owner)
		is = &at
	}
	t.records(b, old, new, was, is)
	t.ranges(b, old, new)
}

// record is the data of services.
type record struct {
	shape uint32
	port  uint64
}

// records is called with what both frontends share: their key.
func (t *table) records(b *batch, old, new *plan.Frontend, was, is *record) {
	if was != nil && is != nil && *was == *is {
		return
	}
	if was != nil {
		b.del(t.services, t.frontendKey(t.scratch[0][:0], old.FrontendKey))
	}
	if is != nil {
		key := t.frontendKey(t.scratch[0][:0], new.FrontendKey)
		data := portID(number(number(t.scratch[1][:0], 0), is.shape), is.port)
		b.add(t.services, key, data)
		t.scratch[0], t.scratch[1] = key, data
	}
}

// ranges updates the sources that may come.
func (t *table) ranges(b *batch, old, new *plan.Frontend) {
	had, has := rangesOf(old), rangesOf(new)
	if slices.Equal(had, has) {
		return
	}
	bounds := func(k plan.FrontendKey, p netip.Prefix) (from, to []byte) {
		key := t.frontendKey(nil, k)
		return t.addr(bytes.Clone(key), p.Addr()), t.addr(key, last(p))
	}
	for _, p := range had {
		if !slices.Contains(has, p) {
			from, to := bounds(old.FrontendKey, p)
			b.delRange(t.sources, from, to)
		}
	}
	for _, p := range has {
		if !slices.Contains(had, p) {
			from, to := bounds(new.FrontendKey, p)
			b.addRange(t.sources, from, to)
		}
	}
}

// rangesOf are a frontend's sources without those that others contain: intervals in a set may not overlap.
func rangesOf(f *plan.Frontend) []netip.Prefix {
	if f == nil {
		return nil
	}
	var out []netip.Prefix
	for _, p := range f.Sources {
		p = p.Masked()
		wider := func(q netip.Prefix) bool {
			q = q.Masked()
			return q.Overlaps(p) && q.Bits() < p.Bits()
		}
		if !slices.Contains(out, p) && !slices.ContainsFunc(f.Sources, wider) {
			out = append(out, p)
		}
	}
	return out
}

// last is the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// settle writes what the changed frontends share: endpoints and shapes.
func (t *table) settle(b *batch) {
	t.settlePorts(b)
	for s, had := range t.touchedShapes {
		if !had {
			t.addShape(b, s, t.shapes[s].id)
			t.undoes(func() { delete(t.shapes, s) })
		}
	}
	t.prune(b)
}

// settlePorts writes the endpoints of the ports that were touched.
func (t *table) settlePorts(b *batch) {
	if len(t.touchedPorts) == 0 {
		return
	}
	for n, was := range t.touchedPorts {
		if b.owners != nil {
			b.forOwner(was.owner)
		}
		t.settlePort(b, n, was.before)
	}
	if b.owners != nil {
		b.forOwner(0)
	}
	clear(t.touchedPorts)
}

// idleShapes is how many chains may wait for another frontend. To add one costs the kernel a walk over the maps that it
// uses, so a Service whose endpoints come and go shouldn't need it each time.
const idleShapes = 64

// prune removes the shapes that nobody uses, when there are many.
func (t *table) prune(b *batch) {
	var idle []shape
	for s, u := range t.shapes {
		if u.refs == 0 {
			idle = append(idle, s)
		}
	}
	if len(idle) <= idleShapes {
		return
	}
	for _, s := range idle {
		if had, ok := t.touchedShapes[s]; ok && !had {
			continue // it goes the next time
		}
		u := t.shapes[s]
		b.del(t.layout.shapes, number(nil, u.id))
		b.delChain(removedChains, t.family, t.table(), s.chain())
		delete(t.shapes, s)
		t.undoes(func() { t.shapes[s] = u })
	}
}

func (t *table) addShape(b *batch, s shape, id uint32) {
	if s.sticky > 0 && !t.sticky {
		t.sticky = true
		t.undoes(func() { t.sticky = false })
		for _, set := range t.sometimes() {
			t.addSet(b, set)
		}
	}
	if !t.keptChain(s.chain(), nil) {
		b.addChain(t.family, t.table(), s.chain(), nil)
	}
	for _, exprs := range t.shape(&s) {
		b.addRule(t.family, t.table(), s.chain(), exprs)
	}
	b.addVerdict(t.layout.shapes, number(nil, id), s.chain())
}

func (t *table) settlePort(b *batch, n uint64, before []poolUse) {
	var after []poolUse
	if p := t.ports[n]; p != nil {
		after = p.pools
	}
	used := false
	for i := range max(len(before), len(after)) {
		var was, is poolUse
		if i < len(before) {
			was = before[i]
		}
		if i < len(after) {
			if is = after[i]; is.refs == 0 {
				after[i].pool = nil
			}
		}
		used = used || is.refs > 0
		t.slots(b, t.backends, n, uint32(i), was.endpoints(), is.endpoints())
		t.memberships(b, n, uint32(i), &was, &is)
	}
	if !used {
		delete(t.ports, n)
	}
}

// endpoints are those that are in the kernel.
func (u *poolUse) endpoints() []plan.Endpoint {
	if u.refs == 0 {
		return nil
	}
	return u.pool.Endpoints
}

// slots makes a pool of another. Slots are in the pool's order, so a change in the middle moves those behind it: cheap,
// and nothing but the pool itself has to be remembered.
func (t *table) slots(b *batch, in *set, n uint64, pool uint32, was, is []plan.Endpoint) {
	for i := range max(len(was), len(is)) {
		gone, come := i < len(was), i < len(is)
		if gone && come && was[i].Addr == is[i].Addr {
			continue
		}
		key := number(portID(t.scratch[0][:0], n), pool<<poolShift+uint32(i))
		t.scratch[0] = key
		if gone {
			b.del(in, key)
		}
		if come {
			data := t.scratch[1][:0]
			if in == t.choices {
				data = number(data, 0)
			}
			data = t.endpoint(data, is[i].Addr)
			t.scratch[1] = data
			b.add(in, key, data)
		}
	}
}

// memberships says which endpoints a client with affinity may get, and stay with.
func (t *table) memberships(b *batch, n uint64, pool uint32, was, is *poolUse) {
	had, has := was.lasting(), is.lasting()
	t.slots(b, t.choices, n, pool, had, has)
	in := func(list []plan.Endpoint, a netip.AddrPort) bool {
		_, found := slices.BinarySearchFunc(list, a, func(e plan.Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) })
		return found
	}
	key := func(a netip.AddrPort) []byte { return t.endpoint(number(portID(nil, n), pool), a) }
	for _, e := range had {
		if !in(has, e.Addr) {
			b.del(t.members, key(e.Addr))
		}
	}
	for _, e := range has {
		if !in(had, e.Addr) {
			b.add(t.members, key(e.Addr), nil)
		}
	}
}

// lasting are the endpoints of clients with affinity.
func (u *poolUse) lasting() []plan.Endpoint {
	if u.sticky == 0 {
		return nil
	}
	return u.endpoints()
}

// clusterIP adds or removes an address whose other ports are rejected.
func (t *table) clusterIP(b *batch, a netip.Addr, add bool) {
	key := t.addr(t.scratch[0][:0], a)
	t.scratch[0] = key
	if add {
		b.add(t.clusterIPs, key, nil)
	} else {
		b.del(t.clusterIPs, key)
	}
}
