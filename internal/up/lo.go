package up

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
)

// AddAddresses adds temporary addresses to the loopback interface, where only this machine reaches them. The function that it
// returns removes them. Addresses that an earlier run could not remove are taken over; an address that the machine has from
// somewhere else stays.
//
// A label marks IPv4 addresses as Portal's. IPv6 addresses have no labels; Portal's are deprecated from the start, which also
// keeps them from being chosen as source addresses.
func AddAddresses(addrs []netip.Addr) (remove func() error, err error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("the loopback interface: %w", err)
	}
	present, err := netlink.AddrList(lo, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of the loopback interface: %w", err)
	}
	var added []*netlink.Addr
	remove = func() error {
		var errs []error
		for _, a := range added {
			if err := netlink.AddrDel(lo, a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				errs = append(errs, fmt.Errorf("remove %s from lo: %w", a.IPNet, err))
			}
		}
		return errors.Join(errs...)
	}
	for _, addr := range addrs {
		a := temporary(addr)
		if i := slices.IndexFunc(present, func(p netlink.Addr) bool { return p.IP.Equal(a.IP) }); i >= 0 {
			if hostnet.IsTemporary(&present[i]) {
				added = append(added, a)
			}
			continue
		}
		if err := netlink.AddrAdd(lo, a); err != nil {
			return nil, errors.Join(fmt.Errorf("add %s to lo: %w", addr, err), remove())
		}
		added = append(added, a)
	}
	return remove, nil
}

func temporary(addr netip.Addr) *netlink.Addr {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}, Scope: unix.RT_SCOPE_HOST}
	if addr.Is4() {
		a.Label = hostnet.TemporaryLabel
		return a
	}
	a.Flags = unix.IFA_F_NODAD // lo has no other hosts, and a tentative address can't be listened on
	a.ValidLft = math.MaxInt32 // decades: only an address with a lifetime can be deprecated
	return a
}
