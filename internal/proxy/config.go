package proxy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// DetectLocal is by what Pods' traffic is told from others'.
type DetectLocal string

const (
	DetectClusterCIDR     DetectLocal = "ClusterCIDR"
	DetectNodeCIDR        DetectLocal = "NodeCIDR"
	DetectBridgeInterface DetectLocal = "BridgeInterface"
	DetectInterfacePrefix DetectLocal = "InterfaceNamePrefix"
)

// Config is what an administrator decides about a node's proxy.
type Config struct {
	Node string
	// Families are those that the kernel has.
	Families []intent.Family
	// NodeAddr replaces the node's primary address of its family; invalid: the Node object's counts.
	NodeAddr netip.Addr

	DetectLocal     DetectLocal
	ClusterCIDRs    []netip.Prefix
	Bridge          string
	InterfacePrefix string

	MasqueradeAll bool
	NodePorts     NodePortAddresses
	// LocalhostNodePorts lets the iptables mode serve node ports on 127.0.0.1 too.
	LocalhostNodePorts bool
	ProxyName          string
	// MinSync is the least time between two changes of the kernel's tables; zero: none.
	MinSync time.Duration
}

// NodePortAddresses says where node ports are served. Nothing set: as the mode is used to.
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

var loopback4, loopback6 = netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")

// facts puts together what a plan must know: the node as the API has it (nil: not known there), the addresses of its
// interfaces, the prefixes of Services' addresses, and what was configured, some of which the mode has its own habits about.
func (c *Config) facts(node *intent.Node, local []netip.Addr, services []netip.Prefix, mode string) *plan.Facts {
	f := &plan.Facts{Node: c.Node, MasqueradeAll: c.MasqueradeAll, ProxyName: c.ProxyName}
	if node != nil {
		f.Zone = node.Labels["topology.kubernetes.io/zone"]
	}
	f.Addrs = c.nodeAddrs(node, local)
	f.Families = c.families(f.Addrs)
	f.Pods = c.detector(node)
	f.NodePorts = c.nodePorts(f, local, mode)
	if mode == "nftables" {
		f.ServicePrefixes = services
	}
	return f
}

// nodeAddrs are the node's addresses, internal ones first, as its Node object has them; without one, those of its
// interfaces that others could reach.
func (c *Config) nodeAddrs(node *intent.Node, local []netip.Addr) []netip.Addr {
	var out []netip.Addr
	if c.NodeAddr.IsValid() && !c.NodeAddr.IsUnspecified() {
		out = append(out, c.NodeAddr.Unmap())
	}
	if node != nil {
		for _, kind := range []string{"InternalIP", "ExternalIP"} {
			for _, a := range node.Addresses {
				if a.Type == kind {
					out = append(out, a.Addr.Unmap())
				}
			}
		}
	}
	if len(out) == 0 {
		for _, a := range local {
			if a.IsGlobalUnicast() {
				out = append(out, a)
			}
		}
	}
	return out
}

// families puts the family of the node's first address first.
func (c *Config) families(addrs []netip.Addr) []intent.Family {
	out := slices.Clone(c.Families)
	if len(addrs) > 0 && len(out) == 2 && intent.FamilyOf(addrs[0]) == out[1] {
		slices.Reverse(out)
	}
	return out
}

func (c *Config) detector(node *intent.Node) (d plan.Detector) {
	switch c.DetectLocal {
	case DetectNodeCIDR:
		if node != nil {
			d.Prefixes = onePerFamily(node.PodCIDRs)
		}
	case DetectBridgeInterface:
		d.Interface = c.Bridge
	case DetectInterfacePrefix:
		d.InterfacePrefix = c.InterfacePrefix
	default:
		d.Prefixes = onePerFamily(c.ClusterCIDRs)
	}
	return d
}

func onePerFamily(list []netip.Prefix) (out []netip.Prefix) {
	seen := map[intent.Family]bool{}
	for _, p := range list {
		if f := intent.FamilyOf(p.Addr()); !seen[f] {
			seen[f] = true
			out = append(out, p.Masked())
		}
	}
	return out
}

// nodePorts works out where node ports are served. A family for which nothing is said is served everywhere.
func (c *Config) nodePorts(f *plan.Facts, local []netip.Addr, mode string) plan.NodePorts {
	want := c.NodePorts
	if want.empty() {
		want.Primary, want.All = mode == "nftables", mode != "nftables"
	}
	var out plan.NodePorts
	all := 0
	for _, family := range f.Families {
		prefixes := want.of(family, f.Addrs)
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
		// Only iptables has the habit of serving loopback without being asked by name.
		*serves = named
		if mode == "iptables" {
			*serves = c.LocalhostNodePorts && family == intent.IPv4 && (named || everywhere)
		}
	}
	slices.SortFunc(out.Checks, netip.Addr.Compare)
	out.Checks = slices.Compact(out.Checks)
	if all == len(f.Families) {
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
	zero, loop := netip.PrefixFrom(netip.IPv4Unspecified(), 0), loopback4
	if family == intent.IPv6 {
		zero, loop = netip.PrefixFrom(netip.IPv6Unspecified(), 0), loopback6
	}
	if n.All {
		out = append(out, zero)
	}
	if n.Localhost {
		out = append(out, loop)
	}
	if i := slices.IndexFunc(node, func(a netip.Addr) bool { return intent.FamilyOf(a) == family }); n.Primary && i >= 0 && !node[i].IsLoopback() {
		out = append(out, netip.PrefixFrom(node[i], node[i].BitLen()))
	}
	return out
}
