package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/plan/oracle"
)

// maxHops bounds how often a packet is led on: an endpoint may be another node's port.
const maxHops = 8

// fewEndpoints are named in words; Ends has them all.
const fewEndpoints = 3

// judge asks what becomes of the packet on the node where it is.
func (x *walk) judge() oracle.Answer {
	own := func(a netip.Addr) bool {
		return a.IsLoopback() || slices.Contains(x.at.addrs, a) || slices.Contains(x.at.gateways, a)
	}
	return oracle.Judge(x.snapshot(x.at), oracle.Packet{
		Src: netip.AddrPortFrom(x.src, 1), Dst: x.dst, Protocol: x.protocol, In: x.in, SrcLocal: x.in == "" || own(x.src), DstLocal: own(x.dst.Addr()),
	})
}

// hop follows the packet through a node.
func (x *walk) hop() {
	if x.hops++; x.hops > maxHops {
		x.end(Lost, "it is led in circles")
		return
	}
	a := x.judge()
	if x.Service == "" {
		x.Node = x.at.Name
	}
	if a.Frontend == nil {
		x.withoutFrontend(&a)
		return
	}
	f := a.Frontend
	x.Service = f.ID.Service.String()
	x.step("frontend", "%s", frontendText(f, x.dst))
	x.step("origin", "%s", originText(a.Origin))
	for _, note := range x.snapshot(x.at).Services[f.ID.Service].Notes {
		x.step("frontend", "%s", note)
	}
	if f.Sources != nil {
		x.step("ranges", "loadBalancerSourceRanges let in %s", prefixText(f.Sources))
	}
	verdict := a.Verdict
	if verdict == oracle.Drop && x.mode.RejectsFirst && f.Rejected() {
		verdict = oracle.Reject
	}
	if verdict == oracle.Forward && x.mode.NoSCTP && x.protocol == intent.SCTP {
		x.end(Rejected, "the proxy mode %s does not carry SCTP", x.mode.Name)
		return
	}
	switch verdict {
	case oracle.Reject:
		if x.mode.PassesFromNode && x.in == "" && f.Kind != plan.ClusterIP {
			x.end(Lost, "%s; the proxy mode %s does not reject what a node itself sends there, so it goes out and finds nobody", x.whyNone(f), x.mode.Name)
			return
		}
		x.end(Rejected, "%s", x.whyNone(f))
	case oracle.Drop:
		x.end(Dropped, "%s", x.whyDropped(f))
	case oracle.Forward:
		x.forward(&a)
	}
}

// forward follows the packet to each endpoint of the pool.
func (x *walk) forward(a *oracle.Answer) {
	f := a.Frontend
	x.policy(f, a.Origin)
	n := len(a.Endpoints)
	var lines []string
	for i, e := range a.Endpoints {
		if i == fewEndpoints {
			lines = append(lines, "…")
			break
		}
		lines = append(lines, x.describe(e))
	}
	odds := ""
	if n > 1 {
		odds = fmt.Sprintf(", one is chosen %s, each with odds 1/%d", x.mode.Choice, n)
	}
	x.step("pool", "%s%s: %s", count(n, "endpoint"), odds, strings.Join(lines, ", "))
	if f.Affinity > 0 {
		x.step("affinity", "the client stays with its endpoint until %s after its last connection (sessionAffinity: ClientIP)", f.Affinity.Round(time.Second))
	}
	x.rewriting(a)
	good, failed := 0, (*Report)(nil)
	for _, e := range a.Endpoints {
		y := *x
		y.Report, y.odds = &Report{}, x.odds/float64(n)
		y.lead(e, a.Rewrites(e))
		x.Steps, x.Ends = append(x.Steps, y.Steps...), append(x.Ends, y.Ends...)
		for _, text := range y.Assumptions {
			x.assume(text)
		}
		if y.Verdict.Good() {
			good++
			x.Verdict, x.Reason = y.Verdict, y.Reason
		} else {
			failed = y.Report
		}
	}
	switch {
	case good == 0:
		x.Verdict, x.Reason = failed.Verdict, failed.Reason
	case good < n:
		x.Reason = fmt.Sprintf("%d of %d endpoints get it; else %s", good, n, failed.Reason)
	case n > 1:
		x.Reason = fmt.Sprintf("it arrives at one of %d endpoints", n)
	}
}

// rewriting says what becomes of the packet's addresses.
func (x *walk) rewriting(a *oracle.Answer) {
	self := slices.ContainsFunc(a.Endpoints, func(e netip.AddrPort) bool { return e.Addr() == x.src })
	switch {
	case x.mode.Relays:
		x.step("rewrite", "the proxy ends the connection and makes one of its own: the endpoint sees node %s, not %s", x.at.Name, x.src)
	case a.Masquerade:
		x.step("rewrite", "the destination becomes the endpoint's, the source an address of node %s instead of %s", x.at.Name, x.src)
	case self && len(a.Endpoints) == 1:
		x.step("rewrite", "the destination becomes the endpoint's, the source an address of node %s: the sender is the endpoint itself", x.at.Name)
	case self:
		x.step("rewrite", "the destination becomes the endpoint's, the source stays %s, unless the endpoint is the sender itself, which sees node %s", x.src, x.at.Name)
	default:
		x.step("rewrite", "the destination becomes the endpoint's, the source stays %s", x.src)
	}
}

