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
	eventually(t, "a known outage is not answered from the cache", func() bool {
		_, hit := cached(t, f, "www.example.", c.Now())
		return hit == Stale
	})
	c.advance(2 * time.Hour)
	if _, err := resolve(t, f, "www.example."); err == nil {
		t.Fatal("served past the limit for stale answers")
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what, "after 20 s")
		}
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

// raw serves UDP with whatever a test makes of a query, several datagrams if it wants to.
func raw(t *testing.T, reply func(r *dns.Msg) [][]byte) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { c.Close(); <-done })
	go func() {
		defer close(done)
		buf := make([]byte, 512)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			r := new(dns.Msg)
			r.Unpack(buf[:n])
			for _, b := range reply(r) {
				c.WriteTo(b, from)
			}
		}
	}()
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

func packed(m *dns.Msg) []byte {
	b, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return b
}

// An answer with another ID or question, as a forger would send it, must be passed over.
func TestForgedAnswersArePassedOver(t *testing.T) {
	addr := raw(t, func(r *dns.Msg) [][]byte {
		wrongID, wrongName, wrongType, query := address(r, 100, 3), address(r, 100, 3), address(r, 100, 3), address(r, 100, 3)
		wrongID.Id++
		wrongName.Question[0].Name = "evil.example."
		wrongType.Question[0].Qtype ^= 0x20 // the bit that tells upper case from lower case in names
		query.Response = false
		return [][]byte{packed(wrongID), packed(wrongName), packed(wrongType), packed(query), {1, 2, 3}, packed(address(r, 100, 1))}
	})
	f, _ := forwarder(t, nil, Upstream{Addr: addr})
	for _, typ := range []uint16{dns.TypeA, dns.TypeHTTPS} { // 65, which is an A
		q := new(dns.Msg)
		q.SetQuestion("www.example.", typ)
		parsed := new(wire.Query)
		parsed.Parse(packed(q))
		out, err := f.Resolve(t.Context(), make([]byte, 0, 4096), parsed, 4096)
		m := new(dns.Msg)
		if err != nil || m.Unpack(out) != nil || len(m.Answer) != 1 {
			t.Fatalf("type %d: %v %v", typ, m, err)
		}
	}
}

// malformed are responses that no client may see as an answer.
var malformed = map[string]func(*dns.Msg) []byte{
	"cut within a record": func(r *dns.Msg) []byte { b := packed(address(r, 100, 2)); return b[:len(b)-3] },
	"cut between records": func(r *dns.Msg) []byte { b := packed(address(r, 100, 2)); return b[:len(b)-len("www.example.")-1-14] },
	"counts an answer, has none": func(r *dns.Msg) []byte {
		b := packed(address(r, 100, 0))
		b[7] = 1
		return b
	},
	"owner loops": func(r *dns.Msg) []byte {
		b := packed(address(r, 100, 0))
		b[7] = 1
		at := len(b)
		return append(b, 0xC0|byte(at>>8), byte(at), 0, 1, 0, 1, 0, 0, 0, 100, 0, 4, 192, 0, 2, 1)
	},
	"address of three bytes": func(r *dns.Msg) []byte {
		b := packed(address(r, 100, 0))
		b[7] = 1
		return append(b, 0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 100, 0, 3, 192, 0, 2)
	},
	"another opcode": func(r *dns.Msg) []byte { m := address(r, 100, 1); m.Opcode = dns.OpcodeNotify; return packed(m) },
}

func TestMalformedAnswersAreNotRelayed(t *testing.T) {
	good := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	for name, make := range malformed {
		bad := Upstream{Addr: raw(t, func(r *dns.Msg) [][]byte { return [][]byte{make(r)} })}
		f, _ := forwarder(t, nil, bad)
		if m, err := resolve(t, f, "www.example."); err == nil {
			t.Errorf("%s: relayed as %v", name, m)
		}
		both, _ := forwarder(t, func(o *Options) { o.Sequential = true }, bad, Upstream{Addr: good.addr})
		if m, err := resolve(t, both, "www.example."); err != nil || len(m.Answer) != 1 {
			t.Errorf("%s: the second upstream was not asked: %v %v", name, m, err)
		}
	}
}

// beside serves TCP at the port that a raw server has for UDP.
func beside(t *testing.T, addr netip.AddrPort, reply func(*dns.Msg) *dns.Msg) {
	t.Helper()
	l, err := net.Listen("tcp", addr.String())
	if err != nil {
		t.Skipf("the port is taken for TCP: %v", err)
	}
	started, done := make(chan struct{}), make(chan struct{})
	d := &dns.Server{Listener: l, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) { w.WriteMsg(reply(r)) })}
	go func() { d.ActivateAndServe(); close(done) }()
	<-started
	t.Cleanup(func() { d.Shutdown(); <-done })
}

// A datagram longer than asked for is read whole over TCP, and never passed on cut off without saying so.
func TestLongDatagrams(t *testing.T) {
	many := func(r *dns.Msg) *dns.Msg { m := address(r, 100, 250); m.Compress = false; return m } // some 6,700 bytes
	long := raw(t, func(r *dns.Msg) [][]byte { return [][]byte{packed(many(r))} })
	f, _ := forwarder(t, nil, Upstream{Addr: long})
	if m, err := resolve(t, f, "www.example."); err == nil && !m.Truncated {
		t.Fatalf("cut off without TC: %d answers", len(m.Answer))
	}
	beside(t, long, many)
	g, _ := forwarder(t, nil, Upstream{Addr: long})
	if m, err := resolve(t, g, "www.example."); err != nil || len(m.Answer) != 250 {
		t.Fatalf("%v %v", m, err)
	}
	// Truncated by the server, and no TCP: the client gets to know.
	short := raw(t, func(r *dns.Msg) [][]byte { m := address(r, 100, 1); m.Truncated = true; return [][]byte{packed(m)} })
	h, _ := forwarder(t, nil, Upstream{Addr: short})
	if m, err := resolve(t, h, "www.example."); err != nil || !m.Truncated {
		t.Fatalf("TC got lost: %v %v", m, err)
	}
}

