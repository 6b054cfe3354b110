package zone

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
	"portal/internal/intent"
)

// big is a headless Service with many endpoints, of both families.
func big(t testing.TB, n int) *Zones {
	c := intent.NewCluster()
	c.SetNamespace(&intent.Namespace{Name: "shop"})
	c.SetService(&intent.Service{Key: intent.Key{Namespace: "shop", Name: "big"}, Headless: true})
	for _, family := range []intent.Family{intent.IPv4, intent.IPv6} {
		s := &intent.Slice{Key: intent.Key{Namespace: "shop", Name: fmt.Sprint("big-", family)}, Service: "big", Family: family,
			Ports: []intent.EndpointPort{{Name: "a", Protocol: intent.TCP, Port: 1}, {Name: "b", Protocol: intent.UDP, Port: 2}}}
		for i := range n {
			e := intent.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Hostname: fmt.Sprintf("endpoint-%d", i), Condition: intent.Ready}
			if family == intent.IPv6 {
				e.Addr = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})
			}
			s.Endpoints = append(s.Endpoints, e)
		}
		c.SetSlice(s)
	}
	z, err := New(c, Options{Zones: []string{"cluster.local"}, TTL: 30})
	if err != nil {
		t.Fatal(err)
	}
	z.Update(c.Follow().Take())
	return z
}

func limited(t testing.TB, z *Zones, name string, typ uint16, limit int, edns bool) (*dns.Msg, *Request, int) {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(name, typ)
	if edns {
		m.SetEdns0(uint16(limit), false)
	}
	raw, _ := m.Pack()
	r := &Request{Query: &wire.Query{}, Limit: limit, Rotate: 7}
	if r.Parse(raw) != wire.OK {
		t.Fatal("cannot ask for " + name)
	}
	out, _ := z.Answer(make([]byte, 0, limit), r)
	got := new(dns.Msg)
	if err := got.Unpack(out); err != nil {
		t.Fatalf("%s within %d: %v", dns.TypeToString[typ], limit, err)
	}
	return got, r, len(out)
}

// Targets that lie too far back for a pointer are written out; the records are those of the plain form.
func TestFarTargets(t *testing.T) {
	z := big(t, 300)
	var n *Name
	z.each(func(o *Name) bool {
		if o.owner == "\x03big\x04shop\x03svc\x07cluster\x05local\x00" {
			n = o
		}
		return n == nil
	})
	want := new(dns.Msg)
	if err := want.Unpack(n.message(wire.TypeSRV, *n.find(wire.TypeSRV))); err != nil {
		t.Fatal(err)
	}
	got, r, size := limited(t, z, "big.shop.svc.cluster.local.", dns.TypeSRV, 65535, false)
	if size <= maxPointer || r.Cut {
		t.Fatalf("%d bytes, cut: %v: nothing lies far back", size, r.Cut)
	}
	if lines(got.Answer) != lines(want.Answer) || lines(got.Extra) != lines(want.Extra) {
		t.Errorf("%d records and %d more, not the %d and %d of the plain form", len(got.Answer), len(got.Extra), len(want.Answer), len(want.Extra))
	}
}

// An answer that is cut off is as long as it may be, says so, and holds whole records of the full one.
func TestCutOff(t *testing.T) {
	z := big(t, 100)
	for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV} {
		whole, r, size := limited(t, z, "big.shop.svc.cluster.local.", typ, 65535, false)
		if r.Cut || whole.Truncated {
			t.Fatalf("the whole answer of %d bytes is cut off", size)
		}
		var all []string
		for _, rr := range append(whole.Answer, whole.Extra...) {
			all = append(all, rr.String())
		}
		for limit := 512; limit < size+100; limit += 61 {
			for _, edns := range []bool{false, true} {
				got, r, n := limited(t, z, "big.shop.svc.cluster.local.", typ, limit, edns)
				room := limit
				if edns {
					room -= wire.OPTLen
				}
				if cut := size > room; got.Truncated != cut || r.Cut != cut || n > limit || cut && n < limit-120 {
					t.Errorf("%s within %d: %d bytes of %d, cut off: %v, %v", dns.TypeToString[typ], limit, n, size, got.Truncated, r.Cut)
				}
				for _, rr := range append(got.Answer, got.Extra...) {
					if rr.Header().Rrtype != dns.TypeOPT && !slices.Contains(all, rr.String()) {
						t.Errorf("%s within %d: %s is not in the whole answer", dns.TypeToString[typ], limit, rr)
					}
				}
			}
		}
	}
}

