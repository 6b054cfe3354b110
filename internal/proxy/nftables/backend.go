package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
)

// tables is the mode at work: what it has told the kernel.
type tables struct {
	socket *socket
	mark   uint32
	// transact is the socket's, but for tests that let the kernel refuse.
	transact func(msg []byte) error

	byFamily map[intent.Family]*table
	facts    *plan.Facts
	// closed: packets don't come to byFamily yet.
	closed bool
	// absent are frontends that the kernel refused: they count as acknowledged, but aren't there.
	absent map[plan.FrontendKey]bool

	seen seen
	// late are sets that nothing uses any more, and that go with the next Check.
	late []lateSet
}

type lateSet struct {
	family byte
	name   string
}

func newTables(s *socket, mark uint32) *tables {
	return &tables{socket: s, mark: mark, transact: s.Transact}
}

// Close leaves all in the kernel.
func (t *tables) Close() error { return t.socket.Close() }

// Prepare writes everything but the chains by which packets come in. Somebody's table where they do is left alone.
func (t *tables) Prepare(ctx context.Context, next *plan.Snapshot) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if t.byFamily == nil {
		for _, family := range families {
			left, err := t.socket.inventory(layoutOf(family, tableName))
			if err != nil {
				return err
			}
			if left != nil && left.open() {
				return backend.ErrServing
			}
		}
		return t.replace(next, true)
	}
	return t.follow(next, next.Delta(), true)
}

// Apply changes what the delta says; where that doesn't work out, somebody else has changed our tables, and they are
// written anew.
func (t *tables) Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t.seen.generation = 0
	if delta.Full && !delta.Ahead || t.byFamily == nil {
		return t.replace(next, false)
	}
	return t.follow(next, delta, false)
}

// follow goes on from what was written before. closed: packets are not to come in yet.
func (t *tables) follow(next *plan.Snapshot, delta *plan.Delta, closed bool) error {
	if delta.Facts && !sameRules(t.facts, next.Facts) {
		return t.replace(next, closed)
	}
	err := t.update(delta, t.closed && !closed)
	if errors.Is(err, errDrift) {
		return t.replace(next, closed)
	}
	return err
}

// sameRules says whether the rules are the same for both facts.
func sameRules(a, b *plan.Facts) bool {
	return reflect.DeepEqual(a.Families, b.Families) && reflect.DeepEqual(a.Pods, b.Pods) && reflect.DeepEqual(a.NodePorts, b.NodePorts) &&
		reflect.DeepEqual(a.ServicePrefixes, b.ServicePrefixes)
}

// blame collects who is refused.
type blame struct {
	frontends map[plan.FrontendKey]error
	units     [][]plan.FrontendKey // by owner, less one
}

// unit returns an owner for frontends that are refused together.
func (l *blame) unit() int {
	l.units = append(l.units, nil)
	return len(l.units)
}

// note reads a refusal, and says whether somebody can be blamed so that the rest can be tried without them.
func (l *blame) note(b *batch, err error) bool {
	var bad nf.Refusal
	if !errors.As(err, &bad) {
		return false
	}
	found := false
	for seq, errno := range bad {
		// Memory is everybody's.
		if errno == unix.ENOMEM || errno == unix.ENOBUFS || errno == unix.EPERM {
			return false
		}
		if owner := b.owners[seq]; owner != 0 {
			for _, k := range l.units[owner-1] {
				l.frontends[k] = fmt.Errorf("the kernel says: %w", errno)
			}
			found = true
		}
	}
	return found
}

func (l *blame) err() error {
	if len(l.frontends) == 0 {
		return nil
	}
	return &backend.Refused{Frontends: l.frontends}
}

// attempts bounds how often a transaction is tried without those who were refused: the kernel names them all at once,
// but for those in one message.
const attempts = 4