// A response that does not repeat the case of the name is verified over TCP. A server that never repeats it is used without.
func TestCaseIsVerified(t *testing.T) {
	lower := func(r *dns.Msg) *dns.Msg {
		r.Question[0].Name = dns.CanonicalName(r.Question[0].Name)
		return r
	}
	addr := raw(t, func(r *dns.Msg) [][]byte { return [][]byte{packed(address(lower(r), 100, 3))} })
	var overTCP atomic.Int32
	beside(t, addr, func(r *dns.Msg) *dns.Msg { overTCP.Add(1); return address(r, 100, 1) })
	f, _ := forwarder(t, nil, Upstream{Addr: addr})
	const name = "a-name-of-many-letters-is-never-all-lower-case-by-chance.example."
	if m, err := resolve(t, f, name); err != nil || len(m.Answer) != 1 || overTCP.Load() != 1 {
		t.Fatalf("a response in lower case was believed: %v %v", m, err)
	}
	folding := raw(t, func(r *dns.Msg) [][]byte { return [][]byte{packed(address(lower(r), 100, 2))} })
	var again atomic.Int32
	beside(t, folding, func(r *dns.Msg) *dns.Msg { again.Add(1); return address(lower(r), 100, 2) })
	g, _ := forwarder(t, nil, Upstream{Addr: folding})
	for _, prefix := range []string{"one.", "two.", "three."} {
		if m, err := resolve(t, g, prefix+name); err != nil || len(m.Answer) != 2 {
			t.Fatalf("%v %v", m, err)
		}
	}
	if n := again.Load(); n != 1 {
		t.Fatalf("TCP was used %d times for a server that folds the case, want once", n)
	}
}

// silent serves names of example.com, and does not respond to others but health checks.
func silent(t *testing.T, asked *atomic.Int32) netip.AddrPort {
	return raw(t, func(r *dns.Msg) [][]byte {
		name := dns.CanonicalName(r.Question[0].Name)
		if name == "." || dns.IsSubDomain("example.com.", name) {
			return [][]byte{packed(address(r, 100, 1))}
		}
		asked.Add(1)
		return nil
	})
}

// Names that an upstream does not resolve say nothing about its health, and are not asked for again at once.
func TestFailedNames(t *testing.T) {
	var asked atomic.Int32
	f, c := forwarder(t, func(o *Options) { o.Timeout = 100 * time.Millisecond }, Upstream{Addr: silent(t, &asked)})
	for range 5 {
		if _, err := resolve(t, f, "dead.example."); err == nil {
			t.Fatal("an answer out of nothing")
		}
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times for a name that had just failed", n)
	}
	for i := range 5 {
		resolve(t, f, string(rune('a'+i))+".dead.example.")
	}
	if !f.healthy() {
		t.Error("an upstream that does not resolve a few names counts as down")
	}
	if m, err := resolve(t, f, "www.example.com."); err != nil || len(m.Answer) != 1 {
		t.Errorf("%v %v", m, err)
	}
	c.advance(2 * failureTTL)
	resolve(t, f, "dead.example.")
	if n := asked.Load(); n != 7 {
		t.Errorf("asked %d times, want once more after a while", n)
	}
}

// With all upstreams down most queries fail at once, and a server that is back is noticed.
func TestFailsFast(t *testing.T) {
	var down atomic.Bool
	down.Store(true)
	addr := raw(t, func(r *dns.Msg) [][]byte {
		if down.Load() {
			return nil
		}
		return [][]byte{packed(address(r, 100, 1))}
	})
	f, _ := forwarder(t, nil, Upstream{Addr: addr})
	f.check(f.upstreams[0])
	eventually(t, "the upstream still counts as healthy", func() bool { return !f.healthy() })
	began := time.Now()
	failed := make(chan time.Duration, 200)
	var wg sync.WaitGroup
	for i := range cap(failed) {
		wg.Go(func() {
			resolve(t, f, string(rune('a'+i%26))+string(rune('a'+i/26))+".example.")
			failed <- time.Since(began)
		})
	}
	wg.Wait()
	close(failed)
	slow := 0
	for d := range failed {
		if d > attempt*3/4 {
			slow++
		}
	}
	if slow > maxLastTries {
		t.Errorf("%d of 200 queries waited for an upstream that is known to be down", slow)
	}
	down.Store(false)
	eventually(t, "the upstream still counts as down", f.healthy)
	if m, err := resolve(t, f, "www.example.com."); err != nil || len(m.Answer) != 1 {
		t.Errorf("%v %v", m, err)
	}
}

// When nobody waits for a query any more, it is cancelled.
func TestAbandonedQueriesEnd(t *testing.T) {
	var asked atomic.Int32
	f, _ := forwarder(t, nil, Upstream{Addr: silent(t, &asked)})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { f.Resolve(ctx, make([]byte, 0, 512), query(t, "dead.example."), 512) })
	}
	eventually(t, "not asked", func() bool { return asked.Load() == 1 })
	began := time.Now()
	cancel()
	wg.Wait()
	f.running.Wait()
	if d := time.Since(began); d > attempt*9/10 {
		t.Errorf("ended after %v", d)
	}
	if !f.healthy() || len(f.calls) != 0 || len(f.failures) != 0 {
		t.Errorf("healthy %v, %d calls, %d failures", f.healthy(), len(f.calls), len(f.failures))
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
