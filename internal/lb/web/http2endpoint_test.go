package web

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"

	"golang.org/x/net/http2"

	"portal/internal/lb/config"
)

// A client announces trailer fields that HTTP/2 has no place for: that is no fault of the endpoint, which must not be ejected for it.
func TestForbiddenTrailerIsNotTheEndpoints(t *testing.T) {
	cfg := endpoint(t, config.H2C, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s", body, r.Trailer.Get("X-Sum"))
	})
	s := start(t, cfg)
	c := s.dial()
	request := "POST / HTTP/1.1\r\nHost: a\r\nTrailer: Content-Length, X-Sum, Transfer-Encoding, Trailer, a b, @\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 6\r\n\r\n"
	if res, body := s.ask(c, bufio.NewReader(c), request, "POST"); res.StatusCode != 200 || body != "abc 6" {
		t.Error(res.Status, body)
	}
	if n := s.pool("a").Endpoints()[0].Counters.Failures.Load(); n != 0 {
		t.Errorf("%d failures of the endpoint", n)
	}
}

// Connections that many requests at once needed are closed when they have been idle for long, as those of HTTP/1 are.
func TestIdleHTTP2EndpointConnections(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	cfg := endpoint(t, config.H2C, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			asked <- struct{}{}
			<-release
		}
	})
	s := start(t, cfg)
	c := s.dial()
	s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
	e := s.pool("a").Endpoints()[0]
	if n := e.OpenConnections(); n != 1 {
		t.Fatal(n, " connections")
	}
	found, _ := s.server.conns.Load(e)
	conns := found.(*endpointConns)
	later := s.server.now() + 2*endpointIdle.Milliseconds()
	// One with a request under way is not idle, however long that takes.
	busy := s.dial()
	io.WriteString(busy, "GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
	<-asked
	if conns.closeIdle(later, false) || e.OpenConnections() != 1 {
		t.Error("a connection in use was closed")
	}
	close(release)
	s.response(bufio.NewReader(busy), "GET")
	if conns.closeIdle(0, false) || e.OpenConnections() != 1 {
		t.Error("a connection that was just used was closed")
	}
	eventually(t, "the idle connection is closed", func() bool { return conns.closeIdle(later, false) && e.OpenConnections() == 0 })
}

// A client that leaves while an endpoint is being connected to says nothing about the endpoint.
func TestClientLeavesWhileConnecting(t *testing.T) {
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		cfg := pool(netip.MustParseAddrPort("192.0.2.1:80"))
		cfg.Protocol = protocol
		connecting := make(chan struct{})
		s := start(t, cfg, func(s *site, _ *config.Listener) {
			s.toEndpoint = func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
				close(connecting)
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})
		h := newRaw(s)
		h.headers(1, true, ":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a.example")
		<-connecting
		h.WriteRSTStream(1, http2.ErrCodeCancel)
		eventually(t, "the request ends", func() bool { return s.server.Stats("test").Active.Load() == 0 })
		if n := s.pool("a").Endpoints()[0].Counters.ConnectFailures.Load(); n != 0 {
			t.Errorf("%s: %d failures of the endpoint", protocol, n)
		}
	}
}
