package ipvs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/intent"
)

// deviceName is our device's. Whatever is on it is ours.
const deviceName = "portal-ipvs0"

// link is our device in the kernel.
type link struct {
	*netlink.Handle
	index int
}

func openLink() (*link, error) {
	h, err := hostnet.OpenNetlink(netns.None(), unix.NETLINK_ROUTE)
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
func (l *link) ensure(families []intent.Family) error {
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
	return l.installRoutes(families)
}

// routeTable is where a packet with our mark finds that it is at its destination. The number is also that of the rule
// that sends it there.
const routeTable = 20560

// bothFamilies is for removal: what is there may be from when the machine had IPv6.
var bothFamilies = []intent.Family{intent.IPv4, intent.IPv6}

// everywhere is the prefix of all addresses of a family, and the kernel's number of the family.
func everywhere(f intent.Family) (*net.IPNet, int) {
	if f == intent.IPv6 {
		return &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, netlink.FAMILY_V6
	}
	return &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, netlink.FAMILY_V4
}

// routingRules are about packets with our marks: those that a process here sends, or IPVS sends on, go where they would
// without one; all others are for this node.
func routingRules(families []intent.Family) (out []*netlink.Rule) {
	for _, f := range families {
		mask := uint32(markMask)
		sent, here := netlink.NewRule(), netlink.NewRule()
		sent.Priority, sent.IifName, sent.Table = routeTable-1, "lo", unix.RT_TABLE_MAIN
		here.Priority, here.Table = routeTable, routeTable
		for _, r := range []*netlink.Rule{sent, here} {
			_, r.Family = everywhere(f)
			r.Mark, r.Mask = markBase, &mask
			out = append(out, r)
		}
	}
	return out
}

// localRoutes are the routes in our table.
func (l *link) localRoutes(families []intent.Family) (out []*netlink.Route) {
	for _, f := range families {
		dst, family := everywhere(f)
		out = append(out, &netlink.Route{Table: routeTable, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST, Family: family, Dst: dst, LinkIndex: l.index})
	}
	return out
}

// installRoutes makes those of the families in use: a kernel with IPv6 turned off refuses its routes.
func (l *link) installRoutes(families []intent.Family) error {
	for _, r := range l.localRoutes(families) {
		if err := l.RouteReplace(r); err != nil {
			return fmt.Errorf("make a local route in the table %d: %w", routeTable, err)
		}
	}
	for _, r := range routingRules(families) {
		if there, err := l.has(r); err != nil {
			return err
		} else if there {
			continue
		}
		if err := l.RuleAdd(r); err != nil {
			return fmt.Errorf("make a routing rule for our marks: %w", err)
		}
	}
	return nil
}

// has says whether there is a rule.
func (l *link) has(r *netlink.Rule) (bool, error) {
	list, err := l.RuleListFiltered(r.Family, &netlink.Rule{Priority: r.Priority}, netlink.RT_FILTER_PRIORITY)
	if err != nil {
		return false, fmt.Errorf("list routing rules: %w", err)
	}
	for _, x := range list {
		if x.Mark == r.Mark && x.Mask != nil && *x.Mask == *r.Mask && x.Table == r.Table && x.IifName == r.IifName {
			return true, nil
		}
	}
	return false, nil
}

func (l *link) routed(families []intent.Family) error {
	for _, r := range routingRules(families) {
		if there, err := l.has(r); err != nil || !there {
			return errors.Join(fmt.Errorf("the routing rule %d for our marks is missing", r.Priority), err)
		}
	}
	for _, r := range l.localRoutes(families) {
		list, err := l.RouteListFiltered(r.Family, r, netlink.RT_FILTER_TABLE)
		if err != nil || len(list) == 0 {
			return errors.Join(fmt.Errorf("the local route in the table %d is missing", routeTable), err)
		}
	}
	return nil
}

// removeRoutes removes the rules and routes, as far as there are any.
func (l *link) removeRoutes() error {
	var errs []error
	note := func(what string, err error) {
		if err != nil && !hostnet.Absent(err) {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	for _, r := range routingRules(bothFamilies) {
		there, err := l.has(r)
		if there {
			err = l.RuleDel(r)
		}
		note(fmt.Sprintf("remove the routing rule %d", r.Priority), err)
	}
	for _, r := range l.localRoutes(bothFamilies) {
		list, err := l.RouteListFiltered(r.Family, r, netlink.RT_FILTER_TABLE)
		note(fmt.Sprintf("list the routes of the table %d", routeTable), err)
		for i := range list {
			note(fmt.Sprintf("remove a route of the table %d", routeTable), l.RouteDel(&list[i]))
		}
	}
	return errors.Join(errs...)
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
	if err := l.removeRoutes(); err != nil {
		return err
	}
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
