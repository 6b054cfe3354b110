package iptables

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	// leafSize is how many spots a chain lists before it is split; below mergeSize a split chain is made one again.
	leafSize, mergeSize = 32, 12
	// splitBits is how many bits of an address one chain looks at.
	splitBits = 2
	fanout    = 1 << splitBits
	// maxDepth keeps the way through the chains below the 16 that nf_tables follows, with room for those around the tree.
	maxDepth = 8
)

// spot is what a rule of a leaf looks for: an address, or none for a node port, a protocol and a port.
type spot struct {
	addr  netip.Addr
	proto intent.Protocol
	port  uint16
}

func spotOf(f *plan.Frontend) spot { return spot{f.Addr, f.Protocol, f.Port} }

func (s spot) compare(o spot) int {
	return cmp.Or(s.addr.Compare(o.addr), cmp.Compare(s.proto, o.proto), cmp.Compare(s.port, o.port))
}

// tree is a set of chains that leads a packet to the rules of its spot by few comparisons, however many spots there are.
// A chain either lists its spots or sends packets on to up to four others by some bits of the address (iptables takes
// masks with holes, so any bits will do: those are chosen that spread the spots best) or by ranges of the port. Every
// chain but the root is reached by goto, so that a packet that no spot fits goes on behind the jump into the tree. The tree
// knows where spots are, not their rules, which are asked for when a chain is to be written.
type tree struct {
	root *node
	// touched are to be written anew, dropped are gone; grown have new spots, whose place among the others doesn't matter.
	touched map[*node]bool
	grown   map[*node][]spot
	dropped map[string]bool
}

type node struct {
	name   string
	depth  int
	parent *node
	// spots are those of a leaf, in order.
	spots []spot
	split bool
	test  test
	kids  [fanout]*node
	// count is how many spots are below, by protocol, for tests by port must name it.
	count [len(kinds)]int
}

var kinds = [...]intent.Protocol{intent.TCP, intent.UDP, intent.SCTP}

// kind is the place of a protocol among the counts.
func kind(p intent.Protocol) int { return slices.Index(kinds[:], p) }

// test tells which of its children a spot belongs to.
type test struct {
	// shift is where the bits are, counted from the address' end.
	shift int
	// starts are the first ports of the children, the first of them 0; nil for a test of the address.
	starts []uint16
}

func newTree(name string) *tree {
	t := &tree{touched: map[*node]bool{}, grown: map[*node][]spot{}, dropped: map[string]bool{}}
	t.root = t.leaf(name, nil)
	return t
}

func (t *tree) leaf(name string, parent *node) *node {
	n := &node{name: name, parent: parent}
	if parent != nil {
		n.depth = parent.depth + 1
	}
	delete(t.dropped, name)
	t.touched[n] = true
	return n
}

// fill puts many spots into an empty tree, with better splits than one after another would lead to. Leaves have as many as
// said; few leave room for more.
func (t *tree) fill(all []spot, leaf int) {
	slices.SortFunc(all, spot.compare)
	t.root.spots = slices.Compact(all)
	for _, s := range t.root.spots {
		t.root.count[kind(s.proto)]++
	}
	t.touched[t.root] = true
	t.divide(t.root, leaf)
}

// add sets spots. If they are many and the first, more will come, and are not to divide what is written now.
func (t *tree) add(all []spot) {
	if len(all) > leafSize && t.root.size() == 0 {
		t.fill(all, min(leafSize/fanout, len(all)/leafSize))
		return
	}
	for _, s := range all {
		t.set(s)
	}
}

// set adds a spot, or says that its rules are new.
func (t *tree) set(s spot) {
	n := t.find(s)
	i, known := slices.BinarySearchFunc(n.spots, s, spot.compare)
	if known {
		t.touched[n] = true
		return
	}
	n.spots = slices.Insert(n.spots, i, s)
	t.grown[n] = append(t.grown[n], s)
	t.tally(n, s.proto, 1)
	t.divide(n, leafSize)
}

func (t *tree) remove(s spot) {
	n := t.root
	for n != nil && n.split {
		n = n.kids[n.test.child(s)]
	}
	if n == nil {
		return
	}
	i, known := slices.BinarySearchFunc(n.spots, s, spot.compare)
	if !known {
		return
	}
	n.spots = slices.Delete(n.spots, i, i+1)
	t.touched[n] = true
	t.tally(n, s.proto, -1)
	t.merge(n)
}

// find returns the leaf in which a spot is or is to be.
func (t *tree) find(s spot) *node {
	n := t.root
	for n.split {
		i := n.test.child(s)
		if n.kids[i] == nil {
			n.kids[i] = t.leaf(n.name+suffix(n, i), n)
		}
		n = n.kids[i]
	}
	return n
}

func suffix(n *node, i int) string {
	if n.parent == nil {
		return "-" + strconv.Itoa(i)
	}
	return strconv.Itoa(i)
}

// tally counts a spot that came to or left a leaf. A chain above must be written anew where its rules depend on it.
func (t *tree) tally(n *node, p intent.Protocol, by int) {
	for k := kind(p); n != nil; n = n.parent {
		before := n.count[k]
		n.count[k] += by
		if (before == 0 || n.count[k] == 0) && n.parent != nil {
			t.touched[n.parent] = true
		}
	}
}

func (n *node) size() int {
	sum := 0
	for _, c := range n.count {
		sum += c
	}
	return sum
}

