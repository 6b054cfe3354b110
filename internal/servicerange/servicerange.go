// Package servicerange reads the ranges of ServiceCIDR objects. It is pure.
package servicerange

import (
	"net/netip"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
)

// Prefixes are a ServiceCIDR's ranges. The API lets no text in that can't be read.
func Prefixes(cidr *networkingv1.ServiceCIDR) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range cidr.Spec.CIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// Covered says that a Service may have the address by one of the ranges: a network's own address and IPv4's broadcast
// are nobody's.
func Covered(by []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(by, func(p netip.Prefix) bool {
		return p.Contains(addr) && addr != p.Addr() && (addr.Is6() || p.Contains(addr.Next()))
	})
}
