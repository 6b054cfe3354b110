package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/backend"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func facts() *plan.Facts {
	return &plan.Facts{
		Node: "n1", Families: []intent.Family{intent.IPv4, intent.IPv6}, Addrs: []netip.Addr{addr("172.31.0.11")},
		Pods: plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}, NodePorts: plan.NodePorts{All: true},
	}
}

// service is a Service with an endpoint here and others elsewhere, as often wanted.
func service(name string, ip string, change func(*intent.Service), endpoints ...string) *intent.Entry {
	s := &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: name}, ClusterIPs: []netip.Addr{addr(ip)}, HasSelector: true,
		Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}},
	}
	if change != nil {
		change(s)
	}
	slice := &intent.Slice{Key: s.Key, Service: name, Family: intent.FamilyOf(addr(ip)), Ports: []intent.EndpointPort{{Protocol: s.Ports[0].Protocol, Port: 8080}}}
	for i, e := range endpoints {
		slice.Endpoints = append(slice.Endpoints, intent.Endpoint{Addr: addr(e), NodeName: fmt.Sprint("n", i%2+1), Condition: intent.Ready | intent.Serving})
	}
	return &intent.Entry{Service: s, Slices: []*intent.Slice{slice}}
}

// run is a proxy in small: a snapshot, a kernel and a backend.
type run struct {
	snap *plan.Snapshot
	fake *fake
	back *balancer
}

func newRun() *run {
	r := &run{snap: plan.NewSnapshot(facts()), fake: newFake()}
	r.restart()
	return r
}

func (r *run) restart() {
	r.back = newBackend(New(Options{}).(*mode).Options, r.fake.kernel())
	r.snap.Forget()
}

func (r *run) set(e *intent.Entry) { r.snap.Set(e.Service.Key, plan.For(e, r.snap.Facts)) }

func (r *run) apply() error {
	err := r.back.Apply(context.Background(), r.snap, r.snap.Delta())
	var some *backend.Refused
	switch {
	case errors.As(err, &some):
		r.snap.Acknowledge(sortedKeys(some.Frontends)...)
	case err == nil:
		r.snap.Acknowledge()
	}
	return err
}

func sortedKeys(m map[plan.FrontendKey]error) (out []plan.FrontendKey) {
	for k := range m {
		out = append(out, k)
	}
	return out
}

// differs says where the kernel does otherwise than the snapshot says; empty: nowhere.
func (r *run) differs() string {
	endpoints := map[netip.Addr]bool{}
	for k, f := range r.snap.Frontends {
		for o, route := range f.Routes {
			v, to, stays := r.fake.route(k, plan.Origin(o))
			if v != verdictOf(route) {
				return fmt.Sprintf("%v from %v: verdict %d, want %d", k, plan.Origin(o), v, verdictOf(route))
			}
			if route.Pool == nil {
				continue
			}
			want := map[netip.AddrPort]bool{}
			for _, e := range route.Pool.Endpoints {
				want[e.Addr] = true
				endpoints[e.Addr.Addr()] = true
			}
			if !maps.Equal(to, want) || stays != f.Affinity {
				return fmt.Sprintf("%v from %v: to %v for %v, want %v for %v", k, plan.Origin(o), to, stays, want, f.Affinity)
			}
		}
	}
	held := map[netip.Addr]bool{}
	for a := range r.snap.ClusterIPs {
		held[a] = !r.fake.elsewhere[a]
	}
	maps.DeleteFunc(held, func(_ netip.Addr, here bool) bool { return !here })
	for at, s := range r.fake.table {
		for _, d := range s.dests {
			if at.mark == 0 && at != foreign && (d.living > 0 || d.connections > 0 && at.protocol == intent.UDP) && !held[at.addr] {
				held[at.addr] = true
			}
		}
	}
	if !maps.Equal(held, r.fake.addrs) {
		return fmt.Sprintf("addresses %v, want %v", r.fake.addrs, held)
	}
	return r.leftovers(held, endpoints)
}

