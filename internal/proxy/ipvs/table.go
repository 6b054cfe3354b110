package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// rules is our nftables table.
type rules interface {
	probe() error
	// read returns what an earlier process noted; nothing where there is no table.
	read() (*found, error)
	// replace makes the table what is given in one step, for the families given; in others there is none afterwards.
	replace(f *plan.Facts, bit uint32, all map[intent.Family]map[element]bool) error
	// change removes and adds elements in one step.
	change(del, add map[intent.Family]map[element]bool) error
	// check compares the table with what was written.
	check() error
	remove() error
	close()
}

const (
	tableName = "portal-ipvs"
	comment   = "written by portal over netlink, not for saving and loading: nft can't express all of it"
	// clientLimit is how many clients with an endpoint are remembered in a family.
	clientLimit = 1 << 18
)

// tables is our table in the kernel, one of each family.
type tables struct {
	*nf.Socket
	of map[intent.Family]*familyTable
}

// familyTable is the table of a family.
type familyTable struct {
	*nf.Table
	ruler *ruler
	sets  map[string]*nf.Set
	// stays are the affinities that there are chains for.
	stays map[string]bool
}

func openTable() (*tables, error) {
	s, err := nf.Dial()
	if err != nil {
		return nil, err
	}
	return &tables{Socket: s}, nil
}

func (t *tables) close() { _ = t.Close() }

// probe makes what kernels learned last of all that our table has, and removes it again: to refuse before routing. No
// packet has the mark that the rule is about.
func (t *tables) probe() error {
	table := &nf.Table{Family: unix.NFPROTO_IPV4, Name: tableName + "-probe"}
	b := nf.NewBatch()
	b.Replace(table, nil)
	b.AddChain(table, nf.Chain{
		Name: "prerouting", Hook: nf.Hook{Type: "filter", Point: unix.NF_INET_PRE_ROUTING, Priority: mangle},
		Rules: []nf.Rule{{nf.Mark(reg0), nf.Cmp{Reg: reg0, Data: nf.Number(probeMark)}, nf.Reject{Code: 3}}},
	})
	b.DeleteTableLast(table)
	return t.Commit(b)
}

var families = []intent.Family{intent.IPv4, intent.IPv6}

func newFamilyTable(f intent.Family) *familyTable {
	t := &familyTable{Table: &nf.Table{Family: ipOf(f).Family, Name: tableName, Comment: comment}, stays: map[string]bool{}}
	t.sets = setsOf(f, t.Table)
	return t
}

// setsOf are the sets and maps of a family.
func setsOf(f intent.Family, table *nf.Table) map[string]*nf.Set {
	addr := ipOf(f).AddrField()
	frontend := []nf.Field{addr, nf.ProtoField, nf.PortField}
	number := []nf.Field{nf.NumberField}
	out := map[string]*nf.Set{
		vipsSet:     {Key: []nf.Field{addr}},
		hairpinSet:  {Key: []nf.Field{addr, addr}},
		rangedSet:   {Key: frontend},
		ledSet:      {Key: frontend},
		sourcesSet:  {Key: append(slices.Clone(frontend), addr), Intervals: true},
		goneSet:     {Key: []nf.Field{addr}},
		goingSet:    {Key: []nf.Field{nf.NumberField, addr, addr, nf.PortField, nf.PortField}},
		stickySet:   {Key: number, Verdicts: true},
		learnSet:    {Key: number, Verdicts: true},
		membersSet:  {Key: number},
		slotsSet:    {Key: []nf.Field{nf.NumberField, addr, nf.PortField}, Data: []nf.Field{nf.NumberField, nf.NumberField}},
		affinitySet: {Key: []nf.Field{addr, nf.NumberField}, Data: number, Dynamic: true, Size: clientLimit},
	}
	for o := range plan.Origins {
		out[routesMap[o]] = &nf.Set{Key: frontend, Verdicts: true}
		out[marksMap[o]] = &nf.Set{Key: frontend, Data: number}
	}
	for name, s := range out {
		s.Name, s.Table = name, table
	}
	return out
}

