package plan_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"portal/internal/intent"
	"portal/internal/plan"
)

// here is the node that tests plan for: n1 in zone z1, Pods known by their addresses.
func here() *plan.Facts {
	return &plan.Facts{
		Node: "n1", Zone: "z1", Families: []intent.Family{intent.IPv4, intent.IPv6}, Addrs: addrs("192.0.2.1", "2001:db8::1"),
		Pods: plan.Detector{Prefixes: prefixes("10.244.0.0/16", "fd00:244::/32")}, NodePorts: plan.NodePorts{All: true},
	}
}

// service is a LoadBalancer Service with everything that one can have; tests take away and change.
func service(change ...func(*intent.Service)) *intent.Service {
	s := &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: "web"}, Type: intent.LoadBalancer, ClusterIPs: addrs("10.96.0.1"),
		Families: []intent.Family{intent.IPv4}, Ports: []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80, NodePort: 30080}},
		ExternalIPs: addrs("198.51.100.1"), Ingress: []intent.Ingress{{Addr: addr("203.0.113.1")}},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func externalLocal(s *intent.Service) { s.ExternalLocal = true }
func internalLocal(s *intent.Service) { s.InternalLocal = true }

// slice reads endpoints such as "10.244.1.1@n1 terminating zone=z1,z2 node=n1": an address, its node, what differs from
// ready, and hints. They listen on port 8080, name http.
func slice(endpoints ...string) *intent.Slice {
	s := &intent.Slice{
		Key: intent.Key{Namespace: "ns", Name: "web-1"}, Service: "web", Family: intent.IPv4,
		Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: 8080}},
	}
	for _, text := range endpoints {
		s.Endpoints = append(s.Endpoints, endpoint(text))
		s.Family = intent.FamilyOf(s.Endpoints[0].Addr)
	}
	return s
}

func endpoint(text string) intent.Endpoint {
	words := strings.Fields(text)
	at, node, _ := strings.Cut(words[0], "@")
	e := intent.Endpoint{Addr: addr(at), NodeName: node, Condition: intent.Ready | intent.Serving}
	hint := func(add func(*intent.Hints)) {
		if e.Hints == nil {
			e.Hints = &intent.Hints{}
		}
		add(e.Hints)
	}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "unready":
			e.Condition = 0
		case "serving":
			e.Condition = intent.Serving
		case "terminating":
			e.Condition = intent.Serving | intent.Terminating
		case "gone":
			e.Condition = intent.Terminating
		case "secondary":
			e.Condition |= intent.Secondary
		case "zone":
			hint(func(h *intent.Hints) { h.ForZones = strings.Split(value, ",") })
		case "node":
			hint(func(h *intent.Hints) { h.ForNodes = strings.Split(value, ",") })
		default:
			panic("unknown word " + w)
		}
	}
	return e
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, addr(s))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// describe prints the routes of one kind: "pod: …; node: …; outside: …", shortened to one when all are the same, with
// endpoints by the last two parts of their addresses.
func describe(s *plan.Service, kind plan.Kind) string {
	if s == nil {
		return "nothing"
	}
	var out []string
	for _, f := range s.Frontends {
		if f.Kind != kind {
			continue
		}
		var parts []string
		for o, r := range f.Routes {
			parts = append(parts, fmt.Sprintf("%v: %v", plan.Origin(o), r))
		}
		text := strings.Join(parts, "; ")
		if f.Routes[0] == f.Routes[1] && f.Routes[1] == f.Routes[2] {
			text = f.Routes[0].String()
		}
		out = append(out, strings.ReplaceAll(strings.ReplaceAll(text, "10.244.", ""), ":8080", ""))
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, " | ")
}