func (r *run) leftovers(held, endpoints map[netip.Addr]bool) string {
	n := map[string]int{}
	for _, list := range r.fake.nft {
		for e := range list {
			n[e.set]++
		}
	}
	if n[vipsSet] != len(held) || n[hairpinSet] != len(endpoints) || n[routesMap[0]] != len(r.snap.Frontends) {
		return fmt.Sprintf("elements %v, want %d addresses, %d endpoints, %d frontends", n, len(held), len(endpoints), len(r.snap.Frontends))
	}
	for at, s := range r.fake.table {
		if at == foreign {
			continue
		}
		wanted, living := r.back.desired.targets[at] != nil, 0
		for _, d := range s.dests {
			if d.weight == 0 {
				living += d.connections
				if d.connections == 0 {
					return fmt.Sprintf("%v keeps an endpoint that noIPVS is connected to", at)
				}
			}
		}
		if !wanted && living == 0 {
			return fmt.Sprintf("%v is left over", at)
		}
	}
	return r.flows()
}

// flows says what is wrong with what rules know of UDP; empty: nothing.
func (r *run) flows() string {
	want := map[element]bool{}
	for at, s := range r.fake.table {
		if at.protocol != intent.UDP {
			continue
		}
		for f := range r.back.flows.of[at] {
			if s.dests[f.to] == nil {
				return fmt.Sprintf("flows from %v go on to %v, which %v has no longer", f.from, f.to, at)
			}
			want[goingElement(f)] = true
		}
		for to := range s.dests {
			service := r.snap.Services[r.back.have[at].id.Service]
			if service == nil {
				continue
			}
			for _, x := range service.Serving {
				if x.ID == r.back.have[at].id && !slices.Contains(x.Endpoints, to) {
					return fmt.Sprintf("%v has %v, which does not serve", at, to)
				}
			}
		}
	}
	for k, f := range r.snap.Frontends {
		for _, route := range f.Routes {
			if route.Pool == nil || k.Protocol != intent.UDP {
				continue
			}
			for _, e := range route.Pool.Endpoints {
				if !want[goingElement(flow{k, e.Addr})] {
					return fmt.Sprintf("flows from %v to %v do not go on", k, e.Addr)
				}
			}
		}
	}
	n := 0
	for _, list := range r.fake.nft {
		for e := range list {
			if e.set != goingSet {
				continue
			}
			if n++; !want[e] {
				return fmt.Sprintf("rules let flows pass that noIPVS leads: %x", e.key)
			}
		}
	}
	if n != len(want) {
		return fmt.Sprintf("rules let %d flows pass, want %d", n, len(want))
	}
	return ""
}

var foreign = key{family: intent.IPv4, addr: addr("192.0.2.1"), protocol: intent.TCP, port: 80}

func draw(t *rapid.T, name string) *intent.Entry {
	pick := func(what string, n int) int { return rapid.IntRange(0, n-1).Draw(t, what) }
	ip := rapid.SampledFrom([]string{"10.96.0.1", "10.96.0.2", "172.31.0.11", "fd00:96::1"}).Draw(t, "ip")
	return service(name, ip, func(s *intent.Service) {
		s.Ports[0].Protocol = rapid.SampledFrom([]intent.Protocol{intent.TCP, intent.TCP, intent.UDP}).Draw(t, "protocol")
		s.InternalLocal, s.ExternalLocal = pick("internal", 3) == 0, pick("external", 2) == 0
		s.Affinity = time.Duration(pick("affinity", 2)) * 1500 * time.Millisecond
		if pick("node port", 2) == 0 {
			s.Type, s.Ports[0].NodePort = intent.NodePort, uint16(30000+pick("number", 3))
		}
		if pick("external ip", 2) == 0 {
			s.ExternalIPs = []netip.Addr{addr(rapid.SampledFrom([]string{"198.51.100.1", "172.31.0.11", "fd00:198::1"}).Draw(t, "at"))}
		}
		if pick("balancer", 2) == 0 {
			s.Type, s.Ingress = intent.LoadBalancer, []intent.Ingress{{Addr: addr("203.0.113.1")}}
			if pick("ranges", 2) == 0 {
				s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16")}
			}
		}
	}, rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"10.244.1.1", "10.244.1.2", "10.244.1.3", "fd00:244::1"}), 0, 3, rapid.ID).Draw(t, "endpoints")...)
}

