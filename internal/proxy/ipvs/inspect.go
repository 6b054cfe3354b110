package ipvs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// What is read back from our table: by whoever takes it over, and by whoever looks whether it is as it was told.

// found is what the table says to whoever takes it over.
type found struct {
	marks map[plan.FrontendKey][plan.Origins]uint32
	addrs map[netip.Addr]bool
	slots map[key]map[netip.AddrPort]uint32
}

func (t *table) read() (*found, error) {
	out := &found{map[plan.FrontendKey][plan.Origins]uint32{}, map[netip.Addr]bool{}, map[key]map[netip.AddrPort]uint32{}}
	for _, f := range families {
		there, err := t.exists(f)
		if err != nil {
			return nil, err
		}
		if !there {
			continue
		}
		for o := range plan.Origins {
			list, err := t.ownList(f, marksMap[o])
			if err != nil {
				return nil, err
			}
			for _, e := range list {
				if k, ok := decodeFrontend([]byte(e.from), f); ok && len(e.data) == 4 {
					m := out.marks[k]
					m[o] = binary.NativeEndian.Uint32([]byte(e.data))
					out.marks[k] = m
				}
			}
		}
		list, err := t.ownList(f, vipsSet)
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			if a, ok := netip.AddrFromSlice([]byte(e.from)); ok {
				out.addrs[a] = true
			}
		}
		if list, err = t.ownList(f, slotsSet); err != nil {
			return nil, err
		}
		for _, e := range list {
			pool, to, ok := decodeSlot([]byte(e.from), f)
			if !ok || len(e.data) != 8 {
				continue
			}
			if out.slots[pool] == nil {
				out.slots[pool] = map[netip.AddrPort]uint32{}
			}
			out.slots[pool][to] = binary.NativeEndian.Uint32([]byte(e.data[4:])) & maxSlot
		}
	}
	return out, nil
}

// ownList lists a set of a table that may not be as we make it: what can't be read is not ours, and will be replaced. But a
// list that others keep interrupting says nothing.
func (t *table) ownList(f intent.Family, set string) ([]entry, error) {
	list, err := t.list(f, set)
	if errors.Is(err, unix.EINTR) {
		return nil, err
	}
	return list, nil
}

// entry is an element as the kernel has it, comparable: bytes but for the verdict.
type entry struct {
	from, to, data string
	verdict        expr.Verdict
}

// entry is what the kernel makes of an element.
func (e element) entry() entry {
	x := e.encode()
	out := entry{from: string(x.Key), to: string(x.KeyEnd), data: string(x.Val)}
	if x.VerdictData != nil {
		out.verdict = *x.VerdictData
	}
	return out
}

// key is what it takes to remove it.
func (e entry) key() nftables.SetElement {
	out := nftables.SetElement{Key: []byte(e.from)}
	if e.to != "" {
		out.KeyEnd = []byte(e.to)
	}
	return out
}

// standing is what sets have, all but the clients.
type standing map[intent.Family]map[string][]entry

func (t *table) standing(there map[intent.Family]bool) (standing, error) {
	out := standing{}
	for _, f := range families {
		if !there[f] {
			continue
		}
		out[f] = map[string][]entry{}
		for name := range setsOf(f) {
			if name == affinitySet {
				continue
			}
			var err error
			// One that is not there yet has nothing.
			if out[f][name], err = t.list(f, name); err != nil && !errors.Is(err, unix.ENOENT) {
				return nil, err
			}
		}
	}
	return out, nil
}

// list lists a set.
func (t *table) list(f intent.Family, set string) (out []entry, err error) {
	body := nf.AppendString(nf.AppendString(nil, unix.NFTA_SET_ELEM_LIST_TABLE, tableName), unix.NFTA_SET_ELEM_LIST_SET, set)
	err = nf.Again(func() error {
		out = nil
		return t.asks.Ask(byte(in(f).Family), unix.NFT_MSG_GETSETELEM, true, body, func(m []byte) {
			for typ, v := range nf.Attributes(m) {
				if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
					continue
				}
				for _, v := range nf.Attributes(v) {
					out = append(out, entryOf(v))
				}
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list the set %s of the table %s: %w", set, tableName, err)
	}
	return out, nil
}

func entryOf(m []byte) (out entry) {
	value := func(v []byte) (text string) {
		for typ, v := range nf.Attributes(v) {
			switch typ {
			case unix.NFTA_DATA_VALUE:
				text = string(v)
			case unix.NFTA_DATA_VERDICT:
				out.verdict = verdictIn(v)
			}
		}
		return text
	}
	for typ, v := range nf.Attributes(m) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			out.from = value(v)
		case nftables.NFTA_SET_ELEM_KEY_END:
			out.to = value(v)
		case unix.NFTA_SET_ELEM_DATA:
			out.data = value(v)
		}
	}
	return out
}

func verdictIn(m []byte) (out expr.Verdict) {
	for typ, v := range nf.Attributes(m) {
		switch typ {
		case unix.NFTA_VERDICT_CODE:
			out.Kind = expr.VerdictKind(int32(binary.BigEndian.Uint32(v)))
		case unix.NFTA_VERDICT_CHAIN:
			out.Chain = nf.Text(v)
		}
	}
	return out
}

// clients are those that have an endpoint, for as long as they keep it.
func (t *table) clients(f intent.Family) []nftables.SetElement {
	list, _ := t.GetSetElements(setsOf(f)[affinitySet])
	list = slices.DeleteFunc(list, func(e nftables.SetElement) bool { return e.Expires <= 0 || len(e.Val) != 4 })
	for i := range list {
		list[i].Timeout, list[i].Expires = list[i].Expires, 0
	}
	return list
}

func (t *table) check() error {
	for f, want := range t.has {
		rules, err := t.countRules(f)
		if errors.Is(err, unix.EINTR) {
			return nil // others are at work; the next check will see
		}
		if err != nil {
			return fmt.Errorf("list the rules of the table %s: %w", tableName, err)
		}
		for name, n := range want.rules {
			if rules[name] != n {
				return fmt.Errorf("the chain %s of the table %s has %d rules instead of %d", name, tableName, rules[name], n)
			}
		}
		for name, n := range want.elements {
			list, err := t.list(f, name)
			if errors.Is(err, unix.EINTR) {
				return nil
			}
			if err != nil {
				return err
			}
			if len(list) != n {
				return fmt.Errorf("the set %s of the table %s has %d elements instead of %d", name, tableName, len(list), n)
			}
		}
	}
	return nil
}

// countRules counts the rules of each of our chains.
func (t *table) countRules(f intent.Family) (out map[string]int, err error) {
	err = nf.Again(func() error {
		out = map[string]int{}
		return t.asks.Ask(byte(in(f).Family), unix.NFT_MSG_GETRULE, true, nf.AppendString(nil, unix.NFTA_RULE_TABLE, tableName), func(m []byte) {
			if table, chain := nf.Names(m, unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN); table == tableName {
				out[chain]++
			}
		})
	})
	return out, err
}
