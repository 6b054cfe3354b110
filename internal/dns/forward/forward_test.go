package forward

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
)

// stub is an upstream server whose behaviour a test sets.
type stub struct {
	addr  netip.AddrPort
	asked atomic.Int32
	reply func(*dns.Msg) *dns.Msg
	stop  func()
}

// serve starts a stub over UDP and TCP on one port.
func serve(t *testing.T, reply func(*dns.Msg) *dns.Msg) *stub {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p, err := net.ListenPacket("udp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s := &stub{reply: reply, addr: netip.MustParseAddrPort(l.Addr().String())}
	h := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		s.asked.Add(1)
		if m := s.reply(r); m != nil {
			if _, tcp := w.RemoteAddr().(*net.TCPAddr); !tcp {
				m.Truncate(512)
			}
			w.WriteMsg(m)
		}
	})
	servers := []*dns.Server{{Listener: l, Handler: h}, {PacketConn: p, Handler: h}}
	var wg sync.WaitGroup
	for _, d := range servers {
		started := make(chan struct{})
		d.NotifyStartedFunc = func() { close(started) }
		wg.Go(func() { d.ActivateAndServe() })
		<-started
	}
	s.stop = sync.OnceFunc(func() {
		for _, d := range servers {
			d.Shutdown()
		}
		wg.Wait()
	})
	t.Cleanup(s.stop)
	return s
}

func address(r *dns.Msg, ttl uint32, n int) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(r)
	for i := range n {
		m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: net.IPv4(192, 0, 2, byte(i+1))})
	}
	return m
}

func denial(r *dns.Msg, ttl, minimum uint32) *dns.Msg {
	m := new(dns.Msg)
	m.SetRcode(r, dns.RcodeNameError)
	m.Ns = []dns.RR{&dns.SOA{Hdr: dns.RR_Header{Name: "example.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: ttl}, Ns: "a.", Mbox: "b.", Minttl: minimum}}
	return m
}

// clock is a time that a test turns.
type clock struct{ now atomic.Int64 }

func (c *clock) Now() time.Time          { return time.Unix(0, c.now.Load()) }
func (c *clock) advance(d time.Duration) { c.now.Add(int64(d)) }

func forwarder(t *testing.T, change func(*Options), upstreams ...Upstream) (*Forwarder, *clock) {
	t.Helper()
	c := &clock{}
	c.now.Store(time.Now().UnixNano())
	o := Defaults()
	o.Clock, o.Upstreams = c.Now, upstreams
	if change != nil {
		change(&o)
	}
	f := New(o)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return f, c
}

func query(t *testing.T, name string) *wire.Query {
	m := new(dns.Msg)
	m.SetQuestion(name, dns.TypeA)
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	q := new(wire.Query)
	if q.Parse(raw) != wire.OK {
		t.Fatal("bad query")
	}
	return q
}

func resolve(t *testing.T, f *Forwarder, name string) (*dns.Msg, error) {
	t.Helper()
	out, err := f.Resolve(t.Context(), make([]byte, 0, 4096), query(t, name), 4096)
	if err != nil {
		return nil, err
	}
	m := new(dns.Msg)
	if err := m.Unpack(out); err != nil {
		t.Fatal(err)
	}
	return m, nil
}

func cached(t *testing.T, f *Forwarder, name string, now time.Time) (*dns.Msg, Hit) {
	t.Helper()
	out, hit := f.Cached(make([]byte, 0, 4096), query(t, name), 4096, now)
	if hit == Miss {
		return nil, Miss
	}
	m := new(dns.Msg)
	if err := m.Unpack(out); err != nil {
		t.Fatal(err)
	}
	return m, hit
}

func TestKeepsAnswersForTheirTime(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	f, c := forwarder(t, nil, Upstream{Addr: s.addr})
	if m, err := resolve(t, f, "www.example."); err != nil || len(m.Answer) != 1 || m.Answer[0].Header().Ttl != 100 {
		t.Fatal(m, err)
	}
	m, hit := cached(t, f, "WWW.Example.", c.Now().Add(40*time.Second))
	if hit != Fresh || m.Answer[0].Header().Ttl != 60 || m.Question[0].Name != "WWW.Example." || m.Answer[0].Header().Name != "WWW.Example." {
		t.Fatalf("after 40 s: %v %v", hit, m)
	}
	if _, hit := cached(t, f, "www.example.", c.Now().Add(101*time.Second)); hit != Miss {
		t.Fatal("given again after its time")
	}
	if _, hit := cached(t, f, "other.example.", c.Now()); hit != Miss {
		t.Fatal("an answer for a name that nobody asked for")
	}
}

func TestKeepsDenialsBySOA(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return denial(r, 300, 20) })
	f, c := forwarder(t, nil, Upstream{Addr: s.addr})
	if m, err := resolve(t, f, "no.example."); err != nil || m.Rcode != dns.RcodeNameError {
		t.Fatal(m, err)
	}
	if m, hit := cached(t, f, "no.example.", c.Now().Add(19*time.Second)); hit != Fresh || m.Rcode != dns.RcodeNameError {
		t.Fatal("a denial was not kept")
	}
	if _, hit := cached(t, f, "no.example.", c.Now().Add(21*time.Second)); hit != Miss {
		t.Fatal("a denial was kept longer than its SOA's minimum")
	}
}

func TestAsksOnceForMany(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg {
		time.Sleep(100 * time.Millisecond) // until all have asked
		return address(r, 100, 1)
	})
	f, _ := forwarder(t, nil, Upstream{Addr: s.addr})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if m, err := resolve(t, f, "www.example."); err != nil || len(m.Answer) != 1 {
				t.Error(m, err)
			}
		})
	}
	wg.Wait()
	if n := s.asked.Load(); n != 1 {
		t.Fatalf("the upstream was asked %d times", n)
	}
}

