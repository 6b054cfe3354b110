package server

import (
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"portal/internal/dns/wire"
)

// TestRateLimitHolds: a limit holds for as long as the server runs, also when 32 bits of milliseconds start over; and a
// network that was quiet meanwhile has its tokens again.
func TestRateLimitHolds(t *testing.T) {
	m := new(dns.Msg)
	m.SetQuestion("web.shop.svc.cluster.local.", dns.TypeA)
	raw, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var q wire.Query
	if q.Parse(raw) != wire.OK {
		t.Fatal("the query can't be parsed")
	}
	const rate = 20
	l := newLimiter(rate)
	for _, up := range []time.Duration{0, time.Hour, 24 * time.Hour, 1<<31*time.Millisecond - time.Second, 1<<32*time.Millisecond - time.Second, 1 << 32 * time.Millisecond, 1000 * 24 * time.Hour} {
		now := l.start.Add(up + time.Hour)
		pass := 0
		for range 1000 {
			if l.check(netip.MustParseAddr("192.0.2.1"), &q, raw, now) == limitPass {
				pass++
			}
		}
		if pass != rate {
			t.Errorf("after %v, %d of 1000 responses at once passed, want %d", up, pass, rate)
		}
	}
}
