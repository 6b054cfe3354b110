package l2

import (
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// link is an Ethernet interface that is up.
type link struct {
	index    int
	name     string
	mac      MAC
	prefixes []netip.Prefix // of its addresses
	// gateway: a default route leads through it, for IPv4 or IPv6.
	gateway4, gateway6 bool
}

// from is an address of the link's own to send advertisements from: the link-local one if it has one.
func (l *link) from() netip.Addr {
	var best netip.Addr
	for _, p := range l.prefixes {
		if a := p.Addr(); a.Is6() && (!best.IsValid() || a.IsLinkLocalUnicast()) {
			best = a
		}
	}
	return best
}

// listLinks are those of this network namespace that packets of other machines come by.
func listLinks(names []string) ([]*link, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var out []*link
	for _, i := range all {
		if i.Flags&(net.FlagUp|net.FlagBroadcast) != net.FlagUp|net.FlagBroadcast || i.Flags&net.FlagLoopback != 0 || len(i.HardwareAddr) != 6 {
			continue
		}
		if len(names) > 0 && !slices.Contains(names, i.Name) {
			continue
		}
		l := &link{index: i.Index, name: i.Name, mac: MAC(i.HardwareAddr)}
		addrs, err := i.Addrs()
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				l.prefixes = append(l.prefixes, p)
			}
		}
		out = append(out, l)
	}
	for family, set := range map[int]func(*link){unix.AF_INET: func(l *link) { l.gateway4 = true }, unix.AF_INET6: func(l *link) { l.gateway6 = true }} {
		routes, err := netlink.RouteList(nil, family)
		if err != nil {
			continue // without IPv6
		}
		for _, r := range routes {
			for _, l := range out {
				if l.index == r.LinkIndex && r.Gw != nil && (r.Dst == nil || r.Dst.IP.IsUnspecified()) {
					set(l)
				}
			}
		}
	}
	return out, nil
}

// linksFor are the links that an address is announced on: those whose own addresses are of its network; if there are none, those that
// lead to the rest of the world, where somebody has a route to the address; or those that were chosen by name.
func linksFor(all []*link, chosen bool, a netip.Addr) (out []*link) {
	if chosen {
		return all
	}
	for _, l := range all {
		if slices.ContainsFunc(l.prefixes, func(p netip.Prefix) bool { return p.Contains(a) }) {
			out = append(out, l)
		}
	}
	if len(out) > 0 {
		return out
	}
	for _, l := range all {
		if a.Is4() && l.gateway4 || a.Is6() && l.gateway6 {
			out = append(out, l)
		}
	}
	return out
}
