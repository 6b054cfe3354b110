package plan_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"portal/internal/intent"
	"portal/internal/plan"
)

func entry(name, clusterIP string, endpoints ...string) *intent.Entry {
	s := service(func(s *intent.Service) {
		s.Name, s.ClusterIPs, s.Ports[0].NodePort = name, addrs(clusterIP), 0
	})
	return &intent.Entry{Service: s, Slices: []*intent.Slice{slice(endpoints...)}}
}

// only leaves a Service nothing but its cluster IP.
func only(e *intent.Entry) *intent.Entry {
	e.Service.ExternalIPs, e.Service.Ingress = nil, nil
	return e
}

func set(s *plan.Snapshot, e *intent.Entry) { s.Set(e.Service.Key, plan.For(e, s.Facts)) }

func changes(d *plan.Delta) string {
	var out []string
	if d.Full {
		out = append(out, "full")
	}
	if d.Facts {
		out = append(out, "facts")
	}
	if d.Serving {
		out = append(out, "serving")
	}
	for _, c := range d.Frontends {
		sign := "~"
		if c.Old == nil {
			sign = "+"
		} else if c.New == nil {
			sign = "-"
		}
		out = append(out, sign+c.FrontendKey.String())
	}
	for _, a := range d.AddedIPs {
		out = append(out, "+"+a.String())
	}
	for _, a := range d.RemovedIPs {
		out = append(out, "-"+a.String())
	}
	return strings.Join(out, " ")
}

