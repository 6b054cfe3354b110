package nftables

import (
	"fmt"
	"hash/fnv"
	"slices"

	"golang.org/x/sys/unix"

	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// table is what the kernel has of one family, as far as the next change must know it: not the frontends themselves,
// which the plan remembers, but what they share.
type table struct {
	*ruler
	shapes map[shape]*shapeUse
	ports  map[uint64]*port
	sticky bool     // the sets of affinity are there
	late   []string // sets that were replaced, and are deleted a little later

	// Of the transaction in the making:
	touchedPorts  map[uint64]touched
	touchedShapes map[shape]bool // whether the kernel had it before
	last          lastShape
	undo          []func() // how to forget all of it; nil while nobody will ask
	undoable      bool
	scratch       [2][]byte
}

// lastShape is the shape that was touched last: mostly it is the next one's, too.
type lastShape struct {
	shape
	use *shapeUse
}

type shapeUse struct {
	id   uint32
	refs int32
}

// port is a port of a Service with its pools, by their number.
type port struct {
	id    plan.PortID
	pools []poolUse
}

type poolUse struct {
	pool *plan.Pool
	refs int32
	// sticky counts those refs that want affinity.
	sticky int32
}

// touched is a port as it was before the transaction.
type touched struct {
	before []poolUse
	owner  int
}

func newTable(r *ruler) *table {
	return &table{
		ruler: r, shapes: map[shape]*shapeUse{}, ports: map[uint64]*port{},
		touchedPorts: map[uint64]touched{}, touchedShapes: map[shape]bool{},
	}
}

// expect makes room for ports.
func (t *table) expect(n int) { t.ports = make(map[uint64]*port, n) }

// begin starts a transaction that can be taken back.
func (t *table) begin() { t.undo, t.undoable, t.last = nil, true, lastShape{} }

// rollback makes the table what it was when the transaction began.
func (t *table) rollback() {
	for _, f := range slices.Backward(t.undo) {
		f()
	}
	t.end()
}

func (t *table) end() {
	t.undo, t.undoable, t.last = nil, false, lastShape{}
	// New ones: to walk over a map costs what it has ever held.
	t.touchedPorts, t.touchedShapes = map[uint64]touched{}, map[shape]bool{}
}

func (t *table) undoes(f func()) {
	if t.undoable {
		t.undo = append(t.undo, f)
	}
}

const dstnat, srcnat = -100, 100

// baseChains are there whatever the Services.
func (t *table) baseChains(f *plan.Facts) []nf.Chain {
	hook := func(point uint32, priority int32) nf.Hook {
		return nf.Hook{Type: "nat", Point: point, Priority: priority}
	}
	return []nf.Chain{
		{Name: "prerouting", Hook: hook(unix.NF_INET_PRE_ROUTING, dstnat), Rules: t.dispatch(&f.NodePorts)},
		{Name: "output", Hook: hook(unix.NF_INET_LOCAL_OUT, dstnat), Rules: t.dispatch(&f.NodePorts)},
		// Before anybody's srcnat, since a flow with a rewritten source is not looked at any more.
		{Name: "nobody", Hook: hook(unix.NF_INET_POST_ROUTING, srcnat-1), Rules: t.unallocated(f.ServicePrefixes)},
		{Name: "postrouting", Hook: hook(unix.NF_INET_POST_ROUTING, srcnat), Rules: t.rewriting()},
		{Name: rejectChain, Rules: t.Reject()},
		{Name: hairpinChain, Rules: t.hairpins()},
	}
}

// base declares the sets and chains that are there whatever the Services. The sets of affinity stay if they are there: clients
// keep their endpoints.
func (t *table) base(b *nf.Batch, f *plan.Facts, present *nf.Present) {
	b.Replace(t.at, present)
	sets := t.always()
	if t.sticky = present.Like(t.affinity); t.sticky {
		sets = append(sets, t.withAffinity()...)
	}
	for _, s := range sets {
		b.AddSet(s)
	}
	for _, c := range t.baseChains(f) {
		b.AddChain(t.at, c)
	}
	for _, key := range nibbles() {
		b.Add(t.same, nf.Element{Key: key})
	}
	for _, a := range f.NodePorts.Addrs {
		if a.Is6() == t.Is6() && !a.IsLoopback() {
			b.Add(t.nodeIPs, nf.Element{Key: t.AppendAddr(nil, a)})
		}
	}
}

// portOf finds the port of an ID, and what it is known as. Two names with one number (nobody has seen it happen, but
// somebody might look for it) are told apart.
func (t *table) portOf(id plan.PortID) (uint64, *port) {
	for salt := byte(0); ; salt++ {
		n := idOf(id, salt)
		p := t.ports[n]
		if p == nil || p.id == id {
			return n, p
		}
	}
}

// find returns the number of a pool.
func (p *port) find(pool *plan.Pool) (uint32, bool) {
	for i := range p.pools {
		if has := p.pools[i].pool; has != nil && (has == pool || has.Equal(pool)) {
			return uint32(i), true
		}
	}
	return 0, false
}

// touch remembers a port as it was.
func (t *table) touch(n uint64, id plan.PortID, owner int) *port {
	p := t.ports[n]
	if _, ok := t.touchedPorts[n]; !ok {
		was := touched{owner: owner}
		if p != nil {
			was.before = slices.Clone(p.pools)
		}
		t.touchedPorts[n] = was
		if t.undoable { // asked here, not in undoes: a full sync makes no function for each port
			t.undo = append(t.undo, func() {
				if was.before == nil {
					delete(t.ports, n)
				} else {
					t.ports[n] = &port{id, was.before}
				}
			})
		}
	}
	if p == nil {
		p = &port{id: id}
		t.ports[n] = p
	}
	return p
}

// shapeOf is the shape and port of a frontend that the kernel has.
func (t *table) shapeOf(f *plan.Frontend) (shape, uint64) {
	n, p := t.portOf(f.ID)
	s := outline(f)
	for o, r := range f.Routes {
		if r.Pool != nil {
			s.routes[o].pool, _ = p.find(r.Pool)
		}
	}
	return s, n
}

// outline is a shape but for the numbers of its pools.
func outline(f *plan.Frontend) shape {
	s := shape{sticky: f.Affinity.Milliseconds(), ranged: f.Sources != nil, nodePort: !f.Addr.IsValid()}
	for o, r := range f.Routes {
		s.routes[o] = leg{verdict: r.Verdict, masquerade: r.Masquerade}
		if r.Pool != nil {
			s.routes[o].of = uint32(len(r.Pool.Endpoints))
		}
	}
	return s
}

// release takes a frontend's references away.
func (t *table) release(f *plan.Frontend, s shape, n uint64, owner int) {
	p := t.touch(n, f.ID, owner)
	for o, r := range f.Routes {
		if r.Pool != nil {
			u := &p.pools[s.routes[o].pool]
			u.refs--
			if s.sticky > 0 {
				u.sticky--
			}
		}
	}
	t.useShape(s, -1)
}

// place gives a frontend's pools their numbers. like is the shape it had before: a pool that takes the place of one that
// nobody uses any more gets its number, so that only what differs between the two is changed.
func (t *table) place(f *plan.Frontend, like *shape, owner int) record {
	n, _ := t.portOf(f.ID)
	p := t.touch(n, f.ID, owner)
	s := outline(f)
	for o, r := range f.Routes {
		if r.Pool == nil {
			continue
		}
		i, found := p.find(r.Pool)
		if !found {
			i = p.free(like, o)
			p.pools[i].pool = r.Pool
		}
		s.routes[o].pool = i
		p.pools[i].refs++
		if s.sticky > 0 {
			p.pools[i].sticky++
		}
	}
	return record{t.useShape(s, 1), n}
}

// free finds a number for a new pool.
func (p *port) free(like *shape, o int) uint32 {
	if like != nil {
		if i := like.routes[o].pool; int(i) < len(p.pools) && p.pools[i].refs == 0 {
			return i
		}
	}
	for i := range p.pools {
		if p.pools[i].refs == 0 {
			return uint32(i)
		}
	}
	p.pools = append(p.pools, poolUse{})
	return uint32(len(p.pools) - 1)
}

func (t *table) useShape(s shape, by int32) uint32 {
	if t.last.use == nil || t.last.shape != s {
		t.last = lastShape{s, t.touchShape(s)}
	}
	u := t.last.use
	u.refs += by
	if t.undoable {
		t.undo = append(t.undo, func() { u.refs -= by })
	}
	return u.id
}

// touchShape remembers whether the kernel had a shape.
func (t *table) touchShape(s shape) *shapeUse {
	u := t.shapes[s]
	if _, ok := t.touchedShapes[s]; !ok {
		t.touchedShapes[s] = u != nil
	}
	if u == nil {
		u = &shapeUse{id: t.shapeID(&s)}
		t.shapes[s] = u
	}
	return u
}

// shapeID is a number that the shape gets each time, unless another has it.
func (t *table) shapeID(s *shape) uint32 {
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(s.chain()))
	for id := max(1, sum.Sum32()); ; id = max(1, id+1) { // zero is no shape
		taken := false
		for _, u := range t.shapes {
			taken = taken || u.id == id
		}
		if !taken {
			return id
		}
	}
}

// encodable says why a frontend can't be programmed.
func encodable(f *plan.Frontend) error {
	for _, r := range f.Routes {
		if r.Verdict != plan.Forward {
			continue
		}
		if r.Pool == nil || len(r.Pool.Endpoints) == 0 {
			return fmt.Errorf("a route without endpoints")
		}
		if len(r.Pool.Endpoints) >= 1<<poolShift {
			return fmt.Errorf("%d endpoints are more than this mode can choose from", len(r.Pool.Endpoints))
		}
	}
	return nil
}
