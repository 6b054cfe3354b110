package top

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// TestLatency: quantiles are right to a tenth, and histograms add up.
func TestLatency(t *testing.T) {
	var fast, slow Latency
	for range 90 {
		fast.note(time.Millisecond)
	}
	for range 10 {
		slow.note(400 * time.Millisecond)
	}
	fast.note(-time.Second) // a clock that was set back
	slow.note(time.Hour)
	all := Latency{}
	all.Add(&fast)
	all.Add(&slow)
	if all.Count != 102 || len(all.Buckets) > maxBuckets+1 {
		t.Errorf("%d times in %d buckets", all.Count, len(all.Buckets))
	}
	near := func(part float64, want time.Duration) {
		if got := all.Quantile(part); got < want || got > want*5/4 {
			t.Errorf("quantile %v is %v, want %v or a little more", part, got, want)
		}
	}
	near(.5, time.Millisecond)
	near(.95, 400*time.Millisecond)
	if got := (&Latency{}).Quantile(.5); got != 0 {
		t.Errorf("of nothing, it is %v", got)
	}
}

// eventSockets counts the sockets of this network namespace that conntrack has to report to.
func eventSockets(t *testing.T) (n int) {
	t.Helper()
	data, err := os.ReadFile("/proc/thread-self/net/netlink")
	if err != nil {
		t.Error(err)
		return -1
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 3 && f[1] == "12" && f[3] != "00000000" {
			n++
		}
	}
	return n
}

// inThisNamespace runs something beside, in the network namespace of the calling thread.
func inThisNamespace(t *testing.T, do func()) (done chan struct{}) {
	t.Helper()
	done = make(chan struct{})
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Error(err)
		close(done)
		return done
	}
	go func() {
		defer close(done)
		defer ns.Close()
		runtime.LockOSThread()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		do()
	}()
	return done
}

// TestServer: the first question begins the counting, answers have what was asked for, and a while after the last question the kernel has
// nobody to report to.
func TestServer(t *testing.T) {
	inNamespace(t, func() {
		if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_timestamp", []byte("1"), 0); err != nil {
			t.Error(err)
			return
		}
		l, err := net.Listen("tcp", "10.0.0.1:8080")
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_ = c.Close()
			}
		}()
		known := (*intent.Cluster)(nil)
		s := NewServer(func() *intent.Cluster { return known }, func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.0.0.1")}, nil })
		s.Interval, s.Idle = 50*time.Millisecond, 2*time.Second
		ctx, cancel := context.WithCancel(t.Context())
		done := inThisNamespace(t, func() { s.Run(ctx) })
		defer func() { cancel(); <-done }()
		ask := func(query string) (int, Sample, string) {
			w := httptest.NewRecorder()
			s.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, Path+query, nil))
			var out Sample
			body := w.Body.String()
			if w.Code == http.StatusOK {
				if err := json.Unmarshal([]byte(body), &out); err != nil {
					t.Error(err)
				}
			}
			return w.Code, out, body
		}
		if n := eventSockets(t); n != 0 {
			t.Errorf("%d sockets wait for events before anybody asked", n)
		}
		if code, _, body := ask(""); code != http.StatusServiceUnavailable || !strings.Contains(body, "does not know the Services") {
			t.Errorf("without Services: %d %s", code, body)
		}
		if code, _, body := ask("?service=web"); code != http.StatusBadRequest || !strings.Contains(body, "NAMESPACE/NAME") {
			t.Errorf("a wrong question: %d %s", code, body)
		}
		known = cluster()
		var got Sample
		for end := time.Now().Add(time.Minute); ; {
			c, err := net.Dial("tcp", "10.96.0.1:80")
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.Copy(io.Discard, c)
			_ = c.Close()
			if _, got, _ = ask("?service=shop/web"); got.of("web", "web").Counts.New >= 3 {
				break
			}
			if time.Now().After(end) {
				t.Errorf("connections are not counted: %+v", got)
				return
			}
		}
		if web := got.of("web", "web"); len(web.Endpoints) != 1 || web.Endpoints[0].Address != netip.MustParseAddrPort("10.0.0.1:8080") || !got.Accounting || !got.Timestamps {
			t.Errorf("the sample is %+v", got)
		}
		if _, other, _ := ask("?service=shop/broken"); len(other.Services) != 0 {
			t.Errorf("Services that nobody asked for: %+v", other.Services)
		}
		if _, all, _ := ask(""); len(all.Services) > 0 && len(all.Services[0].Endpoints) > 0 {
			t.Errorf("endpoints that nobody asked for: %+v", all.Services)
		}
		if n := eventSockets(t); n != 1 {
			t.Errorf("%d sockets wait for events while somebody asks", n)
		}
		for end := time.Now().Add(time.Minute); eventSockets(t) != 0; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Error("it counts for nobody")
				return
			}
		}
	})
}

// TestAnswerTime: with the kernel's clock on, the time until an endpoint answers is measured; a refusal is no answer.
func TestAnswerTime(t *testing.T) {
	inNamespace(t, func() {
		if err := os.WriteFile("/proc/sys/net/netfilter/nf_conntrack_timestamp", []byte("1"), 0); err != nil {
			t.Error(err)
			return
		}
		l, err := net.Listen("tcp", "10.0.0.1:8080")
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		top := start(t, 50*time.Millisecond)
		if _, err := top.Next(t.Context()); err != nil {
			t.Error(err)
			return
		}
		const n = 5
		for range n {
			c, err := net.Dial("tcp", "10.96.0.1:80")
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			if c, err := net.Dial("tcp", "10.96.0.2:80"); err == nil {
				_ = c.Close()
				t.Error("a port that nobody listens at answers")
			}
		}
		var all Latency
		for end := time.Now().Add(time.Minute); all.Count < n; {
			s, err := top.Next(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if l := s.of("web", "web").Counts.Latency; l != nil {
				all.Add(l)
			}
			if l := s.of("broken", "web").Counts.Latency; l != nil {
				t.Errorf("refusals count as answers: %+v", l)
			}
			if time.Now().After(end) {
				t.Errorf("%d of %d answers were timed (Linux before 6.14 has no times in events)", all.Count, n)
				return
			}
		}
		if half := all.Quantile(.5); all.Count != n || half <= 0 || half > 10*time.Second {
			t.Errorf("%d times, half within %v", all.Count, half)
		}
	})
}
