package iptables

import (
	"encoding/binary"
	"errors"
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
type direct struct {
	socket *nf.Socket
	// transact is the socket's, but for tests that let the kernel refuse.
	transact func(msg []byte) error
}

func newDirect(s *nf.Socket) *direct { return &direct{s, s.Transact} }

func family(f intent.Family) byte {
	if f == intent.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
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
	all := []string{"raw", "mangle", "nat", "filter", "security"}
	err = nf.Again(func() error {
		n = 0
		return s.Ask(family(f), unix.NFT_MSG_GETRULE, true, nil, func(m []byte) {
			for typ, v := range nf.Attributes(m) {
				if typ == unix.NFTA_RULE_TABLE && slices.Contains(all, nf.Text(v)) {
					n++
				}
			}
		})
	})
	if err != nil {
		return 0, err
	}
	ours, _, err := newDirect(s).look(f)
	for _, have := range ours {
		n += len(have.chains)
	}
	return n, err
}

// probe tells the kernel a rule of each kind that the mode may write, and to forget them, in one transaction.
func (m *mode) probe(families []intent.Family) error {
	s, err := m.spare.Take()
	if err != nil {
		return err
	}
	defer func() { m.spare.Put(s) }()
	t := begin()
	for _, f := range families {
		_, all, err := newDirect(s).look(f)
		if err != nil {
			return err
		}
		for _, table := range tables {
			t.prepare(f, table, all[table])
			scratch, gone := newSection(), newSection()
			var rules []string
			for _, n := range needs {
				if n.table == table {
					rules = append(rules, n.of(f))
				}
			}
			scratch.set(probeChain, rules)
			gone.remove(probeChain)
			there := map[string]bool{}
			t.write(f, table, &scratch, there)
			t.write(f, table, &gone, there)
		}
	}
	return newDirect(s).commit(t)
}

// look reads what the tables of a family hold that concerns us, by table; all are the names of all chains there.
func (d *direct) look(f intent.Family) (ours map[string]found, all map[string][]string, err error) {
	err = nf.Again(func() error { ours, all, err = d.lookOnce(f); return err })
	return ours, all, err
}

func (d *direct) lookOnce(f intent.Family) (ours map[string]found, all map[string][]string, err error) {
	ours, all = map[string]found{}, map[string][]string{}
	for _, table := range tables {
		ours[table] = found{jumps: map[string]bool{}}
	}
	err = d.socket.Ask(family(f), unix.NFT_MSG_GETCHAIN, true, nil, func(m []byte) {
		table, name := nf.Names(m, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME)
		if slices.Contains(tables, table) {
			all[table] = append(all[table], name)
			if strings.HasPrefix(name, prefix) {
				have := ours[table]
				have.chains = append(have.chains, name)
				ours[table] = have
			}
		}
	})
	if err != nil {
		return nil, nil, err
	}
	for _, table := range tables {
		for _, jump := range jumps[table] {
			from, to, _ := strings.Cut(jump, " -j ")
			if !slices.Contains(all[table], from) {
				continue
			}
			there, err := d.leads(f, table, from, to)
			if err != nil {
				return nil, nil, err
			}
			ours[table].jumps["-A "+jump] = there
		}
	}
	return ours, all, nil
}

// check looks at the jumps, and at the chains that a flush of ours would have emptied.
func (d *direct) check(f intent.Family) error {
	ours, _, err := d.look(f)
	if err != nil {
		return err
	}
	for _, table := range tables {
		if !slices.Contains(ours[table].chains, canaryChain) {
			return fmt.Errorf("the %s table was flushed", table)
		}
		for _, jump := range jumps[table] {
			_, to, _ := strings.Cut(jump, " -j ")
			if !ours[table].jumps["-A "+jump] {
				return fmt.Errorf("the %s table has lost its rule %q", table, jump)
			}
			some := false
			if err := nf.Again(func() error { return d.rules(f, table, to, func([]byte) { some = true }) }); err != nil {
				return err
			}
			if !some {
				return fmt.Errorf("the %s table's chain %s was emptied", table, to)
			}
		}
	}
	return nil
}

// rules calls do with the expressions of each of a chain's rules.
func (d *direct) rules(f intent.Family, table, chain string, do func(exprs []byte)) error {
	body := nf.AppendString(nil, unix.NFTA_RULE_TABLE, table)
	body = nf.AppendString(body, unix.NFTA_RULE_CHAIN, chain)
	return d.socket.Ask(family(f), unix.NFT_MSG_GETRULE, true, body, func(m []byte) {
		var exprs []byte
		of := ""
		for typ, v := range nf.Attributes(m) {
			switch typ {
			case unix.NFTA_RULE_CHAIN:
				of = nf.Text(v)
			case unix.NFTA_RULE_EXPRESSIONS:
				exprs = v
			}
		}
		if of == chain {
			do(exprs)
		}
	})
}

// leads says whether a chain has a rule that sends everything to another.
func (d *direct) leads(f intent.Family, table, from, to string) (there bool, err error) {
	err = d.rules(f, table, from, func(exprs []byte) { there = there || leadsTo(exprs, to) })
	return there, err
}

// leadsTo says whether expressions do nothing but count packets and send them to a chain.
func leadsTo(exprs []byte, chain string) bool {
	found := false
	for _, e := range nf.Attributes(exprs) {
		var name string
		var data []byte
		for typ, v := range nf.Attributes(e) {
			switch typ {
			case unix.NFTA_EXPR_NAME:
				name = nf.Text(v)
			case unix.NFTA_EXPR_DATA:
				data = v
			}
		}
		switch name {
		case "counter":
		case "immediate":
			code, to := verdictOf(data)
			found = code == unix.NFT_JUMP && to == chain
		default:
			return false
		}
	}
	return found
}

func verdictOf(immediate []byte) (code int32, chain string) {
	for typ, v := range nf.Attributes(immediate) {
		if typ != unix.NFTA_IMMEDIATE_DATA {
			continue
		}
		for typ, v := range nf.Attributes(v) {
			if typ != unix.NFTA_DATA_VERDICT {
				continue
			}
			for typ, v := range nf.Attributes(v) {
				switch {
				case typ == unix.NFTA_VERDICT_CODE && len(v) == 4:
					code = int32(binary.BigEndian.Uint32(v))
				case typ == unix.NFTA_VERDICT_CHAIN:
					chain = nf.Text(v)
				}
			}
		}
	}
	return code, chain
}

// transaction is put together in the order in which the kernel carries it out, all or nothing.
type transaction struct {
	buf []byte
	seq uint32
	err error
}

func begin() *transaction {
	return &transaction{buf: nf.AppendBracket(nil, unix.NFNL_MSG_BATCH_BEGIN), seq: 1}
}

func (t *transaction) message(f intent.Family, typ, flags uint16, fill func([]byte) []byte) {
	if t.seq++; t.seq == 2 {
		flags |= unix.NLM_F_ACK // the sign that it was read at all
	}
	at := len(t.buf)
	t.buf = nf.AppendHeader(t.buf, nf.Kind(typ), unix.NLM_F_REQUEST|flags, t.seq, family(f), 0)
	t.buf = fill(t.buf)
	binary.NativeEndian.PutUint32(t.buf[at:], uint32(len(t.buf)-at))
}

func (d *direct) commit(t *transaction) error {
	if t.err != nil || t.seq == 1 {
		return t.err
	}
	return d.transact(nf.AppendBracket(t.buf, unix.NFNL_MSG_BATCH_END))
}

// prepare makes a table with its built-in chains, as far as they are not there.
func (t *transaction) prepare(f intent.Family, table string, have []string) {
	missing := false
	for _, c := range builtin[table] {
		missing = missing || !slices.Contains(have, c.name)
	}
	if !missing {
		return
	}
	t.message(f, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(b []byte) []byte {
		b = nf.AppendString(b, unix.NFTA_TABLE_NAME, table)
		return nf.AppendUint32(b, unix.NFTA_TABLE_FLAGS, 0)
	})
	kind := table // their types are called as the tables
	for _, c := range builtin[table] {
		if slices.Contains(have, c.name) {
			continue
		}
		t.message(f, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, func(b []byte) []byte {
			b = nf.AppendString(b, unix.NFTA_CHAIN_TABLE, table)
			b = nf.AppendString(b, unix.NFTA_CHAIN_NAME, c.name)
			b = nf.AppendNested(b, unix.NFTA_CHAIN_HOOK, func(b []byte) []byte {
				b = nf.AppendUint32(b, unix.NFTA_HOOK_HOOKNUM, c.hook)
				return nf.AppendUint32(b, unix.NFTA_HOOK_PRIORITY, uint32(c.priority))
			})
			b = nf.AppendUint32(b, unix.NFTA_CHAIN_POLICY, accept)
			return nf.AppendString(b, unix.NFTA_CHAIN_TYPE, kind)
		})
	}
}

// ruleSize is what a rule of a leaf takes, or less.
const ruleSize = 600

// write carries out a table's changes, in the order in which section.print has them. there are the names of our chains in the
// table, before and after: to make one that is there would do no harm, but counts as a change of it, and after changes
// the kernel lets the next transaction wait until all packets have left the rules.
func (t *transaction) write(f intent.Family, table string, s *section, there map[string]bool) {
	if s.empty() {
		return
	}
	names := slices.Sorted(maps.Keys(s.write))
	removed := slices.DeleteFunc(slices.Sorted(maps.Keys(s.gone)), func(name string) bool { return !there[name] })
	chain := func(typ, flags uint16, tableAttr, nameAttr uint16, name string) {
		t.message(f, typ, flags, func(b []byte) []byte {
			return nf.AppendString(nf.AppendString(b, tableAttr, table), nameAttr, name)
		})
	}
	for _, list := range [][]string{names, removed} {
		for _, name := range list {
			if !there[name] {
				chain(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, name)
				there[name] = true
			}
			chain(unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN, name)
		}
	}
	w := &wire{family: f}
	rules := 0
	s.rules(func(string, string) { rules++ })
	t.buf = slices.Grow(t.buf, rules*ruleSize)
	s.rules(func(name, text string) { t.rule(w, table, name, text, unix.NLM_F_APPEND) })
	for _, line := range s.jumps {
		from, text, _ := strings.Cut(strings.TrimPrefix(line, "-I "), " ")
		t.rule(w, table, from, text, 0)
	}
	for _, name := range removed {
		chain(unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME, name)
		delete(there, name)
	}
	*s = newSection()
}

// rule adds one, at the beginning of the chain unless flags say otherwise.
func (t *transaction) rule(w *wire, table, chain, text string, flags uint16) {
	t.message(w.family, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|flags, func(b []byte) []byte {
		b = nf.AppendString(b, unix.NFTA_RULE_TABLE, table)
		b = nf.AppendString(b, unix.NFTA_RULE_CHAIN, chain)
		b, err := w.appendRule(b, text)
		if err != nil {
			t.err = errors.Join(t.err, fmt.Errorf("the chain %s: %w", chain, err))
		}
		return b
	})
}
