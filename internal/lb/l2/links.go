package l2

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
)

// link is an Ethernet interface that is up.
type link struct {
	index    int
	name     string
	mac      MAC
	prefixes []netip.Prefix // of its addresses
	// gateway4 and gateway6: a default route goes through it, for IPv4 or IPv6.
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

// usable says whether packets of other machines may come by an interface: Ethernet, up, and with neighbours to resolve. On a dummy, which
// proxies keep addresses of Services on, there are none.
func usable(l netlink.Link) bool {
	i := l.Attrs()
	const wanted, refused = unix.IFF_UP | unix.IFF_BROADCAST, unix.IFF_LOOPBACK | unix.IFF_NOARP
	return i.RawFlags&(wanted|refused) == wanted && l.Type() != "dummy" && len(i.HardwareAddr) == len(MAC{})
}

// dump lists again what changed while the kernel listed it: something may be missing.
func dump[T any](list func() ([]T, error)) (out []T, err error) {
	for range 5 {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// listLinks are those of this network namespace that packets of other machines come by.
func listLinks() ([]*link, error) {
	all, err := dump(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	prefixes := map[int][]netip.Prefix{}
	for _, a := range addrs {
		if a.IPNet == nil {
			continue
		}
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			ones, _ := a.Mask.Size()
			prefixes[a.LinkIndex] = append(prefixes[a.LinkIndex], netip.PrefixFrom(ip, ones))
		}
	}
	var out []*link
	for _, l := range all {
		i := l.Attrs()
		if usable(l) {
			out = append(out, &link{index: i.Index, name: i.Name, mac: MAC(i.HardwareAddr), prefixes: prefixes[i.Index]})
		}
	}
	for family, set := range map[int]func(*link){unix.AF_INET: func(l *link) { l.gateway4 = true }, unix.AF_INET6: func(l *link) { l.gateway6 = true }} {
		routes, err := dump(func() ([]netlink.Route, error) { return netlink.RouteList(nil, family) })
		if err != nil {
			continue // without IPv6
		}
		for _, r := range routes {
			for _, l := range out {
				if l.index == r.LinkIndex && isDefault(r) {
					set(l)
				}
			}
		}
	}
	return out, nil
}

func isDefault(r netlink.Route) bool {
	return r.Gw != nil && (r.Dst == nil || r.Dst.IP.IsUnspecified())
}

// interest is in what listLinks lists.
var interest = hostnet.Interest{
	Link:    func(netlink.LinkUpdate) bool { return true },
	Address: func(netlink.AddrUpdate) bool { return true },
	Route:   func(u netlink.RouteUpdate) bool { return isDefault(u.Route) },
}

// choose are the links with these names, or all if there are no names.
func choose(all []*link, names []string) (out []*link) {
	if len(names) == 0 {
		return all
	}
	for _, l := range all {
		if slices.Contains(names, l.name) {
			out = append(out, l)
		}
	}
	return out
}

// linksFor are the links that an address is announced on: those whose own addresses are of its network; if there are none, those with a
// default route, where a router may have a route to the address; or those that were chosen by name. That a link has the address
// itself says nothing of the network: proxies put addresses of Services on this machine.
func linksFor(all []*link, chosen bool, a netip.Addr) (out []*link) {
	if chosen {
		return all
	}
	for _, l := range all {
		if slices.ContainsFunc(l.prefixes, func(p netip.Prefix) bool { return p.Addr() != a && p.Contains(a) }) {
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
