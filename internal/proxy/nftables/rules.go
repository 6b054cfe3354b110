package nftables

import (
	"net/netip"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
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
const reg0 = unix.NFT_REG32_00

func (r *ruler) keyReg() uint32      { return reg0 + 1 }
func (r *ruler) clientReg() uint32   { return reg0 + 1 }
func (r *ruler) idReg() uint32       { return reg0 + 1 + r.words() }
func (r *ruler) slotReg() uint32     { return reg0 + 3 + r.words() }
func (r *ruler) endpointReg() uint32 { return reg0 + 4 + r.words() }

// portReg is the endpoint's port.
func (r *ruler) portReg() uint32 { return r.endpointReg() + r.words() }

// ruler writes the rules of one table.
type ruler struct {
	*layout
	mark uint32
	// pods are the ways in which a Pod is told by: one expression list each.
	pods [][]expr.Any
}

func newRuler(l *layout, f *plan.Facts, family intent.Family, mark uint32) *ruler {
	r := &ruler{layout: l, mark: mark}
	for _, p := range f.Pods.Prefixes {
		if intent.FamilyOf(p.Addr()) == family {
			r.pods = append(r.pods, r.from(p))
		}
	}
	if name := f.Pods.Interface; name != "" {
		padded := make([]byte, unix.IFNAMSIZ)
		copy(padded, name)
		r.pods = append(r.pods, inBy(padded))
	}
	if prefix := f.Pods.InterfacePrefix; prefix != "" {
		r.pods = append(r.pods, inBy([]byte(prefix)))
	}
	return r
}

func (r *ruler) words() uint32 { return uint32(r.width / 4) }

func (r *ruler) source(reg uint32) expr.Any {
	offset := uint32(12)
	if r.width == 16 {
		offset = 8
	}
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(r.width)}
}

func (r *ruler) destination(reg uint32) expr.Any {
	offset := uint32(16)
	if r.width == 16 {
		offset = 24
	}
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(r.width)}
}

// from matches sources of a prefix.
func (r *ruler) from(p netip.Prefix) []expr.Any {
	return append([]expr.Any{r.source(reg0)}, r.within(p)...)
}

// within matches an address in the first register.
func (r *ruler) within(p netip.Prefix) []expr.Any {
	mask := make([]byte, r.width)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return []expr.Any{
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: uint32(r.width), Mask: mask, Xor: make([]byte, r.width)},
		equals(reg0, r.addr(nil, p.Masked().Addr())),
	}
}

// outOf matches when the address in the first register is not in a prefix.
func (r *ruler) outOf(p netip.Prefix) []expr.Any {
	list := r.within(p)
	list[len(list)-1].(*expr.Cmp).Op = expr.CmpOpNeq
	return list
}

// inBy matches the interface that a packet came in by.
func inBy(name []byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg0}, equals(reg0, name)}
}

func equals(reg uint32, data []byte) *expr.Cmp {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
}

// key loads the key of a frontend.
func (r *ruler) key(nodePort bool) []expr.Any {
	address := r.destination(r.keyReg())
	if nodePort {
		address = &expr.Immediate{Register: r.keyReg(), Data: make([]byte, r.width)}
	}
	return []expr.Any{
		address,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: r.keyReg() + r.words()},
		r.port(r.keyReg() + r.words() + 1),
	}
}

func (r *ruler) port(reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

// lookup ends the rule where nothing is found.
func lookup(s *set, from, to uint32) expr.Any {
	return &expr.Lookup{SetName: s.name, SetID: s.id, SourceRegister: from, DestRegister: to, IsDestRegSet: true}
}

func isIn(s *set, reg uint32) expr.Any {
	return &expr.Lookup{SetName: s.name, SetID: s.id, SourceRegister: reg}
}

func isLocal(source bool) []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: reg0, FlagSADDR: source, FlagDADDR: !source, ResultADDRTYPE: true},
		equals(reg0, number(nil, unix.RTN_LOCAL)),
	}
}

func goTo(chain string) expr.Any { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain} }

const rejectChain = "reject"

