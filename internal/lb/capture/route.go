package capture

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
)

const (
	// routeTable says that every address is this machine's; the rule of rulePriority has marked packets look there.
	routeTable   = 20561
	rulePriority = 101
)

func (t *table) family() int {
	if t.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (t *table) rule() *netlink.Rule {
	r := netlink.NewRule()
	mask := uint32(Mark)
	r.Family, r.Mark, r.Mask, r.Table, r.Priority = t.family(), Mark, &mask, routeTable, rulePriority
	return r
}

func (t *table) everywhere() *netlink.Route {
	bits := t.Width * 8
	return &netlink.Route{
		Table: routeTable, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST, Family: t.family(),
		Dst: &net.IPNet{IP: t.zero().AsSlice(), Mask: net.CIDRMask(0, bits)},
	}
}

// route brings marked packets to this machine's sockets, or no longer does. What is there already is not touched.
func (t *table) route(wanted bool) error {
	rule, err := t.hasRule()
	if err != nil {
		return err
	}
	routes, err := netlink.RouteListFiltered(t.family(), &netlink.Route{Table: routeTable}, netlink.RT_FILTER_TABLE)
	if err != nil && !hostnet.Absent(err) {
		return fmt.Errorf("list the routes of table %d: %w", routeTable, err)
	}
	if wanted && len(routes) == 0 {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		r := t.everywhere()
		r.LinkIndex = lo.Attrs().Index
		if err := netlink.RouteReplace(r); err != nil {
			return fmt.Errorf("make a local route in the table %d: %w", routeTable, err)
		}
	}
	if wanted && !rule {
		if err := netlink.RuleAdd(t.rule()); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("make a routing rule for packets to the balancer: %w", err)
		}
	}
	if wanted {
		return nil
	}
	var errs []error
	if rule {
		errs = append(errs, netlink.RuleDel(t.rule()))
	}
	for i := range routes {
		errs = append(errs, netlink.RouteDel(&routes[i]))
	}
	for _, err := range errs {
		if err != nil && !hostnet.Absent(err) {
			return fmt.Errorf("remove the route to the balancer: %w", err)
		}
	}
	return nil
}

func (t *table) hasRule() (bool, error) {
	list, err := netlink.RuleListFiltered(t.family(), &netlink.Rule{Priority: rulePriority, Table: routeTable}, netlink.RT_FILTER_PRIORITY|netlink.RT_FILTER_TABLE)
	if err != nil && !hostnet.Absent(err) {
		return false, fmt.Errorf("list the routing rules: %w", err)
	}
	return len(list) > 0, nil
}
