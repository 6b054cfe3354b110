package server

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/dns/forward"
	"portal/internal/dns/hosts"
	"portal/internal/dns/zone"
	"portal/internal/intent"
	"portal/internal/intent/watch"
)

// upstream serves a few names of the world, and returns a forwarder to it.
func upstream(t testing.TB) *forward.Forwarder {
	t.Helper()
	o := forward.Defaults()
	o.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(upstreamAddr(t))}}
	return forward.New(o)
}

// upstreamAddr serves the same, and returns its address.
func upstreamAddr(t testing.TB) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]string{"www.example.com.": "192.0.2.1", "my.database.example.com.": "192.0.2.7", "10.in-addr.arpa.": ""}
	started := make(chan struct{})
	d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(r)
		q := r.Question[0]
		switch ip, ok := known[dns.CanonicalName(q.Name)]; {
		case dns.CanonicalName(q.Name) == "9.9.9.9.in-addr.arpa." && q.Qtype == dns.TypePTR:
			m.Answer = []dns.RR{&dns.PTR{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: 60}, Ptr: "nine.example."}}
		case !ok:
			m.Rcode = dns.RcodeNameError
		case q.Qtype == dns.TypeA:
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(ip)}}
		}
		w.WriteMsg(m)
	})}
	done := make(chan struct{})
	go func() { d.ActivateAndServe(); close(done) }()
	<-started
	t.Cleanup(func() { d.Shutdown(); <-done })
	return c.LocalAddr().String()
}

func TestForwards(t *testing.T) {
	_, addr := started(t, small(), Options{Forward: upstream(t), Fallthrough: []string{"in-addr.arpa", "ip6.arpa"}})
	for _, network := range []string{"udp", "tcp"} {
		for range 2 { // from upstream, then from the cache
			if m := ask(t, addr, network, "www.example.com.", dns.TypeA); len(m.Answer) != 1 || m.Authoritative || !m.RecursionAvailable {
				t.Fatalf("%s: %v", network, m)
			}
		}
		if m := ask(t, addr, network, "no.example.com.", dns.TypeA); m.Rcode != dns.RcodeNameError {
			t.Errorf("%v", m)
		}
		// An ExternalName leads to the address itself.
		m := ask(t, addr, network, "out.shop.svc.cluster.local.", dns.TypeA)
		if len(m.Answer) != 2 || m.Answer[0].(*dns.CNAME).Target != "www.example.com." || m.Answer[1].(*dns.A).A.String() != "192.0.2.1" {
			t.Errorf("%v", m)
		}
		// What is no address of the cluster's is asked for upstream; what is not in the cluster's domain is not.
		if m := ask(t, addr, network, "9.9.9.9.in-addr.arpa.", dns.TypePTR); len(m.Answer) != 1 || m.Answer[0].(*dns.PTR).Ptr != "nine.example." {
			t.Errorf("%v", m)
		}
		if m := ask(t, addr, network, "10.0.96.10.in-addr.arpa.", dns.TypePTR); len(m.Answer) != 1 || m.Answer[0].(*dns.PTR).Ptr != "web.shop.svc.cluster.local." {
			t.Errorf("%v", m)
		}
		if m := ask(t, addr, network, "no.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeNameError || !m.Authoritative {
			t.Errorf("%v", m)
		}
	}
}

// TestExternalNameUnresolved: if no upstream can resolve the target, clients hear of a failure, in time and with the alias, and
// not that the target has no address. Without an upstream at all, resolving it is the client's business.
func TestExternalNameUnresolved(t *testing.T) {
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	mute, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mute.Close() }) // subtests run on after this function
	for name, c := range map[string]struct {
		upstream string
		rcode    int
	}{
		"refuses":  {closed.LocalAddr().String(), dns.RcodeServerFailure},
		"mute":     {mute.LocalAddr().String(), dns.RcodeServerFailure},
		"fails":    {failingUpstream(t), dns.RcodeServerFailure},
		"NXDOMAIN": {upstreamAddr(t), dns.RcodeSuccess}, // as CoreDNS has it
		"none":     {"", dns.RcodeSuccess},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := small()
			cluster.SetService(&intent.Service{Key: namespaced("shop", "nowhere"), Type: intent.ExternalName, ExternalName: "nowhere.example.com"})
			o := Options{}
			if c.upstream != "" {
				f := forward.Defaults()
				f.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(c.upstream)}}
				o.Forward = forward.New(f)
			}
			_, addr := started(t, cluster, o)
			m := ask(t, addr, "udp", "nowhere.shop.svc.cluster.local.", dns.TypeA) // waits 3 s
			if m.Rcode != c.rcode || len(m.Answer) != 1 || m.Answer[0].(*dns.CNAME).Target != "nowhere.example.com." {
				t.Errorf("%v", m)
			}
		})
	}
}