// dispatch are the rules of prerouting and output: the first packet of a flow finds its way here.
func (r *ruler) dispatch(n *plan.NodePorts) [][]expr.Any {
	byShape := func(nodePort bool) []expr.Any {
		return append(r.key(nodePort), lookup(r.services, r.keyReg(), reg0), lookup(r.shapes, reg0+1, unix.NFT_REG_VERDICT))
	}
	local := []expr.Any{r.destination(reg0), isIn(r.nodeIPs, reg0)}
	if n.All {
		loopback := netip.MustParsePrefix("127.0.0.0/8")
		if r.width == 16 {
			loopback = netip.MustParsePrefix("::1/128")
		}
		local = append([]expr.Any{r.destination(reg0)}, r.outOf(loopback)...)
		local = append(local, isLocal(false)...)
	}
	return [][]expr.Any{
		byShape(false),
		append(local, byShape(true)...),
		{r.destination(reg0), isIn(r.clusterIPs, reg0), goTo(rejectChain)},
	}
}

// unallocated are the rules for service addresses that are nobody's. They come after everybody's DNAT, ours and others'.
func (r *ruler) unallocated(services []netip.Prefix) (out [][]expr.Any) {
	for _, p := range services {
		if p.Addr().Is4() != (r.width == 4) {
			continue
		}
		local := isLocal(false)
		local[len(local)-1].(*expr.Cmp).Op = expr.CmpOpNeq
		rule := append([]expr.Any{r.destination(reg0)}, r.within(p)...)
		out = append(out, append(append(rule, local...), &expr.Verdict{Kind: expr.VerdictDrop}))
	}
	return out
}

// rejection answers that nobody is there. A reset reaches a process on this node even while connect holds its socket,
// when an ICMP message would be lost.
func (r *ruler) rejection() [][]expr.Any {
	unreachable := uint8(3)
	if r.width == 16 {
		unreachable = 4
	}
	return [][]expr.Any{
		{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg0}, equals(reg0, []byte{unix.IPPROTO_TCP}),
			&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
		},
		{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: unreachable}},
	}
}

// rewriting are the rules of postrouting.
func (r *ruler) rewriting() [][]expr.Any {
	bit := number(nil, r.mark)
	masquerade := &expr.Masq{FullyRandom: true}
	return [][]expr.Any{
		{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0},
			&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0 + 1, Len: 4, Mask: bit, Xor: number(nil, 0)},
			equals(reg0+1, bit),
			&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(nil, ^r.mark), Xor: number(nil, 0)},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0, SourceRegister: true},
			masquerade,
		},
		append(append(isDNATed(), r.sameHalf(1)...), goTo(hairpinChain)),
	}
}

const hairpinChain = "hairpin"

// hairpins rewrites the source of an endpoint that has reached itself: it must not see itself as the client.
func (r *ruler) hairpins() [][]expr.Any {
	return [][]expr.Any{append(r.sameHalf(0), &expr.Masq{FullyRandom: true})}
}

// isDNATed matches flows whose destination was changed.
func isDNATed() []expr.Any {
	const dstNAT = 1 << 5 // IPS_DST_NAT
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(nil, dstNAT), Xor: number(nil, 0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg0, Data: number(nil, 0)},
	}
}

// sameHalf matches where one half of the source address is that of the destination's. Rules can't compare what they have
// loaded, but they can look up whether two numbers are the same, if there are few of them: four bits at a time, the last
// first, which differ most often. (A set with each endpoint's address twice would do, and take as long to write as the
// endpoints themselves. Half an IPv6 address is what fits into a rule.)
func (r *ruler) sameHalf(half int) (out []expr.Any) {
	source, destination := r.source(0).(*expr.Payload).Offset, r.destination(0).(*expr.Payload).Offset
	nibble := func(reg, offset uint32, high bool) []expr.Any {
		mask := byte(0x0f)
		if high {
			mask = 0xf0
		}
		return []expr.Any{
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 1},
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{mask}, Xor: []byte{0}},
		}
	}
	end := uint32((half + 1) * r.width / 2)
	for i := range uint32(r.width / 2) {
		at := end - 1 - i
		for _, high := range []bool{false, true} {
			out = append(out, nibble(reg0, source+at, high)...)
			out = append(out, nibble(reg0+1, destination+at, high)...)
			out = append(out, isIn(r.same, reg0))
		}
	}
	return out
}

// nibbles are the elements of same: each number of four bits beside itself, low and high in a byte; zero is the canary.
func nibbles() (out [][]byte) {
	for i := range byte(15) {
		for _, v := range []byte{i + 1, (i + 1) << 4} {
			out = append(out, []byte{v, 0, 0, 0, v, 0, 0, 0})
		}
	}
	return out
}

