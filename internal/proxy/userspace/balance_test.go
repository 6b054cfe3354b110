package userspace

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"portal/internal/plan"
)

func port(n, endpoints int, affinity time.Duration) *frontend {
	pool := &plan.Pool{}
	for i := range endpoints {
		pool.Endpoints = append(pool.Endpoints, plan.Endpoint{Addr: endpoint(i)})
	}
	f := &plan.Frontend{Affinity: affinity, ID: plan.PortID{Port: fmt.Sprint(n)}}
	for o := range f.Routes {
		f.Routes[o].Pool = pool
	}
	return newFrontend(f)
}

func endpoint(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}), 8080)
}

var alice, bob = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")

// clock is a time that tests turn.
type clock struct{ now time.Time }

func (c *clock) memory(shun time.Duration) *memory {
	m := newMemory(shun)
	m.now = func() time.Time { return c.now }
	return m
}

func TestEndpointsTakeTurns(t *testing.T) {
	m, f := newMemory(time.Second), port(1, 3, 0)
	count := map[netip.AddrPort]int{}
	for range 30 {
		order := m.order(nil, f, plan.FromOutside, alice)
		if len(order) != 3 {
			t.Fatalf("%d endpoints to try, not 3", len(order))
		}
		count[order[0].Addr]++
	}
	for i := range 3 {
		if count[endpoint(i)] != 10 {
			t.Errorf("endpoint %d came first %d times of 30", i, count[endpoint(i)])
		}
	}
}

func TestSilentEndpointsComeLast(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	m, f := c.memory(10*time.Second), port(1, 3, 0)
	last := func() (all bool) {
		all = true
		for range 6 {
			all = all && m.order(nil, f, plan.FromOutside, alice)[2].Addr == endpoint(1)
		}
		return all
	}
	m.failed(endpoint(1))
	if !last() {
		t.Error("an endpoint that did not answer is not the last to be tried")
	}
	c.now = c.now.Add(11 * time.Second)
	if last() {
		t.Error("it is not forgiven")
	}
	m.failed(endpoint(1))
	m.answered(f, alice, endpoint(1))
	if last() {
		t.Error("it has answered, and is still shunned")
	}
}

func TestAffinity(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	m, f := c.memory(10*time.Second), port(1, 3, time.Minute)
	m.answered(f, alice, endpoint(2))
	first := func(f *frontend, who netip.Addr) []netip.AddrPort {
		var out []netip.AddrPort
		for range 6 {
			if a := m.order(nil, f, plan.FromOutside, who)[0].Addr; !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
		return out
	}
	is := func(what string, got []netip.AddrPort, n int) {
		t.Helper()
		if len(got) != n || n == 1 && got[0] != endpoint(2) {
			t.Errorf("%s: %v", what, got)
		}
	}
	is("the client's own", first(f, alice), 1)
	is("another client", first(f, bob), 3)
	is("another port", first(port(2, 3, time.Minute), alice), 3)
	is("an endpoint that is gone", first(port(1, 2, time.Minute), alice), 2)
	c.now = c.now.Add(59 * time.Second)
	is("before the time-out", first(f, alice), 1)
	m.answered(f, alice, endpoint(2))
	c.now = c.now.Add(59 * time.Second)
	m.forget()
	is("begun anew", first(f, alice), 1)
	c.now = c.now.Add(2 * time.Second)
	is("after the time-out", first(f, alice), 3)
	m.forget()
	if len(m.sticky) != 0 {
		t.Errorf("%d clients are remembered for nothing", len(m.sticky))
	}
}

// TestAffinityIsBounded: of too many clients, the one that connected last the longest time ago is forgotten.
func TestAffinityIsBounded(t *testing.T) {
	c := &clock{time.Unix(1000, 0)}
	m, f := c.memory(time.Second), port(1, 3, time.Minute)
	m.most = 3
	who := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}) }
	known := func(m *memory) string {
		out := ""
		for n := range 6 {
			if m.sticky[client{f.port, who(n)}] != nil {
				out += fmt.Sprint(n)
			}
		}
		return out
	}
	for n := range 3 {
		m.answered(f, who(n), endpoint(n))
		c.now = c.now.Add(time.Second)
	}
	m.answered(f, who(0), endpoint(1))
	m.answered(f, who(3), endpoint(0))
	if got := known(m); got != "023" {
		t.Errorf("clients %s are remembered, want 0, 2 and 3", got)
	}
	next := c.memory(time.Second)
	next.most = 2
	next.restore(m.changed())
	if got := known(next); got != "03" {
		t.Errorf("clients %s are restored, want 0 and 3", got)
	}
	if got := next.order(nil, f, plan.FromOutside, who(0))[0].Addr; got != endpoint(1) {
		t.Errorf("client 0 gets %v", got)
	}
}

func TestHeader(t *testing.T) {
	for _, c := range []struct{ client, frontend, want string }{
		{"192.0.2.1:1000", "10.96.0.1:80", "\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\xc0\x00\x02\x01\x0a\x60\x00\x01\x03\xe8\x00\x50"},
		{"[fd00::1]:1000", "[fd00::2]:80", "\r\n\r\n\x00\r\nQUIT\n\x21\x21\x00\x24" +
			"\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01" + "\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02" + "\x03\xe8\x00\x50"},
	} {
		if got := string(header(netip.MustParseAddrPort(c.client), netip.MustParseAddrPort(c.frontend))); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}