// TestAliasesAcrossZones: two ExternalNames of different zones that are each other's target lead nowhere, as in one zone.
func TestAliasesAcrossZones(t *testing.T) {
	cluster := small()
	cluster.SetService(&intent.Service{Key: namespaced("shop", "here"), Type: intent.ExternalName, ExternalName: "there.shop.svc.two.example"})
	cluster.SetService(&intent.Service{Key: namespaced("shop", "there"), Type: intent.ExternalName, ExternalName: "here.shop.svc.cluster.local"})
	cluster.SetService(&intent.Service{Key: namespaced("shop", "across"), Type: intent.ExternalName, ExternalName: "web.shop.svc.two.example"})
	_, addr := started(t, cluster, Options{Zone: zone.Options{Zones: []string{"cluster.local", "two.example"}}, Forward: upstream(t)})
	if m := ask(t, addr, "udp", "here.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 0 {
		t.Errorf("a loop: %v", m)
	}
	if m := ask(t, addr, "udp", "across.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeSuccess || len(m.Answer) != 2 {
		t.Errorf("from one zone to the other: %v", m)
	}
}

// TestAliasTargets: the target of an alias is resolved by what answers for its name when a client asks for it: hosts, a stub zone, the
// longest of the server's zones, or what a zone without it falls through to. Clients that may not recurse get the server's own names, too.
func TestAliasTargets(t *testing.T) {
	nodes, err := hosts.New(hosts.Options{Inline: []string{"10.0.0.7 web.node.svc.cluster.local"}, Zones: []string{"."}, TTL: 60})
	if err != nil {
		t.Fatal(err)
	}
	cluster := small()
	for name, target := range map[string]string{
		"nested": "web.shop.svc.east.cluster.local", "other": "web.shop.svc.two.example", "hosts": "web.node.svc.cluster.local",
		"stub": "www.stub.svc.cluster.local", "through": "absent.shop.svc.two.example", "missing": "absent.shop.svc.cluster.local",
	} {
		cluster.SetService(&intent.Service{Key: namespaced("shop", name), Type: intent.ExternalName, ExternalName: target})
	}
	o := Options{
		Zone: zone.Options{Zones: []string{"cluster.local", "east.cluster.local", "two.example"}}, Hosts: []*hosts.Hosts{nodes},
		Stubs: map[string]*forward.Forwarder{"stub.svc.cluster.local": always(t, "192.0.2.10")}, Forward: always(t, "192.0.2.1"), Fallthrough: []string{"two.example"},
	}
	_, addr := started(t, cluster, o)
	o.AllowRecursion, o.Stubs, o.Forward = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, map[string]*forward.Forwarder{"stub.svc.cluster.local": always(t, "192.0.2.10")}, always(t, "192.0.2.1")
	_, shut := started(t, cluster, o)
	for name, want := range map[string][2]string{
		"nested": {"10.96.0.10", "10.96.0.10"}, "other": {"10.96.0.10", "10.96.0.10"}, "hosts": {"10.0.0.7", "10.0.0.7"},
		"stub": {"192.0.2.10", "alone"}, "through": {"192.0.2.1", "alone"}, "missing": {"none", "none"},
	} {
		for i, at := range []string{addr, shut} {
			m := ask(t, at, "udp", name+".shop.svc.cluster.local.", dns.TypeA)
			got := "none"
			switch n := len(m.Answer); {
			case n == 2:
				got = m.Answer[1].(*dns.A).A.String()
			case n == 1:
				got = "alone"
			}
			if got != want[i] || m.Rcode != dns.RcodeSuccess {
				t.Errorf("%s: %s, want %s:\n%v", name, got, want[i], m)
			}
		}
	}
}

// failingUpstream answers SERVFAIL to everything.
func failingUpstream(t *testing.T) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started, done := make(chan struct{}), make(chan struct{})
	d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		_ = w.WriteMsg(new(dns.Msg).SetRcode(r, dns.RcodeServerFailure))
	})}
	go func() { _ = d.ActivateAndServe(); close(done) }()
	<-started
	t.Cleanup(func() { _ = d.Shutdown(); <-done })
	return c.LocalAddr().String()
}

