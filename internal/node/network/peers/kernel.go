package peers

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/node/network"
)

// protocol marks routes as this package's, so that it finds those that are no longer wanted.
const protocol = 112

// again repeats a list that the kernel interrupted because something changed under it.
func again[T any](list func() ([]T, error)) (out []T, err error) {
	for range 5 {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return out, err
}

// services are devices with the addresses of Services: no link leads there.
var services = []string{"portal-ipvs0", "kube-ipvs0", "nodelocaldns"}

// Links lists the interfaces by which other machines may be reached. bridge is that of the Pods.
func Links(bridge string) ([]Link, error) {
	links, err := again(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	all, err := again(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []Link
	for _, l := range links {
		a := l.Attrs()
		if a.Flags&net.FlagUp == 0 || a.Flags&net.FlagLoopback != 0 || a.Name == bridge || slices.Contains(devices[:], a.Name) || slices.Contains(services, a.Name) {
			continue
		}
		link := Link{Index: a.Index, Name: a.Name, MTU: a.MTU}
		for _, addr := range all {
			ip, ok := netip.AddrFromSlice(addr.IP)
			if ip = ip.Unmap(); ok && addr.LinkIndex == a.Index && ip.IsGlobalUnicast() {
				ones, _ := addr.Mask.Size()
				link.Prefixes = append(link.Prefixes, netip.PrefixFrom(ip, ones))
			}
		}
		if len(link.Prefixes) > 0 {
			out = append(out, link)
		}
	}
	return out, nil
}

// route is a route as far as it is compared.
type route struct {
	to     netip.Prefix
	kind   int // RTN_*
	via    netip.Addr
	link   int
	metric int
}

// fallbackMetric makes way for every other route.
const fallbackMetric = 1 << 20

// metric is the kernel's default.
func metric(p netip.Prefix) int {
	if p.Addr().Is4() {
		return 0
	}
	return 1024
}

// routes are those of a plan; tunnels are the devices' indexes, by whether they carry IPv4.
func (p *Plan) routes(tunnels map[bool]int) (out []route) {
	for to, w := range p.Ways {
		r := route{to: to, kind: unix.RTN_UNREACHABLE, metric: metric(to)}
		switch w.Kind {
		case Direct:
			r.kind, r.via, r.link = unix.RTN_UNICAST, w.Address, w.Link
		case Tunnelled:
			if index, ok := tunnels[w.Address.Is4()]; ok {
				r.kind, r.via, r.link = unix.RTN_UNICAST, network.Gateway(to), index
			}
		}
		out = append(out, r)
	}
	for _, to := range p.Fallbacks {
		out = append(out, route{to: to, kind: unix.RTN_UNREACHABLE, metric: fallbackMetric})
	}
	return out
}

func (r route) netlink() *netlink.Route {
	out := &netlink.Route{Dst: ipNet(r.to), Type: r.kind, Priority: r.metric, Protocol: protocol}
	if r.kind == unix.RTN_UNICAST {
		// What the gateway is on is known; its address needn't be on a prefix of that link.
		out.LinkIndex, out.Gw, out.Flags = r.link, r.via.AsSlice(), int(netlink.FLAG_ONLINK)
	}
	return out
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// ownRoutes are those that this or an earlier process made.
func ownRoutes() (map[route]netlink.Route, error) {
	list, err := again(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Protocol: protocol}, netlink.RT_FILTER_PROTOCOL)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	out := map[route]netlink.Route{}
	for _, r := range list {
		ones, _ := r.Dst.Mask.Size()
		addr, _ := netip.AddrFromSlice(r.Dst.IP)
		one := route{to: netip.PrefixFrom(addr.Unmap(), ones), kind: r.Type, metric: r.Priority}
		if r.Type == unix.RTN_UNICAST {
			via, _ := netip.AddrFromSlice(r.Gw)
			one.via, one.link = via.Unmap(), r.LinkIndex
		}
		out[one] = r
	}
	return out, nil
}

// Apply makes the kernel's routes and tunnels what a plan says. What is right already is left alone, and what others made.
func Apply(p *Plan) error {
	tunnels, err := p.tunnels()
	err = errors.Join(err, p.applyRoutes(tunnels))
	return errors.Join(err, p.prune()) // last: no route leads there any more
}

func (p *Plan) applyRoutes(tunnels map[bool]int) error {
	have, err := ownRoutes()
	if err != nil {
		return err
	}
	ours := map[netip.Prefix]map[int]bool{} // that there is one of ours, which may be replaced
	for r := range have {
		if ours[r.to] == nil {
			ours[r.to] = map[int]bool{}
		}
		ours[r.to][r.metric] = true
	}
	want := map[route]bool{}
	var errs []error
	for _, r := range p.routes(tunnels) {
		want[r] = true
		if _, there := have[r]; there {
			continue
		}
		put := netlink.RouteAdd
		if ours[r.to][r.metric] {
			put = netlink.RouteReplace
		}
		err := put(r.netlink())
		if errors.Is(err, unix.EEXIST) {
			err = errors.New("there is a route that Portal did not make: remove it")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("route to %s: %w", r.to, err))
		}
	}
	// Only now, so that no packet meanwhile takes the default route. A route that was replaced is not there any more.
	if have, err = ownRoutes(); err != nil {
		return errors.Join(append(errs, err)...)
	}
	for r, found := range have {
		if want[r] {
			continue
		}
		if err := netlink.RouteDel(&found); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove the route to %s: %w", r.to, err))
		}
	}
	return errors.Join(errs...)
}

// Remove takes routes and tunnels away.
func Remove() error { return Apply(&Plan{}) }

// set writes settings under /proc/sys that differ.
func set(settings map[string]string) error {
	for path, value := range settings {
		path = "/proc/sys/" + path
		data, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) && strings.Contains(path, "/ipv6/") {
			continue // a kernel without IPv6
		}
		if err == nil && strings.TrimSpace(string(data)) == value {
			continue
		}
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			return fmt.Errorf("set %s: %w", path, err)
		}
	}
	return nil
}
