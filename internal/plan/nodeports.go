package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"portal/internal/intent"
)

// Traits are what a mode can do and does by default, as far as facts depend on it.
type Traits struct {
	// PrimaryNodePorts: unless configured otherwise, node ports are served at the node's primary addresses. Without it they are
	// served at all.
	PrimaryNodePorts bool
	// Loopback4 and Loopback6: node ports can be served at loopback addresses of the family.
	Loopback4, Loopback6 bool
	// LoopbackByDefault: node ports that are served at all addresses are served at loopback addresses too.
	LoopbackByDefault bool
	// DropsUnassigned: packets to an address of a service range that no Service has are dropped.
	DropsUnassigned bool
	// Relays: connections end at the proxy's process, so that the kernel forwards nothing.
	Relays bool
}

func (t *Traits) loopback(f intent.Family) bool {
	if f == intent.IPv6 {
		return t.Loopback6
	}
	return t.Loopback4
}

// NodePortAddresses says where node ports should be served, as configured. Nothing set: the mode's default.
type NodePortAddresses struct {
	Primary, Localhost, All bool
	Prefixes                []netip.Prefix
}

// ParseNodePortAddresses reads prefixes and the words primary, localhost and all.
func ParseNodePortAddresses(list []string) (out NodePortAddresses, err error) {
	for _, s := range list {
		switch s = strings.TrimSpace(s); s {
		case "primary":
			out.Primary = true
		case "localhost":
			out.Localhost = true
		case "all":
			out.All = true
		default:
			p, err := netip.ParsePrefix(s)
			if err != nil {
				return out, fmt.Errorf("%q is neither a prefix such as 192.0.2.0/24 nor one of primary, localhost, all", s)
			}
			out.Prefixes = append(out.Prefixes, p.Masked())
		}
	}
	return out, nil
}

func (n *NodePortAddresses) empty() bool {
	return !n.Primary && !n.Localhost && !n.All && len(n.Prefixes) == 0
}

// Unserved are the loopback addresses that are asked for by name and that a mode with these traits can't serve node ports
// at. The word localhost asks for IPv4 only: programs try that too.
func (n *NodePortAddresses) Unserved(t Traits, families []intent.Family) (out []netip.Prefix) {
	for _, f := range families {
		asked := n.Localhost && f == intent.IPv4 || slices.ContainsFunc(n.Prefixes, func(p netip.Prefix) bool {
			return intent.FamilyOf(p.Addr()) == f && p.Addr().IsLoopback()
		})
		if asked && !t.loopback(f) {
			out = append(out, loopbackOf(f))
		}
	}
	return out
}

func loopbackOf(f intent.Family) netip.Prefix {
	if f == intent.IPv6 {
		return netip.PrefixFrom(netip.IPv6Loopback(), 128)
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8)
}

// For works out where node ports are served on a node with these addresses: node are those of the node itself, the primary
// one of a family first, local those of all interfaces. A family for which nothing is configured is served everywhere.
func (n NodePortAddresses) For(t Traits, families []intent.Family, node, local []netip.Addr) NodePorts {
	if n.empty() {
		n.Primary, n.All = t.PrimaryNodePorts, !t.PrimaryNodePorts
	}
	var out NodePorts
	all := 0
	for _, family := range families {
		prefixes := n.of(family, node)
		everywhere := len(prefixes) == 0 || slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Bits() == 0 })
		named := slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Addr().IsLoopback() })
		var here []netip.Addr
		for _, a := range local {
			if intent.FamilyOf(a) == family && !a.IsLoopback() && (everywhere || slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })) {
				here = append(here, a)
			}
		}
		out.Addrs = append(out.Addrs, here...)
		unspecified, loopback, serves := netip.IPv4Unspecified(), netip.AddrFrom4([4]byte{127, 0, 0, 1}), &out.Loopback4
		if family == intent.IPv6 {
			unspecified, loopback, serves = netip.IPv6Unspecified(), netip.IPv6Loopback(), &out.Loopback6
		}
		switch {
		case everywhere:
			all++
			here = []netip.Addr{unspecified}
		case named:
			here = append(here, loopback)
		}
		out.Checks = append(out.Checks, here...)
		*serves = t.loopback(family) && (named || everywhere && t.LoopbackByDefault)
	}
	slices.SortFunc(out.Checks, netip.Addr.Compare)
	out.Checks = slices.Compact(out.Checks)
	if all == len(families) {
		out.All, out.Addrs = true, nil
		return out
	}
	slices.SortFunc(out.Addrs, netip.Addr.Compare)
	out.Addrs = slices.Compact(out.Addrs)
	return out
}

// of lists what is wanted in a family, as prefixes.
func (n *NodePortAddresses) of(family intent.Family, node []netip.Addr) (out []netip.Prefix) {
	for _, p := range n.Prefixes {
		if intent.FamilyOf(p.Addr()) == family {
			out = append(out, p)
		}
	}
	if n.All {
		zero := netip.IPv4Unspecified()
		if family == intent.IPv6 {
			zero = netip.IPv6Unspecified()
		}
		out = append(out, netip.PrefixFrom(zero, 0))
	}
	if n.Localhost {
		out = append(out, loopbackOf(family))
	}
	if i := slices.IndexFunc(node, func(a netip.Addr) bool { return intent.FamilyOf(a) == family }); n.Primary && i >= 0 && !node[i].IsLoopback() {
		out = append(out, netip.PrefixFrom(node[i], node[i].BitLen()))
	}
	return out
}