func TestServesStaleWhileUpstreamIsDown(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 10, 1) })
	f, c := forwarder(t, func(o *Options) { o.Timeout = 300 * time.Millisecond }, Upstream{Addr: s.addr})
	if _, err := resolve(t, f, "www.example."); err != nil {
		t.Fatal(err)
	}
	s.stop()
	c.advance(time.Minute)
	if m, err := resolve(t, f, "www.example."); err != nil || len(m.Answer) != 1 || m.Answer[0].Header().Ttl != staleTTL {
		t.Fatalf("past its time, upstream down: %v %v", m, err)
	}
	if _, err := resolve(t, f, "new.example."); err == nil {
		t.Fatal("an answer out of nothing")
	}
	if _, hit := cached(t, f, "www.example.", c.Now()); hit != Stale {
		t.Fatal("a known outage must be answered at once")
	}
	c.advance(2 * time.Hour)
	if _, err := resolve(t, f, "www.example."); err == nil {
		t.Fatal("served past the limit for stale answers")
	}
}

func TestPrefetch(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	f, c := forwarder(t, nil, Upstream{Addr: s.addr})
	if _, err := resolve(t, f, "www.example."); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		cached(t, f, "www.example.", c.Now())
	}
	c.advance(95 * time.Second)
	for range 5 {
		cached(t, f, "www.example.", c.Now())
	}
	for end := time.Now().Add(2 * time.Second); s.asked.Load() < 2 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	if n := s.asked.Load(); n != 2 {
		t.Fatalf("asked %d times: want once more, before the end", n)
	}
	if m, hit := cached(t, f, "www.example.", c.Now().Add(50*time.Second)); hit != Fresh || m.Answer[0].Header().Ttl != 50 {
		t.Fatal("the renewed answer is not there")
	}
}

