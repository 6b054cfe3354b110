package trace

import (
	"fmt"
	"net/netip"
	"strings"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Trace answers a question. An error is a MistakeError, unless the world itself is unusable.
func (w *World) Trace(q Question) (*Report, error) {
	from, err := w.sender(&q)
	if err != nil {
		return nil, err
	}
	to, err := parseTarget(q.To)
	if err != nil {
		return nil, err
	}
	via, err := w.via(&q)
	if err != nil {
		return nil, err
	}
	r := &Report{From: from.String(), To: q.To, Protocol: to.protocol.String(), Mode: w.mode.Name, Steps: []Step{}}
	if via != nil && from.node != nil {
		return nil, mistake("via", "is for packets from outside, but %s sends from its own node", from)
	}
	addrs := []netip.Addr{to.addr}
	if to.name != "" {
		if addrs, err = w.lookup(r, from, &to, q.Namespace); err != nil || len(addrs) == 0 {
			return r, err
		}
	}
	w.follow(r, from, via, &to, addrs)
	return r, nil
}

// lookup resolves the target's name; without addresses, the way has ended.
func (w *World) lookup(r *Report, from *sender, to *target, namespace string) ([]netip.Addr, error) {
	if from.pod != nil {
		namespace = from.pod.Namespace
	}
	found, err := w.resolve(to.name, namespace)
	if err != nil {
		return nil, err
	}
	if from.node == nil {
		r.assume("the client asks the cluster's DNS: others don't know these names")
	}
	step := func(format string, args ...any) {
		r.Steps = append(r.Steps, Step{Kind: "dns", Text: fmt.Sprintf(format, args...)})
	}
	end := func(v Verdict, format string, args ...any) {
		r.Verdict, r.Reason = v, fmt.Sprintf(format, args...)
	}
	if found.full == "" {
		step("the cluster's DNS has no address for %s", strings.Join(found.tried, ", "))
		last := found.tried[len(found.tried)-1]
		switch why := w.whyUnresolved(found.tried); {
		case why != "":
			end(Unresolved, "%s has no address: %s", to.name, why)
		case strings.HasSuffix(last, "."+w.Zone+"."):
			end(Unresolved, "%s has no address: there is no such Service", to.name)
		default:
			end(Unresolved, "%s is no name of this cluster: others must resolve it, and a trace asks nobody outside", to.name)
		}
		return nil, nil
	}
	if found.outside != "" {
		step("%s is an alias of %s, which is outside of the cluster", found.full, found.outside)
		end(Leaves, "%s is an alias of %s: the packet goes where that name leads", found.full, found.outside)
		return nil, nil
	}
	// Programs prefer the family that they reach: IPv4 where both are there, because cluster addresses of IPv6 are unique local ones.
	addrs := found.addrs
	for _, f := range []intent.Family{intent.IPv4, intent.IPv6} {
		if list := found.of(f); len(list) > 0 && from.addr(f).IsValid() {
			addrs = list
			break
		}
	}
	var text []string
	for _, a := range addrs {
		text = append(text, a.String())
	}
	step("%s is %s", found.full, strings.Join(text, ", "))
	return addrs, nil
}

// follow walks to each of the addresses of a name, and keeps the words of the first way.
func (w *World) follow(r *Report, from *sender, via *node, to *target, addrs []netip.Addr) {
	for i, a := range addrs {
		one := r
		if i > 0 {
			one = &Report{}
		}
		x := &walk{World: w, Report: one, from: from, via: via, dst: netip.AddrPortFrom(a, to.port), protocol: to.protocol, odds: 1 / float64(len(addrs))}
		x.start()
		if i == 0 {
			r.Target = x.dst
			continue
		}
		r.Ends = append(r.Ends, one.Ends...)
		if one.Verdict != r.Verdict {
			r.Steps = append(r.Steps, Step{Kind: "end", Text: fmt.Sprintf("to %s it is otherwise: %s: %s", a, one.Verdict, one.Reason)})
		}
		if one.Verdict.Good() && !r.Verdict.Good() {
			r.Verdict, r.Reason = one.Verdict, one.Reason
		}
	}
	if n := len(addrs); n > 1 && r.Verdict == Arrives {
		r.Reason = fmt.Sprintf("it arrives at one of %d addresses of the name", n)
	}
}

// walk is a packet on its way.
type walk struct {
	*World
	*Report
	from     *sender
	via      *node
	src      netip.Addr
	dst      netip.AddrPort
	protocol intent.Protocol
	// at is the node where it is, in the interface that it came by; empty: it starts there.
	at *node
	in string
	// masqueraded is the node whose address it has; nil: its sender's.
	masqueraded *node
	odds        float64
	hops        int
}

// outside is the name of the interface by which packets from other machines come; it makes no difference.
const outside = "eth0"

func (x *walk) step(kind, format string, args ...any) {
	s := Step{Kind: kind, Text: fmt.Sprintf(format, args...)}
	if x.at != nil {
		s.Node = x.at.Name
	}
	x.Steps = append(x.Steps, s)
}

// end ends the way without arriving.
func (x *walk) end(v Verdict, format string, args ...any) {
	x.Verdict, x.Reason = v, fmt.Sprintf(format, args...)
	x.step("end", "%s: %s", v, x.Reason)
}

// start finds the first node.
func (x *walk) start() {
	family := intent.FamilyOf(x.dst.Addr())
	x.src = x.from.addr(family)
	if x.dst.Addr().IsLoopback() {
		x.src = x.dst.Addr()
	}
	x.Source = x.src
	switch {
	case !x.src.IsValid():
		x.end(Lost, "%s has no address of IPv%d to send from", x.from, family)
	case x.dst.Addr().IsLoopback() && !x.from.onNode():
		x.end(Arrives, "%s is the sender's own loopback address: the packet does not leave it", x.dst.Addr())
	case x.from.pod != nil && !x.from.onNode() && x.podAt[x.dst.Addr()] == x.from.pod:
		x.arrive(x.dst, "the Pod's own address")
	case x.from.onNode():
		x.at = x.from.node
		x.hop()
	case x.from.node != nil:
		x.at, x.in = x.from.node, bridge
		x.hop()
	default:
		x.enter()
	}
}

// enter finds the node that a packet from outside comes to.
func (x *walk) enter() {
	if !x.from.named {
		x.assume(fmt.Sprintf("the client has the address %s (--from ADDRESS for another)", x.src))
	}
	x.in = outside
	a := x.dst.Addr()
	if x.via != nil {
		x.at = x.via
		x.step("route", "the network leads %s to node %s, as asked", a, x.at.Name)
		x.hop()
		return
	}
	if n := x.nodeAt[a]; n != nil && x.owns(n, a) {
		x.at = n
		x.step("route", "%s is an address of node %s", a, n.Name)
		x.hop()
		return
	}
	if n := x.node(x.announced[a]); n != nil {
		x.at = n
		x.step("route", "node %s announces %s", n.Name, a)
		x.hop()
		return
	}
	if n, why := x.holder(a); n != nil {
		x.at = n
		x.step("route", "the network leads %s to a node that serves it: %s", a, n.Name)
		x.assume(fmt.Sprintf("the packet comes in at node %s%s (--via NODE for another)", n.Name, why))
		x.hop()
		return
	}
	switch kind := x.inside(a); kind {
	case "":
		x.end(Leaves, "neither the sender nor %s is in the cluster: the packet does not come here", a)
	default:
		x.end(Lost, "%s is %s, which networks outside of the cluster don't know the way to (--via NODE if yours does)", a, kind)
	}
}

// owns says whether an address is the node's among machines, not among its Pods alone.
func (x *walk) owns(n *node, a netip.Addr) bool {
	for _, own := range n.addrs {
		if own == a {
			return true
		}
	}
	return false
}

// inside says what an address of the cluster is; empty: it is none.
func (x *walk) inside(a netip.Addr) string {
	for _, p := range x.cluster.ServicePrefixes() {
		if p.Contains(a) {
			return "in the range of cluster IPs"
		}
	}
	if x.podAt[a] != nil {
		return "a Pod's address"
	}
	for _, n := range x.nodes {
		for _, p := range n.PodCIDRs {
			if p.Contains(a) {
				return "in the range of Pods of node " + n.Name
			}
		}
	}
	if len(x.nodes) > 0 && x.snapshot(x.nodes[0]).ClusterIPs[a] > 0 {
		return "a cluster IP"
	}
	return ""
}

// holder picks the node that a balancer's or external address leads to if none is known to announce it, and says why that one. Balancers ask nodes whether they have
// endpoints, if only those will do.
func (x *walk) holder(a netip.Addr) (first *node, why string) {
	key := plan.FrontendKey{Addr: a, Family: intent.FamilyOf(a), Protocol: x.protocol, Port: x.dst.Port()}
	for _, n := range x.nodes {
		s := x.snapshot(n)
		f := s.Frontends[key]
		if f == nil {
			if served(s, a) && first == nil {
				first = n
			}
			continue
		}
		if f.Kind == plan.ClusterIP {
			return nil, ""
		}
		if first == nil {
			first = n
		}
		if f.Routes[plan.FromOutside].Verdict == plan.Forward {
			if n != first {
				why = ", which has endpoints of its own"
			}
			return n, why
		}
	}
	return first, why
}

// served says whether an address is some Service's, at any port, but no cluster IP.
func served(s *plan.Snapshot, a netip.Addr) bool {
	for k, f := range s.Frontends {
		if k.Addr == a && f.Kind != plan.ClusterIP {
			return true
		}
	}
	return false
}
