package zone

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"portal/internal/intent"
)

// aliases makes headless Services whose endpoints are names.
func aliases(t *testing.T, of map[string][]string) *Zones {
	t.Helper()
	c := intent.NewCluster()
	c.SetNamespace(&intent.Namespace{Name: "n"})
	for name, targets := range of {
		s := &intent.Slice{Key: intent.Key{Namespace: "n", Name: name + "-1"}, Service: name}
		for _, target := range targets {
			s.Names = append(s.Names, target)
			s.Endpoints = append(s.Endpoints, intent.Endpoint{Condition: intent.Ready})
		}
		c.SetService(&intent.Service{Key: intent.Key{Namespace: "n", Name: name}, Headless: true})
		c.SetSlice(s)
	}
	c.SetService(&intent.Service{Key: intent.Key{Namespace: "n", Name: "end"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}}})
	z, err := New(c, Options{Zones: []string{"cluster.local"}, TTL: 30})
	if err != nil {
		t.Fatal(err)
	}
	z.Update(c.Follow().Take())
	return z
}

func inZone(name string) string { return name + ".n.svc.cluster.local" }

// TestAliasesOfEachOther: names that all lead to each other are followed once each; the ways among thirty are too many to walk.
func TestAliasesOfEachOther(t *testing.T) {
	of := map[string][]string{}
	for i := range 30 {
		name := fmt.Sprintf("s%d", i)
		for j := range 30 {
			of[name] = append(of[name], inZone(fmt.Sprintf("s%d", j)))
		}
	}
	if m := ask(t, aliases(t, of), inZone("s0")+".", dns.TypeA); m == nil || len(m.Answer) != 0 {
		t.Errorf("a loop without addresses: %v", m)
	}
	of["s5"] = append(of["s5"], inZone("end"))
	m := ask(t, aliases(t, of), inZone("s0")+".", dns.TypeA)
	if m == nil {
		t.Fatal("no answer")
	}
	addresses := 0
	for _, rr := range m.Answer {
		if rr.Header().Rrtype == dns.TypeA {
			addresses++
		}
	}
	if addresses != 1 {
		t.Errorf("%d addresses, want 1: %v", addresses, m)
	}
}

// TestAliasesMeet: a name that two others lead to is in the answer once, with both ways to it.
func TestAliasesMeet(t *testing.T) {
	z := aliases(t, map[string][]string{"a": {inZone("b"), inZone("c")}, "b": {inZone("end")}, "c": {inZone("end")}})
	m := ask(t, z, inZone("a")+".", dns.TypeA)
	got := map[string]int{}
	for _, rr := range m.Answer {
		switch rr := rr.(type) {
		case *dns.CNAME:
			got[rr.Hdr.Name+" "+rr.Target]++
		case *dns.A:
			got[rr.Hdr.Name+" "+rr.A.String()]++
		}
	}
	want := map[string]int{}
	for _, way := range [][2]string{{"a", inZone("b") + "."}, {"a", inZone("c") + "."}, {"b", inZone("end") + "."}, {"c", inZone("end") + "."}, {"end", "10.96.0.1"}} {
		want[inZone(way[0])+". "+way[1]] = 1
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// TestAliasesIntoZones: a target is looked up in the longest of the zones that it is in.
func TestAliasesIntoZones(t *testing.T) {
	c := intent.NewCluster()
	c.SetNamespace(&intent.Namespace{Name: "n"})
	c.SetService(&intent.Service{Key: intent.Key{Namespace: "n", Name: "end"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []intent.Port{{Protocol: intent.TCP, Port: 80}}})
	zones := []string{"cluster.local", "east.cluster.local", "svc.cluster.local", "two.example"}
	for i, zone := range zones {
		c.SetService(&intent.Service{Key: intent.Key{Namespace: "n", Name: fmt.Sprintf("a%d", i)}, Type: intent.ExternalName, ExternalName: "end.n.svc." + zone})
	}
	z, err := New(c, Options{Zones: zones, TTL: 30})
	if err != nil {
		t.Fatal(err)
	}
	z.Update(c.Follow().Take())
	for i, target := range zones {
		if target == "cluster.local" { // below which svc is a zone of its own, so that the name is not there
			continue
		}
		for _, from := range []string{"east.cluster.local", "svc.cluster.local", "two.example"} {
			m := ask(t, z, fmt.Sprintf("a%d.n.svc.%s.", i, from), dns.TypeA)
			if m == nil || len(m.Answer) != 2 || m.Answer[1].Header().Name != "end.n.svc."+target+"." {
				t.Errorf("from %s to %s: %v", from, target, m)
			}
		}
	}
}

// TestAliasesBeforeListed: as long as not everything has been listed, a target that is missing may come.
func TestAliasesBeforeListed(t *testing.T) {
	c := intent.NewCluster(intent.Services, intent.Namespaces)
	feed := c.Follow()
	defer feed.Close()
	c.SetNamespace(&intent.Namespace{Name: "n"})
	c.SetService(&intent.Service{Key: intent.Key{Namespace: "n", Name: "a"}, Type: intent.ExternalName, ExternalName: inZone("late")})
	z, err := New(c, Options{Zones: []string{"cluster.local"}, TTL: 30})
	if err != nil {
		t.Fatal(err)
	}
	z.Update(feed.Take())
	if m := ask(t, z, inZone("a")+".", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Errorf("before everything is listed: %v", m)
	}
	c.MarkListed(intent.Namespaces)
	c.MarkListed(intent.Services)
	z.Update(feed.Take())
	if m := ask(t, z, inZone("a")+".", dns.TypeA); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
		t.Errorf("afterwards: %v", m)
	}
}

// TestAliasesOutside: a slice of very many names makes few queries to upstreams, each name once.
func TestAliasesOutside(t *testing.T) {
	var targets []string
	for i := range 1000 {
		targets = append(targets, fmt.Sprintf("h%d.example", i), "same.example")
	}
	z := aliases(t, map[string][]string{"a": targets})
	r := request(t, inZone("a")+".", dns.TypeA)
	if _, outcome := z.Answer(make([]byte, 0, 65535), r); outcome != Chase {
		t.Fatalf("outcome %v", outcome)
	}
	if n := len(r.Chain.Outside); n < 10 || n > maxReached {
		t.Errorf("%d names to resolve elsewhere, want at most %d", n, maxReached)
	}
	seen := map[string]bool{}
	for _, name := range r.Chain.Outside {
		if seen[name] {
			t.Errorf("%q twice", name)
		}
		seen[name] = true
	}
}
