package proxy

import (
	"net/netip"
	"testing"
	"time"

	"portal/internal/intent"
)

// TestDrained: an endpoint is out of service when it is not ready any more and the kernel is in sync with that, not sooner; for a
// Service that has no other endpoint, too.
func TestDrained(t *testing.T) {
	in(t, nil, func(w *world) {
		w.kernel.slow = time.Second
		w.listed()
		drained := func(name, addr string) bool {
			return w.proxy.Drained(intent.Key{Namespace: "ns", Name: name}, []netip.Addr{netip.MustParseAddr(addr)})
		}
		expect := func(when, name, addr string, want bool) {
			t.Helper()
			if got := drained(name, addr); got != want {
				t.Errorf("%s, %s of %s is drained: %v, want %v", when, addr, name, got, want)
			}
		}
		w.cluster.SetService(service("web", "10.0.0.2"))
		w.cluster.SetSlice(slice("web", "10.1.0.1", "10.1.0.2"))
		headless := service("headless", "10.0.0.3")
		headless.ClusterIPs, headless.Headless = nil, true
		w.cluster.SetService(headless)
		w.cluster.SetSlice(slice("headless", "10.1.0.1"))
		w.after(time.Minute)
		expect("at first", "web", "10.1.0.1", false)
		expect("at first", "headless", "10.1.0.1", false)
		expect("at first", "unknown", "10.1.0.1", true)

		next := slice("web", "10.1.0.1", "10.1.0.2")
		next.Endpoints[0].Condition = intent.Serving | intent.Terminating
		w.cluster.SetSlice(next)
		expect("when it is told", "web", "10.1.0.1", false)
		w.after(500 * time.Millisecond)
		expect("while the kernel is being told", "web", "10.1.0.1", false)
		w.after(time.Minute)
		expect("in the end", "web", "10.1.0.1", true)
		expect("in the end", "web", "10.1.0.2", false)

		w.cluster.SetSlice(slice("headless"))
		w.after(time.Minute)
		expect("in the end", "headless", "10.1.0.1", true)

		// The last one goes on serving, since there is no other.
		last := slice("web", "10.1.0.1", "10.1.0.2")
		for i := range last.Endpoints {
			last.Endpoints[i].Condition = intent.Serving | intent.Terminating
		}
		w.cluster.SetSlice(last)
		w.after(time.Minute)
		expect("without any other", "web", "10.1.0.2", true)
	})
}
