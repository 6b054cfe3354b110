package network

import "net/netip"

// Gateways are the node's own addresses among its Pods', one of each Pod CIDR: what the bridge has.
func (n *Bridge) Gateways() (out []netip.Addr) {
	for _, p := range n.CIDRs {
		out = append(out, Gateway(p))
	}
	return out
}
