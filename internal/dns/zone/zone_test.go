package zone

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"pgregory.net/rapid"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// request is a query over TCP.
func request(t interface{ Fatal(...any) }, name string, typ uint16) *Request {
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	raw, _ := m.Pack()
	var q wire.Query
	if q.Parse(raw) != wire.OK {
		t.Fatal("cannot ask for " + name)
	}
	return &Request{Query: &q, Limit: 65535}
}

func ask(t interface{ Fatal(...any) }, z *Zones, name string, typ uint16) *dns.Msg {
	out, outcome := z.Answer(make([]byte, 0, 65535), request(t, name, typ))
	if outcome == Foreign || outcome == Chase {
		return nil
	}
	r := new(dns.Msg)
	if err := r.Unpack(out); err != nil {
		t.Fatal(err)
	}
	return r
}

// Of two zones one of which is within the other, the longer one has the name, whichever was given first.
func TestZoneWithinZone(t *testing.T) {
	for _, zones := range [][]string{{"example", "east.example"}, {"east.example", "example"}} {
		c := intent.NewCluster()
		z, err := New(c, Options{Zones: zones, TTL: 30})
		if err != nil {
			t.Fatal(err)
		}
		c.SetNamespace(&intent.Namespace{Name: "shop"})
		c.SetService(&intent.Service{Key: intent.Key{Namespace: "shop", Name: "web"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}})
		z.Update(c.Follow().Take())
		for _, zone := range zones {
			if r := ask(t, z, "web.shop.svc."+zone+".", dns.TypeA); len(r.Answer) != 1 {
				t.Errorf("zones %v: %v", zones, r)
			}
			if r := ask(t, z, zone+".", dns.TypeSOA); len(r.Answer) != 1 {
				t.Errorf("zones %v: %v", zones, r)
			}
		}
	}
}

// Records that were brought up to date change by change must equal those made at once from the final state.
func TestIncrementalEqualsFresh(t *testing.T) {
	o := Options{Zones: []string{"cluster.local", "two.example"}, TTL: 30, Pods: PodsInsecure}
	rapid.Check(t, func(t *rapid.T) {
		c := intent.NewCluster()
		if rapid.Bool().Draw(t, "packed") {
			c = intent.NewPackedCluster()
		}
		z, err := New(c, o)
		if err != nil {
			t.Fatal(err)
		}
		feed := c.Follow()
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			change(t, c)
			if rapid.Bool().Draw(t, "update") {
				z.Update(feed.Take())
			}
		}
		z.Update(feed.Take())
		fresh, _ := New(c, o)
		fresh.Update(c.Follow().Take())
		if a, b := dump(z), dump(fresh); fmt.Sprint(a) != fmt.Sprint(b) {
			t.Fatalf("step by step:\n%v\nat once:\n%v", a, b)
		}
		answersAreTheRecords(t, z)
	})
}

// Answers from the packed form must be those that the records written out give, and a name that has none is denied.
func answersAreTheRecords(t *rapid.T, z *Zones) {
	there := map[string]bool{}
	z.each(func(n *Name) bool {
		name := wire.UnpackName([]byte(n.owner))
		there[name] = true
		if n.kind == plain && len(n.all()) == 0 && len(n.targets()) == 0 {
			t.Fatalf("%s has no records at all", name)
		}
		for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypePTR, dns.TypeTXT} {
			s := n.find(typ)
			if s == nil && len(n.targets()) > 0 {
				continue
			}
			got, want := ask(t, z, name, typ), new(dns.Msg)
			if s != nil {
				if err := want.Unpack(n.message(typ, *s)); err != nil {
					t.Fatal(err)
				}
			}
			if a, b := lines(got.Answer), lines(want.Answer); a != b {
				t.Fatalf("%s %s answers\n%s\nwant\n%s", name, dns.TypeToString[typ], a, b)
			}
			if a, b := lines(got.Extra), lines(want.Extra); a != b {
				t.Fatalf("%s %s adds\n%s\nwant\n%s", name, dns.TypeToString[typ], a, b)
			}
			if s == nil && n.kind == plain && got.Rcode != dns.RcodeSuccess {
				t.Fatalf("%s %s: %s", name, dns.TypeToString[typ], dns.RcodeToString[got.Rcode])
			}
		}
		return true
	})
	for _, name := range everyName() {
		if r := ask(t, z, name, dns.TypeA); !there[name] && r.Rcode == dns.RcodeSuccess {
			t.Fatalf("%s is answered, and is not there", name)
		}
	}
}