// TestChoice is the table of what a Service's policies and its endpoints' conditions come to, for traffic to the cluster
// IP and to the node port (as all other external addresses have it).
func TestChoice(t *testing.T) {
	for _, c := range []struct {
		name               string
		change             func(*intent.Service)
		slices             []*intent.Slice
		internal, external string
	}{
		{"both ready", nil, []*intent.Slice{slice("10.244.1.1@n1", "10.244.2.1@n2")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"no slices", nil, nil, "reject", "reject"},
		{"none ready", nil, []*intent.Slice{slice("10.244.1.1@n1 unready")}, "reject", "reject"},
		{"one ready", nil, []*intent.Slice{slice("10.244.1.1@n1 unready", "10.244.2.1@n2")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "2.1 masquerade"},
		{"serving alone is no fallback", nil, []*intent.Slice{slice("10.244.1.1@n1 serving")}, "reject", "reject"},
		{"terminating is", nil, []*intent.Slice{slice("10.244.1.1@n1 terminating", "10.244.2.1@n2 gone")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 masquerade"},
		{"ready goes before terminating", nil, []*intent.Slice{slice("10.244.1.1@n1 terminating", "10.244.2.1@n2")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "2.1 masquerade"},
		{"external Local", externalLocal, []*intent.Slice{slice("10.244.1.1@n1", "10.244.2.1@n2")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade",
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1"},
		{"external Local, none here", externalLocal, []*intent.Slice{slice("10.244.2.1@n2")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "pod: 2.1; node: 2.1 masquerade; outside: drop"},
		{"external Local, terminating here", externalLocal, []*intent.Slice{slice("10.244.1.1@n1 terminating", "10.244.2.1@n2")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "pod: 2.1; node: 2.1 masquerade; outside: 1.1"},
		{"external Local, none anywhere", externalLocal, []*intent.Slice{slice("10.244.2.1@n2 unready")}, "reject", "reject"},
		{"external Local, no node named", externalLocal, []*intent.Slice{slice("10.244.1.1")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "pod: 1.1; node: 1.1 masquerade; outside: drop"},
		{"internal Local", internalLocal, []*intent.Slice{slice("10.244.1.1@n1", "10.244.2.1@n2")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 2.1 masquerade"},
		{"internal Local, none here", internalLocal, []*intent.Slice{slice("10.244.2.1@n2")}, "drop", "2.1 masquerade"},
		{"internal Local, none anywhere", internalLocal, nil, "reject", "reject"},
		{"zone hints", nil, []*intent.Slice{slice("10.244.1.1@n1 zone=z2", "10.244.2.1@n2 zone=z1,z3")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "2.1 masquerade"},
		{"a zone hint missing", nil, []*intent.Slice{slice("10.244.1.1@n1 zone=z2", "10.244.2.1@n2")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"none for this zone", nil, []*intent.Slice{slice("10.244.1.1@n1 zone=z2", "10.244.2.1@n2 zone=z3")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"hints of the unready do not count", nil, []*intent.Slice{slice("10.244.1.1@n1 unready zone=z1", "10.244.2.1@n2 zone=z2")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "2.1 masquerade"},
		{"node hints go before zones", nil, []*intent.Slice{slice("10.244.1.1@n1 zone=z1 node=n1", "10.244.2.1@n2 zone=z1 node=n2")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 masquerade"},
		{"a node hint missing", nil, []*intent.Slice{slice("10.244.1.1@n1 node=n1", "10.244.2.1@n2")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"no node hint for us: the zone", nil, []*intent.Slice{slice("10.244.1.1@n3 zone=z1 node=n3", "10.244.2.1@n2 zone=z2 node=n2")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 masquerade"},
		{"Local does not ask for hints", externalLocal, []*intent.Slice{slice("10.244.1.1@n1 zone=z2", "10.244.2.1@n2 zone=z1")},
			"pod: 2.1; node: 2.1 masquerade; outside: 2.1 masquerade", "pod: 2.1; node: 2.1 masquerade; outside: 1.1"},
		{"two slices, one address twice", nil, []*intent.Slice{slice("10.244.2.1@n2", "10.244.1.1@n1"), slice("10.244.1.1@n1")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"an address used again", nil, []*intent.Slice{slice("10.244.1.1@n1 terminating"), slice("10.244.1.1@n1")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 masquerade"},
		{"an address used again, other order", nil, []*intent.Slice{slice("10.244.1.1@n1", "10.244.2.1@n2"), slice("10.244.1.1@n1 terminating")},
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"further addresses of an endpoint", nil, []*intent.Slice{slice("10.244.1.1@n1", "10.244.1.2@n1 secondary")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 masquerade"},
		{"a slice of the other family", nil, []*intent.Slice{slice("fd00:244::1@n1")}, "reject", "reject"},
		{"ExternalName", func(s *intent.Service) { s.Type = intent.ExternalName }, nil, "nothing", "nothing"},
		{"headless", func(s *intent.Service) { s.Headless, s.ClusterIPs = true, nil }, nil, "nothing", "nothing"},
		{"no cluster IP yet", func(s *intent.Service) { s.ClusterIPs = nil }, nil, "nothing", "nothing"},
		{"another proxy's", func(s *intent.Service) { s.ProxyName = "other" }, nil, "nothing", "nothing"},
		{"labelled headless, with a cluster IP", func(s *intent.Service) { s.HeadlessLabel = true }, []*intent.Slice{slice("10.244.1.1@n1")},
			"pod: 1.1; node: 1.1 masquerade; outside: 1.1 masquerade", "1.1 masquerade"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := service()
			if c.change != nil {
				c.change(s)
			}
			got := plan.For(&intent.Entry{Service: s, Slices: c.slices}, here())
			if d := describe(got, plan.ClusterIP); d != c.internal {
				t.Errorf("cluster IP:\n got %s\nwant %s", d, c.internal)
			}
			for _, kind := range []plan.Kind{plan.NodePort, plan.ExternalIP, plan.LoadBalancerIP} {
				if d := describe(got, kind); d != c.external {
					t.Errorf("%v:\n got %s\nwant %s", kind, d, c.external)
				}
			}
		})
	}
}

func TestMasquerade(t *testing.T) {
	both := []*intent.Slice{slice("10.244.1.1@n1", "10.244.2.1@n2")}
	for _, c := range []struct {
		name               string
		facts              func(*plan.Facts)
		change             func(*intent.Service)
		internal, external string
	}{
		{"all", func(f *plan.Facts) { f.MasqueradeAll = true }, nil, "1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"all, Local", func(f *plan.Facts) { f.MasqueradeAll = true }, externalLocal, "1.1 2.1 masquerade",
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1"},
		{"Pods unknown", func(f *plan.Facts) { f.Pods = plan.Detector{} }, nil, "1.1 2.1", "1.1 2.1 masquerade"},
		{"Pods unknown, Local", func(f *plan.Facts) { f.Pods = plan.Detector{} }, externalLocal, "1.1 2.1",
			"pod: 1.1; node: 1.1 2.1 masquerade; outside: 1.1"},
		{"Pods known in the other family only", func(f *plan.Facts) { f.Pods.Prefixes = f.Pods.Prefixes[1:] }, nil, "1.1 2.1", "1.1 2.1 masquerade"},
		{"Pods known by interface", func(f *plan.Facts) { f.Pods = plan.Detector{Interface: "br0"} }, nil,
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"endpoints that Portal added here", func(f *plan.Facts) { f.Temporary = addrs("10.244.1.1", "10.244.2.1", "10.96.0.1") }, nil,
			"pod: 1.1 2.1; node: 1.1 2.1; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
		{"one of them", func(f *plan.Facts) { f.Temporary = addrs("10.244.1.1") }, nil,
			"pod: 1.1 2.1; node: 1.1 2.1 masquerade; outside: 1.1 2.1 masquerade", "1.1 2.1 masquerade"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, s := here(), service()
			c.facts(f)
			if c.change != nil {
				c.change(s)
			}
			got := plan.For(&intent.Entry{Service: s, Slices: both}, f)
			if d := describe(got, plan.ClusterIP); d != c.internal {
				t.Errorf("cluster IP:\n got %s\nwant %s", d, c.internal)
			}
			if d := describe(got, plan.NodePort); d != c.external {
				t.Errorf("node port:\n got %s\nwant %s", d, c.external)
			}
		})
	}
}

// keys lists a plan's frontends by where they are.
func keys(s *plan.Service) string {
	if s == nil {
		return ""
	}
	var out []string
	for _, f := range s.Frontends {
		out = append(out, f.FrontendKey.String())
	}
	return strings.Join(out, " ")
}

func TestFrontends(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*intent.Service)
		want   string
	}{
		{"all kinds", func(*intent.Service) {}, "*:30080/IPv4/tcp 10.96.0.1:80/tcp 198.51.100.1:80/tcp 203.0.113.1:80/tcp"},
		{"ipMode Proxy", func(s *intent.Service) { s.Ingress[0].Proxied = true }, "*:30080/IPv4/tcp 10.96.0.1:80/tcp 198.51.100.1:80/tcp"},
		{"a balancer by name", func(s *intent.Service) { s.Ingress = []intent.Ingress{{Hostname: "lb.example"}} },
			"*:30080/IPv4/tcp 10.96.0.1:80/tcp 198.51.100.1:80/tcp"},
		{"no node port", func(s *intent.Service) { s.Ports[0].NodePort = 0 }, "10.96.0.1:80/tcp 198.51.100.1:80/tcp 203.0.113.1:80/tcp"},
		{"addresses of a family without a cluster IP", func(s *intent.Service) {
			s.ExternalIPs, s.Ingress = addrs("2001:db8::5"), []intent.Ingress{{Addr: addr("2001:db8::6")}}
		}, "*:30080/IPv4/tcp 10.96.0.1:80/tcp"},
		{"two families", func(s *intent.Service) {
			s.ClusterIPs, s.ExternalIPs, s.Ingress = addrs("fd00:96::1", "10.96.0.1"), addrs("2001:db8::5"), nil
		}, "*:30080/IPv4/tcp 10.96.0.1:80/tcp *:30080/IPv6/tcp [2001:db8::5]:80/tcp [fd00:96::1]:80/tcp"},
		{"one address as external IP and balancer's", func(s *intent.Service) { s.ExternalIPs = addrs("203.0.113.1") },
			"*:30080/IPv4/tcp 10.96.0.1:80/tcp 203.0.113.1:80/tcp"},
		{"two ports, two protocols", func(s *intent.Service) {
			s.ExternalIPs, s.Ingress = nil, nil
			s.Ports = append(s.Ports, intent.Port{Name: "dns", Protocol: intent.UDP, Port: 80, NodePort: 30080})
		}, "*:30080/IPv4/tcp *:30080/IPv4/udp 10.96.0.1:80/tcp 10.96.0.1:80/udp"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := keys(plan.For(&intent.Entry{Service: service(c.change)}, here())); got != c.want {
				t.Errorf("\n got %s\nwant %s", got, c.want)
			}
		})
	}
}

// TestPortsByName: ports of Service and slice belong together by name and protocol, and each endpoint listens where its
// slice says.
func TestPortsByName(t *testing.T) {
	s := service(func(s *intent.Service) {
		s.Ports = []intent.Port{{Name: "a", Protocol: intent.TCP, Port: 80}, {Name: "b", Protocol: intent.TCP, Port: 81}, {Name: "a", Protocol: intent.UDP, Port: 80}}
		s.ExternalIPs, s.Ingress = nil, nil
	})
	one, two := slice("10.244.1.1@n1"), slice("10.244.2.1@n2")
	one.Ports = []intent.EndpointPort{{Name: "a", Protocol: intent.TCP, Port: 1000}, {Name: "b", Protocol: intent.TCP, Port: 1001}}
	two.Ports = []intent.EndpointPort{{Name: "a", Protocol: intent.TCP, Port: 2000}, {Name: "b", Protocol: intent.TCP}}
	got := plan.For(&intent.Entry{Service: s, Slices: []*intent.Slice{one, two}}, here())
	want := map[string]string{
		"10.96.0.1:80/tcp": "10.244.1.1:1000 10.244.2.1:2000", "10.96.0.1:81/tcp": "10.244.1.1:1001", "10.96.0.1:80/udp": "reject",
	}
	for _, f := range got.Frontends {
		if r := f.Routes[plan.FromPod].String(); r != want[f.FrontendKey.String()] {
			t.Errorf("%v leads to %s, want %s", f.FrontendKey, r, want[f.FrontendKey.String()])
		}
	}
	if len(got.Frontends) != len(want) {
		t.Errorf("%d frontends, want %d", len(got.Frontends), len(want))
	}
}

func TestSourceRanges(t *testing.T) {
	for _, c := range []struct {
		name, ranges string
		want         []netip.Prefix
	}{
		{"none", "", nil},
		{"some", "10.0.0.0/8 172.16.0.0/12", prefixes("10.0.0.0/8", "172.16.0.0/12")},
		{"everything", "10.0.0.0/8 0.0.0.0/0", nil},
		{"of the other family only", "fd00::/8", nil},
		{"the node is in", "192.0.2.0/24", prefixes("192.0.2.0/24", "203.0.113.1/32")},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := service(func(s *intent.Service) { s.SourceRanges = prefixes(strings.Fields(c.ranges)...) })
			for _, f := range plan.For(&intent.Entry{Service: s}, here()).Frontends {
				want := c.want
				if f.Kind != plan.LoadBalancerIP {
					want = nil
				}
				if !reflect.DeepEqual(f.Sources, want) {
					t.Errorf("%v takes %v, want %v", f.FrontendKey, f.Sources, want)
				}
			}
		})
	}
}

func TestHealthCheckAndLost(t *testing.T) {
	s := service(externalLocal, internalLocal, func(s *intent.Service) {
		s.HealthCheckNodePort, s.ClusterIPs = 30999, addrs("10.96.0.1", "fd00:96::1")
	})
	two := slice("10.244.1.1@n1", "10.244.1.2@n1", "10.244.1.3@n1 terminating", "10.244.2.1@n2")
	two.Ports = append(two.Ports, intent.EndpointPort{Name: "more", Protocol: intent.TCP, Port: 8081})
	got := plan.For(&intent.Entry{Service: s, Slices: []*intent.Slice{two, slice("fd00:244::1@n2")}}, here())
	want := &plan.HealthCheck{Service: s.Key, Port: 30999, Endpoints: map[intent.Family]int{intent.IPv4: 2, intent.IPv6: 0}}
	if !reflect.DeepEqual(got.HealthCheck, want) {
		t.Errorf("health check %+v, want %+v", got.HealthCheck, want)
	}
	if want := map[intent.Family]plan.Lost{intent.IPv6: {Internal: 1, External: 1}}; !reflect.DeepEqual(got.Lost, want) {
		t.Errorf("lost %v, want %v", got.Lost, want)
	}
	s.ClusterIPs = addrs("10.96.0.1")
	got = plan.For(&intent.Entry{Service: s, Slices: []*intent.Slice{two}}, here())
	if want := map[intent.Family]int{intent.IPv4: 2, intent.IPv6: 2}; !reflect.DeepEqual(got.HealthCheck.Endpoints, want) {
		t.Errorf("health check of a Service with IPv4 only: %v, want %v", got.HealthCheck.Endpoints, want)
	}
	s.ExternalLocal = false
	if got := plan.For(&intent.Entry{Service: s}, here()); got.HealthCheck != nil {
		t.Error("a health check without the policy Local")
	}
}

// TestServing: what goes on to an endpoint that serves is left alone, though new flows go elsewhere.
func TestServing(t *testing.T) {
	s := service(func(s *intent.Service) { s.Ports[0].Protocol = intent.UDP })
	sl := slice("10.244.1.1@n1", "10.244.1.2@n1 terminating", "10.244.1.3@n1 serving", "10.244.1.4@n1 unready")
	sl.Ports[0].Protocol = intent.UDP
	got := plan.For(&intent.Entry{Service: s, Slices: []*intent.Slice{sl}}, here()).Serving
	want := "[10.244.1.1:8080 10.244.1.2:8080 10.244.1.3:8080]"
	if len(got) != 1 || fmt.Sprint(got[0].Endpoints) != want {
		t.Errorf("serving %v, want %s", got, want)
	}
	if tcp := plan.For(&intent.Entry{Service: service()}, here()).Serving; tcp != nil {
		t.Errorf("TCP ends by itself, yet %v", tcp)
	}
}

// TestSharedPools: frontends that choose among the same endpoints share a pool.
func TestSharedPools(t *testing.T) {
	got := plan.For(&intent.Entry{Service: service(externalLocal), Slices: []*intent.Slice{slice("10.244.1.1@n1")}}, here())
	pools := map[*plan.Pool]bool{}
	for _, f := range got.Frontends {
		for _, r := range f.Routes {
			pools[r.Pool] = true
		}
	}
	if len(pools) != 1 {
		t.Errorf("%d pools for one set of endpoints", len(pools))
	}
}

// TestExempt: nobody's Service takes the way by which this node reaches the API.
func TestExempt(t *testing.T) {
	facts := here()
	facts.Exempt = []plan.FrontendKey{
		{Addr: addr("198.51.100.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80},
		{Addr: addr("203.0.113.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80},
		{Addr: addr("10.96.0.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80},
		{Family: intent.IPv4, Protocol: intent.TCP, Port: 30080},
	}
	s := plan.For(&intent.Entry{Service: service(), Slices: []*intent.Slice{slice("10.244.1.1@n1")}}, facts)
	if got, want := keys(s), "10.96.0.1:80/tcp"; got != want {
		t.Errorf("served at %s, want only the cluster IP %s", got, want)
	}
	if len(s.Notes) != 3 || !strings.Contains(strings.Join(s.Notes, "\n"), "198.51.100.1:80/tcp is where this node reaches the API") {
		t.Errorf("notes %q", s.Notes)
	}
	facts.Exempt = []plan.FrontendKey{{Addr: addr("198.51.100.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 6443}}
	if s = plan.For(&intent.Entry{Service: service()}, facts); len(s.Frontends) != 4 || len(s.Notes) != 0 {
		t.Errorf("another port of the API's address: %s, notes %q", keys(s), s.Notes)
	}
}

// TestUnassignable: addresses that mean something else on every machine are never a Service's.
func TestUnassignable(t *testing.T) {
	bad := []string{"0.0.0.0", "127.0.0.1", "169.254.169.254", "224.0.0.1", "255.255.255.255", "::ffff:127.0.0.1"}
	s := plan.For(&intent.Entry{Service: service(func(s *intent.Service) {
		s.ExternalIPs, s.Ingress = addrs(bad...), nil
		for _, a := range s.ExternalIPs {
			s.Ingress = append(s.Ingress, intent.Ingress{Addr: a})
		}
	})}, here())
	if got, want := keys(s), "*:30080/IPv4/tcp 10.96.0.1:80/tcp"; got != want {
		t.Errorf("served at %s, want %s", got, want)
	}
	if len(s.Notes) != 2*len(bad) {
		t.Errorf("%d notes for %d addresses: %q", len(s.Notes), 2*len(bad), s.Notes)
	}
	for _, a := range []string{"::", "::1", "fe80::1", "ff02::1"} {
		s := plan.For(&intent.Entry{Service: service(func(s *intent.Service) {
			s.ClusterIPs, s.ExternalIPs, s.Ingress = addrs("fd00:96::1"), addrs(a), nil
		})}, here())
		if len(s.Frontends) != 2 || len(s.Notes) != 1 {
			t.Errorf("%s: served at %s, notes %q", a, keys(s), s.Notes)
		}
	}
}

// TestOverlappingSourceRanges: modes get ranges in order, none within another.
func TestOverlappingSourceRanges(t *testing.T) {
	s := plan.For(&intent.Entry{Service: service(func(s *intent.Service) {
		s.SourceRanges = prefixes("192.0.2.0/24", "10.1.0.0/16", "10.0.0.0/8", "10.1.2.0/24", "10.0.0.0/8", "11.0.0.0/8")
	})}, here())
	for _, f := range s.Frontends {
		if got := fmt.Sprint(f.Sources); f.Kind == plan.LoadBalancerIP && got != "[10.0.0.0/8 11.0.0.0/8 192.0.2.0/24 203.0.113.1/32]" {
			t.Errorf("sources %s", got)
		}
	}
}
