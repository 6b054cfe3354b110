package ipvs

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Chains of our table besides those of origins, which are called like their routes map.
const (
	classifyChain   = "classify"
	masqueradeChain = "masquerade"
	refuseChain     = "refuse"
)

const reg0 = unix.NFT_REG32_00

// ruler writes the rules of one family.
type ruler struct {
	family intent.Family
	width  uint32
	facts  *plan.Facts
	bit    uint32
}

func newRuler(f intent.Family, facts *plan.Facts, bit uint32) *ruler {
	r := &ruler{family: f, width: 4, facts: facts, bit: bit}
	if f == intent.IPv6 {
		r.width = 16
	}
	return r
}

type rule []expr.Any

// chains are all of the table, in an order in which none is named before it is there.
func (r *ruler) chains() []chain {
	out := []chain{
		{name: refuseChain, rules: r.refusing()},
		{name: masqueradeChain, rules: []rule{r.setMasquerade()}},
	}
	for o := range plan.Origins {
		out = append(out, chain{name: routesMap[o], rules: r.from(o)})
	}
	chosen := []rule{r.byMark(learnSet), r.unmark()}
	sent := append(r.answers(), chosen...)
	toClassify := []rule{{&expr.Verdict{Kind: expr.VerdictJump, Chain: classifyChain}}}
	own := append([]rule{r.remember()}, toClassify...)
	return append(out,
		chain{name: classifyChain, rules: r.classify()},
		chain{name: "prerouting", hook: nftables.ChainHookPrerouting, priority: *nftables.ChainPriorityMangle, rules: r.leading()},
		// IPVS looks at what comes in after all filters.
		chain{name: "input", hook: nftables.ChainHookInput, priority: *nftables.ChainPriorityFilter, rules: toClassify},
		// IPVS looks at what goes out right after the destination's translation, which is at -100.
		chain{name: "output", hook: nftables.ChainHookOutput, priority: *nftables.ChainPriorityMangle, rules: own},
		chain{name: "chosen-own", kind: nftables.ChainTypeRoute, hook: nftables.ChainHookOutput, priority: -97, rules: r.turning()},
		// Then it has chosen an endpoint, here or elsewhere.
		chain{name: "chosen-here", hook: nftables.ChainHookInput, priority: 101, rules: chosen},
		chain{name: "chosen", hook: nftables.ChainHookPostrouting, priority: *nftables.ChainPriorityMangle, rules: sent},
		chain{name: "postrouting", hook: nftables.ChainHookPostrouting, priority: *nftables.ChainPriorityNATSource, kind: nftables.ChainTypeNAT, rules: r.rewriting()},
	)
}

type chain struct {
	name     string
	kind     nftables.ChainType // of one with a hook; empty: filter
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	rules    []rule
}

// classify finds the origin of what may be the first packet of a flow. A connection once made is IPVS' alone, whatever
// the plan says by now. So is a flow of UDP, unless IPVS has its endpoint no longer and must choose one anew.
func (r *ruler) classify() []rule {
	established := number(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	done := &expr.Verdict{Kind: expr.VerdictReturn}
	out := []rule{
		isAnswer(),
		{
			protocol(reg0), differs(reg0, []byte{unix.IPPROTO_UDP}),
			&expr.Ct{Key: expr.CtKeySTATE, Register: reg0},
			&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: established, Xor: number(0)},
			differs(reg0, number(0)), done,
		},
		r.going(false, done),
		r.going(true, done),
		{protocol(reg0), equals(reg0, []byte{r.icmp()}), done},
		append(r.frontend(false), isIn(rangedSet, reg0), r.source(r.afterFrontend()),
			&expr.Lookup{SetName: sourcesSet, SourceRegister: reg0, Invert: true}, &expr.Verdict{Kind: expr.VerdictDrop}),
	}
	for _, match := range r.pods() {
		out = append(out, append(match, goTo(routesMap[plan.FromPod])))
	}
	return append(out,
		append(isLocal(true), goTo(routesMap[plan.FromNode])),
		rule{goTo(routesMap[plan.FromOutside])},
	)
}

