package forward

import (
	"context"
	"net"
	"net/netip"
	"slices"
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

// TestTTLs: clients get the time for which a response remains in the cache as the TTL of every record: the least of all sections, no more
// than the SOA record says of a denial, within the bounds. A response that is not cached keeps its own.
func TestTTLs(t *testing.T) {
	a := func(name string, ttl uint32) dns.RR {
		return &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: net.IPv4(192, 0, 2, 1)}
	}
	alias := func(name string, ttl uint32) dns.RR {
		return &dns.CNAME{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: ttl}, Target: "target.example."}
	}
	ns := func(ttl uint32) dns.RR {
		return &dns.NS{Hdr: dns.RR_Header{Name: "example.", Rrtype: dns.TypeNS, Class: dns.ClassINET, Ttl: ttl}, Ns: "ns.example."}
	}
	soa := func(ttl, minimum uint32) dns.RR {
		return &dns.SOA{Hdr: dns.RR_Header{Name: "example.", Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: ttl}, Ns: "a.", Mbox: "b.", Minttl: minimum}
	}
	const q = "www.example."
	for what, c := range map[string]struct {
		change     func(*Options)
		rcode      int
		answer     []dns.RR
		ns, extra  []dns.RR
		ttl, later uint32 // of all records, and three seconds later; 0: not cached
	}{
		"the least of the answers":      {answer: []dns.RR{alias(q, 300), a("target.example.", 20)}, ttl: 20, later: 17},
		"the least of the authority":    {answer: []dns.RR{a(q, 300)}, ns: []dns.RR{ns(40)}, ttl: 40, later: 37},
		"the least of the additional":   {answer: []dns.RR{a(q, 300)}, ns: []dns.RR{ns(40)}, extra: []dns.RR{a("ns.example.", 10)}, ttl: 10, later: 7},
		"raised to the least":           {answer: []dns.RR{a(q, 1)}, ttl: 5, later: 2},
		"none raised to the least":      {answer: []dns.RR{a(q, 0)}, ttl: 5, later: 2},
		"negative":                      {answer: []dns.RR{a(q, 1<<31)}, ttl: 5, later: 2},
		"lowered to the most":           {answer: []dns.RR{a(q, 1<<20)}, ttl: 3600, later: 3597},
		"the most holds":                {change: func(o *Options) { o.MinTTL, o.MaxTTL = time.Minute, 30*time.Second }, answer: []dns.RR{a(q, 1000)}, ttl: 30, later: 27},
		"without a least":               {change: func(o *Options) { o.MinTTL = 0 }, answer: []dns.RR{a(q, 4), a(q, 9)}, ttl: 4, later: 1},
		"the SOA's minimum":             {rcode: dns.RcodeNameError, ns: []dns.RR{soa(300, 20)}, ttl: 20, later: 17},
		"the SOA's TTL":                 {rcode: dns.RcodeNameError, ns: []dns.RR{soa(30, 200)}, ttl: 30, later: 27},
		"no such records":               {ns: []dns.RR{soa(300, 20)}, ttl: 20, later: 17},
		"no such records at the target": {answer: []dns.RR{alias(q, 300)}, ns: []dns.RR{soa(300, 20)}, ttl: 20, later: 17},
		"no such target":                {rcode: dns.RcodeNameError, answer: []dns.RR{alias(q, 10)}, ns: []dns.RR{soa(300, 20)}, ttl: 10, later: 7},
		"a denial lowered to its most":  {rcode: dns.RcodeNameError, ns: []dns.RR{soa(9999, 9999)}, ttl: 1800, later: 1797},
		"a denial raised to its least":  {change: func(o *Options) { o.MinTTL, o.MinNegativeTTL = 60*time.Second, 10*time.Second }, rcode: dns.RcodeNameError, ns: []dns.RR{soa(300, 2)}, ttl: 10, later: 7},
		"denials are not cached":        {change: func(o *Options) { o.MaxNegativeTTL = 0 }, rcode: dns.RcodeNameError, ns: []dns.RR{soa(300, 20)}, ttl: 300},
		"without a cache":               {change: func(o *Options) { o.Entries = 0 }, answer: []dns.RR{a(q, 1)}, ttl: 1},
		"beyond all bounds, no cache":   {change: func(o *Options) { o.Entries = 0 }, answer: []dns.RR{a(q, 1<<20)}, ttl: 1 << 20},
		"a denial that says nothing":    {rcode: dns.RcodeNameError, ns: []dns.RR{ns(300)}, ttl: 300},
	} {
		s := serve(t, func(r *dns.Msg) *dns.Msg {
			m := new(dns.Msg).SetRcode(r, c.rcode)
			m.Answer, m.Ns, m.Extra = c.answer, c.ns, c.extra
			return m
		})
		f, clock := forwarder(t, c.change, Upstream{Addr: s.addr})
		same := func(when string, m *dns.Msg, want uint32) {
			t.Helper()
			for _, rr := range slices.Concat(m.Answer, m.Ns, m.Extra) {
				if rr.Header().Ttl != want {
					t.Errorf("%s, %s: want a TTL of %d: %v", what, when, want, rr)
				}
			}
		}
		m, err := resolve(t, f, q)
		if err != nil {
			t.Fatal(what, err)
		}
		same("at first", m, c.ttl)
		m, hit := cached(t, f, q, clock.Now().Add(3*time.Second))
		if (hit == Fresh) != (c.later > 0) {
			t.Errorf("%s: %v", what, hit)
		}
		if hit == Fresh {
			same("later", m, c.later)
		}
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
	if n := asked.Load(); n != 2 {
		t.Errorf("asked %d times for a name that had just failed, want twice", n)
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
	if n := asked.Load(); n != 8 {
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
	name := func(i int) string { return string(rune('a'+i%26)) + string(rune('a'+i/26)) + ".example." }
	for i := range cap(failed) {
		wg.Go(func() {
			resolve(t, f, name(i))
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
	for i := range cap(failed) {
		if m, err := resolve(t, f, name(i)); err != nil || len(m.Answer) != 1 {
			t.Fatalf("%s: %v %v", name(i), m, err)
		}
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
