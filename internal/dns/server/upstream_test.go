package server

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
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
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() }) // subtests run on after this function
	for name, c := range map[string]struct {
		upstream string
		rcode    int
	}{
		"refuses":  {closed.LocalAddr().String(), dns.RcodeServerFailure},
		"silent":   {silent.LocalAddr().String(), dns.RcodeServerFailure},
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

// By default only private networks and the cluster's may ask for other names; the cluster's names are for everybody.
func TestNoOpenResolver(t *testing.T) {
	s, _ := started(t, small(), Options{Forward: upstream(t), Fallthrough: []string{"in-addr.arpa"}})
	w, addr := s.newWorker(protoUDP), netip.MustParseAddr
	ask := func(name string, typ uint16, from string) (int, verdict) {
		m := new(dns.Msg)
		m.SetQuestion(name, typ)
		raw, _ := m.Pack()
		out, v := w.handle(make([]byte, 0, outSize), raw, addr(from))
		if v != reply {
			return -1, v
		}
		return int(out[3] & 15), v
	}
	for _, from := range []string{"127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.1", "169.254.20.10", "::1", "fd00::1", "fe80::1%lo"} {
		if _, v := ask("www.example.com.", dns.TypeA, from); v != later {
			t.Errorf("%s may not ask for other names", from)
		}
	}
	outside := []string{"203.0.113.1", "8.8.8.8", "172.32.0.1", "2001:db8::1", "11.0.0.1"}
	for _, from := range outside {
		if rcode, _ := ask("www.example.com.", dns.TypeA, from); rcode != dns.RcodeRefused {
			t.Errorf("%s asks for another name: %s", from, dns.RcodeToString[rcode])
		}
		if rcode, v := ask("web.shop.svc.cluster.local.", dns.TypeA, from); rcode != dns.RcodeSuccess || v != reply {
			t.Errorf("%s asks for a name of the cluster: %s", from, dns.RcodeToString[rcode])
		}
		for name, typ := range map[string]uint16{"9.9.9.9.in-addr.arpa.": dns.TypePTR, "out.shop.svc.cluster.local.": dns.TypeA} {
			if _, v := ask(name, typ, from); v != reply {
				t.Errorf("%s makes the server ask others through %s", from, name)
			}
		}
	}
	select {
	case <-s.RecursionRefused():
	default:
		t.Error("nobody was told")
	}
	s.AllowClusterNetworks([]netip.Prefix{netip.MustParsePrefix("2001:db8::/48"), netip.MustParsePrefix("203.0.113.1/32")})
	for from, want := range map[string]verdict{"2001:db8:0:7::1": later, "203.0.113.1": later, "203.0.113.2": reply, "2001:db8:1::": reply} {
		if _, v := ask("www.example.com.", dns.TypeA, from); v != want {
			t.Errorf("%s, with the cluster's networks known: %v, want %v", from, v, want)
		}
	}
}

func TestNetworks(t *testing.T) {
	var list []netip.Prefix
	for _, s := range []string{"10.0.0.0/8", "10.1.0.0/16", "10.0.0.0/16", "192.0.2.7/32", "192.0.2.9/32", "fd00::/8", "fd00:1::/32", "::/0"} {
		list = append(list, netip.MustParsePrefix(s))
	}
	n := newNetworks(list)
	if len(n) != 4 {
		t.Errorf("%v: prefixes within others are left in", n)
	}
	for a, want := range map[string]bool{"10.255.255.255": true, "9.255.255.255": false, "11.0.0.0": false, "192.0.2.7": true, "192.0.2.8": false, "192.0.2.9": true, "::1": true, "255.255.255.255": false} {
		if n.contains(netip.MustParseAddr(a)) != want {
			t.Errorf("%s: want %v", a, want)
		}
	}
	if newNetworks(nil).contains(netip.MustParseAddr("127.0.0.1")) {
		t.Error("nothing contains an address")
	}
}

// A stub zone's upstream is for that zone only, and the longest zone has a name.
func TestStubZones(t *testing.T) {
	one := func(ip string) *forward.Forwarder {
		c, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		started, done := make(chan struct{}), make(chan struct{})
		d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
			m := new(dns.Msg)
			m.SetReply(r)
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}, A: net.ParseIP(ip)}}
			w.WriteMsg(m)
		})}
		go func() { d.ActivateAndServe(); close(done) }()
		<-started
		t.Cleanup(func() { d.Shutdown(); <-done })
		o := forward.Defaults()
		o.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(c.LocalAddr().String())}}
		return forward.New(o)
	}
	lan := one("192.0.2.10")
	nodes, err := hosts.New(hosts.Options{Inline: []string{"10.0.0.7 node-a node-a.lan.example.com www.example.com"}, Zones: []string{"."}, TTL: 60})
	if err != nil {
		t.Fatal(err)
	}
	_, addr := started(t, small(), Options{Forward: one("192.0.2.1"), Hosts: []*hosts.Hosts{nodes}, Stubs: map[string]*forward.Forwarder{
		"lan.example.com": lan, "other.example": lan, "deep.lan.example.com": one("192.0.2.11"), "shut.example.com": nil,
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
	flood.SetReadDeadline(time.Now().Add(20 * time.Second))
	for m := new(dns.Msg); len(m.Question) == 0 || m.Question[0].Name != last.Question[0].Name; {
		buf := make([]byte, 1500)
		n, err := flood.Read(buf)
		if err == nil {
			err = m.Unpack(buf[:n])
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

// Clients can't use up the file descriptors.
func TestLimitsFitDescriptors(t *testing.T) {
	o := Options{Listen: []netip.AddrPort{loopback, loopback}}
	o.defaults()
	for files, want := range map[int][2]int{1 << 20: {2000, 2000}, 4000: {1000, 1000}, 256: {64, 64}, 1: {1, 1}} {
		c := o
		c.MaxTCPConns, c.MaxWaiting = 2000, 2000
		if c.fitDescriptors(files); c.MaxTCPConns != want[0] || c.MaxWaiting != want[1] {
			t.Errorf("%d files: %d connections, %d waiting; want %v", files, c.MaxTCPConns, c.MaxWaiting, want)
		}
	}
}

// A second server on the same address is refused before it takes queries from the first.
func TestAddressInUse(t *testing.T) {
	s, addr := started(t, small(), Options{})
	other := Options{Listen: s.Addrs(), Zone: zone.Options{Zones: []string{"other.local"}, Pods: zone.PodsInsecure}}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := New(intent.NewCluster(), other); !errors.Is(err, unix.EADDRINUSE) {
					t.Errorf("a second server: %v", err)
				}
			}
		}
	})
	for range 200 {
		if m := ask(t, addr, "udp", "web.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 1 {
			t.Errorf("%v", m)
		}
	}
	close(stop)
	wg.Wait()
}

// Connections above the limit are closed, of every protocol.
func TestConnectionLimit(t *testing.T) {
	config, _ := selfSigned(t)
	s, _ := started(t, small(), Options{TLS: config, ListenTLS: []netip.AddrPort{loopback}, ListenHTTPS: []netip.AddrPort{loopback}, MaxTCPConns: 3})
	for name, addr := range map[string]string{"TCP": s.streams[0].l.Addr().String(), "TLS": s.streams[1].l.Addr().String(), "HTTPS": s.https[0].l.Addr().String()} {
		var conns []net.Conn
		for range 3 {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conns = append(conns, c)
		}
		over, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		over.SetReadDeadline(time.Now().Add(3 * time.Second))
		if _, err := over.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: a connection too many stays open: %v", name, err)
		}
		over.Close()
		conns[0].Close()
		for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			_, err = c.Read(make([]byte, 1))
			c.Close()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s: no connection after one was closed", name)
			}
		}
	}
}