// going matches packets of UDP whose endpoint, as connection tracking knows it from the answers, IPVS has for their frontend.
func (r *ruler) going(nodePort bool, then expr.Any) rule {
	const reply = 1 << 24 // the library sends four bytes, and the kernel reads the first
	to, from := uint32(reg0+1), reg0+1+r.width/4
	out := rule{
		protocol(reg0), equals(reg0, []byte{unix.IPPROTO_UDP}),
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(expr.CtStateBitESTABLISHED), Xor: number(0)},
		differs(reg0, number(0)),
	}
	before := len(out)
	// The nft tool does not know how long an address is that connection tracking tells, and aborts where one is a part of a key.
	// So it is put over a constant, but for its beginning, which the tool takes to be there still. (A constant has 16 bytes.)
	for zeros := range slices.Chunk(make([]byte, 4+r.width), 16) {
		out = append(out, &expr.Immediate{Register: reg0 + uint32(len(out)-before)*4, Data: zeros})
	}
	return append(out,
		&expr.Ct{Key: expr.CtKeySRC, Direction: reply, Register: to},
		r.frontendAddress(from, nodePort), toPort(from+r.width/4),
		&expr.Ct{Key: expr.CtKeyPROTOSRC, Direction: reply, Register: from + r.width/4 + 1},
		isIn(goingSet, reg0), then)
}

// leading marks packets whose address is not on our device, so that routing takes them for this node's: all of a flow, as
// its connection remembers, whatever became of the frontend since. A flow's first packet is refused here already.
func (r *ruler) leading() []rule {
	return []rule{
		isAnswer(),
		r.remember(),
		append(r.remembered(), &expr.Immediate{Register: reg0, Data: number(ledMark)}, setMark()),
		append(r.frontend(false), isIn(ledSet, reg0), &expr.Verdict{Kind: expr.VerdictJump, Chain: classifyChain}),
	}
}

// led is the bit of the connection's mark that says that its frontend is led here: the one beside the other, whichever
// that is.
func (r *ruler) led() uint32 { return bits.RotateLeft32(r.bit, 1) }

// remember notes at the connection that its frontend is led here.
func (r *ruler) remember() rule {
	return append(r.frontend(false),
		isIn(ledSet, reg0),
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(^r.led()), Xor: number(r.led())},
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg0, SourceRegister: true},
	)
}

// remembered matches packets of such connections.
func (r *ruler) remembered() rule {
	return rule{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(r.led()), Xor: number(0)},
		equals(reg0, number(r.led())),
	}
}

// turning is for what this node sends to a frontend that is led here, and IPVS has given an endpoint on the node itself:
// IPVS leaves such a packet on the way out to where the frontend would be. In a chain of this type the kernel looks for
// the way again when the mark has changed; so it does, off where there was one and on where there was none.
func (r *ruler) turning() []rule {
	here := append(r.remembered(), isLocal(false)...)
	with := func(more ...expr.Any) rule { return append(here[:len(here):len(here)], more...) }
	return []rule{
		isAnswer(),
		with(r.byMark(learnSet)...),
		with(append(r.unmark(), &expr.Verdict{Kind: expr.VerdictReturn})...),
		with(&expr.Immediate{Register: reg0, Data: number(ledMark)}, setMark()),
	}
}

// from are the rules for an origin: to a Service's address, which else leads nowhere (though it is on a device of this
// node, and whatever listens on all addresses listens there too); or to a node port.
func (r *ruler) from(o plan.Origin) []rule {
	out := []rule{
		append(r.frontend(false), r.lookup(marksMap[o], reg0), setMark()),
		r.byMark(stickySet),
		append(r.frontend(false), r.lookup(routesMap[o], unix.NFT_REG_VERDICT)),
		{r.destination(reg0), isIn(goneSet, reg0), &expr.Verdict{Kind: expr.VerdictDrop}},
		{r.destination(reg0), isIn(vipsSet, reg0), goTo(refuseChain)},
	}
	onNode := r.nodePortAddress()
	if len(onNode) == 0 {
		return out
	}
	for _, match := range onNode {
		out = append(out,
			append(append(match[:len(match):len(match)], r.frontend(true)...), r.lookup(marksMap[o], reg0), setMark()),
			append(match[:len(match):len(match)], r.byMark(stickySet)...),
			append(append(match[:len(match):len(match)], r.frontend(true)...), r.lookup(routesMap[o], unix.NFT_REG_VERDICT)),
		)
	}
	return out
}

// byMark jumps to what a map has for a packet's mark.
func (r *ruler) byMark(set string) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0}, r.lookup(set, unix.NFT_REG_VERDICT)}
}

func stickChain(d time.Duration) string { return "stick-" + d.String() }
func learnChain(d time.Duration) string { return "learn-" + d.String() }

