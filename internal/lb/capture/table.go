package capture

import (
	"cmp"
	"net/netip"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// table is the table of one family.
type table struct {
	nf.IP
	at *nf.Table
	// captured and strict have addresses and ports.
	captured, strict *nf.Set
	// limited are addresses, protocols and ports with filters; allowed has them with the sources that may use them.
	limited, allowed *nf.Set
}

func newTable(f nf.IP) *table {
	t := &table{IP: f, at: &nf.Table{Family: f.Family, Name: Name, Comment: "portal lb: packets for balancers"}}
	a := f.AddrField()
	t.captured = &nf.Set{Table: t.at, Name: "captured", Key: []nf.Field{a, nf.PortField}}
	t.strict = &nf.Set{Table: t.at, Name: "strict", Key: []nf.Field{a, nf.PortField}}
	t.limited = &nf.Set{Table: t.at, Name: "limited", Key: []nf.Field{a, nf.ProtoField, nf.PortField}}
	t.allowed = &nf.Set{Table: t.at, Name: "allowed", Key: []nf.Field{a, nf.ProtoField, nf.PortField, a}, Intervals: true}
	return t
}

func (t *table) mine(a netip.Addr) bool { return a.Is6() == t.Is6() }

// ports are the family's.
func (t *table) ports(s *State) (out []Port) {
	seen := map[netip.AddrPort]bool{}
	for _, p := range s.Ports {
		if t.mine(p.Address.Addr()) && !seen[p.Address] {
			seen[p.Address] = true
			out = append(out, p)
		}
	}
	return out
}

func (t *table) needed(s *State) bool {
	for _, f := range s.Filters {
		if t.mine(f.Address) {
			return true
		}
	}
	return len(t.ports(s)) > 0 || len(s.NLB) > 0
}

// filterKey is what a filter is about.
type filterKey struct {
	address  netip.Addr
	protocol byte
	port     uint16
}

func (f Filter) key() filterKey { return filterKey{f.Address, f.Protocol, f.Port} }

func (k filterKey) compare(o filterKey) int {
	return cmp.Or(k.address.Compare(o.address), cmp.Compare(k.protocol, o.protocol), cmp.Compare(k.port, o.port))
}

const (
	// early is before connection tracking (-200) and all NAT, and after fragments were put together (-400).
	early = -290
	// Mark is the bit by which packets find the way to the balancing process; it is no other's that Portal or kube-proxy uses.
	Mark = 0x100000
)

// declare says what the table should have.
func (t *table) declare(b *nf.Batch, s *State, present *nf.Present) {
	b.Replace(t.at, present)
	for _, set := range []*nf.Set{t.captured, t.strict, t.limited, t.allowed} {
		b.AddSet(set)
	}
	hook := func(kind string, point uint32, priority int32) nf.Hook {
		return nf.Hook{Type: kind, Point: point, Priority: priority}
	}
	b.AddChain(t.at, nf.Chain{Name: "arriving", Hook: hook("filter", unix.NF_INET_PRE_ROUTING, early), Rules: t.arriving()})
	b.AddChain(t.at, nf.Chain{Name: "own", Hook: hook("route", unix.NF_INET_LOCAL_OUT, early), Rules: t.own()})
	if len(s.NLB) > 0 {
		b.AddChain(t.at, nf.Chain{Name: "node-ports", Hook: hook("filter", unix.NF_INET_PRE_ROUTING, early+1), Rules: t.nodePorts(s)})
	}
	for _, p := range t.ports(s) {
		key := nf.AppendPort(t.AppendAddr(nil, p.Address.Addr()), p.Address.Port())
		b.Add(t.captured, nf.Element{Key: key})
		if p.Strict {
			b.Add(t.strict, nf.Element{Key: key})
		}
	}
	seen := map[filterKey]bool{}
	for _, f := range s.Filters {
		if !t.mine(f.Address) || seen[f.key()] {
			continue
		}
		seen[f.key()] = true
		t.addFilter(b, f)
	}
	b.Prune(t.at)
}

func (t *table) addFilter(b *nf.Batch, f Filter) {
	key := nf.AppendPort(nf.AppendProto(t.AppendAddr(nil, f.Address), f.Protocol), f.Port)
	b.Add(t.limited, nf.Element{Key: key})
	var own []netip.Prefix
	for _, p := range f.Allowed {
		if t.mine(p.Addr()) {
			own = append(own, p)
		}
	}
	for _, p := range nf.Disjoint(own) {
		from, to := append([]byte(nil), key...), append([]byte(nil), key...)
		b.Add(t.allowed, nf.Element{Key: t.AppendAddr(from, p.Addr()), End: t.AppendAddr(to, nf.Last(p))})
	}
}

// filtered drops what comes from a source that may not use the address.
func (t *table) filtered() nf.Rule {
	key, words := uint32(nf.Reg0), t.Words()
	return nf.Rule{
		t.Destination(key), nf.Proto(key + words), nf.DestinationPort(key + words + 1), nf.IsIn{Set: t.limited, Key: key},
		t.Source(key + words + 2), nf.IsIn{Set: t.allowed, Key: key, Not: true}, nf.Drop,
	}
}

// to and from match TCP packets to and from ports of a set.
func (t *table) to(set *nf.Set) nf.Rule {
	return nf.Concat(nf.IsProto(unix.IPPROTO_TCP), nf.Rule{t.Destination(nf.Reg0), nf.DestinationPort(nf.Reg0 + t.Words()), nf.IsIn{Set: set, Key: nf.Reg0}})
}

func (t *table) from(set *nf.Set) nf.Rule {
	return nf.Concat(nf.IsProto(unix.IPPROTO_TCP), nf.Rule{t.Source(nf.Reg0), nf.SourcePort(nf.Reg0 + t.Words()), nf.IsIn{Set: set, Key: nf.Reg0}})
}

// arriving are the rules for packets from elsewhere and, by the loopback device, from this machine.
func (t *table) arriving() []nf.Rule {
	loopback := t.From(nil, "lo", "")[0]
	listening := nf.Rule{nf.Transparent{Dst: nf.Reg0}, nf.Cmp{Reg: nf.Reg0, Data: []byte{1}}}
	// The address need not be read from the packet to find the socket: it listens at the very address.
	return []nf.Rule{
		t.filtered(),
		nf.Concat(loopback, t.from(t.captured), nf.Rule{nf.NoTrack{}, nf.Accept}),
		nf.Concat(t.to(t.captured), listening, nf.Rule{nf.NoTrack{}}, nf.MarkBit(Mark), nf.Rule{nf.Accept}),
		nf.Concat(t.to(t.strict), nf.Rule{nf.Reject{Reset: true}}),
		// What this machine sent has passed the proxy's rules already, and the kernel refuses nothing for an address that no interface has.
		nf.Concat(loopback, t.to(t.captured), nf.Rule{nf.Reject{Reset: true}}),
	}
}

// own are the rules for what processes of this machine send. Whether somebody listens can't be asked here: the packet has its sender's socket.
func (t *table) own() []nf.Rule {
	return []nf.Rule{
		nf.Concat(t.from(t.captured), nf.Rule{nf.NoTrack{}, nf.Accept}),
		t.filtered(),
		nf.Concat(t.to(t.captured), nf.Rule{nf.NoTrack{}}, nf.MarkBit(Mark)),
	}
}
