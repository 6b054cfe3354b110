package web

import (
	"bufio"
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"

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

// Requests that an endpoint has not begun when it gives a connection up go to it over another one, whatever their method.
func TestEndpointSaysGoAway(t *testing.T) {
	at := raw(t, func(n int, c net.Conn, r *bufio.Reader) {
		io.CopyN(io.Discard, r, int64(len(http2.ClientPreface)))
		f := http2.NewFramer(c, r)
		f.WriteSettings()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			data, is := frame.(*http2.DataFrame)
			switch {
			case !is || !data.StreamEnded():
			case n == 0 && data.StreamID > 1:
				f.WriteGoAway(1, http2.ErrCodeNo, nil)
			default:
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: data.StreamID, BlockFragment: []byte{0x88}, EndHeaders: true, EndStream: true}) // :status 200
			}
		}
	})
	cfg := pool(at)
	cfg.Protocol = config.H2C
	s := start(t, cfg)
	c := s.dial()
	r := bufio.NewReader(c)
	for n := range 3 {
		if res, body := s.ask(c, r, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\na", "POST"); res.StatusCode != 200 {
			t.Error(n, res.Status, body)
		}
	}
	if n := s.pool("a").Endpoints()[0].Counters.Failures.Load(); n != 0 {
		t.Errorf("%d failures of the endpoint", n)
	}
}

// A connection counts until its last request has ended, also if it is not used for others any more.
func TestRetiredConnectionCounts(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	cfg := endpoint(t, config.H2, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			asked <- struct{}{}
			<-release
		}
	})
	cfg.EndpointConnections = 1
	s := start(t, cfg)
	slow := s.dial()
	io.WriteString(slow, "GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
	<-asked
	changed := *cfg
	changed.TLS = &config.EndpointTLS{ServerName: "other.example"}
	s.pool("a").Update(&changed, "")
	c := s.dial()
	r := bufio.NewReader(c)
	const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	if res, _ := s.ask(c, r, request, "GET"); res.StatusCode != 503 {
		t.Error("beside the one connection that the endpoint may have: ", res.Status)
	}
	close(release)
	s.response(bufio.NewReader(slow), "GET")
	eventually(t, "there is room for another connection", func() bool {
		res, _ := s.ask(c, r, request, "GET")
		return res.StatusCode == 200
	})
}

// Requests that come while the first connection is being made wait for it: it is all that the endpoint may have, and has room for them.
func TestRequestsShareNewConnection(t *testing.T) {
	const requests = 20
	cfg := endpoint(t, config.H2C, func(http.ResponseWriter, *http.Request) {})
	cfg.EndpointConnections = 1
	dialed, release := make(chan struct{}, requests), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(release) })
	defer goOn()
	s := start(t, cfg, func(s *site, _ *config.Listener) {
		s.toEndpoint = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			dialed <- struct{}{}
			<-release
			return dial(ctx, to)
		}
	})
	var readers []*bufio.Reader
	for range requests {
		c := s.dial()
		io.WriteString(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
		readers = append(readers, bufio.NewReader(c))
	}
	eventually(t, "all requests are at the endpoint, or answered", func() bool {
		return s.pool("a").Endpoints()[0].Active() == requests || s.server.Stats("test").Requests[5].Load() > 0
	})
	goOn()
	for _, r := range readers {
		if res, body := s.response(r, "POST"); res.StatusCode != 200 {
			t.Fatal(res.Status, body)
		}
	}
	if n := len(dialed); n != 1 {
		t.Errorf("%d connections were made", n)
	}
}