// TestDeltaStory follows a snapshot through its life.
func TestDeltaStory(t *testing.T) {
	s := plan.NewSnapshot(here())
	expect := func(want string) {
		t.Helper()
		if got := changes(s.Delta()); got != want {
			t.Fatalf("delta %q, want %q", got, want)
		}
	}
	set(s, only(entry("a", "10.96.0.1", "10.244.1.1")))
	expect("full")
	s.Acknowledge()
	expect("")
	set(s, only(entry("a", "10.96.0.1", "10.244.1.1")))
	expect("")
	set(s, only(entry("b", "10.96.0.2", "10.244.1.1")))
	expect("+10.96.0.2:80/tcp +10.96.0.2")
	// Not acknowledged yet, so that what comes now is added to it.
	set(s, only(entry("a", "10.96.0.1", "10.244.1.2")))
	expect("~10.96.0.1:80/tcp +10.96.0.2:80/tcp +10.96.0.2")
	set(s, only(entry("a", "10.96.0.1", "10.244.1.1")))
	expect("+10.96.0.2:80/tcp +10.96.0.2")
	s.Delete(intent.Key{Namespace: "ns", Name: "b"})
	expect("")
	set(s, only(entry("a", "10.96.0.9", "10.244.1.1")))
	expect("-10.96.0.1:80/tcp +10.96.0.9:80/tcp +10.96.0.9 -10.96.0.1")
	s.Acknowledge(plan.FrontendKey{Addr: addr("10.96.0.9"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80})
	expect("+10.96.0.9:80/tcp")
	s.Acknowledge()
	f := here()
	f.MasqueradeAll = true
	s.SetFacts(f)
	expect("facts")
	s.Forget()
	expect("full facts")
	s.Acknowledge()
	s.SetFacts(f)
	expect("")
}

// TestAcknowledgedStory follows a snapshot through changes and acknowledgements: its deltas list what has
// changed since.
func TestAcknowledgedStory(t *testing.T) {
	s := plan.NewSnapshot(here())
	expect := func(want string) {
		t.Helper()
		if got := changes(s.Delta()); got != want {
			t.Fatalf("delta %q, want %q", got, want)
		}
	}
	a, b := intent.Key{Namespace: "ns", Name: "a"}, intent.Key{Namespace: "ns", Name: "b"}
	set(s, only(entry("a", "10.96.0.1", "10.244.1.1")))
	set(s, only(entry("c", "10.96.0.3", "10.244.1.3")))
	expect("full")
	s.Acknowledge()
	expect("")
	set(s, only(entry("b", "10.96.0.2", "10.244.1.1")))
	set(s, only(entry("a", "10.96.0.1", "10.244.1.2")))
	s.Delete(intent.Key{Namespace: "ns", Name: "c"})
	expect("~10.96.0.1:80/tcp +10.96.0.2:80/tcp -10.96.0.3:80/tcp +10.96.0.2 -10.96.0.3")
	// There and back again.
	set(s, only(entry("a", "10.96.0.1", "10.244.1.1")))
	set(s, only(entry("c", "10.96.0.3", "10.244.1.3")))
	s.Delete(b)
	expect("")
	f := here()
	f.MasqueradeAll = true
	s.SetFacts(f)
	set(s, only(entry("b", "10.96.0.2", "10.244.1.1")))
	expect("facts +10.96.0.2:80/tcp +10.96.0.2")
	s.Acknowledge()
	expect("")
	s.Delete(b)
	expect("-10.96.0.2:80/tcp -10.96.0.2")
	dns := only(entry("a", "10.96.0.1", "10.244.1.1"))
	dns.Service.Ports[0].Protocol, dns.Slices[0].Ports[0].Protocol = intent.UDP, intent.UDP
	set(s, dns)
	expect("serving -10.96.0.1:80/tcp +10.96.0.1:80/udp -10.96.0.2:80/tcp -10.96.0.2")
	s.Acknowledge()
	expect("")

	// What was acknowledged counts no more.
	set(s, only(entry("b", "10.96.0.2", "10.244.1.1")))
	s.Forget()
	expect("full")
	set(s, only(entry("b", "10.96.0.2", "10.244.1.2")))
	expect("full")
	s.Acknowledge()
	s.Delete(a)
	expect("-10.96.0.1:80/udp -10.96.0.1")
	s.Acknowledge()
	expect("")
	s.Delete(b)
	expect("-10.96.0.2:80/tcp -10.96.0.2")
}

// TestRefused: what is refused stays what was acknowledged before, or not there if nothing was.
func TestRefused(t *testing.T) {
	s := plan.NewSnapshot(here())
	at := func(ip string) plan.FrontendKey {
		return plan.FrontendKey{Addr: addr(ip), Family: intent.IPv4, Protocol: intent.TCP, Port: 80}
	}
	for i := range 3 {
		set(s, only(entry(fmt.Sprint("s", i), fmt.Sprintf("10.96.0.%d", i), "10.244.1.1")))
	}
	s.Acknowledge()
	before := s.Frontends[at("10.96.0.1")]
	for i := 1; i < 4; i++ {
		set(s, only(entry(fmt.Sprint("s", i), fmt.Sprintf("10.96.0.%d", i), "10.244.1.2")))
	}
	// The first has not changed: it can be refused where the mode has written everything again.
	s.Acknowledge(at("10.96.0.0"), at("10.96.0.1"), at("10.96.0.3"))
	if got, want := changes(s.Delta()), "+10.96.0.0:80/tcp ~10.96.0.1:80/tcp +10.96.0.3:80/tcp"; got != want {
		t.Fatalf("delta %q, want %q", got, want)
	}
	if got := s.Delta().Frontends[1].Old; got != before {
		t.Errorf("the old frontend is %v, want the acknowledged one: %v", got, before)
	}
	s.Acknowledge()
	if d := s.Delta(); !d.Empty() {
		t.Errorf("all acknowledged, yet %s", changes(d))
	}
}

// TestContestedAddress: of several Services that want one address, one has it, and when it leaves the next does.
func TestContestedAddress(t *testing.T) {
	s := plan.NewSnapshot(here())
	at := plan.FrontendKey{Addr: addr("198.51.100.1"), Family: intent.IPv4, Protocol: intent.TCP, Port: 80}
	holder := func(want string) {
		t.Helper()
		got := ""
		if f := s.Frontends[at]; f != nil {
			got = f.ID.Service.Name
		}
		if got != want {
			t.Fatalf("%q has the address, want %q", got, want)
		}
	}
	set(s, entry("m", "10.96.0.1"))
	set(s, entry("z", "10.96.0.2"))
	holder("m")
	s.Acknowledge()
	set(s, entry("a", "10.96.0.3"))
	holder("a")
	set(s, entry("c", "198.51.100.1"))
	holder("c") // a cluster IP can't be taken by naming it as an external one
	s.Delete(intent.Key{Namespace: "ns", Name: "c"})
	s.Delete(intent.Key{Namespace: "ns", Name: "a"})
	holder("m")
	for _, c := range s.Delta().Frontends {
		if c.FrontendKey == at {
			t.Errorf("the address went round to its acknowledged holder, yet %v is in the delta", c)
		}
	}
	s.Delete(intent.Key{Namespace: "ns", Name: "m"})
	s.Delete(intent.Key{Namespace: "ns", Name: "z"})
	holder("")
	if len(s.Frontends)+len(s.ClusterIPs)+len(s.Services) != 0 {
		t.Errorf("left behind: %v %v", s.Frontends, s.ClusterIPs)
	}
}

// TestIdentity: what is as before stays the same pointer.
func TestIdentity(t *testing.T) {
	s := plan.NewSnapshot(here())
	e := entry("a", "10.96.0.1", "10.244.1.1@n1", "10.244.2.1@n2")
	set(s, e)
	before := s.Services[e.Service.Key]
	set(s, e)
	if !reflect.DeepEqual(pointers(before), pointers(s.Services[e.Service.Key])) {
		t.Error("frontends were replaced by equal ones")
	}
	e.Service.Affinity = 1
	set(s, e)
	after := s.Services[e.Service.Key]
	for i, f := range after.Frontends {
		if f == before.Frontends[i] || f.Routes[0].Pool != before.Frontends[i].Routes[0].Pool {
			t.Errorf("%v: want a new frontend with the old pool", f.FrontendKey)
		}
	}
}

func pointers(s *plan.Service) (out []string) {
	for _, f := range s.Frontends {
		out = append(out, fmt.Sprintf("%p", f))
	}
	return out
}

// drawEntry makes any Service, sound or not, of a small world so that addresses and ports meet.
func drawEntry(t *rapid.T, name string) *intent.Entry {
	pick := func(label string, n int) int { return rapid.IntRange(0, n).Draw(t, label) }
	flag := func(label string) bool { return rapid.Bool().Draw(t, label) }
	list := func(label string, from ...string) []netip.Addr {
		return rapid.SliceOfN(rapid.SampledFrom(addrs(from...)), 0, 2).Draw(t, label)
	}
	s := &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: name}, Type: intent.ServiceType(pick("type", 3)), Headless: pick("headless", 9) == 0,
		ClusterIPs:  list("cluster", "10.96.0.1", "10.96.0.2", "fd00:96::1", "203.0.113.1"),
		ExternalIPs: list("external", "203.0.113.1", "10.96.0.2", "2001:db8::9", "192.0.2.1"), InternalLocal: flag("internal"), ExternalLocal: flag("local"),
		HealthCheckNodePort: uint16(pick("health", 1)) * 31000,
	}
	for range pick("ports", 2) {
		s.Ports = append(s.Ports, intent.Port{
			Name: rapid.SampledFrom([]string{"", "http"}).Draw(t, "name"), Protocol: rapid.SampledFrom([]intent.Protocol{intent.TCP, intent.UDP}).Draw(t, "protocol"),
			Port: uint16(80 + pick("port", 1)), NodePort: uint16(pick("nodeport", 2)) * 30000,
		})
	}
	for _, a := range list("ingress", "203.0.113.1", "203.0.113.2", "2001:db8::9") {
		s.Ingress = append(s.Ingress, intent.Ingress{Addr: a, Proxied: pick("proxied", 3) == 0})
	}
	s.SourceRanges = rapid.SliceOfN(rapid.SampledFrom(prefixes("10.0.0.0/8", "192.0.2.0/24", "0.0.0.0/0", "fd00::/8")), 0, 2).Draw(t, "ranges")
	e := &intent.Entry{Service: s}
	for i := range pick("slices", 2) {
		e.Slices = append(e.Slices, drawSlice(t, fmt.Sprint(i)))
	}
	return e
}

