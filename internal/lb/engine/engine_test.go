package engine

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
)

func TestPass(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	c := dialTo(t, at)
	ask(t, c, "hello")
	// One side's end is passed on, and the other side still speaks.
	_, _ = io.WriteString(c, "last words")
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "last words" {
		t.Fatalf("got %q, %v", got, err)
	}
	eventually(t, "nothing is left of the connection", func() bool { return e.Connections() == 0 && e.Pool("web").Endpoints()[0].Active() == 0 })
}

// TestBulk: what comes in bulk arrives whole, and is not copied into the process.
func TestBulk(t *testing.T) {
	const size = 64 << 20
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	c := dialTo(t, at)
	sent := sha256.New()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		source := rand.NewChaCha8([32]byte{1})
		_, err := io.CopyN(io.MultiWriter(c, sent), source, size)
		if err != nil {
			t.Error(err)
		}
		_ = c.CloseWrite()
	})
	got := sha256.New()
	n, err := io.Copy(got, c)
	if err != nil || n != size {
		t.Fatalf("%d bytes came back: %v", n, err)
	}
	wg.Wait()
	if string(got.Sum(nil)) != string(sent.Sum(nil)) {
		t.Fatal("other bytes came back than were sent")
	}
	spliced, copied := e.copied.spliced.Load(), e.copied.copied.Load()
	if spliced+copied != 2*size {
		t.Errorf("%d bytes counted, want %d", spliced+copied, 2*size)
	}
	// The first bytes of each burst are copied.
	if copied > size/4 {
		t.Errorf("%d of %d bytes were copied", copied, 2*size)
	}
	t.Logf("%d bytes spliced, %d copied", spliced, copied)
}

// TestReset: a connection that is reset on one side is on the other.
func TestReset(t *testing.T) {
	at, ended := unused(t), make(chan error, 1)
	s := serve(t, func(c net.Conn) {
		_, err := io.Copy(io.Discard, c)
		ended <- err
	})
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	c := dialTo(t, at)
	_, _ = io.WriteString(c, "x")
	eventually(t, "the endpoint has the byte", func() bool { return e.Pool("web").Endpoints()[0].Counters.BytesIn.Load() == 1 })
	reset(c)
	if err := <-ended; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the endpoint saw %v, want a reset", err)
	}
}

func TestRetry(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	cfg := tcpConfig(at, unused(t), s.address, unused(t))
	apply(t, e, cfg)
	for range 20 {
		ask(t, dialTo(t, at), "hello")
	}
	retries, failures := e.Pool("web").Counters.Retries.Load(), uint64(0)
	for _, m := range e.Pool("web").Endpoints() {
		failures += m.Counters.ConnectFailures.Load()
	}
	if retries == 0 || retries != failures {
		t.Errorf("%d retries after %d failures", retries, failures)
	}
	// With none to be reached, the client sees that.
	cfg = tcpConfig(at, unused(t), unused(t))
	apply(t, e, cfg)
	wantRefused(t, at, "")
	apply(t, e, tcpConfig(at))
	wantRefused(t, at, "")
}

// TestIdle: traffic in either direction keeps a connection, and without it it ends after the time and not before.
func TestIdle(t *testing.T) {
	const idle = 2 * time.Second
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	cfg := tcpConfig(at, s.address)
	cfg.Listeners[0].IdleTimeout = idle
	apply(t, e, cfg)
	c, quiet := dialTo(t, at), dialTo(t, at)
	ask(t, quiet, "x")
	begin := time.Now()
	ended := make(chan time.Duration, 1)
	go func() {
		_, _ = quiet.Read(make([]byte, 1))
		ended <- time.Since(begin)
	}()
	for waiting := true; waiting; {
		ask(t, c, "x")
		select {
		case took := <-ended:
			waiting = false
			if took < idle {
				t.Errorf("the idle connection ended after %v, want %v", took, idle)
			}
		case <-time.After(100 * time.Millisecond):
		}
		if time.Since(begin) > patience {
			t.Fatal("the idle connection did not end")
		}
	}
	ask(t, c, "still there")
}

// TestDraining: connections to an endpoint that left stay for the time, and no longer; if it comes back, they stay.
func TestDraining(t *testing.T) {
	at, a, b := unused(t), serve(t, named("a")), serve(t, named("b"))
	e := newEngine(t, Options{})
	with := func(draining time.Duration, endpoints ...netip.AddrPort) config.Config {
		cfg := tcpConfig(at, endpoints...)
		cfg.Pools["web"].Draining = draining
		return cfg
	}
	apply(t, e, with(2*time.Second, a.address))
	c := dialTo(t, at)
	want(t, c, "a")
	apply(t, e, with(2*time.Second, b.address))
	left := time.Now()
	want(t, dialTo(t, at), "b")
	ask(t, c, "goes on")
	wantEnd(t, c)
	if took := time.Since(left); took < 1900*time.Millisecond {
		t.Errorf("the connection ended after %v, want 2s", took)
	}

	// It comes back before its time is over.
	apply(t, e, with(time.Hour, a.address))
	c = dialTo(t, at)
	want(t, c, "a")
	apply(t, e, with(time.Hour, b.address))
	apply(t, e, with(-1, a.address, b.address))
	ask(t, c, "kept")
	// Without draining it ends at once, also if the whole pool goes.
	apply(t, e, config.Config{})
	wantEnd(t, c)
}