// A client that leaves while a connection is made for its request takes nothing away from others, which wait for it too.
func TestConnectingGoesOnForOthers(t *testing.T) {
	cfg := endpoint(t, config.H2C, func(http.ResponseWriter, *http.Request) {})
	dialed := make(chan struct{}, 2)
	s := start(t, cfg, func(s *site, _ *config.Listener) {
		s.toEndpoint = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			if dialed <- struct{}{}; len(dialed) == 1 {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return dial(ctx, to)
		}
	})
	e := s.pool("a").Endpoints()[0]
	h := newRaw(s)
	h.headers(1, true, ":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a.example")
	eventually(t, "the first request is at the endpoint", func() bool { return len(dialed) == 1 })
	c := s.dial()
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	eventually(t, "the second request is at the endpoint", func() bool { return e.Active() == 2 })
	h.WriteRSTStream(1, http2.ErrCodeCancel)
	if res, body := s.response(bufio.NewReader(c), "GET"); res.StatusCode != 200 {
		t.Error(res.Status, body)
	}
	if n := e.Counters.ConnectFailures.Load(); n != 0 {
		t.Errorf("%d failures of the endpoint", n)
	}
}

// Endpoints get no pings, which servers of gRPC count: a stream that says nothing for two minutes was ended for them. A machine that is gone is noticed all the same.
func TestEndpointsAreNotPinged(t *testing.T) {
	if transport.ReadIdleTimeout != 0 {
		t.Errorf("endpoints get a ping after %v", transport.ReadIdleTimeout)
	}
	for _, protocol := range []config.Protocol{config.H2C, config.H2} {
		made := make(chan net.Conn, 1)
		s := start(t, endpoint(t, protocol, func(http.ResponseWriter, *http.Request) {}), func(s *site, _ *config.Listener) {
			s.toEndpoint = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
				nc, err := dial(ctx, to)
				made <- nc
				return nc, err
			}
		})
		c := s.dial()
		if res, _ := s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); res.StatusCode != 200 {
			t.Fatal(protocol, res.Status)
		}
		rawOf(<-made).Control(func(fd uintptr) {
			probes, err1 := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_KEEPALIVE)
			quiet, err2 := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_KEEPIDLE)
			lost, err3 := unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
			if probes != 1 || quiet != 30 || lost != 45_000 || err1 != nil || err2 != nil || err3 != nil {
				t.Errorf("%s: probes %d after %d s, lost after %d ms; %v %v %v", protocol, probes, quiet, lost, err1, err2, err3)
			}
		})
	}
}

// heldBack is a connection that sends nothing before it may.
type heldBack struct {
	net.Conn
	begun, may chan struct{}
	once       *sync.Once
}

func (h heldBack) Write(b []byte) (int, error) {
	h.once.Do(func() { close(h.begun) })
	<-h.may
	return h.Conn.Write(b)
}

func (h heldBack) NetConn() net.Conn { return h.Conn }

// A connection that is being made while its endpoints' certificates come to be verified is not used for requests that come after that.
func TestVerificationBeginsWhileConnecting(t *testing.T) {
	cfg := endpoint(t, config.H2, func(http.ResponseWriter, *http.Request) {})
	cfg.Retries = -1
	held := heldBack{begun: make(chan struct{}), may: make(chan struct{}), once: new(sync.Once)}
	s := start(t, cfg, func(s *site, _ *config.Listener) {
		s.toEndpoint = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			c, err := dial(ctx, to)
			return heldBack{c, held.begun, held.may, held.once}, err
		}
	})
	const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
	before := s.dial()
	io.WriteString(before, request)
	<-held.begun
	changed := *cfg
	changed.TLS = &config.EndpointTLS{CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate(t).Certificate[0]}), ServerName: "other.example"}
	s.pool("a").Update(&changed, "")
	after := s.dial()
	io.WriteString(after, request)
	eventually(t, "the second request is under way", func() bool {
		found, _ := s.server.conns.Load(s.pool("a").Endpoints()[0])
		return found.(*endpointConns).config() == &changed
	})
	close(held.may)
	if res, _ := s.response(bufio.NewReader(before), "GET"); res.StatusCode != 200 {
		t.Error("the request from before: ", res.Status)
	}
	r := bufio.NewReader(after)
	if res, _ := s.response(r, "GET"); res.StatusCode != 502 {
		t.Error("the request that came meanwhile: ", res.Status)
	}
	if res, _ := s.ask(after, r, request, "GET"); res.StatusCode != 502 {
		t.Error("one that came later: ", res.Status)
	}
	eventually(t, "no connection is left", func() bool { return s.pool("a").Endpoints()[0].OpenConnections() == 0 })
}
