package nat

import (
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// table is the table of one family.
type table struct {
	nf.IP
	at *nf.Table
	// inside has prefixes, each with all protocols: the kernel knows intervals only in keys of several fields.
	inside *nf.Set
	// ports leads from an address (zero: all), protocol and port to a Pod.
	ports *nf.Set
	// hairpins has the addresses of Pods with ports, twice: a Pod that reaches itself by the node must not see itself as the client.
	hairpins *nf.Set
}

func newTable(f nf.IP) *table {
	t := &table{IP: f, at: &nf.Table{Family: f.Family, Name: name, Comment: "portal node: addresses of Pods"}}
	a := f.AddrField()
	t.inside = &nf.Set{Table: t.at, Name: "inside", Key: []nf.Field{a, nf.ProtoField}, Intervals: true}
	t.ports = &nf.Set{Table: t.at, Name: "host-ports", Key: []nf.Field{a, nf.ProtoField, nf.PortField}, Data: []nf.Field{a, nf.PortField}}
	t.hairpins = &nf.Set{Table: t.at, Name: "hairpins", Key: []nf.Field{a, a}}
	return t
}

func (t *table) mine(a netip.Addr) bool { return a.Is6() == t.Is6() }

// needed says whether there is anything to do for the family.
func (t *table) needed(s *State) bool {
	return len(t.pods(s)) > 0 || len(t.elements(s)) > 0
}

// pods are the prefixes of the family's Pods whose packets are masqueraded.
func (t *table) pods(s *State) (out []netip.Prefix) {
	if s.Masquerade {
		for _, p := range s.Pods {
			if t.mine(p.Addr()) {
				out = append(out, p)
			}
		}
	}
	return out
}

// portKey is what a port is known by.
type portKey struct {
	host     netip.Addr
	protocol byte
	port     uint16
}

// elements are the family's ports. Of two Pods with the same one, which nobody should let in, the first by name has it.
func (t *table) elements(s *State) map[portKey]netip.AddrPort {
	out := map[portKey]netip.AddrPort{}
	for _, pod := range slices.Sorted(maps.Keys(s.Ports)) {
		for _, p := range s.Ports[pod] {
			k := portKey{p.key(), p.Protocol, p.HostPort}
			if _, taken := out[k]; !taken && t.mine(p.Pod.Addr()) && (!p.Host.IsValid() || t.mine(p.Host)) {
				out[k] = p.Pod
			}
		}
	}
	return out
}

// The proxy's chains of type nat are at -100 and 100, whatever its mode.
const (
	afterDstnat = -99
	afterSrcnat = 101
	raw         = -300
)

// declare says what the table should have.
func (t *table) declare(b *nf.Batch, s *State, present *nf.Present) {
	b.Replace(t.at, present)
	for _, set := range []*nf.Set{t.inside, t.ports, t.hairpins} {
		b.AddSet(set)
	}
	hook := func(kind string, point uint32, priority int32) nf.Hook {
		return nf.Hook{Type: kind, Point: point, Priority: priority}
	}
	b.AddChain(t.at, nf.Chain{Name: "guard", Hook: hook("filter", unix.NF_INET_PRE_ROUTING, raw), Rules: t.guard(s)})
	b.AddChain(t.at, nf.Chain{Name: "prerouting", Hook: hook("nat", unix.NF_INET_PRE_ROUTING, afterDstnat), Rules: t.toPods()})
	b.AddChain(t.at, nf.Chain{Name: "output", Hook: hook("nat", unix.NF_INET_LOCAL_OUT, afterDstnat), Rules: t.toPods()})
	b.AddChain(t.at, nf.Chain{Name: "postrouting", Hook: hook("nat", unix.NF_INET_POST_ROUTING, afterSrcnat), Rules: t.fromPods(s)})

	for _, p := range nf.Disjoint(t.family(s.Inside)) {
		b.Add(t.inside, nf.Element{Key: nf.AppendProto(t.AppendAddr(nil, p.Addr()), 0), End: nf.AppendProto(t.AppendAddr(nil, nf.Last(p)), 255)})
	}
	pods := map[netip.Addr]bool{}
	for k, to := range t.elements(s) {
		key := nf.AppendPort(nf.AppendProto(t.AppendAddr(nil, k.host), k.protocol), k.port)
		b.Add(t.ports, nf.Element{Key: key, Data: nf.AppendPort(t.AppendAddr(nil, to.Addr()), to.Port())})
		if !pods[to.Addr()] {
			pods[to.Addr()] = true
			b.Add(t.hairpins, nf.Element{Key: t.AppendAddr(t.AppendAddr(nil, to.Addr()), to.Addr())})
		}
	}
	b.Prune(t.at)
}

func (t *table) family(list []netip.Prefix) (out []netip.Prefix) {
	for _, p := range list {
		if t.mine(p.Addr()) {
			out = append(out, p)
		}
	}
	return out
}

// guard keeps Pods from the node's loopback addresses, which a setting for hostPorts would let in. (With IPv6, the kernel does.)
func (t *table) guard(s *State) (out []nf.Rule) {
	if t.Is6() || s.Bridge == "" {
		return nil
	}
	for _, address := range []nf.Expr{t.Destination(nf.Reg0), t.Source(nf.Reg0)} {
		for _, cameByBridge := range t.From(nil, s.Bridge, "") {
			out = append(out, nf.Concat(cameByBridge, nf.Rule{address}, t.Within(t.Loopback(), false), nf.Rule{nf.Drop}))
		}
	}
	return out
}

// toPods are the rules for the first packet of a flow, from elsewhere or from the node itself.
func (t *table) toPods() []nf.Rule {
	key := uint32(nf.Reg0)
	to := key + t.Words() + 2
	rest := nf.Rule{
		nf.Proto(key + t.Words()), nf.DestinationPort(key + t.Words() + 1), nf.Lookup{Map: t.ports, Key: key, Dst: to},
		nf.DNAT{Family: t.Family, Addr: to, Port: to + t.Words()},
	}
	all := nf.Immediate{Dst: key, Data: make([]byte, t.Width)}
	// Only addresses of this node: a Pod may ask for the port of any.
	return []nf.Rule{
		nf.Concat(nf.IsLocal(false, false), nf.Rule{t.Destination(key)}, rest),
		nf.Concat(nf.IsLocal(false, false), nf.Rule{all}, rest),
	}
}

// fromPods are the rules after routing.
func (t *table) fromPods(s *State) []nf.Rule {
	const dstNAT = 1 << 5 // IPS_DST_NAT
	changed := nf.HasBit(nf.Ct{Key: unix.NFT_CT_STATUS, Dst: nf.Reg0}, dstNAT, false)
	next := nf.Reg0 + t.Words()
	out := []nf.Rule{
		nf.Concat(changed, nf.Rule{t.Source(nf.Reg0), t.Destination(next), nf.IsIn{Set: t.hairpins, Key: nf.Reg0}, nf.Masquerade{}}),
		// A process of the node that asked at a loopback address.
		nf.Concat(changed, nf.Rule{t.Source(nf.Reg0)}, t.Within(t.Loopback(), false), nf.Rule{nf.Masquerade{}}),
	}
	for _, p := range t.pods(s) {
		out = append(out, nf.Concat(nf.Rule{t.Source(nf.Reg0)}, t.Within(p, false), nf.Rule{
			t.Destination(nf.Reg0), nf.Proto(next), nf.IsIn{Set: t.inside, Key: nf.Reg0, Not: true}, nf.Masquerade{},
		}))
	}
	return out
}
