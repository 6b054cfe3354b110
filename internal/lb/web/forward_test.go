package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// hits is an endpoint that counts requests and does something with each.
func hits(t *testing.T, n *atomic.Int64, f func(c net.Conn)) netip.AddrPort {
	return raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			if _, err := readHead(r); err != nil {
				return
			}
			n.Add(1)
			f(c)
		}
	})
}

func ok(c net.Conn) { io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") }

func TestRetryAfterConnectFailure(t *testing.T) {
	// The body has not been sent to anyone, so every request can be tried elsewhere.
	for _, method := range []string{"GET", "POST"} {
		s := start(t, pool(refused(t), named(t, "b")))
		for range 10 {
			req, _ := http.NewRequest(method, s.url("/"), strings.NewReader("body"))
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(res.Body)
			if res.StatusCode != 200 || string(body) != "b" {
				t.Errorf("%s: %s %s", method, res.Status, body)
			}
		}
	}
}

func TestNoRetryOfWhatCouldHappenTwice(t *testing.T) {
	for _, tc := range []struct {
		method string
		times  int64
	}{{"GET", 3}, {"PUT", 3}, {"DELETE", 3}, {"POST", 1}, {"PATCH", 1}, {"BREW", 1}} {
		var n atomic.Int64
		drop := func(c net.Conn) { c.Close() }
		var endpoints []netip.AddrPort
		for range 5 {
			endpoints = append(endpoints, hits(t, &n, drop))
		}
		s := start(t, pool(endpoints...))
		req, _ := http.NewRequest(tc.method, s.url("/"), nil)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != 502 || n.Load() != tc.times {
			t.Errorf("%s: %s after %d attempts; want %d", tc.method, res.Status, n.Load(), tc.times)
		}
	}
}

// An endpoint may close a kept connection at any time; a client must not notice.
func TestKeptConnectionClosed(t *testing.T) {
	for _, method := range []string{"GET", "POST"} {
		var n atomic.Int64
		var mu sync.Mutex
		var open []net.Conn
		at := hits(t, &n, func(c net.Conn) {
			ok(c)
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
		})
		s := start(t, pool(at))
		for i := range 5 {
			req, _ := http.NewRequest(method, s.url("/"), nil)
			res, err := http.DefaultClient.Do(req)
			if err != nil || res.StatusCode != 200 {
				t.Fatalf("%s %d: %v %v", method, i, res, err)
			}
			io.Copy(io.Discard, res.Body)
			mu.Lock()
			for _, c := range open {
				c.Close()
			}
			open = nil
			mu.Unlock()
		}
		if n.Load() != 5 {
			t.Errorf("%s: %d requests at the endpoint; want 5", method, n.Load())
		}
	}
}

// What an endpoint says unasked must not be taken for the answer to the next request.
func TestUnsolicitedResponse(t *testing.T) {
	said := make(chan struct{})
	at := raw(t, func(n int, c net.Conn, r *bufio.Reader) {
		if _, err := readHead(r); err != nil {
			return
		}
		ok(c)
		if n == 0 {
			io.WriteString(c, "HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
			close(said)
		}
		io.Copy(io.Discard, r)
	})
	s := start(t, pool(at))
	c := s.dial()
	r := bufio.NewReader(c)
	for range 2 {
		if res, _ := s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); res.StatusCode != 200 {
			t.Error(res.Status)
		}
		<-said
	}
}

func TestNoEndpoint(t *testing.T) {
	s := start(t, pool())
	res, err := http.Get(s.url("/"))
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	if res.StatusCode != 503 || res.Header.Get("Retry-After") == "" {
		t.Error(res.Status, res.Header)
	}
	contains(t, string(body), "503 Service Unavailable: there is no endpoint")
}

func TestErrorsShowNoAddress(t *testing.T) {
	at := refused(t)
	s := start(t, pool(at))
	c := s.dial()
	res, body := s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
	if res.StatusCode != 502 {
		t.Error(res.Status)
	}
	lacks(t, body+fmt.Sprint(res.Header), "127.0.0.1", fmt.Sprint(at.Port()), "refused")
}

func TestEndpointTooSlow(t *testing.T) {
	t.Parallel()
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) { io.Copy(io.Discard, r) })
	s := start(t, pool(at), func(_ *site, l *config.Listener) { l.Limits.RequestTimeout = time.Second })
	res, err := http.Get(s.url("/"))
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != 504 {
		t.Error(res.Status)
	}
}

