package backendtest

import (
	"context"
	"log/slog"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/conntrack"
)

// deadPods are where a node was that is gone: nobody answers, nobody refuses.
var deadPods = map[intent.Family]netip.Addr{intent.IPv4: addr("10.244.2.250"), intent.IPv6: addr("fd00:244:2::250")}

// late is how long a client may take whose first SYNs met nobody: it sends them after 1, 3, 7, 15 and 31 s.
const late = 40 * time.Second

// knock is a client that got no answer.
type knock struct {
	from *host
	at   netip.AddrPort // where it came from; where the proxy itself answers, that doesn't matter
	to   netip.AddrPort
	// waits is a connection of its own that goes on trying.
	waits *flow
}

// testHandshakes has clients connect to an endpoint that is dead. When it has left the Service they are answered by another, whether
// they go on trying or begin anew from the same port. A connection to an endpoint that leaves and lives goes on.
func testHandshakes(t *testing.T, s *suite) {
	if err := s.far.do(func() error { return sysctl("0", "ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding") }); err != nil {
		t.Fatal(err)
	}
	stop := s.clean(t)
	defer stop()
	x := spec{id: 1, remote: []int{0}, nodePort: true}
	s.setAcknowledged(t, x.entry(s))
	drained, err := (&Host{s.client}).Hold(intent.TCP, netip.AddrPortFrom(x.clusterIP(intent.IPv4), 80), s.Patience)
	if err != nil {
		t.Fatal(err)
	}
	defer drained.Close()

	x.remote = nil
	dead := x.entry(s)
	for _, slice := range dead.Slices {
		slice.Endpoints = []intent.Endpoint{{Addr: deadPods[slice.Family], NodeName: "gone", Condition: intent.Ready | intent.Serving}}
	}
	s.setAcknowledged(t, dead)
	knocks := s.knock(t, x)
	x.local = []int{0}
	s.setAcknowledged(t, x.entry(s))

	var wg sync.WaitGroup
	for _, k := range knocks {
		wg.Go(func() {
			if k.waits != nil {
				defer k.waits.close()
				if got := read(k.waits.greet(time.Now().Add(late))); got.what != answered {
					t.Errorf("%s goes on trying to reach %s: %s%s", k.from.name, k.to, got, s.known(k.waits.port))
				}
			}
			f, err := k.from.openFrom(intent.TCP, k.at, k.to)
			if err != nil {
				t.Errorf("%s at %s: %v", k.from.name, k.at, err)
				return
			}
			defer f.close()
			if got := read(f.greet(time.Now().Add(late))); got.what != answered {
				t.Errorf("%s tries anew to reach %s: %s%s", k.from.name, k.to, got, s.known(f.port))
			}
		})
	}
	wg.Wait()
	if err := drained.Alive(); err != nil {
		t.Errorf("a connection to an endpoint that has left: %v", err)
	}
}

// knock has clients everywhere try in vain to reach a Service. Some go on with it; where the proxy connects first, none can.
func (s *suite) knock(t *testing.T, x spec) (out []*knock) {
	t.Helper()
	port, _ := x.nodePorts()
	for i, f := range s.families() {
		for _, way := range []struct {
			from *host
			to   netip.AddrPort
		}{
			{s.client, netip.AddrPortFrom(x.clusterIP(f), 80)},
			{s.node, netip.AddrPortFrom(x.clusterIP(f), 80)},
			{s.outside, netip.AddrPortFrom(s.node.addrs[i], port)},
		} {
			k := &knock{from: way.from, to: way.to}
			open := func() *flow {
				f, err := k.from.open(intent.TCP, netip.Addr{}, k.to)
				if err != nil {
					t.Fatalf("%s to %s: %v", k.from.name, k.to, err)
				}
				return f
			}
			given := open()
			defer given.close()
			if !s.current.Traits().Relays {
				k.at, k.waits = netip.AddrPortFrom(given.src, given.port), open()
				if err := given.wait(unix.POLLOUT, time.Now().Add(s.silence())); err != errSilence {
					t.Fatalf("%s to %s, where nobody is: %v", k.from.name, k.to, err)
				}
			}
			out = append(out, k)
		}
	}
	return out
}

// setAcknowledged plans a Service, applies it, and has flows cleaned as the proxy does.
func (s *suite) setAcknowledged(t *testing.T, e *intent.Entry) {
	t.Helper()
	key := e.Service.Key
	old := s.plan.Services[key]
	s.plan.Set(key, plan.For(e, s.plan.Facts))
	s.apply(t)
	s.cleaner.Acknowledged([]plan.ServiceChange{{Key: key, Old: old, New: s.plan.Services[key]}}, s.plan, s.node.addrs, s.current.Traits().Relays)
}

// clean runs the cleaner of flows on the node.
func (s *suite) clean(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s.cleaner = conntrack.New(conntrack.Kernel{}, slog.New(slog.DiscardHandler), func(f intent.Family, n int, took time.Duration, err error) {
		if err != nil {
			t.Errorf("cleaning flows of IPv%d: %v", f, err)
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends here
		if err := netns.Set(s.node.ns); err != nil {
			t.Errorf("entering the node: %v", err)
			return
		}
		s.cleaner.Run(ctx)
	}()
	return func() { cancel(); <-done }
}
