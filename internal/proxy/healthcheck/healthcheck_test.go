package healthcheck

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
)

// freePort finds a port that nobody has on loopback.
func freePort(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

func change(name string, port uint16, endpoints map[intent.Family]int) plan.ServiceChange {
	c := plan.ServiceChange{Key: intent.Key{Namespace: "ns", Name: name}}
	if port != 0 {
		c.New = &plan.Service{Key: c.Key, HealthCheck: &plan.HealthCheck{Service: c.Key, Port: port, Endpoints: endpoints}}
	}
	return c
}

var atLoopback = &plan.Facts{NodePorts: plan.NodePorts{Checks: []netip.Addr{netip.MustParseAddr("127.0.0.1")}}}

func TestAnswers(t *testing.T) {
	var healthy atomic.Bool
	healthy.Store(true)
	s := New(slog.New(slog.DiscardHandler), healthy.Load)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.Run(ctx) })
	port, other := freePort(t), freePort(t)
	tell := func(c plan.ServiceChange) { s.Acknowledged([]plan.ServiceChange{c}, atLoopback, nil) }

	tell(change("web", port, map[intent.Family]int{intent.IPv4: 2}))
	answers(t, port, `200 {"service":{"namespace":"ns","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true} 2`)
	healthy.Store(false)
	answers(t, port, `503 {"service":{"namespace":"ns","name":"web"},"localEndpoints":2,"serviceProxyHealthy":false} 2`)
	healthy.Store(true)
	tell(change("web", port, map[intent.Family]int{intent.IPv4: 0}))
	answers(t, port, `503 {"service":{"namespace":"ns","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true} 0`)
	s.Acknowledged(nil, atLoopback, map[intent.Key]bool{{Namespace: "ns", Name: "web"}: true})
	refused := `503 {"service":{"namespace":"ns","name":"web"},"localEndpoints":0,"serviceProxyHealthy":false} 0`
	answers(t, port, refused) // the kernel does not have it
	tell(change("web", other, map[intent.Family]int{intent.IPv4: 1}))
	answers(t, other, `200 {"service":{"namespace":"ns","name":"web"},"localEndpoints":1,"serviceProxyHealthy":true} 1`)
	answers(t, port, "refused")
	tell(change("heir", port, map[intent.Family]int{intent.IPv4: 1}))
	answers(t, port, `200 {"service":{"namespace":"ns","name":"heir"},"localEndpoints":1,"serviceProxyHealthy":true} 1`)
	tell(change("web", 0, nil))
	answers(t, other, "refused")
	s.Acknowledged(nil, &plan.Facts{}, nil)
	answers(t, port, "refused") // node ports are served nowhere any more
	cancel()
	wg.Wait()
}

// answers waits until a port answers as wanted.
func answers(t *testing.T, port uint16, want string) {
	t.Helper()
	got := ""
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if got = ask(port); got == want {
			return
		}
	}
	t.Errorf("port %d answers\n     %s\nwant %s", port, got, want)
}

func ask(port uint16) string {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
	r, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/any", port))
	if err != nil {
		return "refused"
	}
	defer r.Body.Close()
	var body answer
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || r.Header.Get("X-Content-Type-Options") != "nosniff" {
		return fmt.Sprint("wrong: ", err, r.Header)
	}
	text, _ := json.Marshal(body)
	return fmt.Sprint(r.StatusCode, " ", string(text), " ", r.Header.Get("X-Load-Balancing-Endpoint-Weight"))
}

// TestPlanned: as long as the kernel does not have a Service, or its new port, its port says that nothing is served here.
func TestPlanned(t *testing.T) {
	s := New(slog.New(slog.DiscardHandler), func() bool { return true })
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.Run(ctx) })
	port, other := freePort(t), freePort(t)
	c := change("web", port, map[intent.Family]int{intent.IPv4: 2})
	s.Planned([]*plan.HealthCheck{c.New.HealthCheck}, atLoopback)
	const not, is = `503 {"service":{"namespace":"ns","name":"web"},"localEndpoints":0,"serviceProxyHealthy":false} 0`, `200 {"service":{"namespace":"ns","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true} 2`
	answers(t, port, not)
	s.Acknowledged([]plan.ServiceChange{c}, atLoopback, nil)
	answers(t, port, is)
	moved := change("web", other, map[intent.Family]int{intent.IPv4: 2})
	s.Planned([]*plan.HealthCheck{moved.New.HealthCheck}, atLoopback)
	answers(t, other, not)
	answers(t, port, is)
	s.Acknowledged([]plan.ServiceChange{moved}, atLoopback, nil)
	answers(t, other, is)
	answers(t, port, "refused")
	cancel()
	wg.Wait()
}

// TestPortInUse: a port that another program has is tried again less and less often, not with each change, and /state can say why; it is
// taken when it is free.
func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := netip.MustParseAddrPort(l.Addr().String()).Port()
	key := intent.Key{Namespace: "ns", Name: "web"}
	s := New(slog.New(slog.DiscardHandler), func() bool { return true })
	s.Acknowledged([]plan.ServiceChange{change("web", port, map[intent.Family]int{intent.IPv4: 1})}, atLoopback, nil)
	now, wait := time.Now(), minRetry
	for range 10 {
		next := s.follow(t.Context(), now)
		if next.Sub(now) != wait {
			t.Fatalf("tried again after %v, want %v", next.Sub(now), wait)
		}
		for range 3 { // other Services change
			if again := s.follow(t.Context(), now.Add(wait/2)); again != next {
				t.Fatalf("tried with another change: again at %v, not %v", again, next)
			}
		}
		now, wait = next, min(2*wait, maxRetry)
	}
	want := fmt.Sprintf("health-check node port %d can't be opened at 127.0.0.1:%d, so balancers take this node for unhealthy: ", port, port)
	if notes := s.Notes()[key]; len(notes) != 1 || !strings.HasPrefix(notes[0], want) || !strings.HasSuffix(notes[0], "address already in use") {
		t.Errorf("the notes are %q", notes)
	}
	l.Close()
	if next := s.follow(t.Context(), now); !next.IsZero() || len(s.Notes()) != 0 {
		t.Errorf("free, and tried again at %v: %v", next, s.Notes())
	}
	if got := ask(port); got[:3] != "200" {
		t.Error(got)
	}
	for k := range s.open {
		s.close(k)
	}
}

// TestEndedListener: a listener that ends by itself is opened again.
func TestEndedListener(t *testing.T) {
	port := freePort(t)
	s := New(slog.New(slog.DiscardHandler), func() bool { return true })
	s.Acknowledged([]plan.ServiceChange{change("web", port, map[intent.Family]int{intent.IPv4: 1})}, atLoopback, nil)
	<-s.wake
	s.follow(t.Context(), time.Now())
	for _, l := range s.open {
		l.socket.Close() // as when accept fails for good
	}
	<-s.wake
	s.follow(t.Context(), time.Now())
	if got := ask(port); got[:3] != "200" {
		t.Error(got)
	}
	for k := range s.open {
		s.close(k)
	}
}