// A time-out is over with its request: the next one on the same connection can fail in its own way.
func TestAfterTimeout(t *testing.T) {
	t.Parallel()
	unresponsive := raw(t, func(_ int, c net.Conn, r *bufio.Reader) { io.Copy(io.Discard, r) })
	s := start(t, pool(unresponsive), func(_ *site, l *config.Listener) { l.Limits.RequestTimeout = time.Second })
	c := s.dial()
	r := bufio.NewReader(c)
	const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	if res, _ := s.ask(c, r, request, "GET"); res.StatusCode != 504 {
		t.Error(res.Status)
	}
	s.set(*s.now.Load().Listener, map[string]*config.Pool{"a": pool(refused(t), refused(t), named(t, "a"))})
	for range 4 {
		if res, _ := s.ask(c, r, request, "GET"); res.StatusCode != 200 {
			t.Error(res.Status)
		}
	}
}

func TestBusy(t *testing.T) {
	begun, end := make(chan bool, 10), make(chan bool)
	at := handler(t, func(w http.ResponseWriter, _ *http.Request) {
		begun <- true
		<-end
	})
	cfg := pool(at)
	cfg.EndpointRequests = 1
	s := start(t, cfg)
	first := make(chan int)
	go func() {
		res, err := http.Get(s.url("/"))
		if err != nil {
			t.Error(err)
			first <- 0
			return
		}
		first <- res.StatusCode
	}()
	<-begun
	res, err := http.Get(s.url("/"))
	if err != nil {
		t.Fatal(err)
	}
	if res.StatusCode != 503 || res.Header.Get("Retry-After") == "" {
		t.Error(res.Status)
	}
	close(end)
	if status := <-first; status != 200 {
		t.Error(status)
	}
}

func TestRoutes(t *testing.T) {
	s := start(t, nil, func(s *site, l *config.Listener) {
		l.Routes = []config.Route{
			{Host: "a.example", Pool: "a"},
			{Host: "b.example", Path: "/x", Match: config.Exact, Pool: "b"},
			{Host: "old.example", Redirect: &config.Redirect{Scheme: "https", Status: 301}},
			{Host: "port.example", Redirect: &config.Redirect{Scheme: "https", Port: 8443}},
			{Host: "gone.example", Status: 503, Message: "its Service has no port named http"},
		}
	})
	s.set(*s.now.Load().Listener, map[string]*config.Pool{"a": pool(named(t, "a")), "b": pool(named(t, "b"))})
	c := s.dial()
	r := bufio.NewReader(c)
	for _, tc := range []struct{ host, path, want string }{
		{"a.example", "/", "200 a"},
		{"A.example:81", "/any", "200 a"},
		{"b.example", "/x", "200 b"},
		{"b.example", "/y", "404 404 Not Found: no route leads from here\n"},
		{"old.example:80", "/p?q", "301 https://old.example/p?q"},
		{"[::1]:80", "/", "404 404 Not Found: no route leads from here\n"},
		{"port.example", "/", "308 https://port.example:8443/"},
		{"gone.example", "/", "503 503 Service Unavailable: its Service has no port named http\n"},
	} {
		res, body := s.ask(c, r, "GET "+tc.path+" HTTP/1.1\r\nHost: "+tc.host+"\r\n\r\n", "GET")
		if location := res.Header.Get("Location"); location != "" {
			body = location
		}
		if got := fmt.Sprint(res.StatusCode, " ", body); got != tc.want {
			t.Errorf("%s%s: %q; want %q", tc.host, tc.path, got, tc.want)
		}
	}
}

func TestChangedRoutesOnOpenConnection(t *testing.T) {
	s := start(t, pool(named(t, "old")))
	c := s.dial()
	r := bufio.NewReader(c)
	const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	if _, body := s.ask(c, r, request, "GET"); body != "old" {
		t.Error(body)
	}
	s.set(config.Listener{}, map[string]*config.Pool{"a": pool(named(t, "new"))})
	if _, body := s.ask(c, r, request, "GET"); body != "new" {
		t.Error(body)
	}
}