func TestLimits(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	cfg := tcpConfig(at, s.address)
	cfg.Listeners[0].Limits = config.Limits{Connections: 3, ClientConnections: 2}
	apply(t, e, cfg)
	first, second := dialTo(t, at), dialTo(t, at)
	ask(t, first, "x")
	ask(t, second, "x")
	wantRefused(t, at, "")
	other := func() net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}}
		c, err := d.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		return c
	}
	ask(t, other(), "another client is not harmed")
	wantRefused(t, at, "127.0.0.9")
	_ = first.Close()
	eventually(t, "its place is free", func() bool { return e.Connections() == 2 })
	ask(t, dialTo(t, at), "there is room again")
	l := e.listeners[at]
	if a, b := l.counters.overClientLimit.Load(), l.counters.overLimit.Load(); a != 1 || b != 1 {
		t.Errorf("counted %d over the client's limit and %d over the listener's, want 1 and 1", a, b)
	}
}

// TestApply: what did not change is not touched, and what is wrong keeps nothing else from working.
func TestApply(t *testing.T) {
	at, second, s := unused(t), unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	cfg := tcpConfig(at, s.address)
	apply(t, e, cfg)
	socket, state := e.listeners[at].socket, e.listeners[at]
	c := dialTo(t, at)
	ask(t, c, "x")
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	bad := func(name string, at netip.AddrPort, change func(*config.Listener)) config.Listener {
		l := tcpConfig(at).Listeners[0]
		l.Name = name
		if change != nil {
			change(&l)
		}
		return l
	}
	next := tcpConfig(at, s.address)
	next.Listeners = append(next.Listeners,
		bad("taken", taken.Addr().(*net.TCPAddr).AddrPort(), nil),
		bad("twice", at, nil),
		bad("poolless", unused(t), func(l *config.Listener) { l.Pool = "none" }),
		bad("protocol", unused(t), func(l *config.Listener) { l.Protocol = "gopher" }),
		bad("web", unused(t), func(l *config.Listener) { l.Protocol = config.HTTP }),
		bad("nowhere", netip.AddrPort{}, nil),
		bad("foreign", netip.MustParseAddrPort("192.0.2.1:80"), nil),
		bad("tls", unused(t), func(l *config.Listener) { l.Protocol = config.SSL }),
		bad("certificate", unused(t), func(l *config.Listener) {
			l.Protocol, l.TLS = config.SSL, &config.TLS{Certificates: []string{"none"}}
		}),
		bad("good", second, nil))
	next.Pools["ca"] = &config.Pool{Protocol: config.SSL, TLS: &config.EndpointTLS{CA: []byte("no PEM")}}
	failed, ok := errors.AsType[*ApplyError](e.Apply(next))
	if !ok {
		t.Fatal("no ApplyError")
	}
	for name, mentions := range map[string]string{
		"taken": "in use", "twice": "another listener", "poolless": `pool "none"`, "protocol": `protocol "gopher"`, "web": "no requests", "nowhere": "address", "foreign": "no interface",
		"tls": "tls.certificates", "certificate": `certificate "none"`, "pool ca": "tls.ca",
	} {
		if err := failed.Parts[name]; err == nil || !strings.Contains(err.Error(), mentions) {
			t.Errorf("%s: error %v, want one that mentions %q", name, err, mentions)
		}
		delete(failed.Parts, name)
	}
	if len(failed.Parts) > 0 {
		t.Errorf("errors of others: %v", failed.Parts)
	}
	ask(t, dialTo(t, second), "a good one among bad ones")
	ask(t, c, "not touched")
	if e.listeners[at] != state || e.listeners[at].socket != socket {
		t.Error("a listener that did not change was replaced")
	}
	if len(e.State().Errors) != 10 {
		t.Errorf("state has the errors %v", e.State().Errors)
	}

	// A listener that can't be changed goes on as it was.
	next = tcpConfig(at, s.address)
	next.Listeners[0].Pool = "none"
	if e.Apply(next) == nil {
		t.Error("no error")
	}
	ask(t, dialTo(t, at), "as before")

	// One that is gone is closed; its connections are the pool's matter.
	next = tcpConfig(at, s.address)
	next.Listeners = nil
	apply(t, e, next)
	if c, err := net.Dial("tcp", at.String()); err == nil {
		_ = c.Close()
		t.Error("a listener that is gone still listens")
	}
	ask(t, c, "not touched")
	apply(t, e, tcpConfig(at, s.address))
	ask(t, dialTo(t, at), "back")
}

