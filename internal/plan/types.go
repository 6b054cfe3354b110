package plan

import (
	"net/netip"
	"slices"
	"time"

	"portal/internal/intent"
)

// Origin is where a packet to a frontend comes from, as this node can tell. The first that applies counts.
type Origin uint8

const (
	// FromPod: a source that Facts.Pods recognises.
	FromPod Origin = iota
	// FromNode: a source address of this node.
	FromNode
	// FromOutside: any other.
	FromOutside
	// Origins is their number.
	Origins
)

// Verdict is what happens to the first packet of a flow.
type Verdict uint8

const (
	// Forward sends it to an endpoint of the route's pool.
	Forward Verdict = iota
	// Reject answers that nobody is there.
	Reject
	// Drop loses it: another node could have answered, and a balancer in front tries it.
	Drop
)

// Kind says why an address and port is a frontend.
type Kind uint8

const (
	ClusterIP Kind = iota
	ExternalIP
	LoadBalancerIP
	NodePort
)

// PortID names one port of a Service in one family. Clients with affinity stick to an endpoint of it, through whichever
// frontend they come.
type PortID struct {
	Service  intent.Key
	Port     string
	Protocol intent.Protocol
	Family   intent.Family
}

// FrontendKey is where packets are addressed to. Addr is the zero Addr for a node port, which is served on every address
// in Facts.NodePorts of the family.
type FrontendKey struct {
	Addr     netip.Addr
	Family   intent.Family
	Protocol intent.Protocol
	Port     uint16
}

// Frontend is an address and port on which a Service answers on this node.
type Frontend struct {
	FrontendKey
	ID   PortID
	Kind Kind
	// Affinity is how long after its last connection a client stays with its endpoint; zero: no affinity.
	Affinity time.Duration
	// Sources are the only ones that may come; nil lets everyone. Others are dropped, whatever their route. They are in order and
	// don't overlap.
	Sources []netip.Prefix
	// Routes are indexed by Origin.
	Routes [Origins]Route
}

// Rejected says whether packets are rejected wherever they come from: there is no endpoint at all.
func (f *Frontend) Rejected() bool {
	for _, r := range f.Routes {
		if r.Verdict != Reject {
			return false
		}
	}
	return true
}

// Forwards says whether packets of some origin are forwarded.
func (f *Frontend) Forwards() bool {
	return slices.ContainsFunc(f.Routes[:], func(r Route) bool { return r.Verdict == Forward })
}

// LeadsTo says whether packets of some origin are forwarded to an endpoint.
func (f *Frontend) LeadsTo(endpoint netip.AddrPort) bool {
	var last *Pool
	for _, r := range f.Routes {
		if r.Pool == nil || r.Pool == last {
			continue
		}
		last = r.Pool
		if _, found := slices.BinarySearchFunc(r.Pool.Endpoints, endpoint, func(e Endpoint, at netip.AddrPort) int { return e.Addr.Compare(at) }); found {
			return true
		}
	}
	return false
}

// Route is what becomes of packets of one origin.
type Route struct {
	Verdict Verdict
	// Masquerade: the endpoint sees this node's address instead of the client's. An endpoint that reaches itself through
	// the Service (hairpin) always sees the node's address.
	Masquerade bool
	// Pool is where to forward to; nil for the other verdicts. Frontends and routes that choose among the same
	// endpoints share one Pool.
	Pool *Pool
}

// Pool is a set of endpoints among which the choice is even. It is never empty and never changed.
type Pool struct {
	ID PortID
	// Local: all of its endpoints are on this node.
	Local bool
	// Endpoints are in the order of their addresses and ports, without duplicates.
	Endpoints []Endpoint
}

// Endpoint is an address and port that a backend listens on.
type Endpoint struct {
	Addr netip.AddrPort
	// Local: it is on this node.
	Local bool
}

// HealthCheck is a port on which a balancer asks whether this node has endpoints of a Service.
type HealthCheck struct {
	Service intent.Key
	Port    uint16
	// Endpoints is how many ready endpoints of the Service are on this node, by the family of the address that is asked: those of that
	// family, or of the only one that the Service has.
	Endpoints map[intent.Family]int
}

// Serving are the endpoints of a port of a protocol without connections that still serve, chosen or not: what goes on
// to them is left alone when pools change, as it would be with TCP.
type Serving struct {
	ID        PortID
	Endpoints []netip.AddrPort
}

// Lost counts ports that lose traffic because a policy says Local and this node has no endpoint while others have.
type Lost struct{ Internal, External int }

// Service is what the plan says about one Service.
type Service struct {
	intent.Key
	// Frontends are in the order of their keys.
	Frontends []*Frontend
	// ClusterIPs are the addresses whose other ports are rejected.
	ClusterIPs []netip.Addr
	// HealthCheck is nil where there is none.
	HealthCheck *HealthCheck
	// Serving has an element for each port of UDP or SCTP.
	Serving []Serving
	// Lost is nil where nothing is.
	Lost map[intent.Family]Lost
	// Notes are what of the Service is not served as it asks, in words for people.
	Notes []string
}

// ServiceChange is one changed plan. Old is what was acknowledged, New what has been now; nil: not there.
type ServiceChange struct {
	intent.Key
	Old, New *Service
}

// Facts are what a plan must know of the node it is for, and of its configuration.
type Facts struct {
	Node string
	// Zone is the node's, from its label; hints are followed only where it is known.
	Zone string
	// Families are those that this node serves, the first the primary one.
	Families []intent.Family
	// Addrs are the node's own addresses as its Node object says, the first of each family the primary one.
	Addrs []netip.Addr
	// Pods recognises Pods' sources.
	Pods Detector
	// MasqueradeAll rewrites the source of everything sent to a cluster IP.
	MasqueradeAll bool
	NodePorts     NodePorts
	// ServicePrefixes are where cluster IPs are taken from: what goes to one that no Service has is dropped, unless it is
	// this node's. Empty where the mode doesn't do so.
	ServicePrefixes []netip.Prefix
	// Temporary are addresses of this node that Portal itself added, for endpoints that run here.
	Temporary []netip.Addr
	// Exempt are never frontends, but for cluster IPs, which nobody can choose: the proxy itself uses them to reach the API, and
	// a Service that took one could not be removed any more. One without an address is a node port.
	Exempt []FrontendKey
	// ProxyName is the value of the label service.kubernetes.io/service-proxy-name for which this proxy is responsible;
	// usually empty, which means Services without it.
	ProxyName string
}

// Detector tells Pods' traffic by its source. All zero: it can't, and nothing is FromPod.
type Detector struct {
	// Prefixes hold the Pods' addresses: of the cluster or of the node.
	Prefixes []netip.Prefix
	// Interface is the bridge that all Pods are behind, InterfacePrefix the beginning of the names of their interfaces.
	Interface, InterfacePrefix string
}

// Known says whether Pods of the family can be recognised.
func (d *Detector) Known(f intent.Family) bool {
	if d.Interface != "" || d.InterfacePrefix != "" {
		return true
	}
	for _, p := range d.Prefixes {
		if intent.FamilyOf(p.Addr()) == f {
			return true
		}
	}
	return false
}

// NodePorts says on which of the node's addresses node ports are served.
type NodePorts struct {
	// All: on every local address. Otherwise on Addrs.
	All   bool
	Addrs []netip.Addr
	// Loopback4 and Loopback6: on 127.0.0.1 or ::1 too, where the mode can.
	Loopback4, Loopback6 bool
	// Checks are where health checks are answered. The unspecified address of a family means all of it.
	Checks []netip.Addr
}

// Loopback says whether loopback addresses of a family count.
func (n *NodePorts) Loopback(f intent.Family) bool {
	if f == intent.IPv6 {
		return n.Loopback6
	}
	return n.Loopback4
}
