package ipvs

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
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
	// check compares the table with what it was told.
	check() error
	remove() error
	close()
}

const tableName = "portal-ipvs"

// sendBuffer must hold a whole transaction.
const sendBuffer = 64 << 20

// inMessage is how many elements go into one message, whose length is limited to 64 KiB.
const inMessage = 300

// clientLimit is how many clients with an endpoint are remembered in a family.
const clientLimit = 1 << 18

// table is our table in the kernel.
type table struct {
	*nftables.Conn
	// asks is for reading: the library takes a list that was interrupted for a whole one, and leaves out verdicts.
	asks *nf.Socket
	// has is how many rules a chain and how many elements a set should have.
	has map[intent.Family]*contents
}

type contents struct {
	ruler           *ruler
	rules, elements map[string]int
}

func openTable() (*table, error) {
	c, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		return errors.Join(c.SetWriteBuffer(sendBuffer), c.SetReadBuffer(sendBuffer))
	}))
	if err != nil {
		return nil, fmt.Errorf("open a connection to nftables: %w", err)
	}
	asks, err := nf.Dial()
	if err != nil {
		_ = c.CloseLasting()
		return nil, err
	}
	return &table{Conn: c, asks: asks, has: map[intent.Family]*contents{}}, nil
}

func (t *table) close() {
	_ = t.CloseLasting()
	_ = t.asks.Close()
}

// probe makes what kernels learned last of all that our table has, and removes it again: to refuse before routing. No
// packet has the mark that the rule is about.
func (t *table) probe() error {
	made := t.AddTable(&nftables.Table{Name: tableName + "-probe", Family: nftables.TableFamilyIPv4})
	at := t.AddChain(&nftables.Chain{
		Name: "prerouting", Table: made, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	t.AddRule(&nftables.Rule{Table: made, Chain: at, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0}, equals(reg0, number(probeMark)),
		&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: 3},
	}})
	if err := t.Flush(); err != nil {
		return err
	}
	t.DelTable(made)
	return t.Flush()
}

var families = []intent.Family{intent.IPv4, intent.IPv6}

func in(f intent.Family) *nftables.Table {
	out := &nftables.Table{Name: tableName, Family: nftables.TableFamilyIPv4}
	if f == intent.IPv6 {
		out.Family = nftables.TableFamilyIPv6
	}
	return out
}

// exists says whether there is a table of ours in a family. A kernel that does not know the family has none.
func (t *table) exists(f intent.Family) (bool, error) {
	list, err := t.ListTablesOfFamily(in(f).Family)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("list tables: %w", err)
	}
	return slices.ContainsFunc(list, func(x *nftables.Table) bool { return x.Name == tableName }), nil
}

// setsOf are the sets and maps of a family.
func setsOf(f intent.Family) map[string]*nftables.Set {
	addr := nftables.TypeIPAddr
	if f == intent.IPv6 {
		addr = nftables.TypeIP6Addr
	}
	frontend := []nftables.SetDatatype{addr, nftables.TypeInetProto, nftables.TypeInetService}
	key := nftables.MustConcatSetType(frontend...)
	out := map[string]*nftables.Set{
		vipsSet:    {KeyType: addr},
		hairpinSet: {KeyType: nftables.MustConcatSetType(addr, addr)},
		rangedSet:  {KeyType: key},
		ledSet:     {KeyType: key},
		sourcesSet: {KeyType: nftables.MustConcatSetType(append(frontend, addr)...), Interval: true, Concatenation: true},
		goneSet:    {KeyType: addr},
		goingSet: {KeyType: nftables.MustConcatSetType(
			nftables.TypeMark, addr, addr, nftables.TypeInetService, nftables.TypeInetService)},
		stickySet:  {KeyType: nftables.TypeMark, IsMap: true, DataType: nftables.TypeVerdict},
		learnSet:   {KeyType: nftables.TypeMark, IsMap: true, DataType: nftables.TypeVerdict},
		membersSet: {KeyType: nftables.TypeMark},
		slotsSet: {
			KeyType: nftables.MustConcatSetType(nftables.TypeMark, addr, nftables.TypeInetService), IsMap: true,
			DataType: nftables.MustConcatSetType(nftables.TypeMark, nftables.TypeMark),
		},
		affinitySet: {
			KeyType: nftables.MustConcatSetType(addr, nftables.TypeMark), IsMap: true, DataType: nftables.TypeMark,
			Dynamic: true, HasTimeout: true, Size: clientLimit,
		},
	}
	for o := range plan.Origins {
		out[routesMap[o]] = &nftables.Set{KeyType: key, IsMap: true, DataType: nftables.TypeVerdict}
		out[marksMap[o]] = &nftables.Set{KeyType: key, IsMap: true, DataType: nftables.TypeMark}
	}
	for name, s := range out {
		s.Name, s.Table = name, in(f)
		if s.KeyType == nftables.TypeMark {
			s.KeyByteOrder = binaryutil.NativeEndian
		}
	}
	return out
}