func TestWaitlist(t *testing.T) {
	w := newWaitlist(4)
	var gone []string
	enter := func(from, name string) *waiter {
		self, _ := w.enter(netip.MustParseAddr(from), func() { gone = append(gone, name) })
		return self
	}
	enter("10.0.0.1", "a1")
	enter("10.0.0.1", "a2")
	b1 := enter("fd00::1", "b1")
	enter("fd00::2", "b2") // of the same client
	enter("10.0.0.1", "a3")
	enter("10.0.0.3", "c1")
	if got := strings.Join(gone, " "); got != "a1 b1" && got != "a1 a2" {
		t.Errorf("evicted: %s", got)
	}
	w.leave(b1)
	w.leave(b1) // or evicted before
	if n := w.total; n < 3 || n > 4 {
		t.Errorf("%d wait", n)
	}
	for range 100 {
		enter("10.0.0.9", "flood")
	}
	if w.total != 4 || len(w.clients) < 2 {
		t.Errorf("a flood displaced the others: %d waiting, %d clients", w.total, len(w.clients))
	}
}

func TestRefusesRecursionFromOutside(t *testing.T) {
	_, addr := started(t, small(), Options{Forward: upstream(t), AllowRecursion: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})
	if m := ask(t, addr, "udp", "www.example.com.", dns.TypeA); m.Rcode != dns.RcodeRefused {
		t.Errorf("%v", m)
	}
	if m := ask(t, addr, "udp", "web.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 1 {
		t.Errorf("%v", m)
	}
}