// TestKernelFollowsPlan: whatever changes, restarts, fails or drains, packets go where the snapshot says, and nothing is
// left over but what has living connections.
func TestKernelFollowsPlan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRun()
		r.fake.elsewhere[addr("172.31.0.11")] = true
		r.fake.table[foreign] = &server{scheduler: "wlc", dests: map[netip.AddrPort]*dest{}}
		for range rapid.IntRange(1, 15).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				r.snap.Delete(intent.Key{Namespace: "ns", Name: name})
			case 1:
				r.restart()
			case 2:
				r.fake.fail = true
			case 3:
				r.connect(t)
			default:
				r.set(draw(t, name))
			}
			if rapid.Bool().Draw(t, "apply") {
				r.settle(t)
			}
		}
		r.settle(t)
		if r.fake.table[foreign] == nil || r.fake.table[foreign].scheduler != "wlc" {
			t.Fatal("a server that is not ours was touched")
		}
	})
}

// connect changes how many connections endpoints have.
func (r *run) connect(t *rapid.T) {
	n := rapid.IntRange(0, 2).Draw(t, "connections")
	for at, s := range r.fake.table {
		for _, d := range s.dests {
			d.connections, d.living = n, 0
			if at.protocol == intent.TCP {
				d.living = min(n, 1)
			}
		}
	}
}

// settle applies, again where that fails, and looks.
func (r *run) settle(t *rapid.T) {
	if err := r.apply(); errors.Is(err, errInjected) {
		if err = r.back.Check(context.Background()); err == nil {
			t.Fatal("Check is content after a failure")
		}
		if err := r.apply(); err != nil {
			t.Fatal(err)
		}
	} else if err != nil {
		t.Fatal(err)
	}
	if err := r.back.Check(context.Background()); err != nil {
		t.Fatalf("Check: %v", err)
	}
	if diff := r.differs(); diff != "" {
		t.Fatal(diff)
	}
}

func applied(t *testing.T, r *run, list ...*intent.Entry) {
	t.Helper()
	for _, e := range list {
		r.set(e)
	}
	if err := r.apply(); err != nil {
		t.Fatal(err)
	}
	if diff := r.differs(); diff != "" {
		t.Fatal(diff)
	}
}

// TestDrain: an endpoint that leaves keeps its connections, gets no new ones, and goes with the last.
func TestDrain(t *testing.T) {
	r := newRun()
	applied(t, r, service("a", "10.96.0.1", nil, "10.244.1.1", "10.244.1.2"))
	at := key{family: intent.IPv4, addr: addr("10.96.0.1"), protocol: intent.TCP, port: 80}
	leaving := netip.MustParseAddrPort("10.244.1.2:8080")
	r.fake.table[at].dests[leaving].connections = 3
	applied(t, r, service("a", "10.96.0.1", nil, "10.244.1.1"))
	if d := r.fake.table[at].dests[leaving]; d == nil || d.weight != 0 {
		t.Fatalf("with connections: %+v", d)
	}
	// Without any endpoint the frontend is refused; who is connected stays so.
	applied(t, r, service("a", "10.96.0.1", nil))
	if r.fake.table[at] == nil || len(r.fake.table[at].dests) != 1 {
		t.Fatalf("the server of a Service without endpoints is %+v", r.fake.table[at])
	}
	// A new process takes over what drains.
	r.restart()
	applied(t, r)
	if d := r.fake.table[at].dests[leaving]; d == nil || d.weight != 0 {
		t.Fatalf("after a restart: %+v", d)
	}
	r.fake.table[at].dests[leaving].connections = 0
	if err := r.back.Check(context.Background()); err != nil {
		t.Fatal(err)
	}
	if r.fake.table[at] != nil {
		t.Fatalf("drained, but still there: %+v", r.fake.table[at])
	}
	applied(t, r, service("a", "10.96.0.1", nil, "10.244.1.2"))
	if d := r.fake.table[at].dests[leaving]; d == nil || d.weight != 1 {
		t.Fatalf("back again: %+v", d)
	}
}