func lines(rrs []dns.RR) string {
	var out []string
	for _, rr := range rrs {
		out = append(out, rr.String())
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// everyName lists those that the random clusters may have.
func everyName() (out []string) {
	for i := range 8 {
		out = append(out, fmt.Sprintf("%d.0.0.10.in-addr.arpa.", i))
	}
	for _, service := range []string{"a.n1", "b.n1", "a.n2", "b.n2"} {
		for _, zone := range []string{"cluster.local.", "two.example."} {
			base := service + ".svc." + zone
			out = append(out, base)
			for _, below := range []string{"h", "10-0-0-1", "10-0-0-2", "10-0-0-5", "fd00--1", "fd00--3", "_p._tcp", "_q._udp", "_r._tcp", "_q._tcp"} {
				out = append(out, below+"."+base)
			}
		}
	}
	return out
}

// change makes a random change to a small cluster.
func change(t *rapid.T, c *intent.Cluster) {
	ns := rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "namespace")
	k := intent.Key{Namespace: ns, Name: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name")}
	addr := func() netip.Addr {
		return netip.AddrFrom4([4]byte{10, 0, 0, byte(rapid.IntRange(1, 20).Draw(t, "addr"))})
	}
	addr6 := func() netip.Addr {
		return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(rapid.IntRange(1, 20).Draw(t, "addr"))})
	}
	switch rapid.IntRange(0, 7).Draw(t, "what") {
	case 0:
		c.SetNamespace(&intent.Namespace{Name: ns})
	case 1:
		c.DeleteNamespace(ns)
	case 2:
		s := &intent.Service{Key: k, ClusterIPs: []netip.Addr{addr()}, Ports: []intent.Port{{Name: "p", Protocol: intent.TCP, Port: 80}}}
		if rapid.Bool().Draw(t, "more") {
			s.ClusterIPs = append(s.ClusterIPs, addr6())
			s.Ports = append(s.Ports, intent.Port{Name: "q", Protocol: intent.UDP, Port: 80}, intent.Port{Name: "r", Protocol: intent.TCP, Port: 81})
		}
		c.SetService(s)
	case 3:
		c.SetService(&intent.Service{Key: k, Headless: true})
	case 4:
		c.DeleteService(k)
	case 5:
		s := &intent.Slice{Key: intent.Key{Namespace: ns, Name: rapid.SampledFrom([]string{"s1", "s2"}).Draw(t, "slice")}, Service: k.Name, Family: intent.IPv4,
			Ports: rapid.SampledFrom(portLists).Draw(t, "ports")}
		make := addr
		if rapid.Bool().Draw(t, "IPv6") {
			s.Family, make = intent.IPv6, addr6
		}
		for range rapid.IntRange(0, 12).Draw(t, "endpoints") {
			e := intent.Endpoint{Addr: make(), Hostname: rapid.SampledFrom([]string{"", "", "h", "H2"}).Draw(t, "host")}
			if rapid.IntRange(0, 3).Draw(t, "ready") > 0 {
				e.Condition = intent.Ready
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		c.SetSlice(s)
	case 7:
		c.SetService(&intent.Service{Key: k, Type: intent.ExternalName, ExternalName: "a.n2.svc.cluster.local"})
	case 6:
		c.DeleteSlice(intent.Key{Namespace: ns, Name: rapid.SampledFrom([]string{"s1", "s2"}).Draw(t, "slice")})
	}
}

var portLists = [][]intent.EndpointPort{
	nil,
	{{Name: "q", Protocol: intent.UDP, Port: 53}},
	{{Name: "q", Protocol: intent.UDP, Port: 53}},
	{{Name: "q", Protocol: intent.UDP, Port: 53}, {Name: "r", Protocol: intent.TCP, Port: 53}, {Protocol: intent.TCP, Port: 80}},
	{{Name: "q", Protocol: intent.UDP}},
	{{Name: "q", Protocol: intent.UDP, Port: 53}, {Name: "q", Protocol: intent.UDP, Port: 54}},
}

// dump writes all records; several PTR records of a name may come in any order.
func dump(z *Zones) map[string]map[string]int {
	out := map[string]map[string]int{}
	z.each(func(n *Name) bool {
		rrs := map[string]int{}
		for _, s := range n.all() {
			m := new(dns.Msg)
			if m.Unpack(n.message(s.typ, s)) != nil {
				rrs["broken"]++
			}
			for _, rr := range append(m.Answer, m.Extra...) {
				rrs[rr.String()]++
			}
		}
		out[wire.UnpackName([]byte(n.owner))] = rrs
		return true
	})
	return out
}

func TestVerifiedPods(t *testing.T) {
	c := intent.NewCluster()
	c.SetNamespace(&intent.Namespace{Name: "shop"})
	c.SetNamespace(&intent.Namespace{Name: "other"})
	c.SetPod(&intent.Pod{Key: intent.Key{Namespace: "shop", Name: "p"}, Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.1"), netip.MustParseAddr("fd00::1")}})
	z, err := New(c, Options{Zones: []string{"cluster.local"}, TTL: 30, Pods: PodsVerified})
	if err != nil {
		t.Fatal(err)
	}
	feed := c.Follow()
	z.Update(feed.Take())
	for name, want := range map[string]int{
		"10-1-0-1.shop.pod.cluster.local.": dns.RcodeSuccess, "10-1-0-2.shop.pod.cluster.local.": dns.RcodeNameError,
		"10-1-0-1.other.pod.cluster.local.": dns.RcodeNameError, "fd00--1.shop.pod.cluster.local.": dns.RcodeSuccess,
		"fd00-0--1.shop.pod.cluster.local.": dns.RcodeNameError,
	} {
		if r := ask(t, z, name, dns.TypeA); r.Rcode != want {
			t.Errorf("%s: %s", name, dns.RcodeToString[r.Rcode])
		}
	}
	if ns := z.NamespaceOf(netip.MustParseAddr("10.1.0.1")); ns != "shop" {
		t.Errorf("the Pod's namespace: %q", ns)
	}
	c.SetPod(&intent.Pod{Key: intent.Key{Namespace: "other", Name: "q"}, Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.1")}})
	z.Update(feed.Take())
	if ns := z.NamespaceOf(netip.MustParseAddr("10.1.0.1")); ns != "" {
		t.Errorf("two Pods share the address, and yet the namespace is %q", ns)
	}
	c.DeletePod(intent.Key{Namespace: "shop", Name: "p"})
	z.Update(feed.Take())
	if r := ask(t, z, "10-1-0-1.shop.pod.cluster.local.", dns.TypeA); r.Rcode != dns.RcodeNameError {
		t.Error("a Pod that is gone is still named")
	}
}

func TestNotReadyBeforeTheFirstList(t *testing.T) {
	c := intent.NewCluster(intent.Services)
	z, err := New(c, Options{Zones: []string{"cluster.local"}, TTL: 30})
	if err != nil {
		t.Fatal(err)
	}
	feed := c.Follow()
	z.Update(feed.Take())
	if r := ask(t, z, "web.shop.svc.cluster.local.", dns.TypeA); r.Rcode != dns.RcodeServerFailure {
		t.Errorf("denied a name before anything was known: %s", dns.RcodeToString[r.Rcode])
	}
	c.MarkListed(intent.Services)
	z.Update(feed.Take())
	if r := ask(t, z, "web.shop.svc.cluster.local.", dns.TypeA); r.Rcode != dns.RcodeNameError {
		t.Errorf("after the list: %s", dns.RcodeToString[r.Rcode])
	}
}
