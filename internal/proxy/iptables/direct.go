package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
)

// direct writes to the tables of the nft variant over netlink: the same rules as the commands would write, all tables and
// both families at once, and without waiting for a command to read what was just put together.
type direct struct{ *nf.Socket }

func tableOf(f intent.Family, name string) *nf.Table {
	if f == intent.IPv6 {
		return &nf.Table{Family: unix.NFPROTO_IPV6, Name: name}
	}
	return &nf.Table{Family: unix.NFPROTO_IPV4, Name: name}
}

// builtin are the chains that the commands make when they first use them, as far as we do.
var builtin = map[string][]struct {
	name     string
	hook     uint32
	priority int32
}{
	"nat": {
		{"PREROUTING", unix.NF_INET_PRE_ROUTING, -100},
		{"OUTPUT", unix.NF_INET_LOCAL_OUT, -100},
		{"POSTROUTING", unix.NF_INET_POST_ROUTING, 100},
	},
	"filter": {
		{"INPUT", unix.NF_INET_LOCAL_IN, 0},
		{"FORWARD", unix.NF_INET_FORWARD, 0},
		{"OUTPUT", unix.NF_INET_LOCAL_OUT, 0},
	},
}

// count is how many rules a family's iptables tables hold, and chains of ours.
func count(f intent.Family) (n int, err error) {
	s, err := nf.Dial()
	if err != nil {
		return 0, err
	}
	defer s.Close()
	d := direct{s}
	for _, name := range []string{"raw", "mangle", "nat", "filter", "security"} {
		rules := 0
		if err := d.Rules(tableOf(f, name), "", func() { rules = 0 }, func(nf.RuleInfo) { rules++ }); err != nil {
			return 0, err
		}
		n += rules
	}
	ours, _, err := d.look(f)
	for _, have := range ours {
		n += len(have.chains)
	}
	return n, err
}

// probe lets the kernel check a rule of each kind that the mode may write, in a transaction that leaves nothing.
func (m *mode) probe(families []intent.Family) error {
	s, err := m.spare.Take()
	if err != nil {
		return err
	}
	defer func() { m.spare.Put(s) }()
	d := direct{s}
	b := nf.NewBatch()
	for _, f := range families {
		_, all, err := d.look(f)
		if err != nil {
			return err
		}
		for _, table := range tables {
			ensureBuiltin(b, f, table, all[table])
			t := tableOf(f, table)
			b.SharedChain(t, probeChain, nf.Hook{})
			for _, n := range needs {
				if n.table == table {
					r := n.of(f)
					sharedRule(b, t, f, probeChain, &r, false)
				}
			}
			b.DeleteSharedChainLast(t, probeChain)
		}
	}
	return d.Commit(b)
}

// look reads what the tables of a family hold that concerns us, by table; all are the names of all chains there.
func (d direct) look(f intent.Family) (ours map[string]found, all map[string][]string, err error) {
	ours, all = map[string]found{}, map[string][]string{}
	for _, table := range tables {
		t := tableOf(f, table)
		have := found{jumps: map[string]bool{}}
		err := d.Chains(t, func() { have.chains, all[table] = nil, nil }, func(name string) {
			all[table] = append(all[table], name)
			if strings.HasPrefix(name, prefix) {
				have.chains = append(have.chains, name)
			}
		})
		if err != nil {
			return nil, nil, err
		}
		for _, j := range jumps[table] {
			if !slices.Contains(all[table], j.from) {
				continue
			}
			there := false
			err := d.Rules(t, j.from, func() { there = false }, func(r nf.RuleInfo) { there = there || r.JumpsTo() == j.to })
			if err != nil {
				return nil, nil, err
			}
			have.jumps["-A "+j.String()] = there
		}
		ours[table] = have
	}
	return ours, all, nil
}

