package userspace

import (
	"net/netip"
	"slices"
	"testing"

	"portal/internal/intent"
	"portal/internal/plan"
)

// TestSessionsEndWithTheirEndpoint: a session goes on with an endpoint that is on its way out, as long as that serves.
func TestSessionsEndWithTheirEndpoint(t *testing.T) {
	s := opened(t)
	staying, leaving := netip.MustParseAddr("127.0.0.2"), netip.MustParseAddr("127.0.0.3")
	key := intent.Key{Namespace: "default", Name: "dns"}
	facts := &plan.Facts{Families: []intent.Family{intent.IPv4}}
	snap := plan.NewSnapshot(facts)
	to := netip.MustParseAddrPort("10.96.0.1:53")
	tell := func(list ...intent.Endpoint) []flow {
		t.Helper()
		snap.Set(key, plan.For(&intent.Entry{
			Service: &intent.Service{Key: key, ClusterIPs: []netip.Addr{to.Addr()}, Families: facts.Families, Ports: []intent.Port{{Protocol: intent.UDP, Port: to.Port()}}},
			Slices:  []*intent.Slice{{Key: key, Service: key.Name, Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: intent.UDP, Port: 53}}, Endpoints: list}},
		}, facts))
		delta := snap.Delta()
		if delta.Empty() {
			t.Fatal("a change makes no difference")
		}
		var fresh []*plan.Frontend
		for _, f := range snap.Frontends {
			fresh = append(fresh, f)
		}
		s.set(fresh)
		defer snap.Acknowledge()
		return s.cut(snap, delta.Full, delta)
	}
	d := s.udp[plan.FromOutside]
	sessions := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.sessions)
	}

	tell(intent.Endpoint{Addr: leaving, Condition: intent.Ready | intent.Serving})
	client := flow{client: netip.MustParseAddrPort("192.0.2.1:1000"), us: netip.MustParseAddrPort("127.0.0.1:1")}
	if d.begin(client, to) == nil {
		t.Fatal("no session began")
	}
	still := intent.Endpoint{Addr: staying, Condition: intent.Ready | intent.Serving}
	tell(still, intent.Endpoint{Addr: leaving, Condition: intent.Serving | intent.Terminating})
	if sessions() != 1 {
		t.Fatal("the session ended with an endpoint that still serves")
	}
	tell(still)
	if sessions() != 0 {
		t.Fatal("the session outlived its endpoint")
	}

	if d.begin(client, to) == nil {
		t.Fatal("no session began")
	}
	refused := tell()
	if sessions() != 0 {
		t.Fatal("the session outlived the last endpoint")
	}
	if want := []flow{client}; !slices.Equal(refused, want) {
		t.Errorf("the kernel forgets %v, not %v: nobody refuses the next datagram", refused, want)
	}

	tell(still)
	if d.begin(client, to) == nil {
		t.Fatal("no session began")
	}
	for k := range snap.Frontends {
		s.remove([]plan.FrontendKey{k})
	}
	snap.Delete(key)
	s.cut(snap, false, snap.Delta())
	if sessions() != 1 {
		t.Error("the session ended with its Service, though its endpoint is there")
	}
}
