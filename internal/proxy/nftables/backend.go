package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
	"portal/internal/proxy/nf"
)

// tables is the mode at work: what it has written.
type tables struct {
	socket *nf.Socket
	mark   uint32

	byFamily map[intent.Family]*table
	facts    *plan.Facts
	// absent are frontends that the kernel refused: they count as acknowledged, but aren't there.
	absent map[plan.FrontendKey]bool
}

// Close leaves everything in the kernel.
func (t *tables) Close() error { return t.socket.Close() }

// Apply changes what the delta says; where that doesn't work out, somebody else has changed our tables, and they are
// synced in full.
func (t *tables) Apply(ctx context.Context, next *plan.Snapshot, delta *plan.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if delta.Full || t.byFamily == nil || delta.Facts && !sameRules(t.facts, next.Facts) {
		return t.replace(next)
	}
	err := t.update(delta)
	if errors.Is(err, errDrift) {
		return t.replace(next)
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
func (l *blame) note(err error) bool {
	var bad nf.Refusal
	if !errors.As(err, &bad) {
		return false
	}
	found := false
	for _, c := range bad {
		// Memory is everybody's.
		if c.Errno == unix.ENOMEM || c.Errno == unix.ENOBUFS || c.Errno == unix.EPERM {
			return false
		}
		if c.Owner == 0 {
			continue
		}
		for _, k := range l.units[c.Owner-1] {
			l.frontends[k] = fmt.Errorf("the kernel refuses %s: %w", c.What, c.Errno)
		}
		found = true
	}
	return found
}

func (l *blame) err() error {
	if len(l.frontends) == 0 {
		return nil
	}
	return &backend.Refused{Frontends: l.frontends}
}

// attempts bounds how often a transaction is tried without those who were refused (the kernel names them all at once, but for
// those in one message), or since somebody else changed something meanwhile.
const attempts = 4

// replace makes the tables what the snapshot says, in one transaction that touches only what differs: before Linux 6.17, a
// look-up that meets the commit half-way finds neither an element that goes nor the same that comes. Affinity stays.
//
// A packet that is on its way through our rules at the moment of the commit goes on with the old rules, but finds what is
// new in sets: each look-up asks for itself which generation it is. So that it finds the same there, a shape has the same
// number as before.
func (t *tables) replace(next *plan.Snapshot) error {
	l := &blame{frontends: map[plan.FrontendKey]error{}}
	var err error
	blaming := false
	for n := range 2 * attempts {
		var b *nf.Batch
		var fresh map[intent.Family]*table
		// Others may change something all the time: in the end it is tried without waiting for a quiet moment.
		if fresh, b, err = t.build(next, l, blaming, n < attempts); err != nil {
			return err
		}
		if err = t.socket.Commit(b); err == nil {
			return t.adopt(next.Facts, fresh, l)
		}
		if errors.Is(err, unix.ERESTART) {
			continue
		}
		if blaming && !l.note(err) {
			break
		}
		blaming = true
	}
	return fmt.Errorf("writing the table %s: %w", tableName, err)
}

func (t *tables) adopt(f *plan.Facts, fresh map[intent.Family]*table, l *blame) error {
	for _, one := range fresh {
		one.end()
	}
	t.byFamily, t.facts, t.absent = fresh, f, map[plan.FrontendKey]bool{}
	for k := range l.frontends {
		t.absent[k] = true
	}
	return l.err()
}

// build puts a whole snapshot into a transaction. blaming: each Service's port gets messages of its own, so that the
// kernel's refusal says whom it is about. alone: only if nobody else changes anything meanwhile.
func (t *tables) build(next *plan.Snapshot, l *blame, blaming, alone bool) (map[intent.Family]*table, *nf.Batch, error) {
	b := nf.NewBatch()
	if alone {
		generation, err := t.socket.Generation()
		if err != nil {
			return nil, nil, fmt.Errorf("reading the generation of nf_tables: %w", err)
		}
		b.OnlyAt(generation)
	}
	fresh := map[intent.Family]*table{}
	for _, family := range families {
		if err := t.rebase(b, fresh, next, family); err != nil {
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
				b.Owner(owner)
			}
			one.enter(b, nil, nil, f, owner)
		}
		// Now, while it is all at hand.
		for _, one := range fresh {
			one.settlePorts(b)
		}
	}
	b.Owner(0)
	for a := range next.ClusterIPs {
		if one := fresh[intent.FamilyOf(a)]; one != nil {
			one.clusterIP(b, a, true)
		}
	}
	for _, one := range fresh {
		one.settle(b)
		b.Prune(one.at, one.late...)
	}
	return fresh, b, nil
}

// rebase reads what there is of a family, and declares what is there whatever the Services.
func (t *tables) rebase(b *nf.Batch, fresh map[intent.Family]*table, next *plan.Snapshot, family intent.Family) error {
	l := layoutOf(family, tableName)
	if !slices.Contains(next.Facts.Families, family) {
		there, err := t.socket.Exists(l.at)
		if there {
			b.DeleteTable(l.at)
		}
		return err
	}
	present, err := t.socket.Read(l.at)
	if err != nil {
		return err
	}
	late := l.fit(present, next.Sizes[family])
	one := newTable(newRuler(l, next.Facts, t.mark))
	one.late = late
	fresh[family] = one
	one.expect(next.Sizes[family].Frontends)
	one.base(b, next.Facts, present)
	return nil
}

// errDrift says that the kernel hasn't what was written.
var errDrift = errors.New("somebody has changed our table")

// update carries out a delta. What it costs is proportional to what has changed.
func (t *tables) update(delta *plan.Delta) error {
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
		err := t.socket.Commit(b)
		if err == nil {
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
		if n > 0 && !l.note(err) {
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

func (t *tables) amend(delta *plan.Delta, l *blame, blaming bool) *nf.Batch {
	b := nf.NewBatch()
	for _, m := range t.moves(delta, l, blaming) {
		b.Owner(m.owner)
		m.table.enter(b, m.old, m.had, m.new, m.owner)
	}
	b.Owner(0)
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

func (t *tables) clusterIP(b *nf.Batch, a netip.Addr, add bool) {
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
