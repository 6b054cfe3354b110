package server

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/dns/forward"
	"portal/internal/dns/zone"
	"portal/internal/intent"
)

// upstream serves a few names of the world, and returns a forwarder to it.
func upstream(t testing.TB) *forward.Forwarder {
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
		case q.Name == "9.9.9.9.in-addr.arpa." && q.Qtype == dns.TypePTR:
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
	o := forward.Defaults()
	o.Upstreams = []forward.Upstream{{Addr: netip.MustParseAddrPort(c.LocalAddr().String())}}
	return forward.New(o)
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
	_, addr := started(t, c, Options{Sockets: 1, Forward: bigUpstream(t)})
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

// FuzzMessages sends what strangers may send through the whole path of a message, and asks something good after each.
func FuzzMessages(f *testing.F) {
	w, questions := hot(f)
	for _, q := range questions {
		f.Add(q)
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
