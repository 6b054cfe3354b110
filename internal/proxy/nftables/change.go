package nftables

import (
	"bytes"
	"net/netip"
	"slices"

	"portal/internal/plan"
	"portal/internal/proxy/nf"
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
func (t *table) enter(b *nf.Batch, old *plan.Frontend, had *stay, new *plan.Frontend, owner int) {
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

// element is a frontend's in services.
func (t *table) element(k plan.FrontendKey, r *record) nf.Element {
	t.scratch[0] = t.frontendKey(t.scratch[0][:0], k)
	t.scratch[1] = portID(number(number(t.scratch[1][:0], 0), r.shape), r.port)
	return nf.Element{Key: t.scratch[0], Data: t.scratch[1]}
}

// records is called with what both frontends share: their key.
func (t *table) records(b *nf.Batch, old, new *plan.Frontend, was, is *record) {
	if was != nil && is != nil && *was == *is {
		return
	}
	if was != nil {
		b.Delete(t.services, t.element(old.FrontendKey, was))
	}
	if is != nil {
		b.Add(t.services, t.element(new.FrontendKey, is))
	}
}

// ranges updates the sources that may connect.
func (t *table) ranges(b *nf.Batch, old, new *plan.Frontend) {
	had, has := rangesOf(old), rangesOf(new)
	if slices.Equal(had, has) {
		return
	}
	bounds := func(k plan.FrontendKey, p netip.Prefix) nf.Element {
		key := t.frontendKey(nil, k)
		return nf.Element{Key: t.AppendAddr(bytes.Clone(key), p.Addr()), End: t.AppendAddr(key, nf.Last(p))}
	}
	for _, p := range had {
		if !slices.Contains(has, p) {
			b.Delete(t.sources, bounds(old.FrontendKey, p))
		}
	}
	for _, p := range has {
		if !slices.Contains(had, p) {
			b.Add(t.sources, bounds(new.FrontendKey, p))
		}
	}
}

func rangesOf(f *plan.Frontend) []netip.Prefix {
	if f == nil {
		return nil
	}
	return nf.Disjoint(f.Sources)
}

// settle writes what the changed frontends share: endpoints and shapes.
func (t *table) settle(b *nf.Batch) {
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
func (t *table) settlePorts(b *nf.Batch) {
	if len(t.touchedPorts) == 0 {
		return
	}
	for n, was := range t.touchedPorts {
		b.Owner(was.owner)
		t.settlePort(b, n, was.before)
	}
	b.Owner(0)
	clear(t.touchedPorts)
}

// idleShapes is how many chains may wait for another frontend. To add one costs the kernel a walk over the maps that it
// uses, so a Service whose endpoints come and go shouldn't need it each time.
const idleShapes = 64

// prune removes the shapes that nobody uses, when there are many.
func (t *table) prune(b *nf.Batch) {
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
		b.Delete(t.layout.shapes, shapeElement(u.id, &s))
		b.DeleteChain(t.at, s.chain())
		delete(t.shapes, s)
		t.undoes(func() { t.shapes[s] = u })
	}
}

func (t *table) addShape(b *nf.Batch, s shape, id uint32) {
	if s.sticky > 0 && !t.sticky {
		t.sticky = true
		t.undoes(func() { t.sticky = false })
		for _, set := range t.withAffinity() {
			b.AddSet(set)
		}
	}
	b.AddChain(t.at, nf.Chain{Name: s.chain(), Rules: t.shape(&s)})
	b.Add(t.layout.shapes, shapeElement(id, &s))
}

func shapeElement(id uint32, s *shape) nf.Element {
	return nf.Element{Key: nf.Number(id), Verdict: nf.Goto(s.chain())}
}

func (t *table) settlePort(b *nf.Batch, n uint64, before []poolUse) {
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
func (t *table) slots(b *nf.Batch, in *nf.Set, n uint64, pool uint32, was, is []plan.Endpoint) {
	element := func(i int, to netip.AddrPort) nf.Element {
		t.scratch[0] = number(portID(t.scratch[0][:0], n), pool<<poolShift+uint32(i))
		data := t.scratch[1][:0]
		if in == t.choices {
			data = number(data, 0)
		}
		t.scratch[1] = t.endpoint(data, to)
		return nf.Element{Key: t.scratch[0], Data: t.scratch[1]}
	}
	for i := range max(len(was), len(is)) {
		gone, come := i < len(was), i < len(is)
		if gone && come && was[i].Addr == is[i].Addr {
			continue
		}
		if gone {
			b.Delete(in, element(i, was[i].Addr))
		}
		if come {
			b.Add(in, element(i, is[i].Addr))
		}
	}
}

// memberships says which endpoints a client with affinity may get, and stay with.
func (t *table) memberships(b *nf.Batch, n uint64, pool uint32, was, is *poolUse) {
	had, has := was.lasting(), is.lasting()
	t.slots(b, t.choices, n, pool, had, has)
	in := func(list []plan.Endpoint, a netip.AddrPort) bool {
		_, found := slices.BinarySearchFunc(list, a, func(e plan.Endpoint, a netip.AddrPort) int { return e.Addr.Compare(a) })
		return found
	}
	member := func(a netip.AddrPort) nf.Element {
		return nf.Element{Key: t.endpoint(number(portID(nil, n), pool), a)}
	}
	for _, e := range had {
		if !in(has, e.Addr) {
			b.Delete(t.members, member(e.Addr))
		}
	}
	for _, e := range has {
		if !in(had, e.Addr) {
			b.Add(t.members, member(e.Addr))
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
func (t *table) clusterIP(b *nf.Batch, a netip.Addr, add bool) {
	t.scratch[0] = t.AppendAddr(t.scratch[0][:0], a)
	if e := (nf.Element{Key: t.scratch[0]}); add {
		b.Add(t.clusterIPs, e)
	} else {
		b.Delete(t.clusterIPs, e)
	}
}
