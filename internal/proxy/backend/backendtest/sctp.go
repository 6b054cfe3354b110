package backendtest

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	sctpPort     = 9
	sctpNodePort = 32000 // and the Service's id
)

// testSCTP asks for Services of SCTP, whose endpoints change meanwhile.
func testSCTP(t *testing.T, s *suite) {
	for _, h := range append([]*host{s.far}, s.pods...) {
		for _, a := range h.addrs {
			stop, err := h.serveSCTP(netip.AddrPortFrom(a, serverPort))
			if err != nil {
				t.Fatalf("serving SCTP on %s: %v", a, err)
			}
			defer stop()
		}
	}
	list := []spec{
		{id: 1, local: []int{0, 1}, remote: []int{0}, nodePort: true, external: true},
		{id: 4, nodePort: true, external: true},
		{id: 7, local: []int{0}, remote: []int{1}, externalLocal: true, nodePort: true, balancer: true},
		{id: 9, local: []int{1}, balancer: true, ranges: []string{"172.31.0.0/16", "fd00:31::/64"}},
	}
	var probes []probe
	for _, x := range list {
		s.setSCTP(x)
		probes = append(probes, x.sctpProbes(s)...)
	}
	s.apply(t)
	s.askAll(t, probes)
	list[0].local, list[0].remote = []int{2}, []int{2}
	list[1].local = []int{0}
	list[2].local = nil
	for _, x := range list {
		s.setSCTP(x)
	}
	s.apply(t)
	s.askAll(t, probes)
}

// setSCTP plans a Service with a third port.
func (s *suite) setSCTP(x spec) {
	e := x.entry(s)
	port := intent.Port{Name: "sctp", Protocol: intent.SCTP, Port: sctpPort}
	if x.nodePort {
		port.NodePort = sctpNodePort + uint16(x.id)
	}
	e.Service.Ports = append(e.Service.Ports, port)
	for _, slice := range e.Slices {
		slice.Ports = append(slice.Ports, intent.EndpointPort{Name: "sctp", Protocol: intent.SCTP, Port: serverPort})
	}
	s.plan.Set(e.Service.Key, plan.For(e, s.plan.Facts))
}

func (x spec) sctpProbes(s *suite) (out []probe) {
	for i, f := range s.families() {
		for _, from := range []*host{s.client, s.pods[0], s.node, s.outside} {
			ask := func(a netip.Addr, port uint16) {
				// Bound, since a client would offer all of its addresses, and not all are translated.
				out = append(out, probe{from: from, src: from.addrs[i], to: netip.AddrPortFrom(a, port), p: intent.SCTP, tries: 4})
			}
			for _, a := range []netip.Addr{x.clusterIP(f), x.externalIP(f), x.balancerIP(f)} {
				ask(a, sctpPort)
			}
			ask(s.node.addrs[i], sctpNodePort+uint16(x.id))
		}
	}
	return out
}

// serveSCTP answers each association with who it is and whom it sees, until stopped.
func (h *host) serveSCTP(at netip.AddrPort) (stop func(), err error) {
	family := unix.AF_INET
	if at.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd := -1
	err = h.do(func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_SCTP)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(unix.Bind(fd, sockaddr(at)), unix.Listen(fd, 64)); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	var stopped atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !stopped.Load() {
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
			c, from, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			if err != nil {
				continue
			}
			_, _ = unix.Write(c, fmt.Appendf(nil, "%s %s\n", at, addrOf(from)))
			_ = unix.Close(c)
		}
	}()
	return func() { stopped.Store(true); <-done; _ = unix.Close(fd) }, nil
}

// emulated is what tests in an emulated machine are given: more time, and less to do unless it is to be long.
func (o *Options) emulated(rounds string) {
	o.SCTP, o.Brief, o.Patience = true, rounds != "long", 24*time.Second
}
