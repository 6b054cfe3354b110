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
)

// label marks an IPv4 address as lent, so that a run that follows a killed one knows it for its own. An IPv6 address has
// no label; it is known by being deprecated from the beginning, which also keeps it from being anybody's source address.
const label = "lo:portal"

// Lend gives the machine further addresses, on its loopback interface, where only the machine itself reaches them. The
// function that it returns takes them back. Addresses that an earlier run could not take back are taken over; those
// that the machine has from somebody else are left to it.
func Lend(addrs []netip.Addr) (takeBack func() error, err error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("the loopback interface: %w", err)
	}
	there, err := netlink.AddrList(lo, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of the loopback interface: %w", err)
	}
	var lent []*netlink.Addr
	takeBack = func() error {
		var errs []error
		for _, a := range lent {
			if err := netlink.AddrDel(lo, a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				errs = append(errs, fmt.Errorf("take %s from lo: %w", a.IPNet, err))
			}
		}
		return errors.Join(errs...)
	}
	for _, addr := range addrs {
		a := loan(addr)
		if i := slices.IndexFunc(there, func(t netlink.Addr) bool { return t.IP.Equal(a.IP) }); i >= 0 {
			if isLoan(&there[i]) {
				lent = append(lent, a)
			}
			continue
		}
		if err := netlink.AddrAdd(lo, a); err != nil {
			return nil, errors.Join(fmt.Errorf("lend %s to lo: %w", addr, err), takeBack())
		}
		lent = append(lent, a)
	}
	return takeBack, nil
}

func loan(addr netip.Addr) *netlink.Addr {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}, Scope: unix.RT_SCOPE_HOST}
	if addr.Is4() {
		a.Label = label
		return a
	}
	a.Flags = unix.IFA_F_NODAD // nobody else is on lo, and an address under examination can't be listened on
	a.ValidLft = math.MaxInt32 // decades: an address can be deprecated only where it has a limit
	return a
}

func isLoan(a *netlink.Addr) bool {
	if a.IP.To4() != nil {
		return a.Label == label
	}
	return a.Flags&unix.IFA_F_DEPRECATED != 0 && a.Flags&unix.IFA_F_NODAD != 0
}

// CanLend says whether this process may lend addresses.
func CanLend() bool {
	lo, err := netlink.LinkByName("lo")
	if err != nil || lo.Attrs().Flags&net.FlagUp == 0 {
		return false
	}
	var capabilities [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&header, &capabilities[0]); err != nil {
		return false
	}
	return capabilities[0].Effective&(1<<unix.CAP_NET_ADMIN) != 0
}