func TestDrain(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	c, stays := dialTo(t, at), dialTo(t, at)
	ask(t, c, "x")
	ask(t, stays, "x")
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		e.Drain(ctx)
		close(ended)
	}()
	eventually(t, "nobody listens", func() bool {
		c, err := net.Dial("tcp", at.String())
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	ask(t, c, "goes on")
	_ = c.Close()
	ask(t, stays, "goes on")
	select {
	case <-ended:
		t.Fatal("drained with a connection open")
	default:
	}
	cancel()
	<-ended
	wantEnd(t, stays)
	if err := e.Apply(tcpConfig(at)); !errors.Is(err, ErrClosed) {
		t.Errorf("Apply after the end: %v", err)
	}
}

func TestRecord(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	records := make(chan *Record, 2)
	e := newEngine(t, Options{Record: func(r *Record) { records <- r }})
	apply(t, e, tcpConfig(at, s.address))
	c := dialTo(t, at)
	ask(t, c, "12345")
	_ = c.Close()
	r := <-records
	if r.BytesIn != 5 || r.BytesOut != 5 || r.Endpoint != s.address || r.Client != localOf(c) || r.Local != at || r.End != "" || r.Duration <= 0 || r.Listener.Name != "shop/web:80" || r.Pool != "web" {
		t.Errorf("record %+v", r)
	}
	apply(t, e, tcpConfig(at))
	wantRefused(t, at, "")
	if r := <-records; r.End != endNone || r.Endpoint.IsValid() {
		t.Errorf("record %+v", r)
	}
}

func TestMetrics(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{})
	cfg := tcpConfig(at, s.address)
	cfg.Listeners[0].Tags = map[string]string{"environment": "prod", "cost center": "7"}
	cfg.Pools["same port"] = cfg.Pools["web"]
	apply(t, e, cfg)
	c := dialTo(t, at)
	ask(t, c, "12345")
	families, err := e.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].String()
	}
	for name, mentions := range map[string]string{
		"portal_lb_listener_downstream_cx_total": "value:1", "portal_lb_listener_downstream_cx_active": "value:1", "portal_lb_listener_downstream_cx_rx_bytes_total": "value:5",
		"portal_lb_endpoint_upstream_cx_total": s.address.String(), "portal_lb_cluster_membership_healthy": `"shop"`, "portal_lb_tags": "tag_cost_center",
	} {
		if text := strings.ReplaceAll(got[name], "  ", " "); !strings.Contains(text, mentions) {
			t.Errorf("%s is %q, want %q in it", name, text, mentions)
		}
	}
}

// TestMetricsOfOnePort: pools of the same port, for example of two families, have the same labels each time.
func TestMetricsOfOnePort(t *testing.T) {
	e := newEngine(t, Options{})
	cfg := tcpConfig(unused(t), unused(t))
	for _, name := range []string{"six", "seven", "eight"} {
		more := *cfg.Pools["web"]
		more.Endpoints = nil
		for range len(cfg.Pools) {
			more.Endpoints = append(more.Endpoints, config.Endpoint{Address: unused(t)})
		}
		cfg.Pools[name] = &more
	}
	apply(t, e, cfg)
	var first string
	for range 20 {
		families, err := e.Registry().Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			switch text := fmt.Sprint(f.GetMetric()); {
			case f.GetName() != "portal_lb_cluster_membership_total":
			case first == "":
				first = text
			case text != first:
				t.Fatalf("the series have changed:\n%s\nwas\n%s", text, first)
			}
		}
	}
}

// TestWeb: connections of HTTP listeners are handed over, with what is known of them; when the listener goes, they are asked to end.
func TestWeb(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	e := newEngine(t, Options{Web: func(ctx context.Context, c net.Conn, info *ConnInfo, ended func()) {
		defer ended()
		_, _ = io.WriteString(c, info.Client.String()+" "+info.Listener().Name+" "+info.Pool("web").Endpoints()[0].Address.String()+"\n")
		<-ctx.Done()
		_, _ = io.WriteString(c, "bye")
	}})
	cfg := tcpConfig(at, s.address)
	cfg.Listeners[0].Protocol = config.HTTP
	apply(t, e, cfg)
	c := dialTo(t, at)
	want(t, c, localOf(c).String()+" shop/web:80 "+s.address.String()+"\n")
	apply(t, e, config.Config{})
	want(t, c, "bye")
	wantEnd(t, c)
}
