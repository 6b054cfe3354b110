package userspace

import (
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

// flows ends what the kernel remembers of datagrams to frontends, where it leads neither to our sockets nor to an endpoint:
// flows from before the frontend was there, or to the sockets of a process that has ended, or to ours where datagrams are
// rejected by now. A client that keeps sending would keep them alive.
type flows struct {
	kernel *netlink.Handle
	track  *tracker
	wake   chan struct{}

	mu     sync.Mutex
	wanted map[plan.FrontendKey]*plan.Frontend
	ended  []flow
	local  map[netip.Addr]bool
}

// newFlows opens sockets in the network namespace of the thread.
func newFlows() (*flows, error) {
	h, err := hostnet.OpenNetlink(netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	track, err := newTracker()
	if err != nil {
		h.Close()
		return nil, err
	}
	return &flows{kernel: h, track: track, wake: make(chan struct{}, 1), wanted: map[plan.FrontendKey]*plan.Frontend{}}, nil
}

// look asks for a pass over the flows to some frontends.
func (f *flows) look(list []*plan.Frontend, local []netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, front := range list {
		if front.Protocol == intent.UDP && front.Forwards() {
			f.wanted[front.FrontendKey] = front
		}
	}
	f.local = map[netip.Addr]bool{}
	for _, a := range local {
		f.local[a] = true
	}
	f.call(len(f.wanted))
}

// end asks for flows to be forgotten: the next datagram is met by the rules.
func (f *flows) end(list []flow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = append(f.ended, list...)
	f.call(len(list))
}

// call has a pass made if there is something to do.
func (f *flows) call(n int) {
	if n == 0 {
		return
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// run makes passes until the server ends.
func (s *server) runFlows() {
	defer s.flows.track.close()
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
	wanted, ended, local := f.wanted, f.ended, f.local
	f.wanted, f.ended = map[plan.FrontendKey]*plan.Frontend{}, nil
	f.mu.Unlock()
	// A flow that can't be deleted now is over already, or will be by its time-out.
	for _, k := range ended {
		_ = f.track.forget(k.us, k.client)
	}
	if len(wanted) == 0 {
		return
	}
	for family, at := range ports {
		af := netlink.InetFamily(unix.AF_INET)
		if family == intent.IPv6 {
			af = unix.AF_INET6
		}
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
	return !hasEndpoint(front, netip.AddrPortFrom(from.Unmap(), flow.Reverse.SrcPort))
}