// TestServing: a flow of UDP stays with an endpoint that is ending but serves, and is moved when it no longer does.
func TestServing(t *testing.T) {
	r := newRun()
	udp := func(s *intent.Service) { s.Ports[0].Protocol = intent.UDP }
	at := key{family: intent.IPv4, addr: addr("10.96.0.1"), protocol: intent.UDP, port: 80}
	ending := netip.MustParseAddrPort("10.244.1.1:8080")
	applied(t, r, service("a", "10.96.0.1", udp, "10.244.1.1"))
	r.fake.table[at].dests[ending].connections = 1
	both := service("a", "10.96.0.1", udp, "10.244.1.1", "10.244.1.2")
	both.Slices[0].Endpoints[0].Condition = intent.Serving | intent.Terminating
	applied(t, r, both)
	if d := r.fake.table[at].dests[ending]; d == nil || d.weight != 0 {
		t.Fatalf("while it serves: %+v", d)
	}
	if err := r.back.Check(context.Background()); err != nil || r.fake.table[at].dests[ending] == nil {
		t.Fatalf("after a check: %v, %v", r.fake.table[at].dests, err)
	}
	applied(t, r, service("a", "10.96.0.1", udp, "10.244.1.3", "10.244.1.2"))
	if d := r.fake.table[at].dests[ending]; d != nil {
		t.Fatalf("when it no longer serves: %+v", d)
	}
	// No frontend changes when only the one that is ending goes.
	again := service("a", "10.96.0.1", udp, "10.244.1.3", "10.244.1.2")
	again.Slices[0].Endpoints[0].Condition = intent.Serving | intent.Terminating
	gone := netip.MustParseAddrPort("10.244.1.3:8080")
	r.fake.table[at].dests[gone].connections = 1
	applied(t, r, again)
	if r.fake.table[at].dests[gone] == nil {
		t.Fatal("gone too early")
	}
	applied(t, r, service("a", "10.96.0.1", udp, "10.244.1.2"))
	if d := r.fake.table[at].dests[gone]; d != nil {
		t.Fatalf("when it is gone: %+v", d)
	}
}

// TestUDPFlowsOutliveTheirFrontend: flows of UDP go on when their Service, their address or their port has gone, and end when it is known that
// their endpoint no longer serves.
func TestUDPFlowsOutliveTheirFrontend(t *testing.T) {
	first, other := netip.MustParseAddrPort("10.244.1.1:8080"), "10.244.1.2"
	udp := func(s *intent.Service) {
		s.Type, s.Ports[0].Protocol, s.Ports[0].NodePort = intent.NodePort, intent.UDP, 30000
	}
	a := intent.Key{Namespace: "ns", Name: "a"}
	vip := plan.FrontendKey{Addr: addr("10.96.0.1"), Family: intent.IPv4, Protocol: intent.UDP, Port: 80}
	nodePort := plan.FrontendKey{Family: intent.IPv4, Protocol: intent.UDP, Port: 30000}
	var r *run
	begin := func() {
		r = newRun()
		applied(t, r, service("a", "10.96.0.1", udp, "10.244.1.1"))
		for _, s := range r.fake.table {
			s.dests[first].connections = 1
		}
	}
	expect := func(step string, want bool) {
		t.Helper()
		if err := r.apply(); err != nil {
			t.Fatal(err)
		}
		if diff := r.differs(); diff != "" {
			t.Fatalf("%s: %s", step, diff)
		}
		for _, from := range []plan.FrontendKey{vip, nodePort} {
			if got := r.fake.nft[intent.IPv4][goingElement(flow{from, first})]; got != want {
				t.Errorf("%s: flows from %v go on: %v", step, from, got)
			}
		}
		there := 0
		for _, s := range r.fake.table {
			if d := s.dests[first]; d != nil && (d.connections > 0 || !want) {
				there++
			}
		}
		if want != (there == 2) || !want && there > 0 {
			t.Errorf("%s: %d of 2 servers have the endpoint", step, there)
		}
	}
	for _, restarted := range []bool{false, true} {
		step := fmt.Sprint("restarted: ", restarted, ": ")
		change := func(do func()) {
			begin()
			if do(); restarted {
				r.restart()
			}
		}
		change(func() { r.snap.Delete(a) })
		expect(step+"the Service is gone", true)
		if err := r.back.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		expect(step+"after a check", true)
		r.set(service("a", "10.96.0.1", udp, other))
		expect(step+"it is back with another endpoint", false)

		change(func() { r.snap.Delete(a) })
		expect(step+"the Service is gone again", true)
		for _, s := range r.fake.table {
			s.dests[first].connections = 0
		}
		if err := r.back.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		expect(step+"noIPVS sends any more", false)

		change(func() {
			r.set(service("a", "10.96.0.1", func(s *intent.Service) { udp(s); s.Ports[0].Port, s.Ports[0].NodePort = 81, 30001 }, "10.244.1.1"))
		})
		expect(step+"other ports", true)
		r.set(service("a", "10.96.0.1", func(s *intent.Service) { udp(s); s.Ports[0].Port, s.Ports[0].NodePort = 81, 30001 }, other))
		// A new process can't know whose ports those were.
		expect(step+"other ports, and another endpoint", restarted)

		change(func() { r.set(service("a", "10.96.0.1", udp, other)) })
		expect(step+"another endpoint", false)
	}
}

