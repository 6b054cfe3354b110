package userspace

import (
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// flows ends what the kernel remembers of datagrams to frontends, where it leads neither to our sockets nor to an endpoint:
// flows from before the frontend was there, or to the sockets of a process that has ended. A client that keeps sending
// would keep them alive.
type flows struct {
	kernel *netlink.Handle
	wake   chan struct{}

	mu     sync.Mutex
	wanted map[plan.FrontendKey]*plan.Frontend
	local  map[netip.Addr]bool
}

// newFlows opens a socket in the network namespace of the thread.
func newFlows() (*flows, error) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	return &flows{kernel: h, wake: make(chan struct{}, 1), wanted: map[plan.FrontendKey]*plan.Frontend{}}, err
}

// look asks for a pass over the flows to some frontends.
func (f *flows) look(list []*plan.Frontend, local []netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, front := range list {
		if front.Protocol == intent.UDP && forwards(front) {
			f.wanted[front.FrontendKey] = front
		}
	}
	f.local = map[netip.Addr]bool{}
	for _, a := range local {
		f.local[a] = true
	}
	if len(f.wanted) > 0 {
		select {
		case f.wake <- struct{}{}:
		default:
		}
	}
}

func forwards(f *plan.Frontend) bool {
	for _, r := range f.Routes {
		if r.Verdict == plan.Forward {
			return true
		}
	}
	return false
}

// run makes passes until the server ends.
func (s *server) runFlows() {
	defer s.flows.kernel.Close()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.flows.wake:
			s.flows.pass(s.ports)
		}
	}
}

func (f *flows) pass(ports map[intent.Family]*listening) {
	f.mu.Lock()
	wanted, local := f.wanted, f.local
	f.wanted = map[plan.FrontendKey]*plan.Frontend{}
	f.mu.Unlock()
	for family, at := range ports {
		af := netlink.InetFamily(unix.AF_INET)
		if family == intent.IPv6 {
			af = unix.AF_INET6
		}
		// A flow that can't be deleted now is over already, or will be by its time-out.
		_, _ = f.kernel.ConntrackDeleteFilters(netlink.ConntrackTable, af, staleFlow{family, at, wanted, local})
	}
}

type staleFlow struct {
	family intent.Family
	at     *listening
	wanted map[plan.FrontendKey]*plan.Frontend
	local  map[netip.Addr]bool
}

func (s staleFlow) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	if flow.Forward.Protocol != unix.IPPROTO_UDP {
		return false
	}
	dst, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	key := plan.FrontendKey{Addr: dst.Unmap(), Family: s.family, Protocol: intent.UDP, Port: flow.Forward.DstPort}
	front := s.wanted[key]
	if front == nil && s.local[key.Addr] {
		key.Addr = netip.Addr{}
		front = s.wanted[key]
	}
	if front == nil {
		return false
	}
	for _, port := range s.at.udp {
		if flow.Reverse.SrcPort == port {
			return false
		}
	}
	from, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
	for _, r := range front.Routes {
		if r.Pool != nil && hasEndpoint(r.Pool, netip.AddrPortFrom(from.Unmap(), flow.Reverse.SrcPort)) {
			return false
		}
	}
	return true
}