// contents reads the chains of a table that concern us.
func (d direct) contents(f intent.Family, table string) (found, error) {
	t := tableOf(f, table)
	have := found{jumps: map[string]bool{}, rules: map[string]chainDigest{}}
	err := d.Chains(t, func() { have.chains = nil }, func(name string) {
		if strings.HasPrefix(name, prefix) {
			have.chains = append(have.chains, name)
		}
	})
	if err != nil {
		return have, err
	}
	var meaning []byte
	err = d.Rules(t, "", func() { clear(have.rules); clear(have.jumps) }, func(r nf.RuleInfo) {
		meaning = nf.AppendMeaning(meaning[:0], r.Expressions)
		have.rules[r.Chain] = have.rules[r.Chain].plus(meaning)
		if to := r.JumpsTo(); strings.HasPrefix(to, prefix) {
			have.jumps["-A "+(jumpRule{r.Chain, to}).String()] = true
		}
	})
	return have, err
}

// ensureBuiltin makes a table with its built-in chains, as far as they are not there.
func ensureBuiltin(b *nf.Batch, f intent.Family, table string, have []string) {
	t := tableOf(f, table)
	made := false
	for _, c := range builtin[table] {
		if slices.Contains(have, c.name) {
			continue
		}
		if !made {
			b.SharedTable(t)
			made = true
		}
		// Their types are called as the tables.
		b.SharedChain(t, c.name, nf.Hook{Type: table, Point: c.hook, Priority: c.priority})
	}
}

// write puts a table's changes into a transaction. there are our chains in the table: to make one that is there would do no
// harm, but counts as a change of it, and after changes the kernel lets the next transaction wait until all packets have
// left the rules.
func (s *section) write(b *nf.Batch, f intent.Family, table string, there map[string]chainDigest) {
	t := tableOf(f, table)
	for _, name := range slices.Sorted(maps.Keys(s.whole)) {
		if have, known := there[name]; !known {
			b.SharedChain(t, name, nf.Hook{})
		} else if have.rules != 0 {
			b.FlushSharedChain(t, name)
		}
	}
	s.rules(func(name string, r *rule) { sharedRule(b, t, f, name, r, false) })
	for _, j := range s.enter {
		r := rule{to: jump(j.to)}
		sharedRule(b, t, f, j.from, &r, true)
	}
	for _, name := range slices.Sorted(maps.Keys(s.gone)) {
		if have, known := there[name]; known {
			if have.rules != 0 {
				b.FlushSharedChain(t, name)
			}
			b.DeleteSharedChain(t, name)
		}
	}
}

func sharedRule(b *nf.Batch, t *nf.Table, f intent.Family, chain string, r *rule, first bool) {
	b.SharedRule(t, chain, byte(r.proto), first, func(m []byte) []byte { return r.appendExprs(m, f) })
}

// missing says what of ours a table lacks, or has otherwise than it was written. What commands made of a chain is learned from
// the first list after it was written.
func (s *ruleset) missing(table string, have found) error {
	for _, j := range jumps[table] {
		if !have.jumps["-A "+j.String()] {
			return fmt.Errorf("the %s table has lost its rule %q", table, j)
		}
	}
	var differ []string
	for name, want := range s.there[table] {
		switch got := have.rules[name]; {
		case !slices.Contains(have.chains, name):
			differ = append(differ, fmt.Sprintf("the chain %s is missing", name))
		case got.rules != want.rules:
			differ = append(differ, fmt.Sprintf("the chain %s has %d rules instead of %d", name, got.rules, want.rules))
		case want.sum == 0:
			s.there[table][name] = got
		case got.sum != want.sum:
			differ = append(differ, fmt.Sprintf("the chain %s has other rules", name))
		}
	}
	if len(differ) == 0 {
		return nil
	}
	slices.Sort(differ)
	more := ""
	if n := len(differ); n > 3 {
		differ, more = differ[:3], fmt.Sprintf("; and %d more", n-3)
	}
	return fmt.Errorf("the %s table is not as it was written: %s%s", table, strings.Join(differ, "; "), more)
}
