package backendtest

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// catalogue are Services of every kind.
func catalogue() []spec {
	return []spec{
		{id: 1, local: []int{0, 1}, remote: []int{0}},
		{id: 2, local: []int{0}, nodePort: true, external: true},
		{id: 3, remote: []int{0, 1}, nodePort: true, external: true, balancer: true},
		{id: 4, nodePort: true, external: true, balancer: true}, // nobody is there
		{id: 5, local: []int{0, 1}, remote: []int{1}, internalLocal: true},
		{id: 6, remote: []int{1, 2}, internalLocal: true},
		{id: 7, local: []int{0, 2}, remote: []int{1}, externalLocal: true, nodePort: true, external: true, balancer: true},
		{id: 8, remote: []int{1, 2}, externalLocal: true, nodePort: true, external: true, balancer: true},
		{id: 9, local: []int{1}, remote: []int{2}, balancer: true, nodePort: true, ranges: []string{"172.31.0.0/16", "172.31.0.100/32", "fd00:31::/64"}},
		{id: 10, local: []int{1}, balancer: true, ranges: []string{"192.0.2.0/24", "10.244.0.0/16", "fd00:244:1::/64"}},
		{id: 11, leaving: []int{0, 1}, remote: nil, nodePort: true},
		{id: 12, local: []int{0, 1, 2}, remote: []int{0, 1, 2}, externalLocal: true, internalLocal: true, balancer: true},
	}
}

// testRoutes asks everybody for everything, of all Services at once, and again after each has become the next.
func testRoutes(t *testing.T, s *suite) {
	list := catalogue()
	var probes []probe
	tries := many
	if s.Brief {
		tries = 2
	}
	for _, x := range list {
		probes = append(probes, x.probes(s, tries)...)
	}
	s.set(list...)
	s.apply(t)
	s.askAll(t, probes)
	if t.Failed() {
		return
	}
	for i := range list {
		x := list[(i+1)%len(list)]
		x.id = list[i].id
		s.set(x)
	}
	s.apply(t)
	s.askAll(t, sample(probes, 3))
	for i := range list {
		if i%2 == 0 {
			s.plan.Delete(list[i].entry(s).Service.Key)
		}
	}
	s.apply(t)
	s.askAll(t, sample(probes, 3))
	if err := s.check(); err != nil {
		t.Errorf("the check after it: %v", err)
	}
}

// sample takes every n-th.
func sample(probes []probe, n int) (out []probe) {
	for i := 0; i < len(probes); i += n {
		probes[i].tries = 3
		out = append(out, probes[i])
	}
	return out
}

// testFacts changes the node's configuration under living Services.
func testFacts(t *testing.T, s *suite) {
	list := []spec{
		{id: 1, local: []int{0, 1}, nodePort: true},
		{id: 7, local: []int{0}, remote: []int{1}, externalLocal: true, nodePort: true, balancer: true},
	}
	var probes []probe
	for _, x := range list {
		probes = append(probes, x.probes(s, 3)...)
	}
	if s.Brief {
		probes = sample(probes, 3)
	}
	local := netip.AddrPortFrom(addr("127.0.0.1"), 30001)
	probes = append(probes, probe{from: s.node, src: local.Addr(), to: local, p: intent.TCP, tries: 3})
	for _, nobody := range []string{"10.96.9.9", "fd00:96::9:9"} {
		for _, from := range []*host{s.client, s.node, s.outside} {
			probes = append(probes, probe{from: from, to: netip.AddrPortFrom(addr(nobody), 80), p: intent.TCP})
			probes = append(probes, probe{from: from, to: netip.AddrPortFrom(addr(nobody), 53), p: intent.UDP})
		}
	}
	for name, change := range map[string]func(*plan.Facts){
		"unallocated": func(f *plan.Facts) {
			if s.DropsUnallocated {
				f.ServicePrefixes = []netip.Prefix{netip.MustParsePrefix(servicePrefix4), netip.MustParsePrefix(servicePrefix6)}
			}
		},
		"masquerade all":   func(f *plan.Facts) { f.MasqueradeAll = true },
		"pods unknown":     func(f *plan.Facts) { f.Pods = plan.Detector{} },
		"pods by bridge":   func(f *plan.Facts) { f.Pods = plan.Detector{Interface: "cbr0"} },
		"pods by prefix":   func(f *plan.Facts) { f.Pods = plan.Detector{InterfacePrefix: "cb"} },
		"all node's ports": func(f *plan.Facts) { f.NodePorts = plan.NodePorts{All: true} },
		"loopback":         func(f *plan.Facts) { f.NodePorts.Loopback4, f.NodePorts.Loopback6 = s.Loopback, s.Loopback },
		"one family":       func(f *plan.Facts) { f.Families = f.Families[:1] },
		"as it was":        func(*plan.Facts) {},
	} {
		f := s.facts(s.Options)
		change(f)
		s.plan.SetFacts(f)
		s.set(list...)
		s.apply(t)
		s.askAll(t, probes)
		if t.Failed() {
			t.Fatalf("with %s", name)
		}
	}
}

