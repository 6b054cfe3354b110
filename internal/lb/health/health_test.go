package health

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lb/balance"
	"portal/internal/lb/config"
)

func addressOf(s *httptest.Server) netip.AddrPort {
	return s.Listener.Addr().(*net.TCPAddr).AddrPort()
}

func poolOf(check *config.HealthCheck, endpoints ...netip.AddrPort) *config.Pool {
	p := &config.Pool{Protocol: config.TCP, HealthCheck: check}
	for _, a := range endpoints {
		p.Endpoints = append(p.Endpoints, config.Endpoint{Address: a})
	}
	return p
}

func eventually(t *testing.T, what string, true func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 45*time.Second)
	defer cancel()
	for !true() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited in vain: %s", what)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func TestProbe(t *testing.T) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ok":
		case "/created":
			w.WriteHeader(http.StatusCreated)
		case "/moved":
			http.Redirect(w, r, "/ok", http.StatusFound)
		case "/slow":
			<-r.Context().Done()
		default:
			http.NotFound(w, r)
		}
	})
	plain, encrypted := httptest.NewServer(handler), httptest.NewTLSServer(handler)
	defer plain.Close()
	defer encrypted.Close()
	encrypted.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	closed := httptest.NewServer(handler)
	closed.Close()
	for _, c := range []struct {
		what     string
		protocol config.Protocol
		path     string
		at       *httptest.Server
		error    string // empty: none
	}{
		{"tcp", config.TCP, "", plain, ""},
		{"tcp, closed", config.TCP, "", closed, "refused"},
		{"ssl", config.SSL, "", encrypted, ""},
		{"ssl without TLS", config.SSL, "", plain, "tls"},
		{"ssl, closed", config.SSL, "", closed, "refused"},
		{"http", config.HTTP, "/ok", plain, ""},
		{"http of TLS", config.HTTP, "/ok", encrypted, "400"},
		{"http, another answer", config.HTTP, "/created", plain, "201"},
		{"http, no path", config.HTTP, "", plain, "404"},
		{"http, elsewhere", config.HTTP, "/moved", plain, "302"},
		{"http, slow", config.HTTP, "/slow", plain, "deadline"},
		{"https", config.HTTPS, "/ok", encrypted, ""},
		{"https, not found", config.HTTPS, "/none", encrypted, "404"},
		{"https without TLS", config.HTTPS, "/ok", plain, "tls"},
	} {
		timeout := 45 * time.Second
		if c.path == "/slow" {
			timeout = 100 * time.Millisecond
		}
		err := target{check: config.HealthCheck{Protocol: c.protocol, Path: c.path, Timeout: timeout}, address: addressOf(c.at)}.probe(t.Context())
		if (err == nil) != (c.error == "") || err != nil && !strings.Contains(err.Error(), c.error) {
			t.Errorf("%s: error %v, want %q", c.what, err, c.error)
		}
	}
}

// TestProxyHeader: endpoints that expect a PROXY header get one that says it is nobody's connection.
func TestProxyHeader(t *testing.T) {
	for version, want := range local {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan string, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				got <- err.Error()
				return
			}
			defer c.Close()
			text, _ := io.ReadAll(c)
			got <- string(text)
		}()
		tg := target{check: config.HealthCheck{Protocol: config.TCP, Timeout: 45 * time.Second}, address: l.Addr().(*net.TCPAddr).AddrPort(), proxyProtocol: version}
		if err := tg.probe(t.Context()); err != nil {
			t.Fatal(err)
		}
		if text := <-got; text != want {
			t.Errorf("version %d: the endpoint got %q, want %q", version, text, want)
		}
		_ = l.Close()
	}
}

// TestThresholds: it takes as many results in a row as asked for to change one's mind.
func TestThresholds(t *testing.T) {
	address := netip.MustParseAddrPort("10.0.0.1:80")
	pool := balance.New(poolOf(nil, address), "", time.Now)
	c := &check{
		checker: &Checker{log: slog.New(slog.DiscardHandler)}, pool: pool, endpoint: address, healthy: true,
		target: target{check: config.HealthCheck{Healthy: 2, Unhealthy: 3}},
	}
	got := ""
	for _, result := range "--+---+-++-+++---" {
		if result == '+' {
			c.note(nil)
		} else {
			c.note(io.EOF)
		}
		if pool.Endpoints()[0].Healthy() {
			got += "h"
		} else {
			got += "u"
		}
	}
	if want := "hhhhhuuuuhhhhhhhu"; got != want {
		t.Errorf("states %s, want %s", got, want)
	}
}

// TestUpdate: endpoints that stay keep what is known of them, also under another check.
func TestUpdate(t *testing.T) {
	var bad atomic.Bool
	var paths atomic.Pointer[string]
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		paths.Store(&r.URL.Path)
		if bad.Load() {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	defer s.Close()
	check := func(path string, healthy int) *config.HealthCheck {
		return &config.HealthCheck{Protocol: config.HTTP, Path: path, Healthy: healthy, Unhealthy: 2, Interval: 10 * time.Millisecond, Timeout: 45 * time.Second}
	}
	pool := balance.New(poolOf(check("/a", 2), addressOf(s)), "", time.Now)
	c := New(slog.New(slog.DiscardHandler))
	defer c.Close()
	pools := map[string]*balance.Pool{"p": pool}
	update := func(cfg *config.Pool) {
		pool.Update(cfg, "")
		c.Update(pools)
	}
	c.Update(pools)
	healthy := func() bool {
		all := pool.Endpoints()
		return all[len(all)-1].Healthy() // by address, the other one comes before it
	}
	checked := func(path string) func() bool {
		return func() bool { p := paths.Load(); return p != nil && *p == path }
	}
	eventually(t, "it is checked", checked("/a"))
	if !healthy() {
		t.Error("unhealthy without a reason")
	}
	bad.Store(true)
	eventually(t, "it is unhealthy", func() bool { return !healthy() })
	if r := c.Results()["p"][addressOf(s)]; r.Healthy || !strings.Contains(r.Error, "500") || r.Failures < 2 {
		t.Errorf("result %+v", r)
	}

	// The other check never finds it healthy: it must stay unhealthy although the endpoint answers.
	update(poolOf(check("/b", 1<<30), addressOf(s), netip.MustParseAddrPort("127.0.0.1:1")))
	bad.Store(false)
	if healthy() {
		t.Error("another check made it healthy")
	}
	eventually(t, "the other check is used", checked("/b"))
	if healthy() {
		t.Error("healthy before its threshold")
	}
	update(poolOf(check("/c", 2), addressOf(s)))
	eventually(t, "it is healthy again", healthy)

	// Without a check everybody is healthy, and nothing is checked.
	bad.Store(true)
	eventually(t, "it is unhealthy again", func() bool { return !healthy() })
	update(poolOf(nil, addressOf(s)))
	if !healthy() || len(c.Results()) != 0 {
		t.Error("unhealthy without a check")
	}

	// What another process found out holds until checks say something else.
	bad.Store(false)
	update(poolOf(check("/d", 1), addressOf(s)))
	c.Unhealthy("p", addressOf(s))
	eventually(t, "its check makes it healthy", healthy)
}