// TestSRVPortOutOfRange: an EndpointSlice from elsewhere may have a port that is none. It has no SRV record, in particular not one
// with what is left of it in sixteen bits.
func TestSRVPortOutOfRange(t *testing.T) {
	c := small()
	c.SetService(&intent.Service{Key: namespaced("shop", "odd"), Headless: true})
	c.SetSlice(watch.Slice(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "odd-1", Labels: map[string]string{discoveryv1.LabelServiceName: "odd"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.1.0.9"}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}}},
		Ports: []discoveryv1.EndpointPort{
			{Name: ptr.To("bad"), Port: ptr.To[int32](70000), Protocol: ptr.To(corev1.ProtocolTCP)},
			{Name: ptr.To("good"), Port: ptr.To[int32](65535), Protocol: ptr.To(corev1.ProtocolTCP)},
		},
	}))
	_, addr := started(t, c, Options{})
	for name, want := range map[string]int{"_bad._tcp.odd.shop.svc.cluster.local.": 0, "_good._tcp.odd.shop.svc.cluster.local.": 1, "odd.shop.svc.cluster.local.": 1} {
		m := ask(t, addr, "udp", name, dns.TypeSRV)
		if len(m.Answer) != want || want == 1 && m.Answer[0].(*dns.SRV).Port != 65535 {
			t.Errorf("%v", m)
		}
	}
}

// always forwards to a server that has one address for all names.
func always(t *testing.T, ip string) *forward.Forwarder {
	t.Helper()
	return answering(t, func(r *dns.Msg) *dns.Msg {
		m := new(dns.Msg).SetReply(r)
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(ip)}}
		return m
	})
}

// answering forwards to a server that answers as a test wants; nil: not at all.
func answering(t *testing.T, answer func(*dns.Msg) *dns.Msg) *forward.Forwarder {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started, done := make(chan struct{}), make(chan struct{})
	d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		if m := answer(r); m != nil {
			_ = w.WriteMsg(m)
		}
	})}
	go func() { _ = d.ActivateAndServe(); close(done) }()
	<-started
	t.Cleanup(func() { _ = d.Shutdown(); <-done })
	o := forward.Defaults()
	o.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(c.LocalAddr().String())}}
	return forward.New(o)
}

// A stub zone's upstream is for that zone only, and the longest zone has a name.
func TestStubZones(t *testing.T) {
	lan := always(t, "192.0.2.10")
	nodes, err := hosts.New(hosts.Options{Inline: []string{"10.0.0.7 node-a node-a.lan.example.com www.example.com"}, Zones: []string{"."}, TTL: 60})
	if err != nil {
		t.Fatal(err)
	}
	_, addr := started(t, small(), Options{Forward: always(t, "192.0.2.1"), Hosts: []*hosts.Hosts{nodes}, Stubs: map[string]*forward.Forwarder{
		"lan.example.com": lan, "other.example": lan, "deep.lan.example.com": always(t, "192.0.2.11"), "shut.example.com": nil,
		"legacy.svc.cluster.local": lan, "local": lan,
	}})
	for _, network := range []string{"udp", "tcp"} {
		for range 2 {
			for name, want := range map[string]string{
				"lan.example.com.": "192.0.2.10", "a.lan.example.com.": "192.0.2.10", "A.LAN.example.com.": "192.0.2.10", "x.other.example.": "192.0.2.10",
				"a.deep.lan.example.com.": "192.0.2.11", "xlan.example.com.": "192.0.2.1", "example.com.": "192.0.2.1", "www.example.": "192.0.2.1",
				"db.legacy.svc.cluster.local.": "192.0.2.10", "printer.local.": "192.0.2.10", "node-a.": "10.0.0.7", "node-a.lan.example.com.": "192.0.2.10", "web.shop.svc.cluster.local.": "10.96.0.10",
			} {
				m := ask(t, addr, network, name, dns.TypeA)
				if len(m.Answer) != 1 || m.Answer[0].(*dns.A).A.String() != want {
					t.Errorf("%s over %s: %v, want %s", name, network, m.Answer, want)
				}
			}
		}
		// An ExternalName leads to a name that the hosts table has.
		if m := ask(t, addr, network, "out.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 2 || m.Answer[1].(*dns.A).A.String() != "10.0.0.7" {
			t.Errorf("%v", m)
		}
		if m := ask(t, addr, network, "a.shut.example.com.", dns.TypeA); m.Rcode != dns.RcodeRefused {
			t.Errorf("%v", m)
		}
		if m := ask(t, addr, network, "no.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeNameError {
			t.Errorf("%v", m)
		}
	}
}