func TestAutopath(t *testing.T) {
	c := small()
	c.SetPod(&intent.Pod{Key: namespaced("shop", "me"), Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	_, addr := started(t, c, Options{Forward: upstream(t), Autopath: true, Zone: zone.Options{Pods: zone.PodsVerified}})
	// The first name of the search path is answered for the last one.
	m := ask(t, addr, "udp", "www.example.com.shop.svc.cluster.local.", dns.TypeA)
	if m.Rcode != dns.RcodeSuccess || len(m.Answer) != 2 || m.Answer[0].(*dns.CNAME).Target != "www.example.com." {
		t.Errorf("%v", m)
	}
	m = ask(t, addr, "udp", "web.shop.shop.svc.cluster.local.", dns.TypeA)
	if len(m.Answer) != 2 || m.Answer[0].(*dns.CNAME).Target != "web.shop.svc.cluster.local." {
		t.Errorf("%v", m)
	}
	// A path that is not this Pod's gets no short cut, and what is nowhere stays denied.
	for _, name := range []string{"www.example.com.default.svc.cluster.local.", "nowhere.example.shop.svc.cluster.local."} {
		if m := ask(t, addr, "udp", name, dns.TypeA); m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: %v", name, m)
		}
	}
}

// TestAutopathIsNoWayAround: a Pod that may not recurse gets the cluster's names of its search path, and no others.
func TestAutopathIsNoWayAround(t *testing.T) {
	c := small()
	c.SetPod(&intent.Pod{Key: namespaced("shop", "me"), Addrs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}})
	_, addr := started(t, c, Options{
		Forward: upstream(t), Autopath: true, Zone: zone.Options{Pods: zone.PodsVerified},
		AllowRecursion: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
	})
	if m := ask(t, addr, "udp", "www.example.com.shop.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeNameError {
		t.Errorf("%v", m)
	}
	if m := ask(t, addr, "udp", "web.shop.shop.svc.cluster.local.", dns.TypeA); len(m.Answer) != 2 {
		t.Errorf("%v", m)
	}
}

// TestPrivateBesideOthers: a network beside private ones takes none of those away, the cluster's included.
func TestPrivateBesideOthers(t *testing.T) {
	s, _ := started(t, small(), Options{AllowPrivate: true, AllowRecursion: []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}})
	s.AllowClusterNetworks([]netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")})
	for text, want := range map[string]bool{"203.0.113.1": true, "10.1.2.3": true, "127.0.0.1": true, "198.51.100.7": true, "192.0.2.1": false} {
		if got := s.mayRecurse(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s may recurse: %v, want %v", text, got, want)
		}
	}
}

func selfSigned(t *testing.T) (*tls.Config, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := x509.ParseCertificate(der)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, pool
}

