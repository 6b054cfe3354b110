package userspace

import (
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

const (
	tableName = "portal-userspace"
	// ownMark is on what this process sends, so that it is not redirected back to it.
	ownMark = 0x20000

	rejectChain = "reject"
	reg0        = nf.Reg0
)

var (
	families = []intent.Family{intent.IPv4, intent.IPv6}
	origins  = [plan.Origins]string{"pod", "node", "outside"}
)

// listening are the ports of our sockets of one family, by origin: the port that a connection is redirected to says where
// it comes from.
type listening struct{ tcp, udp [plan.Origins]uint16 }

// table writes the nftables table of one family. Rules are the same whatever Services there are; Services are elements of
// sets.
type table struct {
	nf.IP
	at     *nf.Table
	source Source

	vips, nodePorts, clusterIPs, guarded, allowed, protocols, nodeAddrs, sockets *nf.Set
	// By origin, with and without an address: what is rejected or dropped; and who gets packets while the process is away.
	refused, pick, slots [plan.Origins][2]*nf.Set
	// affinity is what a restarted process reads of its clients' endpoints.
	affinity *nf.Set
}

func newTable(f intent.Family, s Source) *table { return tableNamed(f, s, tableName) }

func tableNamed(f intent.Family, s Source, name string) *table {
	t := &table{IP: nf.IPv4, source: s}
	if f == intent.IPv6 {
		t.IP = nf.IPv6
	}
	t.at = &nf.Table{Family: t.Family, Name: name, Comment: "written by portal, not for saving and loading: it leads to sockets of a process"}
	addr := t.AddrField()
	set := func(name string, key ...nf.Field) *nf.Set { return &nf.Set{Table: t.at, Name: name, Key: key} }
	frontend, port := []nf.Field{addr, nf.ProtoField, nf.PortField}, []nf.Field{nf.ProtoField, nf.PortField}
	t.vips, t.guarded = set("vips", frontend...), set("guarded", frontend...)
	t.nodePorts, t.sockets = set("node-ports", port...), set("sockets", port...)
	t.clusterIPs, t.nodeAddrs, t.protocols = set("cluster-ips", addr), set("node-addrs", addr), set("protocols", nf.ProtoField)
	t.allowed = set("allowed", append(slices.Clone(frontend), addr)...)
	t.allowed.Intervals = true
	for o, name := range origins {
		for i, key := range [][]nf.Field{frontend, port} {
			suffix := []string{"", "-ports"}[i]
			t.refused[o][i] = set(name+"-refused"+suffix, key...)
			t.pick[o][i] = set(name+"-pick"+suffix, key...)
			t.refused[o][i].Verdicts, t.pick[o][i].Verdicts = true, true
			t.slots[o][i] = set(name+"-slots"+suffix, append(slices.Clone(key), nf.NumberField)...)
			t.slots[o][i].Data = []nf.Field{addr, nf.PortField}
		}
	}
	t.affinity = set("affinity", addr, nf.NumberField, nf.NumberField)
	t.affinity.Data, t.affinity.Dynamic, t.affinity.Size = []nf.Field{addr, nf.PortField}, true, affinityLimit
	return t
}

// key loads what a packet is addressed to, with or without the address.
func (t *table) key(withAddr bool) nf.Rule {
	if withAddr {
		return nf.Rule{t.Destination(reg0), nf.Proto(reg0 + t.Words()), nf.DestinationPort(reg0 + t.Words() + 1)}
	}
	return nf.Rule{nf.Proto(reg0), nf.DestinationPort(reg0 + 1)}
}

// base declares the rules and sets, and elements that are there whatever Services there are. Without sockets, the chains
// that lead to them are empty.
func (t *table) base(b *nf.Batch, facts *plan.Facts, at *listening, present *nf.Present) {
	b.Replace(t.at, present)
	for _, s := range []*nf.Set{t.vips, t.nodePorts, t.clusterIPs, t.guarded, t.allowed, t.protocols, t.nodeAddrs, t.sockets, t.affinity} {
		b.AddSet(s)
	}
	for o := range origins {
		b.AddSet(t.refused[o][0])
		b.AddSet(t.refused[o][1])
	}
	for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
		b.Add(t.protocols, nf.Element{Key: []byte{p}})
	}
	for _, a := range facts.NodePorts.Addrs {
		if a.Is6() == t.Is6() && !a.IsLoopback() {
			b.Add(t.nodeAddrs, nf.Element{Key: t.AppendAddr(nil, a)})
		}
	}
	pods := t.From(facts.Pods.Prefixes, facts.Pods.Interface, facts.Pods.InterfacePrefix)
	ports := t.ports(&facts.NodePorts)
	t.reject(b, pods, ports)
	t.redirect(b, pods, ports, "in", t.home(facts), at)
	t.redirect(b, pods, ports, "out", netip.Addr{}, at)
	if at != nil {
		t.guardSockets(b, at)
	}
	if t.source == Preserve {
		// Answers to a client's address that one of our sockets has are ours; a rule for this mark routes them here.
		b.AddChain(t.at, nf.Chain{
			Name: "come-back", Hook: nf.Hook{Type: "filter", Point: unix.NF_INET_PRE_ROUTING, Priority: -150},
			Rules: []nf.Rule{append(nf.Rule{nf.Transparent{Dst: reg0}, nf.Cmp{Reg: reg0, Data: []byte{1}}}, nf.MarkBit(returnMark)...)},
		})
	}
}