func drawSlice(t *rapid.T, name string) *intent.Slice {
	family := rapid.SampledFrom([]intent.Family{0, intent.IPv4, intent.IPv4, intent.IPv6}).Draw(t, "family")
	s := &intent.Slice{Key: intent.Key{Namespace: "ns", Name: name}, Family: family}
	for _, n := range rapid.SliceOfN(rapid.SampledFrom([]string{"", "http"}), 0, 2).Draw(t, "ports") {
		s.Ports = append(s.Ports, intent.EndpointPort{Name: n, Protocol: intent.TCP, Port: uint16(rapid.IntRange(0, 1).Draw(t, "target")) * 8080})
	}
	for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
		e := intent.Endpoint{
			Addr:     rapid.SampledFrom([]netip.Addr{addr("10.244.1.1"), addr("10.244.1.2"), addr("fd00:244::1"), {}}).Draw(t, "addr"),
			NodeName: rapid.SampledFrom([]string{"", "n1", "n2"}).Draw(t, "node"), Condition: intent.Condition(rapid.IntRange(0, 15).Draw(t, "condition")),
		}
		if rapid.Bool().Draw(t, "hints") {
			e.Hints = &intent.Hints{ForZones: []string{rapid.SampledFrom([]string{"z1", "z2"}).Draw(t, "zone")}}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// TestPlanHolds checks on any Service what every plan promises.
func TestPlanHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := drawEntry(t, "a")
		s := plan.For(e, here())
		if s == nil {
			return
		}
		for i, f := range s.Frontends {
			if i > 0 && s.Frontends[i-1].FrontendKey.Compare(f.FrontendKey) >= 0 {
				t.Fatalf("%v does not come after %v", f.FrontendKey, s.Frontends[i-1].FrontendKey)
			}
			for o, r := range f.Routes {
				holds(t, e.Service, f, plan.Origin(o), r)
			}
		}
	})
}