// replace writes everything anew, in one transaction: there is no moment without a rule. Only affinity stays.
//
// A packet that is on its way through our rules at the moment of the commit goes on with the old rules, but finds what is
// new in sets: each look-up asks for itself which generation it is. So that it finds the same there, sets and chains
// that were there before stay, and only what is in them is exchanged; and a shape has the same number as before.
func (t *tables) replace(next *plan.Snapshot, closed bool) error {
	l := &blame{frontends: map[plan.FrontendKey]error{}}
	var err error
	for n := range attempts {
		var b *batch
		var fresh map[intent.Family]*table
		if fresh, b, err = t.build(next, l, n > 0, closed); err != nil {
			return err
		}
		if err = t.commit(b); err == nil {
			t.closed = closed
			return t.adopt(next.Facts, fresh, l)
		}
		if n > 0 && !l.note(b, err) {
			break
		}
	}
	return fmt.Errorf("writing the table %s: %w", tableName, err)
}

func (t *tables) commit(b *batch) error {
	msg, err := b.bytes()
	if msg == nil || err != nil {
		return err
	}
	return t.transact(msg)
}

func (t *tables) adopt(f *plan.Facts, fresh map[intent.Family]*table, l *blame) error {
	t.late = nil
	for _, one := range fresh {
		one.end()
		for _, name := range one.late {
			t.late = append(t.late, lateSet{one.family, name})
		}
	}
	t.byFamily, t.facts, t.absent = fresh, f, map[plan.FrontendKey]bool{}
	for k := range l.frontends {
		t.absent[k] = true
	}
	if err := t.remember(); err != nil {
		t.byFamily = nil // somebody was quicker: nothing is known
		return err
	}
	return l.err()
}

// build puts a whole snapshot into a transaction. blaming: each Service's port gets messages of its own, so that the
// kernel's nf.Refusal says whom it is about. closed: no packet comes there.
func (t *tables) build(next *plan.Snapshot, l *blame, blaming, closed bool) (map[intent.Family]*table, *batch, error) {
	b := newBatch()
	fresh := map[intent.Family]*table{}
	for _, family := range families {
		if err := t.rebase(b, fresh, next, family, closed); err != nil {
			return nil, nil, err
		}
	}
	owners := map[plan.PortID]int{}
	// By Services, which have their frontends in order: a port's pools get the same numbers each time.
	for _, service := range next.Services {
		for _, f := range service.Frontends {
			k := f.FrontendKey
			one := fresh[k.Family]
			if one == nil || l.frontends[k] != nil || !next.Holds(f) {
				continue
			}
			if err := encodable(f); err != nil {
				l.frontends[k] = err
				continue
			}
			owner := 0
			if blaming {
				if owner = owners[f.ID]; owner == 0 {
					owner = l.unit()
					owners[f.ID] = owner
				}
				l.units[owner-1] = append(l.units[owner-1], k)
				b.forOwner(owner)
			}
			one.enter(b, nil, nil, f, owner)
		}
		// Now, while it is all at hand.
		for _, one := range fresh {
			one.settlePorts(b)
		}
	}
	if blaming {
		b.forOwner(0)
	}
	for a := range next.ClusterIPs {
		if one := fresh[intent.FamilyOf(a)]; one != nil {
			one.clusterIP(b, a, true)
		}
	}
	for _, one := range fresh {
		one.settle(b)
		one.abandon(b)
	}
	return fresh, b, nil
}

// rebase removes what an earlier transaction or process left in a family, and lays the foundation again.
func (t *tables) rebase(b *batch, fresh map[intent.Family]*table, next *plan.Snapshot, family intent.Family, closed bool) error {
	l := layoutOf(family, tableName)
	left, err := t.socket.inventory(l)
	if err != nil {
		return fmt.Errorf("looking for what is in the table %s: %w", tableName, err)
	}
	f := next.Facts
	wanted := false
	for _, w := range f.Families {
		wanted = wanted || w == family
	}
	if !wanted {
		if left != nil {
			b.delTable(cleared, l.family, l.table)
		}
		return nil
	}
	if left != nil && !left.open() {
		// Something that was prepared and never used: nobody is inside.
		b.delTable(cleared, l.family, l.table)
		left = nil
	}
	one := newTable(newRuler(l, f, family, t.mark))
	fresh[family] = one
	one.late = l.fit(left, next.Sizes[family], closed)
	one.expect(next.Sizes[family].Frontends)
	b.addTable(l.family, l.table)
	if left != nil {
		one.takeOver(b, left)
	}
	one.base(b, f)
	if !closed {
		one.open(b, f)
	}
	return nil
}