// notOurs matches packets that this process hasn't sent.
func notOurs() nf.Rule { return nf.HasBit(nf.Mark(reg0), ownMark, true) }

// reject are the chains for packets that are rejected or dropped, before their destination is changed, which happens at
// -100.
func (t *table) reject(b *nf.Batch, pods, ports []nf.Rule) {
	add := func(name string, hook nf.Hook, rules ...nf.Rule) {
		b.AddChain(t.at, nf.Chain{Name: name, Hook: hook, Rules: rules})
	}
	add(rejectChain, nf.Hook{}, t.Reject()...)
	for o, name := range origins {
		rules := []nf.Rule{
			append(t.key(true), nf.VerdictMap(t.refused[o][0], reg0)),
			append(t.key(true), nf.IsIn{Set: t.vips, Key: reg0}, nf.Return),
		}
		for _, match := range ports {
			rules = append(rules, nf.Concat(match, t.key(false), nf.Rule{nf.VerdictMap(t.refused[o][1], reg0)}))
		}
		add("refuse-"+name, nf.Hook{}, append(rules, nf.Rule{
			nf.Proto(reg0), nf.IsIn{Set: t.protocols, Key: reg0}, t.Destination(reg0), nf.IsIn{Set: t.clusterIPs, Key: reg0}, nf.Goto(rejectChain),
		})...)
	}
	excluded := append(t.key(true), nf.IsIn{Set: t.guarded, Key: reg0}, t.Source(reg0+t.Words()+2), nf.IsIn{Set: t.allowed, Key: reg0, Not: true}, nf.Drop)
	add("refuse", nf.Hook{}, append([]nf.Rule{excluded}, byOrigin("refuse", pods)...)...)
	const isNew = 8
	first := nf.Concat(nf.HasBit(nf.Ct{Key: unix.NFT_CT_STATE, Dst: reg0}, isNew, false), nf.Rule{nf.Jump("refuse")})
	add("refuse-in", nf.Hook{Type: "filter", Point: unix.NF_INET_PRE_ROUTING, Priority: -110}, first)
	add("refuse-out", nf.Hook{Type: "filter", Point: unix.NF_INET_LOCAL_OUT, Priority: -110}, nf.Concat(notOurs(), first))
}

