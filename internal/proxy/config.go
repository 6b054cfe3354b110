package proxy

import (
	"net/netip"
	"slices"
	"time"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

// DetectLocal is how traffic of Pods is recognised.
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
	NodePorts     plan.NodePortAddresses
	// LocalhostNodePorts lets a mode that does so by default (plan.Traits) serve node ports at loopback addresses.
	LocalhostNodePorts bool
	ProxyName          string
	// MinSync is the least time between two changes of the kernel's tables, by mode; zero: none.
	MinSync map[string]time.Duration
}

// facts puts together what a plan must know: the node as the API has it (nil: not known there), the addresses of its
// interfaces, the prefixes of Services' addresses, and what was configured, some of which depends on the mode.
func (c *Config) facts(node *intent.Node, have hostnet.Addresses, services []netip.Prefix, traits plan.Traits) *plan.Facts {
	f := &plan.Facts{Node: c.Node, MasqueradeAll: c.MasqueradeAll, ProxyName: c.ProxyName, Temporary: have.Temporary}
	if node != nil {
		f.Zone = node.Labels["topology.kubernetes.io/zone"]
	}
	f.Addrs = c.nodeAddrs(node, have.Node, services)
	f.Families = c.families(f.Addrs)
	f.Pods = c.detector(node)
	if traits.LoopbackByDefault && !c.LocalhostNodePorts {
		traits.Loopback4, traits.Loopback6 = false, false
	}
	f.NodePorts = c.NodePorts.For(traits, f.Families, f.Addrs, have.Local)
	if traits.DropsUnassigned {
		f.ServicePrefixes = services
	}
	return f
}

// nodeAddrs are the node's addresses, internal ones first, as its Node object has them; without one, the machine's own, but
// for those of Services, which may be on one of its interfaces.
func (c *Config) nodeAddrs(node *intent.Node, own []netip.Addr, services []netip.Prefix) []netip.Addr {
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
		for _, a := range own {
			if !slices.ContainsFunc(services, func(p netip.Prefix) bool { return p.Contains(a) }) {
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