// errDrift says that the kernel hasn't what it was told.
var errDrift = errors.New("somebody has changed our table")

// update carries out a delta. What it does is proportional to what has changed. opening: packets come from now on.
func (t *tables) update(delta *plan.Delta, opening bool) error {
	l := &blame{frontends: map[plan.FrontendKey]error{}}
	for _, c := range delta.Frontends {
		if c.New != nil {
			if err := encodable(c.New); err != nil {
				l.frontends[c.FrontendKey] = err
			}
		}
	}
	for n := range attempts {
		for _, one := range t.byFamily {
			one.begin()
		}
		b := t.amend(delta, l, n > 0)
		if opening {
			for _, one := range t.byFamily {
				one.open(b, t.facts)
			}
		}
		err := t.commit(b)
		if err == nil {
			t.closed = t.closed && !opening
			t.acknowledge(delta, l)
			return l.err()
		}
		for _, one := range t.byFamily {
			one.rollback()
		}
		// ENFILE: a set is full; in a full sync it gets a larger one.
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENFILE) {
			return errDrift
		}
		if n > 0 && !l.note(b, err) {
			return fmt.Errorf("changing the table %s: %w", tableName, err)
		}
	}
	return errDrift
}

// move is a change on its way.
type move struct {
	table    *table
	old, new *plan.Frontend
	had      *stay
	owner    int
}

func (t *tables) amend(delta *plan.Delta, l *blame, blaming bool) *batch {
	b := newBatch()
	for _, m := range t.moves(delta, l, blaming) {
		if blaming {
			b.forOwner(m.owner)
		}
		m.table.enter(b, m.old, m.had, m.new, m.owner)
	}
	if blaming {
		b.forOwner(0)
	}
	for _, a := range delta.RemovedIPs {
		t.clusterIP(b, a, false)
	}
	for _, a := range delta.AddedIPs {
		t.clusterIP(b, a, true)
	}
	for _, one := range t.byFamily {
		one.settle(b)
	}
	return b
}

// moves lets all frontends of a delta leave that nobody is to blame for.
func (t *tables) moves(delta *plan.Delta, l *blame, blaming bool) (out []move) {
	owners := map[plan.PortID]int{}
	for _, c := range delta.Frontends {
		m := move{table: t.byFamily[c.Family], old: c.Old, new: c.New}
		if m.table == nil || l.frontends[c.FrontendKey] != nil {
			continue
		}
		if t.absent[c.FrontendKey] {
			m.old = nil
		}
		if blaming {
			id := changedPort(c)
			if m.owner = owners[id]; m.owner == 0 {
				m.owner = l.unit()
				owners[id] = m.owner
			}
			l.units[m.owner-1] = append(l.units[m.owner-1], c.FrontendKey)
		}
		if m.old != nil {
			m.had = m.table.leave(m.old, m.owner)
		}
		out = append(out, m)
	}
	return out
}

func changedPort(c plan.FrontendChange) plan.PortID {
	if c.New != nil {
		return c.New.ID
	}
	return c.Old.ID
}

func (t *tables) clusterIP(b *batch, a netip.Addr, add bool) {
	if one := t.byFamily[intent.FamilyOf(a)]; one != nil {
		one.clusterIP(b, a, add)
	}
}

// acknowledge notes that a delta was carried out but for those to blame. What was refused stays what it was.
func (t *tables) acknowledge(delta *plan.Delta, l *blame) {
	for _, one := range t.byFamily {
		one.end()
	}
	for _, c := range delta.Frontends {
		if l.frontends[c.FrontendKey] == nil {
			delete(t.absent, c.FrontendKey)
		} else if c.Old == nil {
			t.absent[c.FrontendKey] = true
		}
	}
}