// replace writes in place where there is a table: a packet that is inside our rules at the commit goes on with the old ones,
// but each look-up asks anew which elements count, and should find some. What is as it should be isn't touched at all:
// before Linux 6.17, a look-up that the commit meets half-way finds neither an element that goes nor the same that comes.
func (t *table) replace(facts *plan.Facts, bit uint32, all map[intent.Family]map[element]bool) error {
	there := map[intent.Family]bool{}
	for _, f := range families {
		var err error
		if there[f], err = t.exists(f); err != nil {
			return err
		}
	}
	if there[intent.IPv4] || there[intent.IPv6] {
		if has, err := t.standing(there); err == nil && t.write(facts, bit, all, there, has.trim) == nil {
			return nil
		}
		// Somebody else has changed it meanwhile, or keeps changing something, so that it can't be read.
		if t.write(facts, bit, all, there, empty) == nil {
			return nil
		}
		// What is there is not as this version makes it.
	}
	return t.write(facts, bit, all, there, discard)
}

// clearing makes room in a table that is there for all that is wanted in it. It returns what is missing then, and clients
// that are to be kept.
type clearing func(t *table, f intent.Family, all map[element]bool) (missing map[element]bool, clients []nftables.SetElement, err error)

// write makes the tables, after what is to be done with those that are there.
func (t *table) write(facts *plan.Facts, bit uint32, all map[intent.Family]map[element]bool, there map[intent.Family]bool, clear clearing) error {
	has := map[intent.Family]*contents{}
	for _, f := range families {
		missing := all[f]
		var clients []nftables.SetElement
		if there[f] && all[f] == nil {
			t.DelTable(in(f))
		} else if there[f] {
			var err error
			if missing, clients, err = clear(t, f, all[f]); err != nil {
				return err
			}
		}
		if all[f] == nil {
			continue
		}
		has[f] = &contents{newRuler(f, facts, bit), map[string]int{}, map[string]int{}}
		if err := t.build(has[f]); err != nil {
			return err
		}
		t.addAffinity(all[f], has[f])
		if err := t.elements(f, missing, t.SetAddElements); err != nil {
			return err
		}
		if err := handOver(setsOf(f)[affinitySet], clients, t.SetAddElements); err != nil {
			return err
		}
		has[f].count(all[f], 1)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("make the table %s: %w", tableName, err)
	}
	t.has = has
	return nil
}

// trim takes out of a table's sets what is not wanted.
func (s standing) trim(t *table, f intent.Family, all map[element]bool) (map[element]bool, []nftables.SetElement, error) {
	wanted := map[string]map[entry]element{}
	for e := range all {
		if wanted[e.set] == nil {
			wanted[e.set] = map[entry]element{}
		}
		wanted[e.set][e.entry()] = e
	}
	missing := maps.Clone(all)
	t.AddTable(in(f))
	for name, set := range setsOf(f) {
		var stale []nftables.SetElement
		listed := map[entry]bool{} // the kernel may list one twice, if the set grows meanwhile
		for _, is := range s[f][name] {
			if e, ok := wanted[name][is]; ok {
				delete(missing, e)
			} else if !listed[is] {
				listed[is] = true
				stale = append(stale, is.key())
			}
		}
		if err := handOver(set, stale, t.SetDeleteElements); err != nil {
			return nil, nil, err
		}
	}
	return missing, nil, nil
}

// empty takes the elements out of a table's sets, but for the clients that have an endpoint.
func empty(t *table, f intent.Family, all map[element]bool) (map[element]bool, []nftables.SetElement, error) {
	t.AddTable(in(f))
	for name, s := range setsOf(f) {
		if name != affinitySet {
			t.FlushSet(s)
		}
	}
	return all, nil, nil
}

// discard removes a table.
func discard(t *table, f intent.Family, all map[element]bool) (map[element]bool, []nftables.SetElement, error) {
	clients := t.clients(f)
	t.DelTable(in(f))
	return all, clients, nil
}

