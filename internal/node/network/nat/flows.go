package nat

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"portal/internal/intent"
	"portal/internal/proxy/conntrack"
)

// forgetFlows ends flows of UDP and SCTP that lead to where a port no longer does: the kernel sees no end of them. A connection of TCP ends
// with its Pod; one that no Pod has answered would take along what its client sends later to the Pod that has the port then.
func forgetFlows(before, now *State) error {
	if before == nil {
		before = &State{}
	}
	gone, fresh := difference(before, now), difference(now, before)
	if len(gone) == 0 && len(fresh) == 0 {
		return nil
	}
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return err
	}
	var local []netip.Addr
	for _, a := range list {
		addr, _ := netip.AddrFromSlice(a.IP)
		local = append(local, addr.Unmap())
	}
	var errs []error
	for _, family := range []intent.Family{intent.IPv4, intent.IPv6} {
		for _, protocol := range []intent.Protocol{intent.UDP, intent.SCTP, intent.TCP} {
			of := func(p Port) bool {
				return intent.FamilyOf(p.Pod.Addr()) == family && intent.Protocol(p.Protocol) == protocol
			}
			if !slices.ContainsFunc(gone, of) && !slices.ContainsFunc(fresh, of) {
				continue
			}
			_, err := (conntrack.Kernel{}).Delete(family, protocol, func(f conntrack.Flow) bool { return stale(f, gone, fresh, local) })
			if err != nil {
				errs = append(errs, fmt.Errorf("end flows to ports that changed: %w", err))
			}
		}
	}
	return errors.Join(errs...)
}

// difference are the ports that one state has and the other has not.
func difference(a, b *State) (out []Port) {
	for pod, list := range a.Ports {
		for _, p := range list {
			if !slices.Contains(b.Ports[pod], p) {
				out = append(out, p)
			}
		}
	}
	return out
}

// stale says whether a flow leads to a Pod that no longer has the port, or to the node itself from before a Pod had it.
func stale(f conntrack.Flow, gone, fresh []Port, local []netip.Addr) bool {
	at := func(p Port) bool {
		host := p.key()
		return byte(f.Protocol) == p.Protocol && f.Dst.Port() == p.HostPort && (host == f.Dst.Addr() || !host.IsValid())
	}
	if slices.ContainsFunc(gone, func(p Port) bool { return at(p) && f.From == p.Pod }) {
		return true
	}
	return f.From == f.Dst && slices.Contains(local, f.Dst.Addr()) && slices.ContainsFunc(fresh, at)
}