// byOrigin sends packets to one of three chains.
func byOrigin(prefix string, pods []nf.Rule) (out []nf.Rule) {
	for _, match := range pods {
		out = append(out, nf.Concat(match, nf.Rule{nf.Goto(prefix + "-pod")}))
	}
	return append(out, append(nf.IsLocal(true, false), nf.Goto(prefix+"-node")), nf.Rule{nf.Goto(prefix + "-outside")})
}

// ports matches packets to addresses on which node ports are served; one list for each way.
func (t *table) ports(n *plan.NodePorts) []nf.Rule {
	family := intent.IPv4
	if t.Is6() {
		family = intent.IPv6
	}
	switch {
	case n.All && n.Loopback(family):
		return []nf.Rule{nf.IsLocal(false, false)}
	case n.All:
		return []nf.Rule{t.NotLoopback()}
	}
	out := []nf.Rule{{t.Destination(reg0), nf.IsIn{Set: t.nodeAddrs, Key: reg0}}}
	if n.Loopback(family) {
		out = append(out, append(nf.Rule{t.Destination(reg0)}, t.Within(t.Loopback(), false)...))
	}
	return out
}

// redirect are the chains that lead a packet to the socket of its protocol and origin: at an address, or at that of the
// interface which the packet came in by.
func (t *table) redirect(b *nf.Batch, pods, ports []nf.Rule, way string, to netip.Addr, at *listening) {
	for o, name := range origins {
		c := nf.Chain{Name: way + "-" + name}
		if at != nil {
			c.Rules = []nf.Rule{t.toSocket(unix.IPPROTO_TCP, to, at.tcp[o]), t.toSocket(unix.IPPROTO_UDP, to, at.udp[o])}
		} else {
			for i, withAddr := range []bool{true, false} {
				c.Rules = append(c.Rules, append(t.key(withAddr), nf.VerdictMap(t.pick[o][i], reg0)))
			}
		}
		b.AddChain(t.at, c)
	}
	b.AddChain(t.at, nf.Chain{Name: way + "-origin", Rules: byOrigin(way, pods)})
	vips := []nf.Rule{append(t.key(true), nf.IsIn{Set: t.vips, Key: reg0}, nf.Goto(way+"-origin"))}
	for _, match := range ports {
		vips = append(vips, nf.Concat(match, t.key(false), nf.Rule{nf.IsIn{Set: t.nodePorts, Key: reg0}, nf.Goto(way + "-origin")}))
	}
	b.AddChain(t.at, nf.Chain{Name: way + "-vips", Rules: vips})
	take := nf.Chain{
		Name: "take-" + way, Hook: nf.Hook{Type: "nat", Point: unix.NF_INET_PRE_ROUTING, Priority: -100}, Rules: []nf.Rule{{nf.Jump(way + "-vips")}},
	}
	if way == "out" {
		take.Hook.Point, take.Rules = unix.NF_INET_LOCAL_OUT, []nf.Rule{append(notOurs(), nf.Jump(way+"-vips"))}
	}
	b.AddChain(t.at, take)
}

func (t *table) toSocket(proto byte, to netip.Addr, port uint16) nf.Rule {
	out := nf.IsProto(proto)
	at := nf.Immediate{Dst: reg0, Data: []byte{byte(port >> 8), byte(port)}}
	if !to.IsValid() {
		return append(out, at, nf.Redirect{Port: reg0})
	}
	return append(out, at, nf.Immediate{Dst: reg0 + 1, Data: t.AppendAddr(nil, to)}, nf.DNAT{Family: t.Family, Addr: reg0 + 1, Port: reg0})
}