// testSpreading counts how often each of seven endpoints is chosen.
func testSpreading(t *testing.T, s *suite) {
	x := spec{id: 1, local: []int{0, 1, 2}, remote: []int{0, 1, 2}}
	e := x.entry(s)
	// The seventh is a Pod's other port.
	e.Slices = append(e.Slices, &intent.Slice{
		Key: intent.Key{Namespace: "test", Name: "other"}, Service: x.name(), Family: intent.IPv4,
		Ports:     []intent.EndpointPort{{Name: "dns", Protocol: intent.UDP, Port: otherPort}},
		Endpoints: []intent.Endpoint{{Addr: s.pods[0].addrs[0], Condition: intent.Ready | intent.Serving}},
	})
	s.plan.Set(e.Service.Key, plan.For(e, s.plan.Facts))
	s.apply(t)
	flows := 100_000
	switch {
	case s.Brief:
		flows = 350
	case s.NotRandom:
		flows = 7000 // there is no chance that could be misjudged
	}
	count := map[netip.AddrPort]int{}
	for begun := 0; begun < flows; begun += batch {
		// An address has fewer ports than this has flows.
		list := s.outside.sendAll(t, clientAddr(begun/25_000), netip.AddrPortFrom(x.clusterIP(intent.IPv4), 53), min(batch, flows-begun))
		for _, f := range list {
			count[f.answer(s.Patience).endpoint]++
			f.close()
		}
	}
	if len(count) != 7 {
		t.Fatalf("%d endpoints answered, not 7: %v", len(count), count)
	}
	chi, want := 0.0, float64(flows)/7
	for _, n := range count {
		chi += math.Pow(float64(n)-want, 2) / want
	}
	// With 6 degrees of freedom, chance exceeds 33.1 once in 100,000 runs.
	if chi > 33.1 {
		t.Errorf("chi-squared is %.1f: %v", chi, count)
	}
	// And falls below 0.1 about as rarely.
	if chi < 0.1 && !s.NotRandom {
		t.Errorf("chi-squared is %.3f, too even for chance: %v", chi, count)
	}
	t.Logf("chi-squared %.2f", chi)
}

// batch is how many flows wait for their answers at once.
const batch = 250

