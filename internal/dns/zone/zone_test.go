package zone

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"github.com/miekg/dns"
	"pgregory.net/rapid"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

func ask(t interface{ Fatal(...any) }, z *Zones, name string, typ uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	raw, _ := m.Pack()
	var q wire.Query
	if q.Parse(raw) != wire.OK {
		t.Fatal("cannot ask for " + name)
	}
	out, outcome := z.Answer(make([]byte, 0, 65535), &Request{Query: &q, Limit: 65535})
	if outcome == Foreign || outcome == Chase {
		return nil
	}
	r := new(dns.Msg)
	if err := r.Unpack(out); err != nil {
		t.Fatal(err)
	}
	return r
}

// Records that were brought up to date change by change must equal those made at once from the final state.
func TestIncrementalEqualsFresh(t *testing.T) {
	o := Options{Zones: []string{"cluster.local", "two.example"}, TTL: 30, Pods: PodsInsecure}
	rapid.Check(t, func(t *rapid.T) {
		c := intent.NewCluster()
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
	})
}

// change makes a random change to a small cluster.
func change(t *rapid.T, c *intent.Cluster) {
	ns := rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "namespace")
	k := intent.Key{Namespace: ns, Name: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "name")}
	addr := func() netip.Addr {
		return netip.AddrFrom4([4]byte{10, 0, 0, byte(rapid.IntRange(1, 5).Draw(t, "addr"))})
	}
	switch rapid.IntRange(0, 6).Draw(t, "what") {
	case 0:
		c.SetNamespace(&intent.Namespace{Name: ns})
	case 1:
		c.DeleteNamespace(ns)
	case 2:
		c.SetService(&intent.Service{Key: k, ClusterIPs: []netip.Addr{addr()}, Ports: []intent.Port{{Name: "p", Protocol: intent.TCP, Port: 80}}})
	case 3:
		c.SetService(&intent.Service{Key: k, Headless: true})
	case 4:
		c.DeleteService(k)
	case 5:
		s := &intent.Slice{Key: intent.Key{Namespace: ns, Name: rapid.SampledFrom([]string{"s1", "s2"}).Draw(t, "slice")}, Service: k.Name, Family: intent.IPv4,
			Ports: []intent.EndpointPort{{Name: "q", Protocol: intent.UDP, Port: 53}}}
		for range rapid.IntRange(0, 3).Draw(t, "endpoints") {
			e := intent.Endpoint{Addr: addr(), Hostname: rapid.SampledFrom([]string{"", "h"}).Draw(t, "host")}
			if rapid.Bool().Draw(t, "ready") {
				e.Condition = intent.Ready
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		c.SetSlice(s)
	case 6:
		c.DeleteSlice(intent.Key{Namespace: ns, Name: rapid.SampledFrom([]string{"s1", "s2"}).Draw(t, "slice")})
	}
}

// dump writes all records; several PTR records of a name may come in any order.
func dump(z *Zones) map[string]map[string]int {
	out := map[string]map[string]int{}
	z.table.each(func(n *Name) bool {
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

func TestTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table, model := newTable(), map[string]*Name{}
		for range rapid.IntRange(1, 400).Draw(t, "steps") {
			owner := fmt.Sprint("n", rapid.IntRange(0, 120).Draw(t, "name"))
			if rapid.IntRange(0, 2).Draw(t, "what") == 0 {
				table.remove(owner)
				delete(model, owner)
			} else {
				n := &Name{owner: owner}
				table.put(n)
				model[owner] = n
			}
		}
		for i := range 121 {
			owner := fmt.Sprint("n", i)
			if table.get([]byte(owner)) != model[owner] {
				t.Fatalf("%s is not what was put", owner)
			}
		}
		if table.live != len(model) {
			t.Fatalf("%d live, want %d", table.live, len(model))
		}
	})
}

// Readers must see a name that is replaced over and over at every moment, while the table grows and shrinks around it.
func TestTableWhileWritten(t *testing.T) {
	table := newTable()
	table.put(&Name{owner: "always"})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if table.get([]byte("always")) == nil {
					t.Error("a name went that was never removed")
					return
				}
			}
		})
	}
	for round := range 20 {
		for i := range 2000 {
			table.put(&Name{owner: fmt.Sprint(round, i)})
			if i%100 == 0 {
				table.put(&Name{owner: "always"})
			}
		}
		for i := range 2000 {
			table.remove(fmt.Sprint(round, i))
		}
	}
	close(stop)
	wg.Wait()
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
