package conntrack

import (
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"context"

	"portal/internal/intent"
	"portal/internal/plan"
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// table is a kernel's table in memory.
type table struct {
	slow time.Duration

	mu     sync.Mutex
	flows  []Flow
	passes int
	fail   int // so many passes fail
}

func (t *table) left() []Flow {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.flows
}

func (t *table) passed() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.passes
}

func (t *table) Delete(_ intent.Family, protocol intent.Protocol, match func(Flow) bool) (n int, _ error) {
	time.Sleep(t.slow)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.passes++
	if t.fail > 0 {
		t.fail--
		return 0, errors.New("the dump was interrupted")
	}
	var left []Flow
	for _, f := range t.flows {
		if f.Protocol == protocol && match(f) {
			n++
		} else {
			left = append(left, f)
		}
	}
	t.flows = left
	return n, nil
}

func planned(protocol intent.Protocol, endpoints ...string) *plan.Service {
	s := &intent.Service{
		Key: intent.Key{Namespace: "ns", Name: "dns"}, Type: intent.NodePort, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports: []intent.Port{{Protocol: protocol, Port: 53, NodePort: 30053}}, ExternalIPs: []netip.Addr{netip.MustParseAddr("198.51.100.1")},
	}
	slice := &intent.Slice{Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: protocol, Port: 5353}}}
	for _, e := range endpoints {
		at, leaving := strings.CutSuffix(e, " leaving")
		end := intent.Endpoint{Addr: netip.MustParseAddr(at), Condition: intent.Ready | intent.Serving}
		if leaving {
			end.Condition = intent.Serving | intent.Terminating
		}
		slice.Endpoints = append(slice.Endpoints, end)
	}
	return plan.For(&intent.Entry{Service: s, Slices: []*intent.Slice{slice}}, &plan.Facts{Families: []intent.Family{intent.IPv4}})
}

// only is a snapshot of one Service; nil: of none.
func only(s *plan.Service) *plan.Snapshot {
	snap := plan.NewSnapshot(&plan.Facts{})
	snap.Set(intent.Key{Namespace: "ns", Name: "dns"}, s)
	return snap
}