// affinity are the chains for clients that stay with their endpoint for a time. A packet comes there with its pool's mark.
func (r *ruler) affinity(d time.Duration) []chain {
	mark := reg0 + r.width/4
	client := rule{r.source(reg0), &expr.Meta{Key: expr.MetaKeyMARK, Register: mark}}
	find := &expr.Lookup{SetName: affinitySet, SourceRegister: reg0, DestRegister: mark + 1, IsDestRegSet: true}
	with := func(more ...expr.Any) rule { return append(client[:len(client):len(client)], more...) }
	change := func(operation, data uint32, timeout time.Duration) expr.Any {
		return &expr.Dynset{SetName: affinitySet, SrcRegKey: reg0, SrcRegData: data, Operation: operation, Timeout: timeout}
	}
	pool := number(^uint32(maxSlot))
	return []chain{
		{name: stickChain(d), rules: []rule{
			// A client that is known counts as having come now; what is known of it stays, whatever an update says.
			with(find, change(unix.NFT_DYNSET_OP_UPDATE, mark, d)),
			with(&expr.Lookup{SetName: affinitySet, SourceRegister: reg0, DestRegister: reg0, IsDestRegSet: true}, setMark()),
			{&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0}, isIn(membersSet, reg0), &expr.Verdict{Kind: expr.VerdictReturn}},
			// Its endpoint is gone: back to the pool.
			{
				&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0},
				&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: pool, Xor: number(0)}, setMark(),
			},
		}},
		{name: learnChain(d), rules: []rule{
			// An update leaves what is known as it is: that must go first.
			with(change(dynsetDelete, mark, 0)),
			// The nft tool must be able to list this, and aborts where a key or data is what a map gave. It takes a register for
			// what was loaded into it last, and doesn't see that a map may fill two: slots gives the pool's mark and then the
			// endpoint's, which comes to lie where the tool sees the packet's.
			{
				r.source(reg0), &expr.Meta{Key: expr.MetaKeyMARK, Register: mark + 1}, r.destination(mark + 2),
				toPort(mark + 2 + r.width/4),
				&expr.Lookup{SetName: slotsSet, SourceRegister: mark + 1, DestRegister: mark, IsDestRegSet: true},
				&expr.Meta{Key: expr.MetaKeyMARK, Register: mark},
				change(unix.NFT_DYNSET_OP_UPDATE, mark+1, d),
			},
		}},
	}
}

// dynsetDelete is NFT_DYNSET_OP_DELETE, which package unix lacks.
const dynsetDelete = 2

// nodePortAddress matches addresses on which node ports are served; one list for each way.
func (r *ruler) nodePortAddress() (out []rule) {
	n := &r.facts.NodePorts
	if n.All {
		loopback := netip.MustParsePrefix("127.0.0.0/8")
		if r.family == intent.IPv6 {
			loopback = netip.MustParsePrefix("::1/128")
		}
		outside := append(rule{r.destination(reg0)}, r.within(loopback)...)
		outside[len(outside)-1].(*expr.Cmp).Op = expr.CmpOpNeq
		return []rule{append(outside, isLocal(false)...)}
	}
	for _, a := range n.Addrs {
		if intent.FamilyOf(a) == r.family && !a.IsLoopback() {
			out = append(out, rule{r.destination(reg0), equals(reg0, a.AsSlice())})
		}
	}
	return out
}

// refusing answers that nobody is there. A reset reaches a process on this node even while it is in connect, when an
// ICMP message would be lost.
func (r *ruler) refusing() []rule {
	unreachable := uint8(3)
	if r.family == intent.IPv6 {
		unreachable = 4
	}
	return []rule{
		{protocol(reg0), equals(reg0, []byte{unix.IPPROTO_TCP}), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST}},
		{&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: unreachable}},
	}
}

// setMasquerade notes at the connection that its source is to be rewritten. The packet's mark could not say it too: IPVS
// compares the whole of that.
func (r *ruler) setMasquerade() rule {
	return rule{
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(^r.bit), Xor: number(r.bit)},
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg0, SourceRegister: true},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}
}

// answers gives an answer the source that the client addressed, as connection tracking remembers it. IPVS knows only which
// client and which endpoint it is between: where a client uses one port for several addresses that lead to one
// endpoint, it takes the first that it finds. Only what was masqueraded can be told apart. (The library can't have the
// checksum of an IPv6 packet corrected.)
func (r *ruler) answers() (out []rule) {
	if r.family == intent.IPv6 {
		return nil
	}
	const original, pseudoHeader = 0, 1
	for protocol, checksum := range map[byte]uint32{unix.IPPROTO_TCP: 16, unix.IPPROTO_UDP: 6} {
		out = append(out, rule{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg0}, equals(reg0, []byte{protocol}),
			&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg0}, equals(reg0, []byte{1}),
			&expr.Ct{Key: expr.CtKeyMARK, Register: reg0},
			&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(r.bit), Xor: number(0)},
			equals(reg0, number(r.bit)),
			&expr.Ct{Key: expr.CtKeyPROTODST, Direction: original, Register: reg0},
			&expr.Payload{
				OperationType: expr.PayloadWrite, SourceRegister: reg0, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2,
				CsumType: expr.CsumTypeInet, CsumOffset: checksum,
			},
			&expr.Ct{Key: expr.CtKeyDST, Direction: original, Register: reg0},
			&expr.Payload{
				OperationType: expr.PayloadWrite, SourceRegister: reg0, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4,
				CsumType: expr.CsumTypeInet, CsumOffset: 10, CsumFlags: pseudoHeader,
			},
		})
	}
	return out
}

