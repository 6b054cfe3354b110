package server

import (
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// hot returns a worker on a prepared zone, and questions of the usual kinds.
func hot(t testing.TB) (*worker, map[string][]byte) {
	c := small()
	s, err := New(c, Options{Listen: []netip.AddrPort{loopback}, Sockets: 1, Zone: zone.Options{Zones: []string{"cluster.local"}, TTL: 30, Pods: zone.PodsInsecure}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.closeAll)
	feed := c.Follow()
	s.zones.Update(feed.Take())
	questions := map[string][]byte{}
	for name, q := range map[string]struct {
		name string
		typ  uint16
		edns bool
	}{
		"A": {"web.shop.svc.cluster.local.", dns.TypeA, false}, "AAAA, EDNS": {"web.shop.svc.cluster.local.", dns.TypeAAAA, true},
		"headless": {"db.shop.svc.cluster.local.", dns.TypeA, true}, "SRV": {"_http._tcp.db.shop.svc.cluster.local.", dns.TypeSRV, false},
		"PTR": {"10.0.96.10.in-addr.arpa.", dns.TypePTR, false}, "NXDOMAIN": {"www.example.com.shop.svc.cluster.local.", dns.TypeA, false},
		"NODATA": {"db.shop.svc.cluster.local.", dns.TypeAAAA, true}, "refused": {"www.example.com.", dns.TypeA, false},
	} {
		m := new(dns.Msg)
		m.SetQuestion(q.name, q.typ)
		if q.edns {
			m.SetEdns0(1232, false)
		}
		questions[name], _ = m.Pack()
	}
	return s.newWorker(protoUDP), questions
}

// The hot path must not allocate: garbage is what makes a DNS server's slowest answers slow.
func TestHotPathDoesNotAllocate(t *testing.T) {
	w, questions := hot(t)
	buf := make([]byte, 0, outSize)
	from := netip.MustParseAddr("10.0.0.1")
	w.now = time.Now()
	for name, q := range questions {
		out, v := w.handle(buf, q, from)
		if v != reply || len(out) < 12 {
			t.Errorf("%s: %v, %d bytes", name, v, len(out))
		}
		if n := testing.AllocsPerRun(100, func() { w.handle(buf, q, from) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkHandle(b *testing.B) {
	w, questions := hot(b)
	buf := make([]byte, 0, outSize)
	from := netip.MustParseAddr("10.0.0.1")
	w.now = time.Now()
	for name, q := range questions {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				w.handle(buf, q, from)
			}
		})
	}
}

// BenchmarkUpdate is how long a changed endpoint takes to be answered, once it is known, among 10,000 Services.
func BenchmarkUpdate(b *testing.B) {
	c := intent.NewPackedCluster()
	c.SetNamespace(&intent.Namespace{Name: "shop"})
	z, err := zone.New(c, zone.Options{Zones: []string{"cluster.local"}, TTL: 30})
	if err != nil {
		b.Fatal(err)
	}
	feed := c.Follow()
	one := func(i int) {
		k := namespaced("shop", "s"+string(rune('a'+i%26))+time.Duration(i).String())
		c.SetService(&intent.Service{Key: k, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})}, Ports: []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}}})
		c.SetSlice(&intent.Slice{Key: k, Service: k.Name, Family: intent.IPv4, Endpoints: []intent.Endpoint{{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Condition: intent.Ready}}})
	}
	for i := range 10000 {
		one(i)
	}
	z.Update(feed.Take())
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		one(i % 10000)
		i++
		z.Update(feed.Take())
	}
}