// replace writes in place where there is a table, and touches only what differs: a packet that is inside our rules at the
// commit goes on with the old ones, but each look-up asks anew which elements count; and before Linux 6.17, a look-up that
// the commit meets half-way finds neither an element that goes nor the same that comes.
func (t *tables) replace(facts *plan.Facts, bit uint32, all map[intent.Family]map[element]bool) error {
	var fresh map[intent.Family]*familyTable
	err := t.Sync(func(b *nf.Batch) error {
		fresh = map[intent.Family]*familyTable{}
		for _, f := range families {
			one := newFamilyTable(f)
			present, err := t.Read(one.Table)
			switch {
			case err != nil:
				return err
			case all[f] == nil && present != nil:
				b.DeleteTable(one.Table)
				continue
			case all[f] == nil:
				continue
			}
			one.ruler = newRuler(one.sets, ipOf(f), facts, bit)
			one.declare(b, present, all[f])
			fresh[f] = one
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing the table %s: %w", tableName, err)
	}
	t.of = fresh
	return nil
}

// declare puts all of a table into a transaction.
func (t *familyTable) declare(b *nf.Batch, present *nf.Present, all map[element]bool) {
	b.Replace(t.Table, present)
	for _, s := range t.sets {
		b.AddSet(s)
	}
	for _, c := range t.ruler.chains() {
		b.AddChain(t.Table, c)
	}
	t.addAffinity(b, all)
	for e := range all {
		b.Add(t.sets[e.set], e.encode())
	}
	b.Prune(t.Table)
}

// addAffinity adds the chains that elements lead to.
func (t *familyTable) addAffinity(b *nf.Batch, list map[element]bool) {
	for e := range list {
		if e.affinity == 0 || t.stays[stickChain(e.affinity)] {
			continue
		}
		t.stays[stickChain(e.affinity)] = true
		for _, c := range t.ruler.affinity(e.affinity) {
			b.AddChain(t.Table, c)
		}
	}
}

func (e element) encode() nf.Element {
	out := nf.Element{Key: []byte(e.key)}
	if e.end != "" {
		out.End = []byte(e.end)
	}
	switch {
	case e.set == slotsSet:
		out.Data = append([]byte(e.key[:4]), nf.Number(e.mark)...)
	case e.mark != 0:
		out.Data = nf.Number(e.mark)
	case e.set == stickySet:
		out.Verdict = nf.Jump(stickChain(e.affinity))
	case e.set == learnSet:
		out.Verdict = nf.Jump(learnChain(e.affinity))
	}
	switch e.verdict {
	case forward:
		out.Verdict = nf.Accept
	case drop:
		out.Verdict = nf.Drop
	case masquerade:
		out.Verdict = nf.Goto(masqueradeChain)
	case refuse:
		out.Verdict = nf.Goto(refuseChain)
	}
	return out
}

func (t *tables) change(del, add map[intent.Family]map[element]bool) error {
	b := nf.NewBatch()
	for f, one := range t.of {
		for e := range del[f] {
			b.Delete(one.sets[e.set], e.encode())
		}
		one.addAffinity(b, add[f])
		for e := range add[f] {
			b.Add(one.sets[e.set], e.encode())
		}
	}
	if b.Empty() {
		return nil
	}
	if err := t.Commit(b); err != nil {
		return fmt.Errorf("changing the table %s: %w", tableName, err)
	}
	return nil
}

func (t *tables) check() error {
	var list []*nf.Table
	for _, one := range t.of {
		list = append(list, one.Table)
	}
	return t.Check(list...)
}

func (t *tables) remove() error {
	return t.Remove(newFamilyTable(intent.IPv4).Table, newFamilyTable(intent.IPv6).Table)
}

// found is what the table says to a process that takes it over.
type found struct {
	marks map[plan.FrontendKey][plan.Origins]uint32
	addrs map[netip.Addr]bool
	slots map[key]map[netip.AddrPort]uint32
}

func (t *tables) read() (*found, error) {
	out := &found{map[plan.FrontendKey][plan.Origins]uint32{}, map[netip.Addr]bool{}, map[key]map[netip.AddrPort]uint32{}}
	for _, f := range families {
		one := newFamilyTable(f)
		there, err := t.Exists(one.Table)
		if err != nil {
			return nil, err
		}
		if !there {
			continue
		}
		for o := range plan.Origins {
			err := t.list(one.sets[marksMap[o]], func(e nf.Element) {
				if k, ok := decodeFrontend(e.Key, f); ok && len(e.Data) == 4 {
					m := out.marks[k]
					m[o] = binary.NativeEndian.Uint32(e.Data)
					out.marks[k] = m
				}
			})
			if err != nil {
				return nil, err
			}
		}
		err = t.list(one.sets[vipsSet], func(e nf.Element) {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				out.addrs[a] = true
			}
		})
		if err != nil {
			return nil, err
		}
		err = t.list(one.sets[slotsSet], func(e nf.Element) {
			pool, to, ok := decodeSlot(e.Key, f)
			if !ok || len(e.Data) != 8 {
				return
			}
			if out.slots[pool] == nil {
				out.slots[pool] = map[netip.AddrPort]uint32{}
			}
			out.slots[pool][to] = binary.NativeEndian.Uint32(e.Data[4:]) & maxSlot
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// list lists a set of a table that may not be as we make it: what can't be read is not ours, and will be replaced. But a
// list that others keep interrupting says nothing.
func (t *tables) list(set *nf.Set, got func(nf.Element)) error {
	if err := t.Elements(set, func() {}, got); errors.Is(err, unix.EINTR) {
		return err
	}
	return nil
}