// unmark takes our mark away when it has served.
func (r *ruler) unmark() rule {
	return rule{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(markMask), Xor: number(0)},
		equals(reg0, number(markBase)),
		&expr.Immediate{Register: reg0, Data: number(0)},
		setMark(),
	}
}

// rewriting are the rules of postrouting: what was noted; an endpoint that reached itself; and what comes from a
// Service's address, which the kernel takes for the node's own connections to it.
func (r *ruler) rewriting() []rule {
	masquerade := &expr.Masq{FullyRandom: true}
	return []rule{
		{
			&expr.Ct{Key: expr.CtKeyMARK, Register: reg0},
			&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: number(r.bit), Xor: number(0)},
			equals(reg0, number(r.bit)), masquerade,
		},
		{r.source(reg0), r.destination(reg0 + r.width/4), isIn(hairpinSet, reg0), masquerade},
		{r.source(reg0), isIn(vipsSet, reg0), masquerade},
	}
}

// pods matches Pods' packets; one list for each way.
func (r *ruler) pods() (out []rule) {
	d := &r.facts.Pods
	for _, p := range d.Prefixes {
		if intent.FamilyOf(p.Addr()) == r.family {
			out = append(out, append(rule{r.source(reg0)}, r.within(p)...))
		}
	}
	if d.Interface != "" {
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, d.Interface)
		out = append(out, inBy(name))
	}
	if d.InterfacePrefix != "" {
		out = append(out, inBy([]byte(d.InterfacePrefix)))
	}
	return out
}

// frontend loads the key of a frontend: of the packet's own address, or of node ports.
func (r *ruler) frontend(nodePort bool) rule {
	return rule{r.frontendAddress(reg0, nodePort), protocol(reg0 + r.width/4), toPort(reg0 + r.width/4 + 1)}
}

func (r *ruler) frontendAddress(reg uint32, nodePort bool) expr.Any {
	if nodePort {
		return &expr.Immediate{Register: reg, Data: make([]byte, r.width)}
	}
	return r.destination(reg)
}

func toPort(reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

func (r *ruler) afterFrontend() uint32 { return reg0 + r.width/4 + 2 }

func (r *ruler) source(reg uint32) expr.Any      { return r.address(reg, 12, 8) }
func (r *ruler) destination(reg uint32) expr.Any { return r.address(reg, 16, 24) }

func (r *ruler) address(reg, in4, in6 uint32) expr.Any {
	offset := in4
	if r.family == intent.IPv6 {
		offset = in6
	}
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: r.width}
}

// within matches an address in the first register.
func (r *ruler) within(p netip.Prefix) rule {
	mask := make([]byte, r.width)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return rule{
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: r.width, Mask: mask, Xor: make([]byte, r.width)},
		equals(reg0, p.Masked().Addr().AsSlice()),
	}
}

func (r *ruler) icmp() byte {
	if r.family == intent.IPv6 {
		return unix.IPPROTO_ICMPV6
	}
	return unix.IPPROTO_ICMP
}

func (r *ruler) lookup(set string, to uint32) expr.Any {
	return &expr.Lookup{SetName: set, SourceRegister: reg0, DestRegister: to, IsDestRegSet: true}
}

func isIn(set string, reg uint32) expr.Any { return &expr.Lookup{SetName: set, SourceRegister: reg} }

func protocol(reg uint32) expr.Any { return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg} }

func setMark() expr.Any {
	return &expr.Meta{Key: expr.MetaKeyMARK, Register: reg0, SourceRegister: true}
}

func inBy(name []byte) rule {
	return rule{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg0}, equals(reg0, name)}
}

func isLocal(source bool) rule {
	return rule{
		&expr.Fib{Register: reg0, FlagSADDR: source, FlagDADDR: !source, ResultADDRTYPE: true},
		equals(reg0, number(unix.RTN_LOCAL)),
	}
}

// isAnswer ends a chain for packets of a flow's other direction.
func isAnswer() rule {
	return rule{
		&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg0}, equals(reg0, []byte{1}), &expr.Verdict{Kind: expr.VerdictReturn},
	}
}

func goTo(chain string) expr.Any { return &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain} }

func equals(reg uint32, data []byte) *expr.Cmp {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
}

func differs(reg uint32, data []byte) *expr.Cmp {
	return &expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: data}
}

// number is a number as the kernel computes with it.
func number(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }
