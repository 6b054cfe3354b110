// Package peers leads a node's packets to the Pods of other nodes: directly where the other node is on a link of this one, otherwise
// in a VXLAN tunnel. All of it follows from the nodes' addresses and prefixes (Make, which is pure), so nodes tell each other nothing.
// It knows nothing of the API and of single Pods.
package peers

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Node is a node as far as its Pods are to be reached.
type Node struct {
	Name      string
	Addresses []netip.Addr // by which other nodes reach it
	PodCIDRs  []netip.Prefix
}

// Link is an interface of this machine that is up, with its addresses and their prefixes.
type Link struct {
	Index    int
	Name     string
	MTU      int
	Prefixes []netip.Prefix
}

// Tunnels says which nodes are reached through tunnels.
type Tunnels string

// The choices.
const (
	// Auto: those that are on no link of this machine.
	Auto Tunnels = "auto"
	// Always: all. Some networks drop what has a Pod's address, even between machines on one link.
	Always Tunnels = "always"
	// Never: none. Those that are on no link of this machine are not reached, unless others make routes.
	Never Tunnels = "never"
)

// Input is all that a plan follows from.
type Input struct {
	Self  Node
	Links []Link
	Peers []Node
	// Cluster are the prefixes of all Pods, if they are known.
	Cluster []netip.Prefix
	Tunnels Tunnels
}

// Kind is what becomes of packets to a prefix.
type Kind int

// The kinds.
const (
	Unreachable Kind = iota // the sender gets an error
	Direct                  // by the node itself, on a shared link
	Tunnelled
)

func (k Kind) String() string { return [...]string{"unreachable", "direct", "tunnelled"}[k] }

// Way is how packets get to the Pods of a node.
type Way struct {
	Node string
	Kind Kind
	// Address is the node's: the gateway, or the other end of the tunnel.
	Address netip.Addr
	Link    int // of a direct way
}

// Tunnel is a VXLAN device: one for each family of addresses that nodes reach each other by.
type Tunnel struct {
	Local netip.Addr
	MTU   int
}

// Plan says how each prefix is reached.
type Plan struct {
	Ways map[netip.Prefix]Way
	// Fallbacks are prefixes of Pods whose addresses lead nowhere unless there is a better route: packets to them must not leave by the
	// default route, and come back.
	Fallbacks []netip.Prefix
	Tunnels   []Tunnel
	// Own are this node's prefixes of Pods.
	Own []netip.Prefix
	// MTU is the largest that fits all ways.
	MTU int
	// Problems are what keeps nodes from being reached, for people.
	Problems []string
}

// Neighbours are the addresses of nodes that are reached directly, in order.
func (p *Plan) Neighbours() (out []netip.Addr) {
	for _, w := range p.Ways {
		if w.Kind == Direct && !slices.Contains(out, w.Address) {
			out = append(out, w.Address)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

const (
	// defaultMTU is for a machine of which nothing is known.
	defaultMTU = 1500
	// minMTU is what IPv6 needs.
	minMTU = 1280
)

// overhead is what a tunnel adds to a packet: Ethernet, VXLAN, UDP and IP.
func overhead(outer netip.Addr) int {
	if outer.Is4() {
		return 14 + 8 + 8 + 20
	}
	return 14 + 8 + 8 + 40
}

// Make plans.
func Make(in Input) *Plan {
	p := &Plan{Ways: map[netip.Prefix]Way{}, Own: in.Self.PodCIDRs, Fallbacks: slices.Concat(in.Self.PodCIDRs, in.Cluster)}
	slices.SortFunc(p.Fallbacks, comparePrefixes)
	p.Fallbacks = slices.Compact(p.Fallbacks)
	for _, a := range in.Self.Addresses {
		p.fits(in.mtu(a))
	}
	others := slices.Clone(in.Peers)
	slices.SortFunc(others, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	for _, peer := range others {
		if peer.Name == in.Self.Name {
			continue
		}
		for _, to := range peer.PodCIDRs {
			if why := p.refuse(&in, to); why != "" {
				p.problem(peer.Name, to, why)
				continue
			}
			w, why := in.way(peer, to)
			if why != "" {
				p.problem(peer.Name, to, why)
			}
			p.Ways[to] = w
			p.use(&in, w)
		}
	}
	slices.SortFunc(p.Tunnels, func(a, b Tunnel) int { return a.Local.Compare(b.Local) })
	if p.MTU == 0 {
		p.MTU = defaultMTU
	}
	p.MTU = max(p.MTU, minMTU)
	return p
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

func (p *Plan) problem(node string, to netip.Prefix, why string) {
	p.Problems = append(p.Problems, fmt.Sprintf("the Pods of node %s (%s) are not reached: %s", node, to, why))
}

func (p *Plan) fits(mtu int) {
	if p.MTU == 0 || mtu < p.MTU {
		p.MTU = mtu
	}
}

// use notes what a way needs.
func (p *Plan) use(in *Input, w Way) {
	switch w.Kind {
	case Direct:
		for _, l := range in.Links {
			if l.Index == w.Link {
				p.fits(l.MTU)
			}
		}
	case Tunnelled:
		local := in.own(w.Address.Is4())
		mtu := max(in.mtu(local)-overhead(local), minMTU)
		p.fits(mtu)
		if t := (Tunnel{local, mtu}); !slices.Contains(p.Tunnels, t) {
			p.Tunnels = append(p.Tunnels, t)
		}
	}
}

// carrierGrade are addresses that are nobody's on the internet, as private ones.
var carrierGrade = netip.MustParsePrefix("100.64.0.0/10")

// refuse says why a node can't have a prefix: its traffic is all that it should get.
func (p *Plan) refuse(in *Input, to netip.Prefix) string {
	switch a := to.Addr(); {
	case to != to.Masked():
		return fmt.Sprintf("it must be %s", to.Masked())
	case to.Bits() == 0:
		return "it is all addresses there are"
	case a.IsLoopback(), a.IsMulticast(), a.IsLinkLocalUnicast(), a.Is4In6():
		return "such addresses can't be those of Pods"
	case len(in.Cluster) > 0 && !slices.ContainsFunc(in.Cluster, func(c netip.Prefix) bool { return c.Bits() <= to.Bits() && c.Contains(a) }):
		return "it is outside of the cluster's prefixes"
	case len(in.Cluster) == 0 && !a.IsPrivate() && !carrierGrade.Contains(a):
		return "it is not of a private range, and would draw others' traffic: name it with --cluster-cidr"
	}
	for _, own := range in.Self.PodCIDRs {
		if own.Overlaps(to) {
			return fmt.Sprintf("it overlaps %s, which is this node's", own)
		}
	}
	for taken, w := range p.Ways {
		if taken.Overlaps(to) {
			return fmt.Sprintf("it overlaps %s, which is of node %s", taken, w.Node)
		}
	}
	for _, l := range in.Links {
		for _, own := range l.Prefixes {
			if to.Contains(own.Addr()) {
				return fmt.Sprintf("this machine's own address %s is in it", own.Addr())
			}
		}
	}
	for _, n := range in.Peers {
		for _, a := range n.Addresses {
			if to.Contains(a) {
				return fmt.Sprintf("the address %s of node %s is in it", a, n.Name)
			}
		}
	}
	return ""
}

// way finds how a node's prefix is reached.
func (in *Input) way(peer Node, to netip.Prefix) (Way, string) {
	nowhere := Way{Node: peer.Name}
	if len(peer.Addresses) == 0 {
		return nowhere, "it has no address of type InternalIP yet"
	}
	for _, a := range peer.Addresses {
		if in.isOwn(a) {
			return nowhere, fmt.Sprintf("it says that it has this machine's address %s", a)
		}
	}
	if in.Tunnels != Always {
		// A gateway is of the family of what it leads to.
		for _, a := range peer.Addresses {
			if link, ok := in.shared(a); ok && a.Is4() == to.Addr().Is4() {
				return Way{peer.Name, Direct, a, link}, ""
			}
		}
	}
	if in.Tunnels == Never {
		return nowhere, "it is on no link of this machine, and tunnels are turned off"
	}
	// Both ends choose the same family: IPv4 if both have it.
	for _, four := range []bool{true, false} {
		i := slices.IndexFunc(peer.Addresses, func(a netip.Addr) bool { return a.Is4() == four })
		if i >= 0 && in.own(four).IsValid() {
			return Way{Node: peer.Name, Kind: Tunnelled, Address: peer.Addresses[i]}, ""
		}
	}
	return nowhere, fmt.Sprintf("it has the addresses %s, and this node none of such a family", join(peer.Addresses))
}

func join(list []netip.Addr) string {
	var out []string
	for _, a := range list {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}

// shared is the link that an address is on, if there is one: of several, that with the longest prefix.
func (in *Input) shared(a netip.Addr) (link int, ok bool) {
	longest := -1
	for _, l := range in.Links {
		for _, p := range l.Prefixes {
			if p.Masked().Contains(a) && p.Bits() < a.BitLen() && p.Bits() > longest {
				link, ok, longest = l.Index, true, p.Bits()
			}
		}
	}
	return link, ok
}

// own is this node's address of a family.
func (in *Input) own(four bool) netip.Addr {
	for _, a := range in.Self.Addresses {
		if a.Is4() == four {
			return a
		}
	}
	return netip.Addr{}
}

func (in *Input) isOwn(a netip.Addr) bool {
	return slices.Contains(in.Self.Addresses, a) || slices.ContainsFunc(in.Links, func(l Link) bool {
		return slices.ContainsFunc(l.Prefixes, func(p netip.Prefix) bool { return p.Addr() == a })
	})
}

// mtu is that of the link with an address of this machine. One that is on none (on the loopback interface, for example) may be reached
// by any.
func (in *Input) mtu(a netip.Addr) int {
	least := 0
	for _, l := range in.Links {
		if slices.ContainsFunc(l.Prefixes, func(p netip.Prefix) bool { return p.Addr() == a }) {
			return l.MTU
		}
		if least == 0 || l.MTU < least {
			least = l.MTU
		}
	}
	return cmp.Or(least, defaultMTU)
}
