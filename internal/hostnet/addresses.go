// Package hostnet knows the network of the machine that Portal runs on: its addresses, and the settings and routes without
// which packets to Services are lost. It knows nothing of Services.
package hostnet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TemporaryLabel is the label of IPv4 addresses that Portal adds to the loopback interface for as long as it runs. IPv6
// addresses have no label: Portal's are deprecated from the beginning, which also keeps them from being source addresses.
const TemporaryLabel = "lo:portal"

// IsTemporary says whether Portal added an address.
func IsTemporary(a *netlink.Addr) bool {
	if a.IP.To4() != nil {
		return a.Label == TemporaryLabel
	}
	return a.Flags&unix.IFA_F_DEPRECATED != 0 && a.Flags&unix.IFA_F_NODAD != 0
}

// serviceDevices hold the cluster IPs of all Services, which a proxy that uses IPVS puts there; virtualDevices hold addresses of
// Services at all. None of them is the machine's own.
var (
	serviceDevices = []string{"portal-ipvs0", "kube-ipvs0"}
	virtualDevices = append([]string{"nodelocaldns"}, serviceDevices...)
)

// Addresses are a machine's.
type Addresses struct {
	// Local are the addresses of all interfaces but those that hold every Service's, in the kernel's order.
	Local []netip.Addr
	// Node are those by which others reach the machine: the source address of each family's default route first, then those
	// of other interfaces. Loopback, link-local and temporary addresses are not among them.
	Node []netip.Addr
	// Temporary are those that Portal itself added.
	Temporary []netip.Addr
}

// Interfaces are the addresses of the network namespace that the process is in.
type Interfaces struct{}

// List returns the addresses of this moment.
func (Interfaces) List() (Addresses, error) {
	links, err := complete(netlink.LinkList)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return Addresses{}, fmt.Errorf("list the interfaces of this machine: %w", err)
	}
	all, err := complete(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return Addresses{}, fmt.Errorf("list the addresses of this machine: %w", err)
	}
	var out Addresses
	ofServices := indexes(links, serviceDevices)
	for i := range all {
		if a, ok := netip.AddrFromSlice(all[i].IP); ok && !ofServices[all[i].LinkIndex] {
			out.Local = append(out.Local, a.Unmap())
			if IsTemporary(&all[i]) {
				out.Temporary = append(out.Temporary, a.Unmap())
			}
		}
	}
	out.Node = nodeAddresses(links, all, defaultRoutes())
	return out, nil
}

// indexes are those of the links with some names.
func indexes(links []netlink.Link, names []string) map[int]bool {
	out := map[int]bool{}
	for _, l := range links {
		if slices.Contains(names, l.Attrs().Name) {
			out[l.Attrs().Index] = true
		}
	}
	return out
}

// complete repeats a dump that the kernel interrupted because something came or went under it.
func complete[T any](dump func() ([]T, error)) (out []T, err error) {
	for range 5 {
		out, err = dump()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// defaultRoutes are those of the main table, the preferred ones first. A machine without any is none the worse.
func defaultRoutes() (out []netlink.Route) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, _ := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		routes = slices.DeleteFunc(routes, func(r netlink.Route) bool { return !isDefault(&r) })
		slices.SortStableFunc(routes, func(a, b netlink.Route) int { return cmp.Compare(a.Priority, b.Priority) })
		out = append(out, routes...)
	}
	return out
}

func isDefault(r *netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// nodeAddresses puts addresses in the order in which they are the node's.
func nodeAddresses(links []netlink.Link, all []netlink.Addr, routes []netlink.Route) []netip.Addr {
	loopback, virtual := map[int]bool{}, indexes(links, virtualDevices)
	for _, l := range links {
		attrs := l.Attrs()
		loopback[attrs.Index] = attrs.Flags&net.FlagLoopback != 0
	}
	var out []netip.Addr
	add := func(a netip.Addr) {
		if !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	for i := range routes {
		if a, ok := sourceOf(&routes[i], all); ok {
			add(a)
		}
	}
	// Routers that speak BGP have their own address on the loopback interface; those come last.
	for _, onLoopback := range []bool{false, true} {
		for i := range all {
			if a, ok := candidate(&all[i]); ok && !virtual[all[i].LinkIndex] && loopback[all[i].LinkIndex] == onLoopback {
				add(a)
			}
		}
	}
	return out
}

// sourceOf is the address that packets by a route have as their source, as far as the route or its interface says.
func sourceOf(r *netlink.Route, all []netlink.Addr) (netip.Addr, bool) {
	if a, ok := netip.AddrFromSlice(r.Src); ok {
		return a.Unmap(), true
	}
	index := r.LinkIndex
	if len(r.MultiPath) > 0 {
		index = r.MultiPath[0].LinkIndex
	}
	for i := range all {
		if a, ok := candidate(&all[i]); ok && all[i].LinkIndex == index && a.Is4() == (r.Family == netlink.FAMILY_V4) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// candidate returns an address if it can be the node's.
func candidate(a *netlink.Addr) (netip.Addr, bool) {
	addr, ok := netip.AddrFromSlice(a.IP)
	addr = addr.Unmap()
	// IFA_F_SECONDARY and IFA_F_TEMPORARY are one bit: a second IPv4 address of a subnet is as good as the first, a temporary
	// IPv6 address (RFC 8981) is made to change.
	temporary := a.Label == TemporaryLabel || !addr.Is4() && a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_TEMPORARY) != 0
	return addr, ok && addr.IsGlobalUnicast() && !temporary
}

// Changes receives when addresses or default routes may have changed, until the context ends: see Watch.
func (Interfaces) Changes(ctx context.Context) <-chan struct{} {
	return Watch(ctx, ofAddresses)
}

var ofAddresses = Interest{
	Address: func(netlink.AddrUpdate) bool { return true },
	Route:   func(u netlink.RouteUpdate) bool { return isDefault(&u.Route) },
}
