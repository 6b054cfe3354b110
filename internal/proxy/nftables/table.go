package nftables

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// table is what the kernel has of one family, as far as the next change must know it: not the frontends themselves,
// which the plan remembers, but what they share.
type table struct {
	*ruler
	shapes map[shape]*shapeUse
	ports  map[uint64]*port
	sticky bool // affinity and members are there
	// kept are the sets and chains that were there before, in the transaction that takes over; late are sets that it
	// replaces, which go a little later.
	kept *inventory
	late []string

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
	t.undo, t.undoable, t.kept, t.last = nil, false, nil, lastShape{}
	// New ones: to walk over a map costs what it has ever held.
	t.touchedPorts, t.touchedShapes = map[uint64]touched{}, map[shape]bool{}
}

func (t *table) undoes(f func()) {
	if t.undoable {
		t.undo = append(t.undo, f)
	}
}

// baseChains are there whatever the Services.
var baseChains = []struct {
	name string
	at   *hook
}{
	{"prerouting", &hook{unix.NF_INET_PRE_ROUTING, dstnat}},
	{"output", &hook{unix.NF_INET_LOCAL_OUT, dstnat}},
	// Before anybody's srcnat, since a flow with a rewritten source is not looked at any more.
	{"nobody", &hook{unix.NF_INET_POST_ROUTING, srcnat - 1}},
	{"postrouting", &hook{unix.NF_INET_POST_ROUTING, srcnat}},
	{rejectChain, nil},
	{hairpinChain, nil},
}

const dstnat, srcnat = -100, 100

// takeOver keeps what is there and is as we want it, without what is in it, and removes the rest but for chains, of which
// it isn't known yet who needs them.
func (t *table) takeOver(b *batch, left *inventory) {
	t.kept = left
	b.delRules(t.family, t.table())
	for _, s := range append(t.always(), t.sometimes()...) {
		switch k, there := left.sets[s.name]; {
		case !there || !k.like(s):
		case s == t.affinity:
			t.sticky = true
		default:
			b.flush(s)
		}
	}
	for name := range left.sets {
		if !t.keptSet(name) && !slices.Contains(t.late, name) {
			b.delSet(t.family, t.table(), name)
		}
	}
	for _, c := range baseChains {
		if _, there := left.chains[c.name]; there && !t.keptChain(c.name, c.at) {
			b.delChain(cleared, t.family, t.table(), c.name)
		}
	}
	if t.sticky {
		t.addSet(b, t.choices)
		t.addSet(b, t.members)
	}
}

// keptSet says whether a set of the name was there and stays.
func (t *table) keptSet(name string) bool {
	if t.kept == nil {
		return false
	}
	k, there := t.kept.sets[name]
	if !there {
		return false
	}
	for _, s := range append(t.always(), t.sometimes()...) {
		if s.name == name {
			return k.like(s)
		}
	}
	return false
}

// keptChain says whether a chain was there and stays.
func (t *table) keptChain(name string, at *hook) bool {
	if t.kept == nil {
		return false
	}
	was, there := t.kept.chains[name]
	return there && (was == nil) == (at == nil) && (at == nil || *was == *at)
}

func (t *table) addSet(b *batch, s *set) {
	if !t.keptSet(s.name) {
		b.addSet(s)
	}
}

// abandon removes the chains that were there before and that nobody needs.
func (t *table) abandon(b *batch) {
	if t.kept == nil {
		return
	}
	needed := map[string]bool{}
	for _, c := range baseChains {
		needed[c.name] = true
	}
	for s := range t.shapes {
		needed[s.chain()] = true
	}
	for name := range t.kept.chains {
		if !needed[name] {
			b.delChain(cleared, t.family, t.table(), name)
		}
	}
}

// base are the rules and sets that are there whatever the Services, but for those by which packets come in.
func (t *table) base(b *batch, f *plan.Facts) {
	t.addBase(b, f, func(at *hook) bool { return at == nil })
	for _, s := range t.always() {
		t.addSet(b, s)
	}
	t.canaries(b)
	for _, key := range nibbles() {
		b.add(t.same, key, nil)
	}
	for _, a := range f.NodePorts.Addrs {
		if t.has(a) && !a.IsLoopback() {
			b.add(t.nodeIPs, t.addr(nil, a), nil)
		}
	}
}

// open lets packets in.
func (t *table) open(b *batch, f *plan.Facts) {
	t.addBase(b, f, func(at *hook) bool { return at != nil })
}

// addBase writes some of the chains that are there whatever the Services.
func (t *table) addBase(b *batch, f *plan.Facts, which func(*hook) bool) {
	wanted := map[string]bool{}
	for _, c := range baseChains {
		if wanted[c.name] = which(c.at); wanted[c.name] && !t.keptChain(c.name, c.at) {
			b.addChain(t.family, t.table(), c.name, c.at)
		}
	}
	for _, rule := range t.baseRules(f) {
		if wanted[rule.chain] {
			b.addRule(t.family, t.table(), rule.chain, rule.exprs)
		}
	}
}

type baseRule struct {
	chain string
	exprs []expr.Any
}

func (t *table) baseRules(f *plan.Facts) (out []baseRule) {
	add := func(chain string, list [][]expr.Any) {
		for _, exprs := range list {
			out = append(out, baseRule{chain, exprs})
		}
	}
	add("prerouting", t.dispatch(&f.NodePorts))
	add("output", t.dispatch(&f.NodePorts))
	add("nobody", t.unallocated(f.ServicePrefixes))
	add("postrouting", t.rewriting())
	add(rejectChain, t.rejection())
	add(hairpinChain, t.hairpins())
	return out
}

func (t *table) table() string { return t.layout.table }

func (t *table) has(a netip.Addr) bool { return (intent.FamilyOf(a) == intent.IPv4) == (t.width == 4) }

// canaries are elements that match no packet. Whoever flushes a map takes them too, and Check sees it.
func (t *table) canaries(b *batch) {
	for _, c := range t.canaryKeys() {
		if c.set.verdicts {
			b.addVerdict(c.set, c.key, "")
			continue
		}
		var end, data []byte
		if c.set.flags&unix.NFT_SET_INTERVAL != 0 {
			end = c.key
		}
		if c.set.data != nil {
			data = make([]byte, c.set.dataLen)
		}
		b.element(c.set, false, c.key, end, data)
	}
}

type canary struct {
	set *set
	key []byte
}

func (t *table) canaryKeys() (out []canary) {
	for _, s := range t.always() {
		out = append(out, canary{s, make([]byte, s.keyLen)})
	}
	return out
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
	for id := max(1, sum.Sum32()); ; id = max(1, id+1) { // zero is the canary's
		taken := false
		for _, u := range t.shapes {
			taken = taken || u.id == id
		}
		if !taken {
			return id
		}
	}
}

// encodable says why a frontend can't be told to the kernel.
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