// Names that nobody answers, however many are asked for, keep no other name from being resolved.
func TestUnansweredQueriesDenyNothingElse(t *testing.T) {
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	begun, done := make(chan struct{}), make(chan struct{})
	d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(begun) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		if name := dns.CanonicalName(r.Question[0].Name); dns.IsSubDomain("example.com.", name) {
			m := new(dns.Msg)
			m.SetReply(r)
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(192, 0, 2, 1)}}
			w.WriteMsg(m)
		}
	})}
	go func() { d.ActivateAndServe(); close(done) }()
	<-begun
	t.Cleanup(func() { d.Shutdown(); <-done })
	o := forward.Defaults()
	o.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(c.LocalAddr().String())}}
	s, addr := started(t, small(), Options{Forward: forward.New(o), MaxWaiting: 200})
	flood, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer flood.Close()
	waiting := func() int { s.waiting.mu.Lock(); defer s.waiting.mu.Unlock(); return s.waiting.total }
	for i := range 600 {
		m := new(dns.Msg)
		m.SetQuestion(fmt.Sprintf("n%d.dead.example.", i), dns.TypeA)
		b, _ := m.Pack()
		flood.Write(b)
		if i%50 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	for end := time.Now().Add(5 * time.Second); waiting() < 200; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d queries wait, want 200", waiting())
		}
	}
	// One socket has all of the flood, in order: when it answers this, none of it is yet to come.
	last := new(dns.Msg)
	last.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	b, _ := last.Pack()
	flood.Write(b)
	end := time.Now().Add(time.Minute)
	for m := new(dns.Msg); len(m.Question) == 0 || m.Question[0].Name != last.Question[0].Name; {
		buf := make([]byte, 1500)
		flood.SetReadDeadline(time.Now().Add(time.Second))
		n, err := flood.Read(buf)
		if err == nil {
			err = m.Unpack(buf[:n])
		} else if time.Now().Before(end) { // it was lost among the answers to the flood
			flood.Write(b)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		for _, name := range []string{fmt.Sprintf("www%d.example.com.", i), "web.shop.svc.cluster.local.", "out.shop.svc.cluster.local."} {
			m := ask(t, addr, "udp", name, dns.TypeA)
			if m.Rcode == dns.RcodeServerFailure { // a datagram to the upstream may be lost on a busy machine, and resolvers ask again
				m = ask(t, addr, "udp", name, dns.TypeA)
			}
			if m.Rcode != dns.RcodeSuccess || len(m.Answer) == 0 {
				t.Fatalf("%s: %v", name, m)
			}
		}
	}
}

// A client may ask for more than a usual buffer over UDP; it gets the whole, or what says that it was cut off.
func TestBigAnswersOverUDP(t *testing.T) {
	c := small()
	var ends []intent.Endpoint
	for i := range 300 {
		ends = append(ends, intent.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), Condition: intent.Ready})
	}
	c.SetService(&intent.Service{Key: namespaced("shop", "big"), Headless: true})
	c.SetSlice(&intent.Slice{Key: namespaced("shop", "big-1"), Service: "big", Family: intent.IPv4, Endpoints: ends})
	careful, _ := started(t, c, Options{})
	_, addr := started(t, c, Options{Sockets: 1, Forward: bigUpstream(t), MaxUDPSize: 65507})
	client := dns.Client{Timeout: 3 * time.Second, UDPSize: 65000}
	for range 3 {
		for name, want := range map[string]int{"big.shop.svc.cluster.local.": 300, "many.example.com.": -1, "web.shop.svc.cluster.local.": 1} {
			m := new(dns.Msg)
			m.SetQuestion(name, dns.TypeA)
			m.SetEdns0(65000, false)
			r, _, err := client.Exchange(m, addr)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if want >= 0 && len(r.Answer) != want || want < 0 && len(r.Answer) != 400 && !r.Truncated {
				t.Errorf("%s: %d answers", name, len(r.Answer))
			}
		}
	}
	// By default 1,232 bytes, but on loopback what the client accepts.
	m := new(dns.Msg)
	m.SetQuestion("big.shop.svc.cluster.local.", dns.TypeA)
	m.SetEdns0(65000, false)
	query, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	for from, longest := range map[string]int{"192.0.2.1": 1232, "::ffff:10.0.0.1": 1232, "127.0.0.1": 65000, "::1": 65000, "::ffff:127.0.0.1": 65000} {
		out, _ := careful.newWorker(protoUDP).handle(make([]byte, 0, bigSize), query, netip.MustParseAddr(from))
		r := new(dns.Msg)
		if err := r.Unpack(out); err != nil {
			t.Fatalf("%s: %v", from, err)
		}
		if cut := longest == 1232; len(out) > longest || r.Truncated != cut || len(r.Answer) == 0 {
			t.Errorf("%s gets %d bytes with %d answers, truncated %v", from, len(out), len(r.Answer), r.Truncated)
		}
	}
}

// bigUpstream answers everything with 400 addresses, by TCP.
func bigUpstream(t *testing.T) *forward.Forwarder {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &dns.Server{Listener: l, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(r)
		m.Compress = true
		for i := range 400 {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.IPv4(192, 0, byte(i>>8), byte(i))})
		}
		w.WriteMsg(m)
	})}
	done := make(chan struct{})
	started := make(chan struct{})
	d.NotifyStartedFunc = func() { close(started) }
	go func() { d.ActivateAndServe(); close(done) }()
	<-started
	t.Cleanup(func() { d.Shutdown(); <-done })
	o := forward.Defaults()
	o.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(l.Addr().String()), Transport: forward.TCP}}
	return forward.New(o)
}