func holds(t *rapid.T, s *intent.Service, f *plan.Frontend, o plan.Origin, r plan.Route) {
	if (r.Verdict == plan.Forward) != (r.Pool != nil) || r.Pool != nil && len(r.Pool.Endpoints) == 0 {
		t.Fatalf("%v from %v: verdict %v with pool %v", f.FrontendKey, o, r.Verdict, r.Pool)
	}
	local := s.ExternalLocal
	if f.Kind == plan.ClusterIP {
		local = s.InternalLocal
	}
	if r.Verdict == plan.Drop && !local {
		t.Fatalf("%v from %v is dropped without a policy Local", f.FrontendKey, o)
	}
	if r.Pool == nil {
		return
	}
	for i, e := range r.Pool.Endpoints {
		if intent.FamilyOf(e.Addr.Addr()) != f.Family || r.Pool.ID.Family != f.Family {
			t.Fatalf("%v leads to %v of another family", f.FrontendKey, e.Addr)
		}
		if i > 0 && r.Pool.Endpoints[i-1].Addr.Compare(e.Addr) >= 0 {
			t.Fatalf("%v is not after %v", e.Addr, r.Pool.Endpoints[i-1].Addr)
		}
		if local && o == plan.FromOutside && !e.Local {
			t.Fatalf("%v from outside leads to %v elsewhere, in spite of the policy", f.FrontendKey, e.Addr)
		}
	}
}

// TestDeltasAddUp: whatever is changed, prepared, acknowledged, refused or forgotten, a copy to which the deltas are applied
// holds what a snapshot made afresh holds.
func TestDeltasAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		entries := map[string]*intent.Entry{}
		s := plan.NewSnapshot(here())
		kernel := newMirror()
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			name := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
			key := intent.Key{Namespace: "ns", Name: name}
			switch rapid.IntRange(0, 6).Draw(t, "what") {
			case 0:
				delete(entries, name)
				s.Delete(key)
			case 1:
				s.Forget()
			case 2:
				kernel.apply(s, s.Delta())
				s.Acknowledge()
				kernel.compare(t, fresh(entries))
			default:
				entries[name] = drawEntry(t, name)
				s.Set(key, plan.For(entries[name], s.Facts))
			}
		}
		kernel.apply(s, s.Delta())
		s.Acknowledge()
		kernel.compare(t, fresh(entries))
		if d := s.Delta(); !d.Empty() {
			t.Fatalf("all acknowledged, yet %s", changes(d))
		}
		for f, size := range fresh(entries).Sizes {
			if got := s.Sizes[f]; got.Frontends != size.Frontends || got.ClusterIPs != size.ClusterIPs || got.Endpoints < 0 {
				t.Fatalf("IPv%d: %+v, expected %+v", f, *got, *size)
			}
		}
		for name := range entries {
			s.Delete(intent.Key{Namespace: "ns", Name: name})
		}
		for f, size := range s.Sizes {
			if *size != (plan.Size{}) {
				t.Fatalf("IPv%d: nothing is left but %+v", f, *size)
			}
		}
	})
}

func fresh(entries map[string]*intent.Entry) *plan.Snapshot {
	s := plan.NewSnapshot(here())
	for name, e := range entries {
		s.Set(intent.Key{Namespace: "ns", Name: name}, plan.For(e, s.Facts))
	}
	return s
}

// mirror does what a mode does: it knows what it was told, and nothing else.
type mirror struct {
	frontends map[plan.FrontendKey]*plan.Frontend
	ips       map[netip.Addr]bool
}

func newMirror() *mirror {
	return &mirror{map[plan.FrontendKey]*plan.Frontend{}, map[netip.Addr]bool{}}
}

func (m *mirror) apply(s *plan.Snapshot, d *plan.Delta) {
	if d.Full {
		*m = *newMirror()
		for k, f := range s.Frontends {
			m.frontends[k] = f
		}
		for a := range s.ClusterIPs {
			m.ips[a] = true
		}
	}
	for _, c := range d.Frontends {
		if !c.Old.Equal(m.frontends[c.FrontendKey]) {
			panic(fmt.Sprintf("%v: Old is not what was acknowledged", c.FrontendKey))
		}
		delete(m.frontends, c.FrontendKey)
		if c.New != nil {
			m.frontends[c.FrontendKey] = c.New
		}
	}
	for _, a := range d.AddedIPs {
		m.ips[a] = true
	}
	for _, a := range d.RemovedIPs {
		delete(m.ips, a)
	}
}

func (m *mirror) compare(t *rapid.T, want *plan.Snapshot) {
	if len(m.frontends) != len(want.Frontends) || len(m.ips) != len(want.ClusterIPs) {
		t.Fatalf("%d frontends and %d addresses, want %d and %d", len(m.frontends), len(m.ips), len(want.Frontends), len(want.ClusterIPs))
	}
	for k, f := range want.Frontends {
		if !f.Equal(m.frontends[k]) {
			t.Fatalf("%v is %+v, want %+v", k, m.frontends[k], f)
		}
	}
	for a := range want.ClusterIPs {
		if !m.ips[a] {
			t.Fatalf("%v is missing", a)
		}
	}
}
