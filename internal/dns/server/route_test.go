package server

import (
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/forward"
)

// TestIsOwn: an upstream is the server itself at whatever address of the machine it listens.
func TestIsOwn(t *testing.T) {
	local := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("fe80::1")}
	for _, c := range []struct {
		upstream, listen string
		want             bool
	}{
		{"192.0.2.1:53", "192.0.2.1:53", true}, {"192.0.2.1:5353", "192.0.2.1:53", false}, {"192.0.2.2:53", "192.0.2.1:53", false},
		{"127.0.0.1:53", "0.0.0.0:53", true}, {"127.0.0.53:53", "0.0.0.0:53", true}, {"192.0.2.1:53", "0.0.0.0:53", true}, {"192.0.2.2:53", "0.0.0.0:53", false},
		{"[2001:db8::1]:53", "0.0.0.0:53", false}, {"[::1]:53", "0.0.0.0:53", false}, {"127.0.0.53:53", "127.0.0.1:53", false},
		{"192.0.2.1:53", "[::]:53", true}, {"[2001:db8::1]:53", "[::]:53", true}, {"[fe80::1%eth0]:53", "[::]:53", true}, {"[2001:db8::2]:53", "[::]:53", false},
		{"[::ffff:192.0.2.1]:53", "0.0.0.0:53", true}, {"[::ffff:192.0.2.1]:53", "192.0.2.1:53", true},
		{"0.0.0.0:53", "[::]:53", true}, {"0.0.0.0:53", "127.0.0.1:53", true}, {"0.0.0.0:53", "192.0.2.1:53", false}, {"[::]:53", "0.0.0.0:53", false}, {"[::]:53", "[::1]:53", true},
	} {
		if got := IsOwn(netip.MustParseAddrPort(c.upstream), []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:9999"), netip.MustParseAddrPort(c.listen)}, local); got != c.want {
			t.Errorf("%s of a server on %s: %v", c.upstream, c.listen, got)
		}
	}
}

// TestFindsLoops: an upstream that passes queries on to this server is not asked; another one is.
func TestFindsLoops(t *testing.T) {
	var back atomic.Pointer[string] // where the upstream passes queries on to
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	began, ended := make(chan struct{}), make(chan struct{})
	d := &dns.Server{PacketConn: c, NotifyStartedFunc: func() { close(began) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		for back.Load() == nil {
			time.Sleep(time.Millisecond)
		}
		if m, err := dns.Exchange(r, *back.Load()); err == nil {
			_ = w.WriteMsg(m)
		}
	})}
	go func() { _ = d.ActivateAndServe(); close(ended) }()
	<-began
	t.Cleanup(func() { _ = d.Shutdown(); <-ended })
	loops := forward.Upstream{Addr: netip.MustParseAddrPort(c.LocalAddr().String())}
	good := forward.Upstream{Addr: netip.MustParseAddrPort(upstreamAddr(t))}
	for _, upstreams := range [][]forward.Upstream{{loops}, {loops, good}} {
		back.Store(nil)
		var log lockedBuffer
		o := forward.Defaults()
		o.Upstreams = upstreams
		_, addr := started(t, small(), Options{Forward: forward.New(o), Log: slog.New(slog.NewTextHandler(&log, nil))})
		back.Store(&addr)
		for end := time.Now().Add(10 * time.Second); !strings.Contains(log.String(), "come back to this server"); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not said after 10 s: %s", log.String())
			}
		}
		if !strings.Contains(log.String(), "upstream="+loops.String()) {
			t.Errorf("the log does not say which: %s", log.String())
		}
		want := dns.RcodeServerFailure
		if len(upstreams) > 1 {
			want = dns.RcodeSuccess
		}
		for range 4 {
			began := time.Now()
			if m := ask(t, addr, "udp", "www.example.com.", dns.TypeA); m.Rcode != want {
				t.Errorf("%d upstreams: %v", len(upstreams), m)
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("%d upstreams: answered after %v", len(upstreams), took)
			}
		}
	}
}

// lockedBuffer is a log that a test reads while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