// TestAffinityIsShared: the frontends of a port have one server, and it keeps its mark when endpoints change and when
// the proxy starts again: clients are remembered by it.
func TestAffinityIsShared(t *testing.T) {
	r := newRun()
	sticky := func(s *intent.Service) {
		s.Affinity, s.Type, s.Ports[0].NodePort = time.Hour, intent.NodePort, 30080
		s.ExternalIPs = []netip.Addr{addr("198.51.100.1")}
	}
	applied(t, r, service("a", "10.96.0.1", sticky, "10.244.1.1", "10.244.1.2"))
	// One for the pool, one for each endpoint.
	if len(r.fake.table) != 3 {
		t.Fatalf("%d servers for one port", len(r.fake.table))
	}
	before := map[key]map[netip.AddrPort]bool{}
	for at, s := range r.fake.table {
		before[at] = s.open()
	}
	applied(t, r, service("b", "10.96.0.2", sticky, "10.244.1.3"), service("a", "10.96.0.1", sticky, "10.244.1.1", "10.244.1.2", "10.244.1.3"))
	r.restart()
	applied(t, r)
	for at, was := range before {
		if now := r.fake.table[at]; now == nil || len(was) == 1 && !maps.Equal(now.open(), was) || len(was) == 2 && len(now.dests) != 3 {
			t.Fatalf("%v was %v, is now %+v", at, was, now)
		}
	}
	// Who comes for one that left gets another slot than it had.
	applied(t, r, service("a", "10.96.0.1", sticky, "10.244.1.1", "10.244.1.3"), service("b", "10.96.0.2", nil))
	applied(t, r, service("a", "10.96.0.1", sticky, "10.244.1.1", "10.244.1.3", "10.244.1.4"))
	for at, was := range before {
		if now := r.fake.table[at]; was[netip.MustParseAddrPort("10.244.1.2:8080")] && len(was) == 1 && now != nil {
			t.Fatalf("%v was %v, is now %+v", at, was, now)
		}
	}
}

// TestAddressesDrain: an address that no Service has any more stays while somebody is connected through it, and then goes; but
// not for ever, and not for connections that are closed.
func TestAddressesDrain(t *testing.T) {
	r := newRun()
	clock := time.Unix(1000, 0)
	a, at := addr("10.96.0.1"), key{family: intent.IPv4, addr: addr("10.96.0.1"), protocol: intent.TCP, port: 80}
	to := netip.MustParseAddrPort("10.244.1.1:8080")
	gone := func(connections, living int) {
		r.restart()
		r.back.now = func() time.Time { return clock }
		applied(t, r, service("a", "10.96.0.1", nil, "10.244.1.1"))
		r.fake.table[at].dests[to].connections, r.fake.table[at].dests[to].living = connections, living
		r.snap.Delete(intent.Key{Namespace: "ns", Name: "a"})
		if err := r.apply(); err != nil {
			t.Fatal(err)
		}
	}
	sweep := func(want bool) {
		t.Helper()
		if err := r.back.Check(context.Background()); err != nil {
			t.Fatal(err)
		}
		if r.fake.addrs[a] != want || (r.fake.table[at] != nil) != want || r.fake.nft[intent.IPv4][vipElement(a)] != want || r.fake.nft[intent.IPv4][goneElement(a)] != want {
			t.Fatalf("address %v, server %v, want %v", r.fake.addrs[a], r.fake.table[at], want)
		}
	}
	gone(5, 0)
	sweep(false)
	gone(5, 1)
	sweep(true)
	r.fake.table[at].dests[to].living = 0
	sweep(false)
	gone(5, 1)
	clock = clock.Add(leaveWithin + time.Second)
	sweep(false)
	gone(5, 1)
	applied(t, r, service("a", "10.96.0.1", nil, "10.244.1.1"))
	if r.fake.nft[intent.IPv4][goneElement(a)] {
		t.Fatal("an address that is back is still taken for gone")
	}
}