func TestCookiePolicy(t *testing.T) {
	cfg := pool(named(t, "a"), named(t, "b"), named(t, "c"), named(t, "d"))
	cfg.Policy = config.Policy{Kind: config.ConsistentHash, Hash: config.HashCookie, Name: "route"}
	s := start(t, cfg)
	c := s.dial()
	r := bufio.NewReader(c)
	seen := map[string]bool{}
	for range 40 {
		res, first := s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
		cookies := res.Cookies()
		if len(cookies) != 1 || cookies[0].Name != "route" || len(cookies[0].Value) != 32 || !cookies[0].HttpOnly {
			t.Fatalf("%v", cookies)
		}
		seen[first] = true
		for range 3 {
			res, again := s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\nCookie: x=y; route="+cookies[0].Value+"\r\n\r\n", "GET")
			if again != first || len(res.Cookies()) != 0 {
				t.Fatalf("from %s to %s, %v", first, again, res.Cookies())
			}
		}
	}
	if len(seen) < 2 {
		t.Errorf("every new client goes to %v", seen)
	}
}

func TestHeaderPolicy(t *testing.T) {
	cfg := pool(named(t, "a"), named(t, "b"), named(t, "c"))
	cfg.Policy = config.Policy{Kind: config.ConsistentHash, Hash: config.HashHeader, Name: "X-Tenant"}
	s := start(t, cfg)
	c := s.dial()
	r := bufio.NewReader(c)
	seen := map[string]bool{}
	for i := range 30 {
		request := fmt.Sprintf("GET / HTTP/1.1\r\nHost: a\r\nx-tenant: %d\r\n\r\n", i)
		_, first := s.ask(c, r, request, "GET")
		_, again := s.ask(c, r, request, "GET")
		if first != again {
			t.Errorf("tenant %d: %s, then %s", i, first, again)
		}
		seen[first] = true
	}
	if len(seen) < 2 {
		t.Error("all tenants at one endpoint")
	}
}

func TestProxyHeaderToEndpoint(t *testing.T) {
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		line, _ := r.ReadString('\n')
		for {
			if _, err := readHead(r); err != nil {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(line), line)
		}
	})
	cfg := pool(at)
	cfg.ProxyProtocol = 1
	s := start(t, cfg)
	lines := map[string]bool{}
	for range 2 {
		c := s.dial()
		r := bufio.NewReader(c)
		want := fmt.Sprintf("PROXY TCP4 127.0.0.1 127.0.0.1 %d %d\r\n", c.LocalAddr().(*net.TCPAddr).Port, s.address.Port())
		for range 2 {
			if _, line := s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); line != want {
				t.Errorf("%q; want %q", line, want)
			}
			lines[want] = true
		}
	}
	if len(lines) != 2 {
		t.Error("two clients shared a connection")
	}
}

func TestAccessLogged(t *testing.T) {
	at := named(t, "abc")
	s := start(t, pool(at), func(_ *site, l *config.Listener) {
		l.AccessLog = &config.AccessLog{Balancer: "lb"}
		l.Tags = map[string]string{"environment": "prod"}
	})
	req, _ := http.NewRequest("POST", s.url("/x?y"), strings.NewReader("body"))
	req.Header.Set("User-Agent", "test/1")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, res.Body)
	r := <-s.logged
	if r.Balancer != "lb" || r.Method != "POST" || r.URL != s.url("/x?y") || r.Proto != "HTTP/1.1" || r.UserAgent != "test/1" || r.Status != 200 || r.EndpointStatus != 200 ||
		r.Received != 4 || r.Sent != 3 || r.Endpoint != at || r.RequestTime < 0 || r.EndpointTime <= 0 || r.ResponseTime < 0 || r.Tags["environment"] != "prod" {
		t.Errorf("%+v", r)
	}
	c := s.dial()
	s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost : a\r\n\r\n", "GET")
	if r := <-s.logged; r.Status != 400 || r.EndpointStatus != 0 || r.Endpoint.IsValid() || r.RequestTime >= 0 {
		t.Errorf("%+v", r)
	}
}