// guardSockets rejects what comes to our sockets without having been redirected there.
func (t *table) guardSockets(b *nf.Batch, at *listening) {
	for o := range origins {
		b.Add(t.sockets, nf.Element{Key: nf.AppendPort(nf.AppendProto(nil, unix.IPPROTO_TCP), at.tcp[o])})
		b.Add(t.sockets, nf.Element{Key: nf.AppendPort(nf.AppendProto(nil, unix.IPPROTO_UDP), at.udp[o])})
	}
	const dstNAT = 1 << 5 // IPS_DST_NAT
	notRedirected := nf.HasBit(nf.Ct{Key: unix.NFT_CT_STATUS, Dst: reg0}, dstNAT, true)
	b.AddChain(t.at, nf.Chain{
		Name: "input", Hook: nf.Hook{Type: "filter", Point: unix.NF_INET_LOCAL_IN, Priority: -10},
		Rules: []nf.Rule{nf.Concat(t.key(false), nf.Rule{nf.IsIn{Set: t.sockets, Key: reg0}}, notRedirected, nf.Rule{nf.Goto(rejectChain)})},
	})
}

// home is the address of this node that packets from elsewhere are redirected to: the interface that they come in by may
// have none, without which a plain redirect fails.
func (t *table) home(facts *plan.Facts) netip.Addr {
	local := localAddrs()
	for _, a := range facts.Addrs {
		if a.Is6() == t.Is6() && slices.Contains(local, a) {
			return a
		}
	}
	return netip.Addr{}
}

// localAddrs are those of the node's interfaces.
func localAddrs() []netip.Addr {
	var out []netip.Addr
	list, _ := net.InterfaceAddrs()
	for _, l := range list {
		if p, err := netip.ParsePrefix(l.String()); err == nil {
			out = append(out, p.Addr())
		}
	}
	return out
}

// element is an element of a set, comparable.
type element struct {
	set            *nf.Set
	key, end, data string
	verdict        nf.Verdict
}

func (e element) encode() nf.Element {
	out := nf.Element{Key: []byte(e.key), Data: []byte(e.data), Verdict: e.verdict}
	if e.end != "" {
		out.End = []byte(e.end)
	}
	return out
}

// elements are what a frontend adds to the sets.
func (t *table) elements(f *plan.Frontend) []element {
	key, kind := t.frontendKey(f)
	members := t.vips
	if f.Kind == plan.NodePort {
		members = t.nodePorts
	}
	var out []element
	forwards := false
	for o, r := range f.Routes {
		switch {
		case r.Verdict == plan.Drop:
			out = append(out, element{set: t.refused[o][kind], key: key, verdict: nf.Drop})
		case r.Verdict == plan.Reject || f.Protocol == intent.SCTP:
			out = append(out, element{set: t.refused[o][kind], key: key, verdict: nf.Goto(rejectChain)})
		default:
			forwards = true
		}
	}
	if forwards {
		out = append(out, element{set: members, key: key})
	}
	if f.Sources != nil {
		out = append(out, element{set: t.guarded, key: key})
		for _, p := range nf.Disjoint(f.Sources) {
			if p.Addr().Is6() == t.Is6() {
				out = append(out, element{set: t.allowed, key: key + string(p.Addr().AsSlice()), end: key + string(nf.Last(p).AsSlice())})
			}
		}
	}
	return out
}

// frontendKey is a frontend in a set, and in which of two: that with addresses or that without.
func (t *table) frontendKey(f *plan.Frontend) (key string, kind int) {
	b := nf.AppendPort(nf.AppendProto(nil, byte(f.Protocol)), f.Port)
	if f.Kind == plan.NodePort {
		return string(b), 1
	}
	return string(f.Addr.AsSlice()) + string(b), 0
}

// clusterIP is the element of an address whose other ports are rejected.
func (t *table) clusterIP(a netip.Addr) element {
	return element{set: t.clusterIPs, key: string(a.AsSlice())}
}

// change deletes and adds elements.
func change(b *nf.Batch, gone, come map[element]bool) {
	for e := range gone {
		b.Delete(e.set, e.encode())
	}
	for e := range come {
		b.Add(e.set, e.encode())
	}
}