// sendAll begins flows with a datagram each.
func (h *host) sendAll(t *testing.T, src netip.Addr, dst netip.AddrPort, n int) []*flow {
	t.Helper()
	list := make([]*flow, n)
	err := h.do(func() error {
		for i := range list {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			list[i] = &flow{fd: fd, src: src}
			if err := errors.Join(list[i].bind(h, netip.AddrPortFrom(src, 0), dst), unix.Connect(fd, sockaddr(dst)), list[i].say("?")); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// testAffinity follows clients that come back. Where a busy machine made them come later than the time-out, which says
// nothing, it follows them again with a longer one.
func testAffinity(t *testing.T, s *suite) {
	timeout := max(3*time.Second, s.Patience/5)
	for range 3 {
		if followClients(t, s, timeout) {
			return
		}
		t.Logf("clients came later than %v", timeout)
		timeout *= 3
	}
	t.Errorf("this machine is too slow to tell")
}

// followClients reports whether every client came in time.
func followClients(t *testing.T, s *suite, timeout time.Duration) bool {
	x := spec{id: 1, local: []int{0, 1, 2}, remote: []int{0, 1, 2}, affinity: timeout, nodePort: true, external: true}
	s.set(x)
	s.apply(t)
	where := []netip.AddrPort{
		netip.AddrPortFrom(x.clusterIP(intent.IPv4), 80), netip.AddrPortFrom(x.externalIP(intent.IPv4), 80),
		netip.AddrPortFrom(s.node.addrs[0], 30001),
	}
	// visit has every client come once, at one of the places.
	visit := func(where ...netip.AddrPort) []netip.AddrPort {
		t.Helper()
		met := make([]netip.AddrPort, clients)
		var wg sync.WaitGroup
		for i := range met {
			wg.Go(func() {
				to := where[i%len(where)]
				got := s.outside.try(intent.TCP, clientAddr(i), to, s.Patience)
				if got.what != answered {
					t.Errorf("client %d at %s: %s", i, to, got)
				}
				met[i] = got.endpoint
			})
		}
		wg.Wait()
		if t.Failed() {
			t.FailNow()
		}
		return met
	}
	since := time.Now()
	home := visit(where[0])
	all := map[netip.AddrPort]bool{}
	for _, e := range home {
		all[e] = true
	}
	if len(all) < 2 {
		t.Errorf("%d clients chose the same endpoint", clients)
	}
	// stay has every client come again, and reports whether they came in time.
	stay := func(when string, except netip.AddrPort) bool {
		t.Helper()
		began := time.Now()
		met := visit(where...)
		if time.Since(since) > timeout*9/10 {
			return false
		}
		since = began
		for i, got := range met {
			if home[i] == except {
				if got == except {
					t.Errorf("%s: client %d went to %s, which is gone", when, i, got)
				}
				home[i] = got
			}
			if got != home[i] {
				t.Errorf("%s: client %d moved from %s to %s", when, i, home[i], got)
			}
		}
		return true
	}
	for range 3 {
		time.Sleep(timeout / 2)
		if !stay("after half the time-out", netip.AddrPort{}) {
			return false
		}
	}
	s.restart(t)
	if !stay("after a restart", netip.AddrPort{}) {
		return false
	}
	x.remote = []int{0, 1}
	s.set(x)
	s.apply(t)
	if !stay("after an endpoint left", netip.AddrPortFrom(s.far.addrs[4], serverPort)) || !stay("and again", netip.AddrPort{}) {
		return false
	}

	time.Sleep(timeout + timeout/2)
	if slices.Equal(visit(where[0]), home) {
		t.Errorf("no client chose again after the time-out")
	}
	return true
}

// testFlows holds connections while things change.
func testFlows(t *testing.T, s *suite) {
	x := spec{id: 1, local: []int{0}, remote: []int{0}, nodePort: true}
	s.set(x)
	s.apply(t)
	var flows []*flow
	hold := func(from *host, to netip.AddrPort) {
		f, err := from.open(intent.TCP, netip.Addr{}, to)
		if err == nil {
			_, err = f.greet(time.Now().Add(s.Patience))
		}
		if err != nil {
			t.Fatalf("connecting from %s to %s: %v", from.name, to, err)
		}
		flows = append(flows, f)
	}
	for range 4 {
		hold(s.client, netip.AddrPortFrom(x.clusterIP(intent.IPv4), 80))
		hold(s.node, netip.AddrPortFrom(x.clusterIP(intent.IPv4), 80))
		hold(s.outside, netip.AddrPortFrom(s.node.addrs[0], 30001))
	}
	defer func() {
		for _, f := range flows {
			f.close()
		}
	}()
	alive := func(when string) {
		t.Helper()
		for i, f := range flows {
			err := f.say("still there\n")
			if err == nil {
				_, err = f.hear(time.Now().Add(s.Patience))
			}
			if err != nil {
				t.Fatalf("%s: flow %d: %v", when, i, err)
			}
		}
	}
	alive("at first")
	x.local, x.remote = []int{1}, nil
	s.set(x)
	s.apply(t)
	alive("after its endpoint left")
	s.askAll(t, x.probes(s, 2))
	if !s.RestartBreaks {
		s.restart(t)
		alive("after a restart")
		s.halt(t)
		alive("without the proxy")
		s.askAll(t, sample(x.probes(s, 1), 4))
		s.start(t)
		s.apply(t)
	}
	s.plan.Delete(x.entry(s).Service.Key)
	s.apply(t)
	alive("after its Service was deleted")
}

// testRewrite writes everything anew, again and again, and changes one Service, while clients ask for others: these
// don't notice. A datagram isn't sent twice, so whatever is lost for a moment is seen.
func testRewrite(t *testing.T, s *suite) {
	moving := spec{id: 13, local: []int{0, 1}}
	list := append(catalogue()[:8], moving)
	s.set(list...)
	s.apply(t)
	var asked atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(stop)
	for _, p := range []probe{
		{from: s.client, to: netip.AddrPortFrom(list[0].clusterIP(intent.IPv4), 53)},
		{from: s.outside, to: netip.AddrPortFrom(list[2].externalIP(intent.IPv4), 53)},
		{from: s.outside, to: netip.AddrPortFrom(list[6].balancerIP(intent.IPv4), 53)},
		{from: s.outside, to: netip.AddrPortFrom(s.node.addrs[0], 31007)},
	} {
		p.p = intent.UDP
		wg.Go(func() {
			for failures := 0; failures < 3; {
				select {
				case <-stop:
					return
				default:
				}
				asked.Add(1)
				if got := p.from.try(p.p, netip.Addr{}, p.to, s.Patience); got.what != answered {
					t.Errorf("%v from port %d: %s%s", p, got.port, got, s.known(got.port))
					failures++
				}
			}
		})
	}
	rounds, pause := 0, 2*time.Millisecond
	for end := time.Now().Add(s.Patience); time.Now().Before(end); rounds++ {
		moving.local = []int{rounds % 3, (rounds + 1) % 3}[:1+rounds%2]
		s.set(moving)
		if rounds%4 > 0 {
			s.plan.Forget()
		}
		s.apply(t)
		time.Sleep(pause)
	}
	t.Logf("%d flows while all was written %d times", asked.Load(), rounds)
}

// testDrift lets somebody remove what the proxy has written.
func testDrift(t *testing.T, s *suite) {
	x := spec{id: 1, local: []int{0, 1}, nodePort: true}
	s.set(x)
	s.apply(t)
	for range 3 {
		if err := s.check(); err != nil {
			t.Fatalf("the check finds fault with what was just written: %v", err)
		}
	}
	if err := s.node.do(func() error { return s.mode().Cleanup(context.Background()) }); err != nil {
		t.Fatal(err)
	}
	for _, p := range x.probes(s, 1)[:2] {
		if got := p.from.try(p.p, p.src, p.to, s.silence()); got.what == answered {
			t.Errorf("%v after cleaning up: %s", p, got)
		}
	}
	if s.check() == nil {
		t.Errorf("the check doesn't see that everything is gone")
	}
	s.plan.Forget()
	s.apply(t)
	if err := s.check(); err != nil {
		t.Errorf("the check after the repair: %v", err)
	}
	s.askAll(t, x.probes(s, 3))
	// Twice is as once.
	s.plan.Forget()
	s.apply(t)
	s.askAll(t, x.probes(s, 3))
}
