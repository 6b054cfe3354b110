package conntrack

import (
	"errors"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// Kernel is the table of the network namespace that the process is in.
type Kernel struct{}

// again is how often a dump is repeated that the kernel interrupted, because the table grew under it.
const again = 5

// Delete reads the table over netlink and deletes one by one what matches.
func (Kernel) Delete(family intent.Family, match func(Flow) bool) (total int, err error) {
	af := netlink.InetFamily(unix.AF_INET)
	if family == intent.IPv6 {
		af = unix.AF_INET6
	}
	for range again {
		n, e := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, af, filter(match))
		total, err = total+int(n), e
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return total, err
}

type filter func(Flow) bool

func (f filter) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	switch p := intent.Protocol(flow.Forward.Protocol); p {
	case intent.UDP, intent.SCTP:
		return f(Flow{p, addrPort(flow.Forward.DstIP, flow.Forward.DstPort), addrPort(flow.Reverse.SrcIP, flow.Reverse.SrcPort)})
	}
	return false
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}