// TestIncrement: one endpoint of one of many Services costs what it costs, whatever else there is.
func TestIncrement(t *testing.T) {
	r := newRun()
	for i := range 200 {
		r.set(service(fmt.Sprint("s", i), fmt.Sprintf("10.96.1.%d", i), nil, "10.244.1.1", "10.244.1.2"))
	}
	applied(t, r)
	r.fake.ops = 0
	applied(t, r, service("s7", "10.96.1.7", nil, "10.244.1.1", "10.244.1.3"))
	// One comes, one is drained and removed; its hairpin comes, the other's is still in use.
	if r.fake.ops != 4 {
		t.Fatalf("%d operations for a changed endpoint, want 4", r.fake.ops)
	}
}

// TestRefused: an endpoint that the kernel does not take costs only the frontends that want it.
func TestRefused(t *testing.T) {
	r := newRun()
	r.fake.refuse = addr("10.244.1.9")
	r.set(service("good", "10.96.0.1", nil, "10.244.1.1"))
	r.set(service("bad", "10.96.0.2", nil, "10.244.1.9"))
	var some *backend.Refused
	if err := r.apply(); !errors.As(err, &some) || len(some.Frontends) != 1 {
		t.Fatalf("got %v", err)
	}
	if _, to, _ := r.fake.route(plan.FrontendKey{Addr: addr("10.96.0.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80}, plan.FromPod); len(to) != 1 {
		t.Fatalf("the good Service leads to %v", to)
	}
	r.set(service("bad", "10.96.0.2", nil, "10.244.1.9", "10.244.1.2"))
	r.fake.ops = 0
	if err := r.apply(); !errors.As(err, &some) {
		t.Fatalf("got %v", err)
	}
	if d := r.fake.table[key{family: intent.IPv4, addr: addr("10.96.0.2"), protocol: intent.TCP, port: 80}].dests; len(d) != 1 || r.fake.ops > 3 {
		t.Fatalf("after %d operations its other endpoint is not there: %v", r.fake.ops, d)
	}
	r.fake.refuse = netip.Addr{}
	applied(t, r)
}

// TestDrift: whatever somebody takes away or changes is found.
func TestDrift(t *testing.T) {
	at := key{family: intent.IPv4, addr: addr("10.96.0.1"), protocol: intent.TCP, port: 80}
	for name, sabotage := range map[string]func(*fake){
		"address":   func(f *fake) { delete(f.addrs, addr("10.96.0.1")) },
		"server":    func(f *fake) { delete(f.table, at) },
		"scheduler": func(f *fake) { f.table[at].scheduler = "lc" },
		"endpoint":  func(f *fake) { clear(f.table[at].dests) },
		"weight":    func(f *fake) { f.table[at].dests[netip.MustParseAddrPort("10.244.1.1:8080")].weight = 7 },
		"setting":   func(f *fake) { f.settings["ipv4/vs/conntrack"] = "0" },
		"elsewhere": func(f *fake) { delete(f.elsewhere, addr("172.31.0.11")) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRun()
			r.fake.elsewhere[addr("172.31.0.11")] = true
			applied(t, r, service("a", "10.96.0.1", nil, "10.244.1.1"), service("b", "172.31.0.11", nil, "10.244.1.1"))
			if err := r.back.Check(context.Background()); err != nil {
				t.Fatal(err)
			}
			sabotage(r.fake)
			if r.back.Check(context.Background()) == nil {
				t.Fatal("not found")
			}
			r.snap.Forget()
			applied(t, r)
			if err := r.back.Check(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestScheduler(t *testing.T) {
	for _, s := range append(Schedulers, "") {
		if err := (&Options{Scheduler: s}).Validate(); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	err := New(Options{Scheduler: "fair"}).Probe(context.Background(), nil)
	if want := `IPVS scheduler "fair" is not one of rr, wrr, lc, wlc, dh, sh, sed, nq, mh, lblc, lblcr`; err == nil || err.Error() != want {
		t.Fatalf("got %v", err)
	}
}