// shape are the rules of a shape's chain.
func (r *ruler) shape(s *shape) (out [][]expr.Any) {
	if s.ranged {
		allowed := &expr.Lookup{SetName: r.sources.name, SetID: r.sources.id, SourceRegister: r.keyReg(), Invert: true}
		out = append(out, append(r.key(s.nodePort), r.source(r.slotReg()), allowed, &expr.Verdict{Kind: expr.VerdictDrop}))
	}
	pod, node, outside := s.routes[plan.FromPod], s.routes[plan.FromNode], s.routes[plan.FromOutside]
	if !s.plain() {
		for _, match := range r.pods {
			out = append(out, r.leg(s, pod, match)...)
		}
	}
	if node != outside {
		out = append(out, r.leg(s, node, isLocal(true))...)
	}
	out = append(out, r.leg(s, outside, nil)...)
	if outside.verdict == plan.Forward {
		// Nothing comes here, but for a packet that met a change half-way and found no endpoint at all. It must not go on as it
		// is, and be remembered so; who sent it will send it again.
		out = append(out, []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}})
	}
	return out
}

// leg are the rules for packets that match.
func (r *ruler) leg(s *shape, l leg, match []expr.Any) [][]expr.Any {
	rule := func(parts ...[]expr.Any) (out []expr.Any) {
		out = append(out, match...)
		if l.masquerade {
			out = append(out, r.setMark()...)
		}
		for _, p := range parts {
			out = append(out, p...)
		}
		return out
	}
	switch l.verdict {
	case plan.Reject:
		return [][]expr.Any{rule([]expr.Any{goTo(rejectChain)})}
	case plan.Drop:
		return [][]expr.Any{rule([]expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}})}
	}
	find := append(r.key(s.nodePort), lookup(r.services, r.keyReg(), r.idReg()-2))
	choose := func(from *set, to uint32) []expr.Any {
		slot := &expr.Numgen{Register: r.slotReg(), Modulus: l.of, Type: unix.NFT_NG_RANDOM, Offset: l.pool << poolShift}
		return []expr.Any{slot, lookup(from, r.idReg(), to)}
	}
	dnat := []expr.Any{&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(r.family), RegAddrMin: r.endpointReg(), RegProtoMin: r.portReg(),
	}}
	simple := [][]expr.Any{rule(find, choose(r.backends, r.endpointReg()), dnat)}
	if l.of > 1 {
		// A packet that met a change half-way may have chosen from more endpoints than are left. The first is there as long
		// as any is.
		first := &expr.Immediate{Register: r.slotReg(), Data: number(nil, l.pool<<poolShift)}
		simple = append(simple, rule(find, []expr.Any{first, lookup(r.backends, r.idReg(), r.endpointReg())}, dnat))
	}
	if s.sticky == 0 {
		return simple
	}
	timeout := time.Duration(s.sticky) * time.Millisecond
	remember := r.remember(unix.NFT_DYNSET_OP_UPDATE, timeout)
	pool := &expr.Immediate{Register: r.slotReg(), Data: number(nil, l.pool)}
	// The destination is loaded for nft's sake, see above.
	client := []expr.Any{r.source(r.clientReg()), r.destination(r.endpointReg()), r.port(r.portReg())}
	return append([][]expr.Any{
		// To the endpoint it had, if that is still one; this counts as its last connection now.
		rule(find, client, []expr.Any{
			lookup(r.affinity, r.clientReg(), r.slotReg()), pool, isIn(r.members, r.idReg()), remember,
		}, dnat),
		// To any, remembered. An update leaves the endpoint of an old element as it is: that must go first.
		rule(find, client, choose(r.choices, r.slotReg()), []expr.Any{pool, r.remember(dynsetDelete, 0), remember}, dnat),
		// To any, when there is no more room for another client.
	}, simple...)
}

// poolShift makes room for a pool's slots beside those of other pools of the same port.
const poolShift = 20

// dynsetDelete is NFT_DYNSET_OP_DELETE, which package unix lacks.
const dynsetDelete = 2

func (r *ruler) remember(operation uint32, timeout time.Duration) expr.Any {
	return &expr.Dynset{
		SetName: r.affinity.name, SetID: r.affinity.id, SrcRegKey: r.clientReg(), SrcRegData: r.slotReg(),
		Operation: operation, Timeout: timeout,
	}
}

// setMark sets our bit and leaves the others, which belong to others.
func (r *ruler) setMark() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(nil, ^r.mark), Xor: number(nil, r.mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0, SourceRegister: true},
	}
}