// Addresses take turns, and each answer has all of them.
func TestTurns(t *testing.T) {
	z := big(t, 12)
	first := map[string]bool{}
	for turn := range uint32(12) {
		raw, _ := new(dns.Msg).SetQuestion("big.shop.svc.cluster.local.", dns.TypeA).Pack()
		r := &Request{Query: &wire.Query{}, Limit: 4096, Rotate: turn}
		r.Parse(raw)
		out, _ := z.Answer(make([]byte, 0, 4096), r)
		m := new(dns.Msg)
		if err := m.Unpack(out); err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, rr := range m.Answer {
			seen[rr.(*dns.A).A.String()] = true
		}
		if len(seen) != 12 {
			t.Fatalf("%d addresses", len(seen))
		}
		first[m.Answer[0].(*dns.A).A.String()] = true
	}
	if len(first) != 12 {
		t.Errorf("%d of 12 came first once", len(first))
	}
}

// FuzzAnswer asks a cluster with Services of every kind what strangers may ask.
func FuzzAnswer(f *testing.F) {
	z := big(f, 20)
	c := z.cluster
	k := func(name string) intent.Key { return intent.Key{Namespace: "shop", Name: name} }
	c.SetService(&intent.Service{Key: k("web"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
		Ports: []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}, {Name: "dns", Protocol: intent.UDP, Port: 53}}})
	c.SetService(&intent.Service{Key: k("out"), Type: intent.ExternalName, ExternalName: "web.shop.svc.cluster.local"})
	c.SetService(&intent.Service{Key: k("unpackable"), Headless: true})
	for i, name := range []string{"unpackable-1", "unpackable-2"} {
		c.SetSlice(&intent.Slice{Key: k(name), Service: "unpackable", Family: intent.IPv4, Ports: []intent.EndpointPort{{Name: "p", Protocol: intent.TCP, Port: uint16(80 + i)}},
			Endpoints: []intent.Endpoint{{Addr: netip.MustParseAddr("10.1.0.1"), Hostname: "same", Condition: intent.Ready}}})
	}
	z.Update(c.Follow().Take())
	for _, name := range []string{"web.shop.svc.cluster.local.", "_http._tcp.web.shop.svc.cluster.local.", "_.http.web.shop.svc.cluster.local.", "endpoint-3.big.shop.svc.cluster.local.",
		"same.unpackable.shop.svc.cluster.local.", "out.shop.svc.cluster.local.", "10-1-0-1.shop.pod.cluster.local.", "1.0.96.10.in-addr.arpa.", "cluster.local."} {
		for _, typ := range []uint16{dns.TypeA, dns.TypeSRV, dns.TypePTR} {
			raw, _ := new(dns.Msg).SetQuestion(name, typ).Pack()
			f.Add(raw, uint16(512))
		}
	}
	f.Fuzz(func(t *testing.T, msg []byte, limit uint16) {
		r := &Request{Query: &wire.Query{}, Limit: max(512, int(limit)), Rotate: uint32(limit)}
		if r.Parse(msg) != wire.OK || r.QClass != wire.ClassIN {
			return
		}
		out, outcome := z.Answer(make([]byte, 0, r.Limit+wire.OPTLen), r)
		if outcome == Foreign || outcome == Chase {
			return
		}
		if len(out) > r.Limit+wire.OPTLen {
			t.Fatalf("%d bytes, more than %d", len(out), r.Limit)
		}
		if err := new(dns.Msg).Unpack(out); err != nil {
			t.Fatalf("the library cannot read the response: %v\n%x", err, out)
		}
	})
}