// lead takes the packet to one endpoint.
func (x *walk) lead(e netip.AddrPort, masquerade bool) {
	if x.snapshot(x.at).ClusterIPs[e.Addr()] > 0 {
		x.end(Lost, "the endpoint %s is the cluster IP of a Service: what was led to an endpoint is not led on", e)
		return
	}
	if masquerade || x.mode.Relays {
		x.masqueraded = x.at
		if own := primary(x.at, e.Addr()); own.IsValid() {
			x.src = own
		}
	}
	x.dst = e
	other := x.nodeAt[e.Addr()]
	if other == x.at && x.nodePort() != nil {
		x.end(Lost, "the endpoint %s is a node port of the same node: what was led to an endpoint is not led on", e)
		return
	}
	if other != nil && other != x.at && x.podAt[e.Addr()] == nil {
		x.at, x.in = other, outside
		if x.judge().Frontend != nil {
			x.step("route", "the endpoint %s is a port of node %s", e, other.Name)
			x.hop()
			return
		}
	}
	x.arrive(e, "")
}

func primary(n *node, like netip.Addr) netip.Addr {
	for _, a := range n.addrs {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// withoutFrontend follows a packet that is not to a Service's port.
func (x *walk) withoutFrontend(a *oracle.Answer) {
	to := x.dst.Addr()
	own := slices.Contains(x.at.addrs, to) || slices.Contains(x.at.gateways, to) || to.IsLoopback()
	switch {
	case a.Verdict == oracle.Reject && !x.mode.PassesOtherPorts:
		x.end(Rejected, "%s", x.whyNoPort(to))
	case a.Verdict == oracle.Reject:
		x.end(Lost, "%s; the proxy mode %s does not reject it, so it goes out and finds nobody", x.whyNoPort(to), x.mode.Name)
	case a.Verdict == oracle.Drop:
		x.end(Dropped, "%s is in the range of cluster IPs, but no Service has it", to)
	case own:
		x.onNode()
	case x.podAt[to] != nil:
		x.step("route", "no Service has %s: it is the address of %s", to, x.describe(x.dst))
		x.arrive(x.dst, "")
	case x.nodeAt[to] != nil:
		x.step("route", "no Service has %s: it is an address of node %s", to, x.nodeAt[to].Name)
		if x.from.pod != nil && !x.at.ours && x.in == bridge {
			x.assume("Pods keep their address on the way to other nodes")
		}
		x.at, x.in = x.nodeAt[to], outside
		x.hop()
	default:
		x.out(to)
	}
}

// out ends the way of a packet to an address that nobody in the cluster has.
func (x *walk) out(to netip.Addr) {
	switch kind := x.inside(to); {
	case kind == "in the range of cluster IPs":
		x.end(Lost, "%s is %s, but no Service has it", to, kind)
	case kind != "":
		x.end(Lost, "%s is %s, but no Pod has it", to, kind)
	case x.served(to):
		x.end(Lost, "a Service has %s, but not the port %d/%s", to, x.dst.Port(), x.protocol)
	default:
		if x.from.pod != nil && !x.from.onNode() && x.at.ours {
			x.step("rewrite", "the source becomes an address of node %s: others don't know the way to Pods", x.at.Name)
		}
		x.end(Leaves, "no Service, Pod or node has %s: the packet leaves the cluster", to)
	}
}

func (x *walk) served(a netip.Addr) bool { return served(x.snapshot(x.at), a) }

// onNode ends at a process of the node, or at the Pod that has its port.
func (x *walk) onNode() {
	for _, p := range x.pods {
		if p.node != x.at.Name {
			continue
		}
		for _, h := range p.ports {
			if h.from != x.dst.Port() || h.protocol != x.protocol || h.host.IsValid() && h.host != x.dst.Addr() {
				continue
			}
			for _, a := range p.addrs {
				if a.Is4() == x.dst.Addr().Is4() {
					x.step("route", "no Service has port %d of node %s: it is the hostPort of Pod %s", h.from, x.at.Name, p.Key)
					x.arrive(netip.AddrPortFrom(a, h.to), "")
					return
				}
			}
		}
	}
	if f := x.nodePort(); f != nil {
		x.end(Rejected, "%d is the node port of Service %s, but node ports are not served at %s in the proxy mode %s as it is configured", x.dst.Port(), f.ID.Service, x.dst.Addr(), x.mode.Name)
		return
	}
	x.step("route", "no Service has port %d/%s at %s: the packet is for node %s itself", x.dst.Port(), x.protocol, x.dst.Addr(), x.at.Name)
	x.arrive(x.dst, "if a process listens there; otherwise the node rejects it")
}

// nodePort finds the node port of the packet's destination port, wherever node ports are served; nil: there is none.
func (x *walk) nodePort() *plan.Frontend {
	return x.snapshot(x.at).Frontends[plan.FrontendKey{Family: intent.FamilyOf(x.dst.Addr()), Protocol: x.protocol, Port: x.dst.Port()}]
}

// arrive notes a place where the way may end.
func (x *walk) arrive(at netip.AddrPort, remark string) {
	e := End{Address: at, Odds: x.odds}
	if p := x.podAt[at.Addr()]; p != nil {
		e.Pod, e.Node = p.Key.String(), p.node
	} else if n := x.nodeAt[at.Addr()]; n != nil {
		e.Node = n.Name
	} else if at.Addr().IsLoopback() && x.at != nil {
		e.Node = x.at.Name
	}
	if x.masqueraded != nil {
		e.Masqueraded, e.SourceNode = true, x.masqueraded.Name
	} else if e.Pod == "" && e.Node == "" && x.from.pod != nil && !x.from.onNode() && x.at != nil && x.at.ours {
		// Others don't know the way to Pods.
		e.Masqueraded, e.SourceNode = true, x.at.Name
	}
	x.Ends = append(x.Ends, e)
	x.Verdict = Arrives
	x.Reason = "it arrives at " + x.describe(at)
	if remark != "" {
		x.Reason += " (" + remark + ")"
	}
}