// TestStale is the table of what is ended when a plan changes.
func TestStale(t *testing.T) {
	const a, b = "10.244.0.1", "10.244.0.2"
	udp := func(endpoints ...string) *plan.Service { return planned(intent.UDP, endpoints...) }
	tcp := func(endpoints ...string) *plan.Service { return planned(intent.TCP, endpoints...) }
	for _, c := range []struct {
		name     string
		old, now *plan.Service
		flow     Flow
		here     bool
		ended    bool
	}{
		{"its endpoint goes", udp(a, b), udp(b), Flow{intent.UDP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"another endpoint goes", udp(a, b), udp(b), Flow{intent.UDP, ap("10.96.0.10:53"), ap(b + ":5353")}, false, false},
		{"its endpoint terminates and serves", udp(a), udp(a+" leaving", b), Flow{intent.UDP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, false},
		{"the last endpoint goes", udp(a), udp(), Flow{intent.UDP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"the first endpoint comes", udp(), udp(a), Flow{intent.UDP, ap("10.96.0.10:53"), ap("10.96.0.10:53")}, false, true},
		{"the Service comes", nil, udp(a), Flow{intent.UDP, ap("10.96.0.10:53"), ap("10.96.0.10:53")}, false, true},
		{"the Service goes", udp(a), nil, Flow{intent.UDP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, false},
		{"by the external IP", udp(a), udp(b), Flow{intent.UDP, ap("198.51.100.1:53"), ap(a + ":5353")}, false, true},
		{"by the node port", udp(a), udp(b), Flow{intent.UDP, ap("192.0.2.1:30053"), ap(a + ":5353")}, false, true},
		{"the same port of another machine", udp(a), udp(b), Flow{intent.UDP, ap("192.0.2.9:30053"), ap("192.0.2.9:30053")}, false, false},
		{"another protocol", udp(a), udp(b), Flow{intent.SCTP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, false},
		{"SCTP", planned(intent.SCTP, a), planned(intent.SCTP, b), Flow{intent.SCTP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"of TCP, its endpoint goes", tcp(a, b), tcp(b), Flow{intent.TCP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"of TCP, another endpoint goes", tcp(a, b), tcp(b), Flow{intent.TCP, ap("10.96.0.10:53"), ap(b + ":5353")}, false, false},
		{"of TCP, its endpoint terminates", tcp(a, b), tcp(a+" leaving", b), Flow{intent.TCP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"of TCP, the only one terminates", tcp(a, b), tcp(a + " leaving"), Flow{intent.TCP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, false},
		{"of TCP, the last endpoint goes", tcp(a), tcp(), Flow{intent.TCP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"of TCP, the first endpoint comes", tcp(), tcp(a), Flow{intent.TCP, ap("10.96.0.10:53"), ap("10.96.0.10:53")}, false, true},
		{"of TCP, an endpoint comes", tcp(a), tcp(a, b), Flow{intent.TCP, ap("10.96.0.10:53"), ap("10.244.0.3:5353")}, false, false},
		{"of TCP, after a restart", nil, tcp(b), Flow{intent.TCP, ap("10.96.0.10:53"), ap(a + ":5353")}, false, true},
		{"of TCP, by the node port", tcp(a), tcp(b), Flow{intent.TCP, ap("192.0.2.1:30053"), ap(a + ":5353")}, false, true},
		{"of TCP, the same port of another machine", tcp(a), tcp(b), Flow{intent.TCP, ap("192.0.2.9:30053"), ap(a + ":5353")}, false, false},
		{"of TCP, in a mode that ends flows itself", tcp(a), tcp(b), Flow{intent.TCP, ap("10.96.0.10:53"), ap("192.0.2.1:40000")}, true, false},
		{"a mode that ends flows itself", udp(a), udp(b), Flow{intent.UDP, ap("10.96.0.10:53"), ap("192.0.2.1:40000")}, true, false},
		{"the same, from before it had the frontend", nil, udp(b), Flow{intent.UDP, ap("10.96.0.10:53"), ap("10.96.0.10:53")}, true, true},
		{"somebody else's", udp(a), udp(b), Flow{intent.UDP, ap("10.96.0.11:53"), ap(a + ":5353")}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				kernel := &table{flows: []Flow{c.flow}}
				cleaner := New(kernel, slog.New(slog.DiscardHandler), nil)
				cleaner.Acknowledged([]plan.ServiceChange{{Key: intent.Key{Namespace: "ns", Name: "dns"}, Old: c.old, New: c.now}}, only(c.now), []netip.Addr{netip.MustParseAddr("192.0.2.1")}, c.here)
				time.Sleep(handshake)
				if _, err := cleaner.pass(); err != nil {
					t.Error(err)
				}
				if ended := len(kernel.left()) == 0; ended != c.ended {
					t.Errorf("ended: %v, want %v", ended, c.ended)
				}
			})
		})
	}
}

// TestPace: changes never wait for the table, are put together, and leave time between passes; what changes nothing for
// flows causes none.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kernel := &table{slow: 100 * time.Millisecond}
		c := New(kernel, slog.New(slog.DiscardHandler), nil)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { c.Run(ctx) })
		one, two := planned(intent.UDP, "10.244.0.1"), planned(intent.UDP, "10.244.0.2")
		start := time.Now()
		for range 500 {
			c.Acknowledged([]plan.ServiceChange{{Old: one, New: two}}, only(two), nil, false)
			one, two = two, one
			time.Sleep(10 * time.Millisecond)
		}
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("changes had to wait: %v", took)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if kernel.passed() < 4 || kernel.passed() > 7 {
			t.Errorf("%d passes of 100 ms in 5 s", kernel.passed())
		}
		before := kernel.passed()
		c.Acknowledged([]plan.ServiceChange{{Old: one, New: one}}, only(one), nil, false)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if kernel.passed() != before {
			t.Error("a pass for nothing")
		}
		cancel()
		wg.Wait()
	})
}

func TestLimits(t *testing.T) {
	dir := t.TempDir()
	put := func(name, value string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	is := func(name, want string) {
		t.Helper()
		if got, _ := os.ReadFile(filepath.Join(dir, name)); strings.TrimSpace(string(got)) != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	put("nf_conntrack_max", "1000\n")
	put("nf_conntrack_udp_timeout", "30\n")
	if errs := (&Limits{}).apply(dir, 2); len(errs) != 0 {
		t.Error(errs)
	}
	is("nf_conntrack_max", "1000")
	l := &Limits{MaxPerCore: 400, Min: 1500, UDP: time.Minute, TCPLiberal: true}
	if errs := l.apply(dir, 2); len(errs) != 1 || !strings.Contains(errs[0].Error(), "nf_conntrack_tcp_be_liberal") {
		t.Errorf("errors %v, want one about what is not there", errs)
	}
	is("nf_conntrack_max", "1500")
	is("nf_conntrack_udp_timeout", "60")
	l.Min = 0
	l.apply(dir, 2)
	is("nf_conntrack_max", "1500") // never made smaller
}

// TestFailedPassIsRepeated until it succeeds, less and less often.
func TestFailedPassIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stale, living := Flow{intent.UDP, ap("10.96.0.10:53"), ap("10.244.0.1:5353")}, Flow{intent.UDP, ap("10.96.0.10:53"), ap("10.244.0.2:5353")}
		kernel := &table{flows: []Flow{stale, living}, fail: 12}
		failed := 0
		c := New(kernel, slog.New(slog.DiscardHandler), func(_ intent.Family, _ int, _ time.Duration, err error) {
			if err != nil {
				failed++
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { c.Run(ctx) })
		before, now := planned(intent.UDP, "10.244.0.1", "10.244.0.2"), planned(intent.UDP, "10.244.0.2")
		c.Acknowledged([]plan.ServiceChange{{Old: before, New: now}}, only(now), nil, false)
		time.Sleep(time.Minute)
		synctest.Wait()
		if kernel.passed() > 8 {
			t.Errorf("%d passes in a minute", kernel.passed())
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if len(kernel.left()) != 1 || kernel.left()[0] != living || failed != 12 {
			t.Errorf("after %d passes, %d failed: %v", kernel.passed(), failed, kernel.left())
		}
		n := kernel.passed()
		time.Sleep(time.Hour)
		if kernel.passed() != n {
			t.Errorf("%d passes though nothing is left to do", kernel.passed()-n)
		}
		cancel()
		wg.Wait()
	})
}
