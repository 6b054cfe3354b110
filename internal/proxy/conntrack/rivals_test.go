package conntrack

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// contested is an address that two Services ask for.
var contested = netip.MustParseAddr("10.96.0.10")

// Ways to ask for it, or not to. Nil: there is no such Service.
var (
	clusterIP  = func(s *intent.Service) { s.ClusterIPs = []netip.Addr{contested} }
	externalIP = func(s *intent.Service) { s.ExternalIPs = []netip.Addr{contested} }
	balancer   = func(s *intent.Service) { s.Type, s.Ingress = intent.LoadBalancer, []intent.Ingress{{Addr: contested}} }
	nothing    = func(*intent.Service) {}
)

// asking is the plan of a Service with a cluster IP and an endpoint of its own, and perhaps more endpoints.
func asking(name string, protocol intent.Protocol, ask func(*intent.Service), more bool) *plan.Service {
	if ask == nil {
		return nil
	}
	s := &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: name}, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 1, name[0]})},
		Ports: []intent.Port{{Protocol: protocol, Port: 53}},
	}
	ask(s)
	addrs := []netip.Addr{endpointOf(name).Addr()}
	if more {
		addrs = append(addrs, netip.MustParseAddr("10.244.0.200"))
	}
	slice := &intent.Slice{Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: protocol, Port: 5353}}}
	for _, a := range addrs {
		slice.Endpoints = append(slice.Endpoints, intent.Endpoint{Addr: a, Condition: intent.Ready | intent.Serving})
	}
	return plan.For(&intent.Entry{Service: s, Slices: []*intent.Slice{slice}}, &plan.Facts{Families: []intent.Family{intent.IPv4}})
}

// TestRivals: whichever Service has an address says which flows to it are stale, and says so as soon as it has it. There is one flow
// to an endpoint of a, and one to an endpoint of b.
func TestRivals(t *testing.T) {
	type asks [2]func(*intent.Service) // before and after
	for _, c := range []struct {
		name string
		a, b asks
		more bool   // endpoints of b, after
		left string // whose flows
	}{
		{"the rival's endpoints change", asks{clusterIP, clusterIP}, asks{externalIP, externalIP}, true, "a b"},
		{"the rival comes", asks{clusterIP, clusterIP}, asks{nil, externalIP}, false, "a b"},
		{"a Service becomes a rival", asks{clusterIP, clusterIP}, asks{nothing, externalIP}, false, "a b"},
		{"the rival goes", asks{clusterIP, clusterIP}, asks{externalIP, nil}, false, "a"},
		{"both come", asks{nil, clusterIP}, asks{nil, externalIP}, false, "a"},
		{"both go", asks{clusterIP, nil}, asks{externalIP, nil}, false, "a b"},
		{"the holder comes", asks{nil, clusterIP}, asks{externalIP, externalIP}, false, "a"},
		{"the holder goes", asks{clusterIP, nil}, asks{externalIP, externalIP}, false, "b"},
		{"the holder goes, the rival changes", asks{clusterIP, nil}, asks{externalIP, externalIP}, true, "b"},
		{"the holder asks for it no more", asks{externalIP, nothing}, asks{externalIP, externalIP}, false, "b"},
		{"the rival overtakes", asks{externalIP, externalIP}, asks{externalIP, balancer}, false, "b"},
		{"the holder falls behind", asks{externalIP, externalIP}, asks{balancer, externalIP}, false, "a"},
	} {
		for _, protocol := range []intent.Protocol{intent.UDP, intent.SCTP, intent.TCP} {
			t.Run(fmt.Sprint(c.name, ", ", protocol), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					snap, kernel := plan.NewSnapshot(&plan.Facts{}), &table{}
					var changes []plan.ServiceChange
					for _, s := range []struct {
						name string
						asks
						more bool
					}{{"a", c.a, false}, {"b", c.b, c.more}} {
						change := plan.ServiceChange{Key: intent.Key{Namespace: "ns", Name: s.name}}
						change.Old = asking(s.name, protocol, s.asks[0], false)
						change.New = asking(s.name, protocol, s.asks[1], s.more)
						snap.Set(change.Key, change.Old)
						changes = append(changes, change)
						kernel.flows = append(kernel.flows, Flow{protocol, netip.AddrPortFrom(contested, 53), endpointOf(s.name)})
					}
					for _, change := range changes {
						snap.Set(change.Key, change.New)
					}
					// The proxy names only what it has planned anew.
					changes = slices.DeleteFunc(changes, func(c plan.ServiceChange) bool { return unchanged(c.Old, c.New) })
					cleaner := New(kernel, slog.New(slog.DiscardHandler), nil)
					cleaner.Acknowledged(changes, snap, nil, false)
					time.Sleep(handshake)
					if _, err := cleaner.pass(); err != nil {
						t.Error(err)
					}
					var left []string
					for _, name := range []string{"a", "b"} {
						if slices.ContainsFunc(kernel.left(), func(f Flow) bool { return f.From == endpointOf(name) }) {
							left = append(left, name)
						}
					}
					if got := strings.Join(left, " "); got != c.left {
						t.Errorf("flows of %q are left, want %q", got, c.left)
					}
				})
			})
		}
	}
}

// endpointOf is the endpoint that a Service always has.
func endpointOf(name string) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, name[0]}), 5353)
}

func unchanged(old, now *plan.Service) bool {
	if old == nil || now == nil {
		return old == now
	}
	return slices.EqualFunc(old.Frontends, now.Frontends, (*plan.Frontend).Equal)
}