func TestNextUpstreamAnswers(t *testing.T) {
	dead := serve(t, func(*dns.Msg) *dns.Msg { return nil })
	dead.stop()
	sick := serve(t, func(r *dns.Msg) *dns.Msg { m := new(dns.Msg); m.SetRcode(r, dns.RcodeServerFailure); return m })
	good := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	f, _ := forwarder(t, nil, Upstream{Addr: dead.addr}, Upstream{Addr: sick.addr}, Upstream{Addr: good.addr})
	for _, name := range []string{"a.example.", "b.example.", "c.example.", "d.example."} {
		if m, err := resolve(t, f, name); err != nil || len(m.Answer) != 1 {
			t.Fatalf("%s: %v %v", name, m, err)
		}
	}
}

func TestLongAnswersComeByTCP(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 60) })
	f, _ := forwarder(t, nil, Upstream{Addr: s.addr})
	if m, err := resolve(t, f, "many.example."); err != nil || len(m.Answer) != 60 || m.Truncated {
		t.Fatalf("%v %v", m, err)
	}
}

func TestOverTLS(t *testing.T) {
	cert, roots := certificate(t)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	d := &dns.Server{Listener: l, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) { w.WriteMsg(address(r, 100, 1)) })}
	go d.ActivateAndServe()
	defer d.Shutdown()
	u := Upstream{Addr: netip.MustParseAddrPort(l.Addr().String()), Transport: TLS, ServerName: "dns.example", RootCAs: &tls.Config{RootCAs: roots}}
	f, _ := forwarder(t, nil, u)
	for _, name := range []string{"a.example.", "b.example."} {
		if m, err := resolve(t, f, name); err != nil || len(m.Answer) != 1 {
			t.Fatalf("%v %v", m, err)
		}
	}
	u.ServerName = "other.example"
	g, _ := forwarder(t, func(o *Options) { o.Timeout = time.Second }, u)
	if _, err := resolve(t, g, "a.example."); err == nil {
		t.Fatal("trusted a certificate for another name")
	}
}

func certificate(t *testing.T) (tls.Certificate, *x509.CertPool) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"dns.example"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, _ := x509.ParseCertificate(der)
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// An answer with another ID or question, as a forger would send it, must be passed over.
func TestForgedAnswersArePassedOver(t *testing.T) {
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		buf := make([]byte, 512)
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		r := new(dns.Msg)
		r.Unpack(buf[:n])
		send := func(m *dns.Msg) { b, _ := m.Pack(); c.WriteTo(b, from) }
		wrongID := address(r, 100, 3)
		wrongID.Id++
		send(wrongID)
		wrongName := address(r, 100, 3)
		wrongName.Question[0].Name = "evil.example."
		send(wrongName)
		c.WriteTo([]byte{1, 2, 3}, from)
		send(address(r, 100, 1))
	}()
	f, _ := forwarder(t, nil, Upstream{Addr: netip.MustParseAddrPort(c.LocalAddr().String())})
	if m, err := resolve(t, f, "www.example."); err != nil || len(m.Answer) != 1 {
		t.Fatalf("%v %v", m, err)
	}
}

func TestCacheIsBounded(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	f, _ := forwarder(t, func(o *Options) { o.Entries = 128 }, Upstream{Addr: s.addr})
	for i := range 600 {
		if _, err := resolve(t, f, "n"+string(rune('a'+i%26))+string(rune('a'+i/26))+".example."); err != nil {
			t.Fatal(err)
		}
	}
	if n, _ := f.cache.count(); n > 128 {
		t.Fatalf("%d entries", n)
	}
}

func TestParseUpstream(t *testing.T) {
	for in, want := range map[string]string{
		"1.1.1.1": "1.1.1.1:53", "1.1.1.1:5353": "1.1.1.1:5353", "[::1]:53": "[::1]:53", "::1": "[::1]:53",
		"tls://1.1.1.1#one.one": "tls://1.1.1.1:853", "tcp://1.1.1.1": "tcp://1.1.1.1:53",
	} {
		got, err := ParseUpstream(in)
		if err != nil || got[0].String() != want {
			t.Errorf("%s: %v %v, want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"", "dns.example", "1.1.1", "/no/such/file"} {
		if _, err := ParseUpstream(in); err == nil {
			t.Errorf("%q was taken", in)
		}
	}
}
