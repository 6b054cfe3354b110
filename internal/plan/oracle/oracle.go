// Package oracle says what must become of a packet under a plan.Snapshot: the judge of every mode's tests, and the answer
// to "which way would it go?". It looks at one packet at a time, straight from the plan's words, and knows no mode.
package oracle

import (
	"net/netip"
	"strings"

	"portal/internal/intent"
	"portal/internal/plan"
)

// Packet is the first packet of a flow as it comes to the node, or leaves a process there.
type Packet struct {
	Src, Dst netip.AddrPort
	Protocol intent.Protocol
	// In is the interface it came in by; empty: a process on the node sent it.
	In string
	// SrcLocal and DstLocal: the address is one of the node's own, loopback included.
	SrcLocal, DstLocal bool
}

// Verdict is what becomes of a packet.
type Verdict uint8

const (
	// Pass: it is none of the proxy's business.
	Pass Verdict = iota
	Forward
	Reject
	Drop
)

func (v Verdict) String() string { return [...]string{"pass", "forward", "reject", "drop"}[v] }

// Answer is what must become of a packet.
type Answer struct {
	Verdict Verdict
	// Frontend is the one that it is addressed to, nil for none.
	Frontend *plan.Frontend
	Origin   plan.Origin
	// Endpoints are those that may get it.
	Endpoints []netip.AddrPort
	// Masquerade: the endpoint must see the node's address; see Rewrites.
	Masquerade bool

	src netip.Addr
}

// Rewrites says whether an endpoint must see the node's address instead of the client's.
func (a *Answer) Rewrites(endpoint netip.AddrPort) bool {
	return a.Masquerade || endpoint.Addr() == a.src
}

// Allows says whether an endpoint may get the packet.
func (a *Answer) Allows(endpoint netip.AddrPort) bool {
	for _, e := range a.Endpoints {
		if e == endpoint {
			return true
		}
	}
	return false
}

// Judge answers for a packet. Its addresses are taken as they are on the wire: an IPv4 address in IPv6's form is IPv4.
func Judge(s *plan.Snapshot, p Packet) Answer {
	src, dst := p.Src.Addr().Unmap(), p.Dst.Addr().Unmap()
	a := Answer{Origin: originOf(&s.Facts.Pods, src, p), src: src}
	a.Frontend = frontend(s, dst, p)
	if a.Frontend == nil {
		switch {
		case s.ClusterIPs[dst] > 0:
			a.Verdict = Reject
		case !p.DstLocal && contain(s.Facts.ServicePrefixes, dst):
			a.Verdict = Drop
		}
		return a
	}
	if !mayCome(a.Frontend.Sources, src) {
		a.Verdict = Drop
		return a
	}
	route := a.Frontend.Routes[a.Origin]
	switch route.Verdict {
	case plan.Reject:
		a.Verdict = Reject
	case plan.Drop:
		a.Verdict = Drop
	case plan.Forward:
		a.Verdict, a.Masquerade = Forward, route.Masquerade
		for _, e := range route.Pool.Endpoints {
			a.Endpoints = append(a.Endpoints, e.Addr)
		}
	}
	return a
}

// originOf classifies the source.
func originOf(pods *plan.Detector, src netip.Addr, p Packet) plan.Origin {
	for _, prefix := range pods.Prefixes {
		if prefix.Contains(src) {
			return plan.FromPod
		}
	}
	if p.In != "" && (p.In == pods.Interface || pods.InterfacePrefix != "" && strings.HasPrefix(p.In, pods.InterfacePrefix)) {
		return plan.FromPod
	}
	if p.SrcLocal {
		return plan.FromNode
	}
	return plan.FromOutside
}

// frontend finds who answers: an address of a Service first, then a node port.
func frontend(s *plan.Snapshot, dst netip.Addr, p Packet) *plan.Frontend {
	k := plan.FrontendKey{Addr: dst, Family: intent.FamilyOf(dst), Protocol: p.Protocol, Port: p.Dst.Port()}
	if f := s.Frontends[k]; f != nil {
		return f
	}
	if !takesNodePorts(&s.Facts.NodePorts, dst, p.DstLocal) {
		return nil
	}
	k.Addr = netip.Addr{}
	return s.Frontends[k]
}

func takesNodePorts(n *plan.NodePorts, dst netip.Addr, local bool) bool {
	if dst.IsLoopback() {
		return n.Loopback(intent.FamilyOf(dst))
	}
	if n.All {
		return local
	}
	for _, a := range n.Addrs {
		if a == dst {
			return true
		}
	}
	return false
}

func mayCome(sources []netip.Prefix, src netip.Addr) bool {
	return sources == nil || contain(sources, src)
}

func contain(list []netip.Prefix, a netip.Addr) bool {
	for _, prefix := range list {
		if prefix.Contains(a) {
			return true
		}
	}
	return false
}
