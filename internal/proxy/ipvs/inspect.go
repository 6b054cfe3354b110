package ipvs

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
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
		sets := setsOf(f)
		// What can't be read is not as we make it, and will be replaced.
		for o := range plan.Origins {
			list, _ := t.GetSetElements(sets[marksMap[o]])
			for _, e := range list {
				if k, ok := decodeFrontend(e.Key, f); ok && len(e.Val) == 4 {
					m := out.marks[k]
					m[o] = binary.NativeEndian.Uint32(e.Val)
					out.marks[k] = m
				}
			}
		}
		list, _ := t.GetSetElements(sets[vipsSet])
		for _, e := range list {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				out.addrs[a] = true
			}
		}
		list, _ = t.GetSetElements(sets[slotsSet])
		for _, e := range list {
			pool, to, ok := decodeSlot(e.Key, f)
			if !ok || len(e.Val) != 8 {
				continue
			}
			if out.slots[pool] == nil {
				out.slots[pool] = map[netip.AddrPort]uint32{}
			}
			out.slots[pool][to] = binary.NativeEndian.Uint32(e.Val[4:]) & maxSlot
		}
	}
	return out, nil
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
		if err != nil {
			return fmt.Errorf("list the rules of the table %s: %w", tableName, err)
		}
		for name, n := range want.rules {
			if rules[name] != n {
				return fmt.Errorf("the chain %s of the table %s has %d rules instead of %d", name, tableName, rules[name], n)
			}
		}
		sets := setsOf(f)
		for name, n := range want.elements {
			list, err := t.GetSetElements(sets[name])
			if err != nil {
				return fmt.Errorf("list the set %s of the table %s: %w", name, tableName, err)
			}
			if len(list) != n {
				return fmt.Errorf("the set %s of the table %s has %d elements instead of %d", name, tableName, len(list), n)
			}
		}
	}
	return nil
}

// countRules counts the rules of each of our chains.
func (t *table) countRules(f intent.Family) (map[string]int, error) {
	header := []byte{byte(in(f).Family), unix.NFNETLINK_V0, 0, 0}
	name, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.NFTA_RULE_TABLE, Data: []byte(tableName + "\x00")}})
	if err != nil {
		return nil, err
	}
	list, err := t.raw.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   append(header, name...),
	})
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for _, m := range list {
		if len(m.Data) < len(header) {
			continue
		}
		attrs, err := netlink.UnmarshalAttributes(m.Data[len(header):])
		if err != nil {
			return nil, err
		}
		var table, chain string
		for _, a := range attrs {
			switch a.Type {
			case unix.NFTA_RULE_TABLE:
				table = unix.ByteSliceToString(a.Data)
			case unix.NFTA_RULE_CHAIN:
				chain = unix.ByteSliceToString(a.Data)
			}
		}
		if table == tableName {
			out[chain]++
		}
	}
	return out, nil
}
