package ipvs

import (
	"math/bits"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// Chains of our table besides those of origins, which are called like their routes map.
const (
	classifyChain   = "classify"
	masqueradeChain = "masquerade"
	refuseChain     = "refuse"
)

const reg0 = nf.Reg0

// ruler writes the rules of one family.
type ruler struct {
	nf.IP
	sets  map[string]*nf.Set
	facts *plan.Facts
	bit   uint32
}

func newRuler(sets map[string]*nf.Set, ip nf.IP, facts *plan.Facts, bit uint32) *ruler {
	return &ruler{ip, sets, facts, bit}
}

const dstnat, srcnat, mangle, filter = -100, 100, -150, 0

// chains are all of the table.
func (r *ruler) chains() []nf.Chain {
	out := []nf.Chain{
		{Name: refuseChain, Rules: r.Reject()},
		{Name: masqueradeChain, Rules: []nf.Rule{append(nf.CtMarkBit(r.bit), nf.Accept)}},
	}
	for o := range plan.Origins {
		out = append(out, nf.Chain{Name: routesMap[o], Rules: r.from(o)})
	}
	chosen := []nf.Rule{r.byMark(learnSet), unmark()}
	toClassify := []nf.Rule{{nf.Jump(classifyChain)}}
	hook := func(point uint32, priority int32) nf.Hook {
		return nf.Hook{Type: "filter", Point: point, Priority: priority}
	}
	return append(out,
		nf.Chain{Name: classifyChain, Rules: r.classify()},
		nf.Chain{Name: "prerouting", Hook: hook(unix.NF_INET_PRE_ROUTING, mangle), Rules: r.leading()},
		// IPVS looks at what comes in after all filters.
		nf.Chain{Name: "input", Hook: hook(unix.NF_INET_LOCAL_IN, filter), Rules: toClassify},
		// IPVS looks at what goes out right after the destination's translation, which is at -100.
		nf.Chain{Name: "output", Hook: hook(unix.NF_INET_LOCAL_OUT, mangle), Rules: append([]nf.Rule{r.remember()}, toClassify...)},
		nf.Chain{Name: "chosen-own", Hook: nf.Hook{Type: "route", Point: unix.NF_INET_LOCAL_OUT, Priority: dstnat + 3}, Rules: r.turning()},
		// Then it has chosen an endpoint, here or elsewhere.
		nf.Chain{Name: "chosen-here", Hook: hook(unix.NF_INET_LOCAL_IN, srcnat+1), Rules: chosen},
		nf.Chain{Name: "chosen", Hook: hook(unix.NF_INET_POST_ROUTING, mangle), Rules: append(r.answers(), chosen...)},
		nf.Chain{Name: "postrouting", Hook: nf.Hook{Type: "nat", Point: unix.NF_INET_POST_ROUTING, Priority: srcnat}, Rules: r.rewriting()},
	)
}

// classify finds the origin of what may be the first packet of a flow. A connection once made is IPVS' alone, whatever
// the plan says by now. So is a flow of UDP, unless IPVS has its endpoint no longer and must choose one anew.
func (r *ruler) classify() []nf.Rule {
	out := []nf.Rule{
		isAnswer(),
		nf.Concat(nf.Rule{nf.Proto(reg0), nf.Cmp{Reg: reg0, Not: true, Data: []byte{unix.IPPROTO_UDP}}}, inState(established|related), nf.Rule{nf.Return}),
		r.going(false),
		r.going(true),
		append(nf.IsProto(r.icmp()), nf.Return),
		append(r.frontend(false), r.isIn(rangedSet), r.Source(r.afterFrontend()), nf.IsIn{Set: r.sets[sourcesSet], Key: reg0, Not: true}, nf.Drop),
	}
	d := &r.facts.Pods
	for _, match := range r.From(d.Prefixes, d.Interface, d.InterfacePrefix) {
		out = append(out, append(match, nf.Goto(routesMap[plan.FromPod])))
	}
	return append(out,
		append(nf.IsLocal(true, false), nf.Goto(routesMap[plan.FromNode])),
		nf.Rule{nf.Goto(routesMap[plan.FromOutside])},
	)
}

// The bits of a connection's state.
const established, related = 2, 4

func inState(bits uint32) nf.Rule {
	return nf.HasBit(nf.Ct{Key: unix.NFT_CT_STATE, Dst: reg0}, bits, false)
}

// going matches packets of UDP whose endpoint, as connection tracking knows it from the answers, IPVS has for their frontend.
func (r *ruler) going(nodePort bool) nf.Rule {
	to, from := uint32(reg0+1), reg0+1+r.Words()
	out := nf.Concat(nf.IsProto(unix.IPPROTO_UDP), inState(established))
	before := len(out)
	// The nft tool does not know how long an address is that connection tracking tells, and aborts where one is a part of a key.
	// So it is put over a constant, but for its beginning, which the tool takes to be there still. (A constant has 16 bytes.)
	for zeros := range slices.Chunk(make([]byte, 4+r.Width), 16) {
		out = append(out, nf.Immediate{Dst: reg0 + uint32(len(out)-before)*4, Data: zeros})
	}
	return append(out,
		nf.Ct{Key: unix.NFT_CT_SRC, Direction: nf.Reply, Dst: to},
		r.frontendAddress(from, nodePort), nf.DestinationPort(from+r.Words()),
		nf.Ct{Key: unix.NFT_CT_PROTO_SRC, Direction: nf.Reply, Dst: from + r.Words() + 1},
		r.isIn(goingSet), nf.Return)
}

// leading marks packets whose address is not on our device, so that routing takes them for this node's: all of a flow, as
// its connection remembers, whatever became of the frontend since. A flow's first packet is rejected here already.
func (r *ruler) leading() []nf.Rule {
	return []nf.Rule{
		isAnswer(),
		r.remember(),
		append(r.remembered(), nf.Immediate{Dst: reg0, Data: nf.Number(ledMark)}, nf.SetMark(reg0)),
		append(r.frontend(false), r.isIn(ledSet), nf.Jump(classifyChain)),
	}
}

// led is the bit of the connection's mark that says that its frontend is led here: the one beside the other, whichever
// that is.
func (r *ruler) led() uint32 { return bits.RotateLeft32(r.bit, 1) }

// remember notes at the connection that its frontend is led here.
func (r *ruler) remember() nf.Rule {
	return nf.Concat(r.frontend(false), nf.Rule{r.isIn(ledSet)}, nf.CtMarkBit(r.led()))
}

// remembered matches packets of such connections.
func (r *ruler) remembered() nf.Rule { return ctBit(r.led()) }

func ctBit(bit uint32) nf.Rule { return nf.HasBit(nf.Ct{Key: unix.NFT_CT_MARK, Dst: reg0}, bit, false) }

// turning is for what this node sends to a frontend that is led here, and IPVS has given an endpoint on the node itself:
// IPVS leaves such a packet on the way out to where the frontend would be. In a chain of this type the kernel looks for
// the way again when the mark has changed; so it does, off where there was one and on where there was none.
func (r *ruler) turning() []nf.Rule {
	here := append(r.remembered(), nf.IsLocal(false, false)...)
	return []nf.Rule{
		isAnswer(),
		nf.Concat(here, r.byMark(learnSet)),
		nf.Concat(here, unmark(), nf.Rule{nf.Return}),
		nf.Concat(here, nf.Rule{nf.Immediate{Dst: reg0, Data: nf.Number(ledMark)}, nf.SetMark(reg0)}),
	}
}

// from are the rules for an origin: to a Service's address, which else leads nowhere (though it is on a device of this
// node, and whatever listens on all addresses listens there too); or to a node port.
func (r *ruler) from(o plan.Origin) []nf.Rule {
	marks := func(nodePort bool) nf.Rule {
		return append(r.frontend(nodePort), r.lookup(marksMap[o]), nf.SetMark(reg0))
	}
	routes := func(nodePort bool) nf.Rule {
		return append(r.frontend(nodePort), nf.VerdictMap(r.sets[routesMap[o]], reg0))
	}
	out := []nf.Rule{
		marks(false), r.byMark(stickySet), routes(false),
		{r.Destination(reg0), r.isIn(goneSet), nf.Drop},
		{r.Destination(reg0), r.isIn(vipsSet), nf.Goto(refuseChain)},
	}
	for _, match := range r.nodePortAddress() {
		out = append(out, nf.Concat(match, marks(true)), nf.Concat(match, r.byMark(stickySet)), nf.Concat(match, routes(true)))
	}
	return out
}

// byMark does what a map has for a packet's mark.
func (r *ruler) byMark(set string) nf.Rule {
	return nf.Rule{nf.Mark(reg0), nf.VerdictMap(r.sets[set], reg0)}
}

func stickChain(d time.Duration) string { return "stick-" + d.String() }
func learnChain(d time.Duration) string { return "learn-" + d.String() }

// affinity are the chains for clients that stay with their endpoint for a time. A packet comes there with its pool's mark.
func (r *ruler) affinity(d time.Duration) []nf.Chain {
	mark := reg0 + r.Words()
	clients := r.sets[affinitySet]
	client := nf.Rule{r.Source(reg0), nf.Mark(mark)}
	with := func(more ...nf.Expr) nf.Rule { return nf.Concat(client, more) }
	change := func(operation, data uint32, timeout time.Duration) nf.Expr {
		return nf.Dynset{Set: clients, Op: operation, Key: reg0, Data: data, Timeout: timeout}
	}
	return []nf.Chain{
		{Name: stickChain(d), Rules: []nf.Rule{
			// A client that is known counts as having come now; what is known of it stays, whatever an update says.
			with(nf.Lookup{Map: clients, Key: reg0, Dst: mark + 1}, change(unix.NFT_DYNSET_OP_UPDATE, mark, d)),
			with(nf.Lookup{Map: clients, Key: reg0, Dst: reg0}, nf.SetMark(reg0)),
			{nf.Mark(reg0), r.isIn(membersSet), nf.Return},
			// Its endpoint is gone: back to the pool.
			{nf.Mark(reg0), nf.Bitwise{Src: reg0, Dst: reg0, Mask: nf.Number(^uint32(maxSlot))}, nf.SetMark(reg0)},
		}},
		{Name: learnChain(d), Rules: []nf.Rule{
			// An update leaves what is known as it is: that must be deleted first.
			with(change(nf.DynsetDelete, mark, 0)),
			// The nft tool must be able to list this, and aborts where a key or data is what a map gave. It takes a register for
			// what was loaded into it last, and doesn't see that a map may fill two: slots gives the pool's mark and then the
			// endpoint's, which comes to lie where the tool sees the packet's.
			{
				r.Source(reg0), nf.Mark(mark + 1), r.Destination(mark + 2), nf.DestinationPort(mark + 2 + r.Words()),
				nf.Lookup{Map: r.sets[slotsSet], Key: mark + 1, Dst: mark},
				nf.Mark(mark),
				change(unix.NFT_DYNSET_OP_UPDATE, mark+1, d),
			},
		}},
	}
}

// nodePortAddress matches addresses on which node ports are served; one list for each way.
func (r *ruler) nodePortAddress() (out []nf.Rule) {
	n := &r.facts.NodePorts
	if n.All {
		return []nf.Rule{r.NotLoopback()}
	}
	for _, a := range n.Addrs {
		if a.Is6() == r.Is6() && !a.IsLoopback() {
			out = append(out, nf.Rule{r.Destination(reg0), nf.Cmp{Reg: reg0, Data: a.AsSlice()}})
		}
	}
	return out
}

// answers gives an answer the source that the client addressed, as connection tracking remembers it. IPVS knows only which
// client and which endpoint it is between: where a client uses one port for several addresses that lead to one
// endpoint, it takes the first that it finds. Only what was masqueraded can be told apart. Answers over
// IPv6 are left as they are.
func (r *ruler) answers() (out []nf.Rule) {
	if r.Is6() {
		return nil
	}
	for _, p := range []struct {
		protocol byte
		checksum uint32
	}{{unix.IPPROTO_TCP, 16}, {unix.IPPROTO_UDP, 6}} {
		out = append(out, nf.Concat(
			nf.IsProto(p.protocol), isReply(), ctBit(r.bit),
			nf.Rule{
				nf.Ct{Key: unix.NFT_CT_PROTO_DST, Direction: nf.Original, Dst: reg0},
				nf.SetPayload{Src: reg0, Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Offset: 0, Len: 2, ChecksumOffset: p.checksum},
				nf.Ct{Key: unix.NFT_CT_DST, Direction: nf.Original, Dst: reg0},
				nf.SetPayload{Src: reg0, Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 12, Len: 4, ChecksumOffset: 10, PseudoHeader: true},
			}))
	}
	return out
}

// unmark takes our mark away when it has served.
func unmark() nf.Rule {
	return nf.Rule{
		nf.Mark(reg0), nf.Bitwise{Src: reg0, Dst: reg0, Mask: nf.Number(markMask)}, nf.Cmp{Reg: reg0, Data: nf.Number(markBase)},
		nf.Immediate{Dst: reg0, Data: nf.Number(0)}, nf.SetMark(reg0),
	}
}

// rewriting are the rules of postrouting: what was noted; an endpoint that reached itself; and what comes from a
// Service's address, which the kernel takes for the node's own connections to it.
func (r *ruler) rewriting() []nf.Rule {
	return []nf.Rule{
		append(ctBit(r.bit), nf.Masquerade{}),
		{r.Source(reg0), r.Destination(reg0 + r.Words()), r.isIn(hairpinSet), nf.Masquerade{}},
		{r.Source(reg0), r.isIn(vipsSet), nf.Masquerade{}},
	}
}

// frontend loads the key of a frontend: of the packet's own address, or of node ports.
func (r *ruler) frontend(nodePort bool) nf.Rule {
	return nf.Rule{r.frontendAddress(reg0, nodePort), nf.Proto(reg0 + r.Words()), nf.DestinationPort(reg0 + r.Words() + 1)}
}

func (r *ruler) frontendAddress(reg uint32, nodePort bool) nf.Expr {
	if nodePort {
		return nf.Immediate{Dst: reg, Data: make([]byte, r.Width)}
	}
	return r.Destination(reg)
}

func (r *ruler) afterFrontend() uint32 { return reg0 + r.Words() + 2 }

func (r *ruler) icmp() byte {
	if r.Is6() {
		return unix.IPPROTO_ICMPV6
	}
	return unix.IPPROTO_ICMP
}

func (r *ruler) lookup(set string) nf.Expr { return nf.Lookup{Map: r.sets[set], Key: reg0, Dst: reg0} }

func (r *ruler) isIn(set string) nf.Expr { return nf.IsIn{Set: r.sets[set], Key: reg0} }

// isReply matches packets of a flow's other direction, isAnswer ends a chain for them.
func isReply() nf.Rule {
	return nf.Rule{nf.Ct{Key: unix.NFT_CT_DIRECTION, Dst: reg0}, nf.Cmp{Reg: reg0, Data: []byte{1}}}
}

func isAnswer() nf.Rule { return append(isReply(), nf.Return) }

func ipOf(f intent.Family) nf.IP {
	if f == intent.IPv6 {
		return nf.IPv6
	}
	return nf.IPv4
}
