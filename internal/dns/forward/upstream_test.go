package forward

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
	"portal/internal/nettest"
)

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

// A datagram that got lost costs a moment, not the answer.
func TestLostDatagrams(t *testing.T) {
	var asked atomic.Int32
	lossy := raw(t, func(r *dns.Msg) [][]byte {
		if asked.Add(1) == 1 {
			return nil
		}
		return [][]byte{packed(address(r, 100, 1))}
	})
	f, _ := forwarder(t, nil, Upstream{Addr: lossy})
	if m, err := resolve(t, f, "www.example."); err != nil || len(m.Answer) != 1 {
		t.Fatalf("%v %v", m, err)
	}
	if n := asked.Load(); n != 2 {
		t.Errorf("asked %d times, want twice", n)
	}
}

// A name whose datagrams all got lost is asked for again with the next query.
func TestLostAnswers(t *testing.T) {
	var asked atomic.Int32
	lossy := raw(t, func(r *dns.Msg) [][]byte {
		if asked.Add(1) == 1 {
			return nil
		}
		return [][]byte{packed(address(r, 100, 1))}
	})
	f, _ := forwarder(t, func(o *Options) { o.Timeout = 200 * time.Millisecond }, Upstream{Addr: lossy})
	if m, err := resolve(t, f, "www.example."); err == nil {
		t.Fatalf("%v out of nothing", m)
	}
	if m, err := resolve(t, f, "www.example."); err != nil || len(m.Answer) != 1 {
		t.Fatalf("%v %v", m, err)
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
	c := listenUDP(t)
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

// listenUDP listens at a port that is free for TCP, too.
func listenUDP(t *testing.T) net.PacketConn {
	t.Helper()
	for {
		c, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp", c.LocalAddr().String())
		if err == nil {
			l.Close()
			return c
		}
		c.Close()
	}
}

// beside serves TCP at the port that a raw server has for UDP.
func beside(t *testing.T, addr netip.AddrPort, reply func(*dns.Msg) *dns.Msg) {
	t.Helper()
	l, err := net.Listen("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
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

// TestSearchPath: the last line counts, without what is no name.
func TestSearchPath(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	text := "domain example\nnameserver 192.0.2.1\nsearch corp.example. a..b .\tLAN\n# search no\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := SearchPath(file); !slices.Equal(got, []string{"corp.example.", "LAN"}) {
		t.Errorf("%q", got)
	}
	if got := SearchPath(file + ".none"); got != nil {
		t.Errorf("%q", got)
	}
}

// TestNoDescriptors: that there are no descriptors for queries says nothing about the upstream, nor about the name. A query waits for one.
func TestNoDescriptors(t *testing.T) {
	s := serve(t, func(r *dns.Msg) *dns.Msg { return address(r, 100, 1) })
	f, _ := forwarder(t, nil, Upstream{Addr: s.addr})
	release := nettest.Exhaust(t)
	f.exchange(t.Context(), f.upstreams[0], question(query(t, "www.example.")), false, false)
	if u := f.upstreams[0]; u.checking.Load() || u.fails.Load() > 0 {
		t.Error("the upstream is suspected")
	}
	answered := make(chan error)
	go func() {
		_, err := resolve(t, f, "www.example.")
		answered <- err
	}()
	eventually(t, "not asked", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.calls) == 1
	})
	select {
	case err := <-answered:
		t.Fatalf("answered without descriptors: %v", err)
	case <-time.After(2 * shortageInterval):
	}
	release()
	if err := <-answered; err != nil {
		t.Error(err)
	}
}