// merge takes chains back that are no longer worth it.
func (t *tree) merge(n *node) {
	if n.size() == 0 && n.parent != nil {
		n.parent.kids[slices.Index(n.parent.kids[:], n)] = nil
		t.drop(n)
	}
	for up := n.parent; up != nil; up = up.parent {
		if up.size() > mergeSize {
			return
		}
		spots := up.collect(nil)
		for i, k := range up.kids {
			if k != nil {
				t.drop(k)
				up.kids[i] = nil
			}
		}
		slices.SortFunc(spots, spot.compare)
		up.spots, up.split = spots, false
		t.touched[up] = true
	}
}

func (n *node) collect(into []spot) []spot {
	into = append(into, n.spots...)
	for _, k := range n.kids {
		if k != nil {
			into = k.collect(into)
		}
	}
	return into
}

func (t *tree) drop(n *node) {
	for _, k := range n.kids {
		if k != nil {
			t.drop(k)
		}
	}
	delete(t.touched, n)
	delete(t.grown, n)
	t.dropped[n.name] = true
}

// divide splits a chain that lists more than it should.
func (t *tree) divide(n *node, leaf int) {
	if len(n.spots) <= leaf || n.depth == maxDepth {
		return
	}
	chosen, ok := choose(n.spots)
	if !ok {
		return
	}
	spots := n.spots
	n.spots, n.split, n.test = nil, true, chosen
	t.touched[n] = true
	for _, s := range spots {
		i := chosen.child(s)
		if n.kids[i] == nil {
			n.kids[i] = t.leaf(n.name+suffix(n, i), n)
		}
		n.kids[i].spots = append(n.kids[i].spots, s)
		n.kids[i].count[kind(s.proto)]++
	}
	for _, k := range n.kids {
		if k != nil {
			t.divide(k, leaf)
		}
	}
}

// sample bounds what choosing a test costs.
const sample = 256

// choose finds the test that divides spots most evenly.
func choose(spots []spot) (test, bool) {
	members := slices.Clone(spots)
	if len(spots) > sample {
		// At random, for neighbours have most bits in common; always the same, for a reader who compares.
		random := rand.New(rand.NewPCG(1, uint64(len(spots))))
		members = members[:sample]
		for i := range members {
			members[i] = spots[random.IntN(len(spots))]
		}
	}
	var best test
	least := len(members) * len(members) // the sum of squares is smallest where the spread is even
	try := func(t test) {
		var n [fanout]int
		for _, s := range members {
			n[t.child(s)]++
		}
		sum := 0
		for _, c := range n {
			sum += c * c
		}
		if sum < least {
			best, least = t, sum
		}
	}
	if members[0].addr.IsValid() {
		for shift := 0; shift <= members[0].addr.BitLen()-splitBits; shift++ {
			try(test{shift: shift})
		}
	}
	if least > len(members)*len(members)/2 {
		try(byPort(members))
	}
	return best, least < len(members)*len(members)
}

// byPort divides into ranges of as many spots each.
func byPort(members []spot) test {
	slices.SortFunc(members, func(a, b spot) int { return cmp.Compare(a.port, b.port) })
	starts := []uint16{0}
	for i := 1; i < fanout; i++ {
		if p := members[i*len(members)/fanout].port; p > starts[len(starts)-1] {
			starts = append(starts, p)
		}
	}
	return test{starts: starts}
}

func (t test) child(s spot) int {
	if t.starts != nil {
		i, found := slices.BinarySearch(t.starts, s.port)
		if !found {
			i--
		}
		return i
	}
	b := s.addr.AsSlice()
	at := len(b) - 1 - t.shift/8
	v := uint(b[at])
	if at > 0 {
		v |= uint(b[at-1]) << 8
	}
	return int(v>>(t.shift%8)) & (fanout - 1)
}

// matches are what packets to a child look like: one for each rule that leads there.
func (n *node) matches(i int, f intent.Family) []rule {
	if n.test.starts == nil {
		return []rule{{dst: address{addr: bits(f, i, n.test.shift), mask: bits(f, fanout-1, n.test.shift)}}}
	}
	last := uint16(65535)
	if i+1 < len(n.test.starts) {
		last = n.test.starts[i+1] - 1
	}
	var out []rule
	for k, p := range kinds {
		if n.kids[i].count[k] > 0 {
			out = append(out, rule{proto: p, ports: portRange{n.test.starts[i], last}})
		}
	}
	return out
}

// bits is the address in which only v is set, shift bits from the end.
func bits(f intent.Family, v, shift int) netip.Addr {
	b := make([]byte, 4)
	if f == intent.IPv6 {
		b = make([]byte, 16)
	}
	at := len(b) - 1 - shift/8
	v <<= shift % 8
	b[at] = byte(v)
	if at > 0 {
		b[at-1] = byte(v >> 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// changes adds the chains that changed since the last call to a section. rules are those of a spot.
func (t *tree) changes(f intent.Family, rules func(spot) []rule, to *section) {
	for n := range t.touched {
		to.set(n.name, n.rules(f, rules))
	}
	for n, spots := range t.grown {
		if !t.touched[n] {
			for _, s := range spots {
				to.extend(n.name, rules(s))
			}
		}
	}
	for name := range t.dropped {
		to.remove(name)
	}
	t.touched, t.grown, t.dropped = map[*node]bool{}, map[*node][]spot{}, map[string]bool{}
}

func (n *node) rules(f intent.Family, of func(spot) []rule) []rule {
	var out []rule
	if !n.split {
		for _, s := range n.spots {
			out = append(out, of(s)...)
		}
		return out
	}
	for i, k := range n.kids {
		if k == nil {
			continue
		}
		for _, m := range n.matches(i, f) {
			out = append(out, m.with(goes(k.name)))
		}
	}
	return out
}