func (c *contents) count(list map[element]bool, by int) {
	for e := range list {
		c.elements[e.set] += by
	}
}

// build makes the sets and chains of a family.
func (t *table) build(has *contents) error {
	r := has.ruler
	t.AddTable(in(r.family))
	for name, s := range setsOf(r.family) {
		if err := t.AddSet(s, nil); err != nil {
			return fmt.Errorf("make the set %s: %w", name, err)
		}
		if name != affinitySet {
			has.elements[name] = 0
		}
	}
	t.addChains(has, r.chains())
	return nil
}

func (t *table) addChains(has *contents, list []chain) {
	to := in(has.ruler.family)
	for _, c := range list {
		made := &nftables.Chain{Name: c.name, Table: to}
		if c.hook != nil {
			made.Type, made.Hooknum, made.Priority = cmp.Or(c.kind, nftables.ChainTypeFilter), c.hook, &c.priority
		}
		t.AddChain(made)
		t.FlushChain(made) // it may have been there
		for _, exprs := range c.rules {
			t.AddRule(&nftables.Rule{Table: to, Chain: made, Exprs: exprs})
		}
		has.rules[c.name] = len(c.rules)
	}
}

// addAffinity adds the chains that elements lead to.
func (t *table) addAffinity(list map[element]bool, has *contents) {
	for e := range list {
		if _, there := has.rules[stickChain(e.affinity)]; e.affinity > 0 && !there {
			t.addChains(has, has.ruler.affinity(e.affinity))
		}
	}
}

// elements hands elements over in messages that the kernel takes.
func (t *table) elements(f intent.Family, list map[element]bool, hand func(*nftables.Set, []nftables.SetElement) error) error {
	bySet := map[string][]nftables.SetElement{}
	for e := range list {
		bySet[e.set] = append(bySet[e.set], e.encode())
	}
	sets := setsOf(f)
	for name, elems := range bySet {
		if err := handOver(sets[name], elems, hand); err != nil {
			return err
		}
	}
	return nil
}

func handOver(to *nftables.Set, elems []nftables.SetElement, hand func(*nftables.Set, []nftables.SetElement) error) error {
	for part := range slices.Chunk(elems, inMessage) {
		if err := hand(to, part); err != nil {
			return fmt.Errorf("change the set %s: %w", to.Name, err)
		}
	}
	return nil
}

func (e element) encode() nftables.SetElement {
	out := nftables.SetElement{Key: []byte(e.key)}
	if e.end != "" {
		out.KeyEnd = []byte(e.end)
	}
	switch {
	case e.set == slotsSet:
		out.Val = append([]byte(e.key[:4]), number(e.mark)...)
	case e.mark != 0:
		out.Val = number(e.mark)
	}
	switch {
	case e.set == stickySet:
		out.VerdictData = &expr.Verdict{Kind: expr.VerdictJump, Chain: stickChain(e.affinity)}
	case e.set == learnSet:
		out.VerdictData = &expr.Verdict{Kind: expr.VerdictJump, Chain: learnChain(e.affinity)}
	}
	switch e.verdict {
	case forward:
		out.VerdictData = &expr.Verdict{Kind: expr.VerdictAccept}
	case drop:
		out.VerdictData = &expr.Verdict{Kind: expr.VerdictDrop}
	case masquerade:
		out.VerdictData = &expr.Verdict{Kind: expr.VerdictGoto, Chain: masqueradeChain}
	case refuse:
		out.VerdictData = &expr.Verdict{Kind: expr.VerdictGoto, Chain: refuseChain}
	}
	return out
}

func (t *table) change(del, add map[intent.Family]map[element]bool) error {
	// What has one key in a map goes before its successor comes.
	for f, list := range del {
		if t.has[f] == nil {
			continue
		}
		if err := t.elements(f, list, t.SetDeleteElements); err != nil {
			return err
		}
	}
	for f, list := range add {
		if t.has[f] == nil {
			continue
		}
		t.addAffinity(list, t.has[f])
		if err := t.elements(f, list, t.SetAddElements); err != nil {
			return err
		}
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("change the table %s: %w", tableName, err)
	}
	for f := range t.has {
		t.has[f].count(del[f], -1)
		t.has[f].count(add[f], 1)
	}
	return nil
}

func (t *table) remove() error {
	for _, f := range families {
		there, err := t.exists(f)
		if err != nil {
			return err
		}
		if there {
			t.DelTable(in(f))
		}
	}
	if err := t.Flush(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the table %s: %w", tableName, err)
	}
	return nil
}