func TestOverTLSAndHTTPS(t *testing.T) {
	config, pool := selfSigned(t)
	s, _ := started(t, small(), Options{TLS: config, ListenTLS: []netip.AddrPort{loopback}, ListenHTTPS: []netip.AddrPort{loopback}, Forward: upstream(t)})
	overTLS := s.streams[1].l.Addr().String()
	client := dns.Client{Net: "tcp-tls", TLSConfig: &tls.Config{RootCAs: pool}, Timeout: 3 * time.Second}
	q := new(dns.Msg)
	q.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	if m, _, err := client.Exchange(q, overTLS); err != nil || len(m.Answer) != 1 {
		t.Errorf("TLS: %v %v", m, err)
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	web := &http.Client{Transport: transport, Timeout: 3 * time.Second}
	url := "https://" + s.https[0].l.Addr().String() + "/dns-query"
	for _, name := range []string{"web.shop.svc.cluster.local.", "www.example.com."} {
		q.SetQuestion(name, dns.TypeA)
		raw, _ := q.Pack()
		get, err := web.Get(url + "?dns=" + base64.RawURLEncoding.EncodeToString(raw))
		checkHTTPS(t, get, err)
		post, err := web.Post(url, "application/dns-message", bytes.NewReader(raw))
		checkHTTPS(t, post, err)
	}
	if r, err := web.Get(url + "?dns=x"); err != nil || r.StatusCode != http.StatusBadRequest {
		t.Errorf("garbage: %v %v", r, err)
	}
}

func checkHTTPS(t *testing.T, r *http.Response, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
		return
	}
	defer r.Body.Close()
	body, _ := io.ReadAll(r.Body)
	m := new(dns.Msg)
	if err := m.Unpack(body); err != nil || len(m.Answer) != 1 || r.Header.Get("Content-Type") != "application/dns-message" {
		t.Errorf("%s: %v %v", r.Status, err, m)
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

// The metrics must be gathered without an error after any use: every protocol, family and response code, several zones and
// upstreams, some of them alike.
func TestMetricsAfterUse(t *testing.T) {
	config, pool := selfSigned(t)
	shared := forward.NewMetrics()
	to := func(zone string, addrs ...string) *forward.Forwarder {
		o := forward.Defaults()
		o.Zone, o.Metrics = zone, shared
		for _, a := range addrs {
			o.Upstreams = append(o.Upstreams, forward.Upstream{Addr: netip.MustParseAddrPort(a)})
		}
		return forward.New(o)
	}
	world := upstreamAddr(t)
	s, _ := started(t, small(), Options{
		Listen: []netip.AddrPort{loopback, netip.MustParseAddrPort("[::1]:0")}, TLS: config, ListenTLS: []netip.AddrPort{loopback}, ListenHTTPS: []netip.AddrPort{loopback},
		Zone:    zone.Options{Zones: []string{"cluster.local", "other.local"}},
		Forward: to(".", world, world), Stubs: map[string]*forward.Forwarder{"lan.example": to("lan.example", world), "shut.example": nil, "down.example": to("down.example", "127.0.0.1:1")},
		AllowTransfer: []netip.Prefix{netip.MustParsePrefix("::/0")}, RateLimit: 1000,
	})
	registry := prometheus.NewRegistry()
	if err := s.Register(registry); err != nil {
		t.Fatal(err)
	}
	endpoint := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer endpoint.Close()
	scrape := func(when string) string {
		t.Helper()
		r, err := http.Get(endpoint.URL)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		if r.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s\n%s", when, r.Status, body)
		}
		return string(body)
	}
	scrape("before use")
	overTLS := func(m *dns.Msg, addr string) (*dns.Msg, error) {
		c := dns.Client{Net: "tcp-tls", TLSConfig: &tls.Config{RootCAs: pool}, Timeout: 10 * time.Second}
		r, _, err := c.Exchange(m, addr)
		return r, err
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	defer transport.CloseIdleConnections()
	overHTTPS := func(m *dns.Msg, addr string) (*dns.Msg, error) {
		raw, _ := m.Pack()
		r, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Post("https://"+addr+"/dns-query", "application/dns-message", bytes.NewReader(raw))
		if err != nil {
			return nil, err
		}
		defer r.Body.Close()
		body, _ := io.ReadAll(r.Body)
		got := new(dns.Msg)
		return got, got.Unpack(body)
	}
	plain := func(network string) func(*dns.Msg, string) (*dns.Msg, error) {
		return func(m *dns.Msg, addr string) (*dns.Msg, error) {
			c := dns.Client{Net: network, Timeout: 10 * time.Second}
			r, _, err := c.Exchange(m, addr)
			return r, err
		}
	}
	ways := []struct {
		addr string
		ask  func(*dns.Msg, string) (*dns.Msg, error)
	}{
		{s.Addrs()[0].String(), plain("udp")}, {s.Addrs()[0].String(), plain("tcp")}, {s.Addrs()[1].String(), plain("udp")}, {s.Addrs()[1].String(), plain("tcp")},
		{s.streams[2].l.Addr().String(), overTLS}, {s.https[0].l.Addr().String(), overHTTPS},
	}
	seen := map[int]bool{}
	for _, way := range ways {
		for _, m := range everyKind() {
			r, err := way.ask(m, way.addr)
			if err != nil {
				t.Fatalf("%v: %v", m, err)
			}
			seen[r.Rcode] = true
		}
	}
	for _, rcode := range []int{dns.RcodeSuccess, dns.RcodeFormatError, dns.RcodeServerFailure, dns.RcodeNameError, dns.RcodeNotImplemented, dns.RcodeRefused, dns.RcodeBadVers} {
		if !seen[rcode] {
			t.Errorf("no query was answered with %s", dns.RcodeToString[rcode])
		}
	}
	text := scrape("after use")
	for _, want := range []string{`proto="udp"`, `proto="tcp"`, `proto="https"`, `family="1"`, `family="2"`, `zone="other.local."`, `rcode="BADVERS"`, `zones="lan.example."`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
}

// everyKind are queries that get each response code, from each source.
func everyKind() (out []*dns.Msg) {
	for _, name := range []string{
		"web.shop.svc.cluster.local.", "no.shop.svc.cluster.local.", "web.shop.svc.other.local.", "out.shop.svc.cluster.local.", "10.0.96.10.in-addr.arpa.",
		"www.example.com.", "www.example.com.", "no.example.com.", "a.lan.example.", "a.shut.example.", "a.down.example.", "a.down.example.",
	} {
		for _, typ := range []uint16{dns.TypeA, dns.TypeSRV, dns.TypePTR, dns.TypeNAPTR, dns.TypeAXFR, 65280} {
			if typ == dns.TypeAXFR && name == "cluster.local." {
				continue
			}
			m := new(dns.Msg)
			m.SetQuestion(name, typ)
			m.SetEdns0(1232, true)
			out = append(out, m)
		}
	}
	notify, version, twice, chaos := new(dns.Msg), new(dns.Msg), new(dns.Msg), new(dns.Msg)
	notify.SetNotify("cluster.local.")
	version.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	version.SetEdns0(1232, false)
	version.IsEdns0().SetVersion(1)
	twice.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	twice.Extra = append(twice.Extra, version.Extra[0], version.Extra[0])
	chaos.SetQuestion("version.bind.", dns.TypeTXT)
	chaos.Question[0].Qclass = dns.ClassCHAOS
	return append(out, notify, version, twice, chaos)
}

func TestMetricsUnderCoreDNSNames(t *testing.T) {
	s, addr := started(t, small(), Options{Forward: upstream(t)})
	registry := prometheus.NewRegistry()
	if err := s.Register(registry); err != nil {
		t.Fatal(err)
	}
	ask(t, addr, "udp", "web.shop.svc.cluster.local.", dns.TypeA)
	ask(t, addr, "tcp", "no.shop.svc.cluster.local.", dns.TypeA)
	ask(t, addr, "udp", "www.example.com.", dns.TypeA)
	ask(t, addr, "udp", "www.example.com.", dns.TypeA)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			key := f.GetName()
			for _, l := range m.Label {
				if l.GetName() == "rcode" || l.GetName() == "proto" || l.GetName() == "zone" && l.GetValue() != "" {
					key += " " + l.GetValue()
				}
			}
			got[key] += m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for key, want := range map[string]float64{
		"coredns_dns_requests_total udp cluster.local.": 1, "coredns_dns_requests_total tcp cluster.local.": 1, "coredns_dns_requests_total udp .": 2,
		"coredns_dns_responses_total NXDOMAIN cluster.local.": 1, "coredns_dns_responses_total NOERROR .": 2,
		"coredns_cache_hits_total": 1, "coredns_proxy_request_duration_seconds NOERROR": 1,
	} {
		if got[key] != want {
			t.Errorf("%s = %v, want %v", key, got[key], want)
		}
	}
	if got["coredns_dns_request_duration_seconds ."] < 4 {
		t.Errorf("durations of %v requests", got["coredns_dns_request_duration_seconds ."])
	}
	if t.Failed() {
		t.Log(got)
	}
}

// FuzzMessages sends arbitrary messages through the server, and a good query after each.
func FuzzMessages(f *testing.F) {
	w, questions := hot(f)
	for _, q := range questions {
		f.Add(q)
	}
	for _, rest := range []string{ // malformed beyond the question: see the parser's own tests
		"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x07\x00\x0a\x00\x04abc", "\x00\x00\x29\x04\xd0\x00\x01\x00\x00\x00\x00", "\xc0\x2c\x00\x01\x00\x01\x00\x00\x00\x00\x00\x00",
		"\x01k\x00\x00\xfa\x00\xff\x00\x00\x00\x00\x00\x00", "",
	} {
		f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x03web\x04shop\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01" + rest))
	}
	f.Add([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x03web\x04shop\x03svc\x07cluster\x05local\x00\x00\x01\x00\x01\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x32"))
	good, buf := questions["A"], make([]byte, 0, outSize)
	from := netip.MustParseAddr("10.0.0.1")
	f.Fuzz(func(t *testing.T, msg []byte) {
		for _, p := range []proto{protoUDP, protoTCP} {
			w.proto = p
			out, v := w.handle(buf, msg, from)
			if v == reply {
				if len(out) < 12 || len(out) > outSize || out[2]&0x80 == 0 {
					t.Fatalf("%d bytes of response, %x", len(out), out[:min(12, len(out))])
				}
				if err := new(dns.Msg).Unpack(out); err != nil && w.q.QClass == 1 && out[3]&15 != 1 {
					t.Fatalf("the library cannot read the response: %v\n%x", err, out)
				}
			}
			w.proto = protoUDP
			if out, v := w.handle(buf, good, from); v != reply || out[7] != 1 {
				t.Fatal("a good question after it was not answered")
			}
		}
	})
}
