package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// deviceName is our device's. Whatever is on it is ours.
const deviceName = "portal-ipvs0"

// link is our device in the kernel.
type link struct {
	*netlink.Handle
	index int
}

func openLink() (*link, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a connection to the kernel's links: %w", err)
	}
	return &link{Handle: h}, nil
}

func (l *link) close() { l.Handle.Close() }

func (l *link) probe() error {
	if _, err := l.find(); err == nil {
		return nil
	}
	const name = "portal-probe0"
	d := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: name}}
	if err := l.LinkAdd(d); err != nil {
		return err
	}
	return l.LinkDel(d)
}

func (l *link) find() (netlink.Link, error) {
	found, err := l.LinkByName(deviceName)
	if err == nil {
		l.index = found.Attrs().Index
	}
	return found, err
}

func missing(err error) bool {
	var none netlink.LinkNotFoundError
	return errors.As(err, &none)
}

// ensure makes the device. It is up, since an IPv6 address on one that is down counts for nothing; without ARP, since
// nobody is behind it.
func (l *link) ensure() error {
	found, err := l.find()
	if missing(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = deviceName
		attrs.Flags = net.FlagUp
		if err := l.LinkAdd(&netlink.Dummy{LinkAttrs: attrs}); err != nil {
			return fmt.Errorf("make the device %s: %w", deviceName, err)
		}
		found, err = l.find()
	}
	if err != nil {
		return fmt.Errorf("find the device %s: %w", deviceName, err)
	}
	if found.Type() != "dummy" {
		return fmt.Errorf("the device %s is a %s and not ours: rename it", deviceName, found.Type())
	}
	if err := l.LinkSetARPOff(found); err != nil {
		return fmt.Errorf("set up the device %s: %w", deviceName, err)
	}
	if err := l.LinkSetUp(found); err != nil {
		return fmt.Errorf("set up the device %s: %w", deviceName, err)
	}
	return nil
}

func (l *link) list() (map[netip.Addr]bool, error) {
	out := map[netip.Addr]bool{}
	found, err := l.find()
	if missing(err) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := l.AddrList(found, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", deviceName, err)
	}
	for _, a := range list {
		// The kernel itself gives the device a link-local address.
		if addr, ok := netip.AddrFromSlice(a.IP); ok && !addr.IsLinkLocalUnicast() {
			out[addr.Unmap()] = true
		}
	}
	return out, nil
}

// elsewhere asks for the way to an address: if that ends here and our device hasn't the address, another has.
func (l *link) elsewhere(a netip.Addr) (bool, error) {
	routes, err := l.RouteGet(a.AsSlice())
	if err != nil {
		// There is no way to it at all.
		return false, nil
	}
	for _, r := range routes {
		if r.Type == unix.RTN_LOCAL {
			return true, nil
		}
	}
	return false, nil
}

func (l *link) address(a netip.Addr) (netlink.Link, *netlink.Addr) {
	out := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is6() {
		// Nobody else may be asked whether the address is free: every node has it.
		out.Flags = unix.IFA_F_NODAD
	}
	return &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: deviceName, Index: l.index}}, out
}

func (l *link) add(a netip.Addr) error {
	on, addr := l.address(a)
	return unless(unix.EEXIST, l.AddrAdd(on, addr))
}

func (l *link) del(a netip.Addr) error {
	on, addr := l.address(a)
	return unless(unix.EADDRNOTAVAIL, l.AddrDel(on, addr))
}

func (l *link) remove() error {
	found, err := l.find()
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := l.LinkDel(found); err != nil {
		return fmt.Errorf("remove the device %s: %w", deviceName, err)
	}
	return nil
}
