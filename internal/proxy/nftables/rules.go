package nftables

import (
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// Registers are loaded in such an order that every look-up finds its key in neighbouring ones (here with IPv4; an IPv6
// address takes four):
//
//	0   | 1       2        3      | 4    | 5        6
//	    | address protocol port   |      |                 the frontend's key, found in services:
//	-   | shape                   |      |                 … by a rule that goes on by shape
//	-   | -       id       id     |      |                 … by a rule that forwards
//	    | client  id       id     |      |                 affinity's key
//	    |         id       id       slot |                 the key of backends
//	    |         id       id       pool   endpoint        the key of members
//
// A rule can't read what another has loaded, so each begins with the frontend's key.
//
// The nft tool must be able to list all this. It takes a register for what was loaded into it last, and aborts where that
// is what a map gave; it doesn't see that a map may fill more than one. So the data of services begins with nothing, and
// what follows comes to lie where the key was: nft prints the key, and the kernel takes what services has for it. The
// same goes for the endpoints of clients with affinity.
const reg0 = nf.Reg0

func (r *ruler) keyReg() uint32      { return reg0 + 1 }
func (r *ruler) clientReg() uint32   { return reg0 + 1 }
func (r *ruler) idReg() uint32       { return reg0 + 1 + r.Words() }
func (r *ruler) slotReg() uint32     { return reg0 + 3 + r.Words() }
func (r *ruler) endpointReg() uint32 { return reg0 + 4 + r.Words() }

// portReg is the endpoint's port.
func (r *ruler) portReg() uint32 { return r.endpointReg() + r.Words() }

// ruler writes the rules of one table.
type ruler struct {
	*layout
	mark uint32
	// pods are the matches for packets from Pods.
	pods []nf.Rule
}

func newRuler(l *layout, f *plan.Facts, mark uint32) *ruler {
	return &ruler{layout: l, mark: mark, pods: l.From(f.Pods.Prefixes, f.Pods.Interface, f.Pods.InterfacePrefix)}
}

// key loads the key of a frontend.
func (r *ruler) key(nodePort bool) nf.Rule {
	var address nf.Expr = r.Destination(r.keyReg())
	if nodePort {
		address = nf.Immediate{Dst: r.keyReg(), Data: make([]byte, r.Width)}
	}
	return nf.Rule{address, nf.Proto(r.keyReg() + r.Words()), nf.DestinationPort(r.keyReg() + r.Words() + 1)}
}

const rejectChain = "reject"

// dispatch are the rules of prerouting and output, which the first packet of a flow passes.
func (r *ruler) dispatch(n *plan.NodePorts) []nf.Rule {
	byShape := func(nodePort bool) nf.Rule {
		return append(r.key(nodePort), nf.Lookup{Map: r.services, Key: r.keyReg(), Dst: reg0}, nf.VerdictMap(r.shapes, reg0+1))
	}
	onNode := nf.Rule{r.Destination(reg0), nf.IsIn{Set: r.nodeIPs, Key: reg0}}
	if n.All {
		onNode = r.NotLoopback()
	}
	return []nf.Rule{
		byShape(false),
		append(onNode, byShape(true)...),
		{r.Destination(reg0), nf.IsIn{Set: r.clusterIPs, Key: reg0}, nf.Goto(rejectChain)},
	}
}

// unallocated are the rules for service addresses that no Service has. They come after everybody's DNAT, ours and others'.
func (r *ruler) unallocated(services []netip.Prefix) (out []nf.Rule) {
	for _, p := range services {
		if p.Addr().Is6() == r.Is6() {
			out = append(out, nf.Concat(nf.Rule{r.Destination(reg0)}, r.Within(p, false), nf.IsLocal(false, true), nf.Rule{nf.Drop}))
		}
	}
	return out
}

// rewriting are the rules of postrouting.
func (r *ruler) rewriting() []nf.Rule {
	bit := nf.Number(r.mark)
	return []nf.Rule{
		{
			nf.Mark(reg0),
			nf.Bitwise{Src: reg0, Dst: reg0 + 1, Mask: bit},
			nf.Cmp{Reg: reg0 + 1, Data: bit},
			nf.Bitwise{Src: reg0, Dst: reg0, Mask: nf.Number(^r.mark)},
			nf.SetMark(reg0),
			nf.Masquerade{},
		},
		nf.Concat(isDNATed(), r.sameHalf(1), nf.Rule{nf.Goto(hairpinChain)}),
	}
}

const hairpinChain = "hairpin"

// hairpins rewrites the source of an endpoint that has reached itself: it must not see itself as the client.
func (r *ruler) hairpins() []nf.Rule { return []nf.Rule{append(r.sameHalf(0), nf.Masquerade{})} }

// isDNATed matches flows whose destination was changed.
func isDNATed() nf.Rule {
	const dstNAT = 1 << 5 // IPS_DST_NAT
	return nf.HasBit(nf.Ct{Key: unix.NFT_CT_STATUS, Dst: reg0}, dstNAT, false)
}

// sameHalf matches where one half of the source address is that of the destination's. Rules can't compare what they have
// loaded, but they can look up whether two numbers are the same, if there are few of them: four bits at a time, the last
// first, which differ most often. (A set with each endpoint's address twice would do, and take as long to write as the
// endpoints themselves. Half an IPv6 address is what fits into a rule.)
func (r *ruler) sameHalf(half int) (out nf.Rule) {
	source, destination := r.Source(0).Offset, r.Destination(0).Offset
	nibble := func(reg, offset uint32, mask byte) nf.Rule {
		return nf.Rule{
			nf.Payload{Dst: reg, Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: offset, Len: 1},
			nf.Bitwise{Src: reg, Dst: reg, Mask: []byte{mask}},
		}
	}
	end := uint32((half + 1) * r.Width / 2)
	for i := range uint32(r.Width / 2) {
		at := end - 1 - i
		for _, mask := range []byte{0x0f, 0xf0} {
			out = append(out, nibble(reg0, source+at, mask)...)
			out = append(out, nibble(reg0+1, destination+at, mask)...)
			out = append(out, nf.IsIn{Set: r.same, Key: reg0})
		}
	}
	return out
}

// nibbles are the elements of same: each number of four bits beside itself, low and high in a byte.
func nibbles() (out [][]byte) {
	out = append(out, make([]byte, 8))
	for i := range byte(15) {
		for _, v := range []byte{i + 1, (i + 1) << 4} {
			out = append(out, []byte{v, 0, 0, 0, v, 0, 0, 0})
		}
	}
	return out
}

// shape are the rules of a shape's chain.
func (r *ruler) shape(s *shape) (out []nf.Rule) {
	if s.ranged {
		out = append(out, append(r.key(s.nodePort), r.Source(r.slotReg()), nf.IsIn{Set: r.sources, Key: r.keyReg(), Not: true}, nf.Drop))
	}
	pod, node, outside := s.routes[plan.FromPod], s.routes[plan.FromNode], s.routes[plan.FromOutside]
	if !s.plain() {
		for _, match := range r.pods {
			out = append(out, r.leg(s, pod, match)...)
		}
	}
	if node != outside {
		out = append(out, r.leg(s, node, nf.IsLocal(true, false))...)
	}
	out = append(out, r.leg(s, outside, nil)...)
	if outside.verdict == plan.Forward {
		// Only a packet that met a change half-way, and found no endpoint at all, comes here. It must not go on unchanged, and be
		// remembered so; its sender will send it again.
		out = append(out, nf.Rule{nf.Drop})
	}
	return out
}

// leg are the rules for packets that match.
func (r *ruler) leg(s *shape, l leg, match nf.Rule) []nf.Rule {
	rule := func(parts ...nf.Rule) nf.Rule {
		out := slices.Clone(match)
		if l.masquerade {
			out = append(out, nf.MarkBit(r.mark)...)
		}
		return append(out, nf.Concat(parts...)...)
	}
	switch l.verdict {
	case plan.Reject:
		return []nf.Rule{rule(nf.Rule{nf.Goto(rejectChain)})}
	case plan.Drop:
		return []nf.Rule{rule(nf.Rule{nf.Drop})}
	}
	find := append(r.key(s.nodePort), nf.Lookup{Map: r.services, Key: r.keyReg(), Dst: r.idReg() - 2})
	choose := func(from *nf.Set, to uint32) nf.Rule {
		return nf.Rule{nf.Random{Dst: r.slotReg(), Below: l.of, Offset: l.pool << poolShift}, nf.Lookup{Map: from, Key: r.idReg(), Dst: to}}
	}
	dnat := nf.Rule{nf.DNAT{Family: r.Family, Addr: r.endpointReg(), Port: r.portReg()}}
	simple := []nf.Rule{rule(find, choose(r.backends, r.endpointReg()), dnat)}
	if l.of > 1 {
		// A packet that met a change half-way may have chosen from more endpoints than are left. The first is there as long
		// as any is.
		first := nf.Immediate{Dst: r.slotReg(), Data: nf.Number(l.pool << poolShift)}
		simple = append(simple, rule(find, nf.Rule{first, nf.Lookup{Map: r.backends, Key: r.idReg(), Dst: r.endpointReg()}}, dnat))
	}
	if s.sticky == 0 {
		return simple
	}
	remember := r.remember(unix.NFT_DYNSET_OP_UPDATE, time.Duration(s.sticky)*time.Millisecond)
	pool := nf.Immediate{Dst: r.slotReg(), Data: nf.Number(l.pool)}
	// The destination is loaded for nft's sake, see above.
	client := nf.Rule{r.Source(r.clientReg()), r.Destination(r.endpointReg()), nf.DestinationPort(r.portReg())}
	return append([]nf.Rule{
		// To the endpoint it had, if that is still one; this counts as its last connection now.
		rule(find, client, nf.Rule{
			nf.Lookup{Map: r.affinity, Key: r.clientReg(), Dst: r.slotReg()}, pool, nf.IsIn{Set: r.members, Key: r.idReg()}, remember,
		}, dnat),
		// To any, remembered. An update leaves the endpoint of an old element as it is: that must be deleted first.
		rule(find, client, choose(r.choices, r.slotReg()), nf.Rule{pool, r.remember(nf.DynsetDelete, 0), remember}, dnat),
		// To any, when there is no more room for another client.
	}, simple...)
}

// poolShift makes room for a pool's slots beside those of other pools of the same port.
const poolShift = 20

func (r *ruler) remember(operation uint32, timeout time.Duration) nf.Expr {
	return nf.Dynset{Set: r.affinity, Op: operation, Key: r.clientReg(), Data: r.slotReg(), Timeout: timeout}
}
