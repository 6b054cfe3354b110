package bgp

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// NextHops are the addresses of this machine that a peer sends packets to: one of each family that it can have.
type NextHops struct{ V4, V6 netip.Addr }

// of is the next hop for an address.
func (n NextHops) of(a netip.Addr) netip.Addr {
	if a.Is4() {
		return n.V4
	}
	return n.V6
}

// FindNextHops asks the kernel: for the peer's own family it is the address that the session comes from, for the other one the first address
// of the interface that the session goes over.
func FindNextHops(p Peer) (NextHops, error) {
	routes, err := netlink.RouteGet(net.IP(p.Address.AsSlice()))
	if err != nil {
		return NextHops{}, fmt.Errorf("no route to %s: %w", p.Address, err)
	}
	if len(routes) == 0 {
		return NextHops{}, fmt.Errorf("no route to %s", p.Address)
	}
	source := p.Source
	if !source.IsValid() {
		from, ok := netip.AddrFromSlice(routes[0].Src)
		if !ok {
			return NextHops{}, fmt.Errorf("the route to %s has no source address", p.Address)
		}
		source = from.Unmap()
	}
	var out NextHops
	other, family := &out.V6, netlink.FAMILY_V6
	if source.Is4() {
		out.V4 = source
	} else {
		out.V6 = source
		other, family = &out.V4, netlink.FAMILY_V4
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return out, fmt.Errorf("the interface to %s: %w", p.Address, err)
	}
	addrs, err := netlink.AddrList(link, family)
	if err != nil {
		return out, fmt.Errorf("addresses of %s: %w", link.Attrs().Name, err)
	}
	const unusable = 0x08 | 0x20 | 0x40 // IFA_F_DADFAILED, IFA_F_DEPRECATED, IFA_F_TENTATIVE
	for _, a := range addrs {
		addr, ok := netip.AddrFromSlice(a.IP)
		// Addresses of balancers may be on the interface, too, but as host routes.
		if bits, size := a.Mask.Size(); ok && a.Flags&unusable == 0 && addr.Unmap().IsGlobalUnicast() && (bits < size || size == 0) {
			*other = addr.Unmap()
			break
		}
	}
	return out, nil
}
