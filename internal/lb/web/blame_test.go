package web

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
)

// failures are those that count against the only endpoint.
func failures(s *site) uint64 { return s.pool("a").Endpoints()[0].Counters.Failures.Load() }

// An endpoint that got a request and ended the connection, or did not answer in time, has failed, also if the connection had carried others before.
func TestKeptConnectionWithoutAnswer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		path   string
		body   string
		status int
	}{
		"ended":                {"/ended", "", 502},
		"ended after a body":   {"/ended", "body", 502},
		"ended in a large one": {"/ended", strings.Repeat("body", 100_000), 502},
		"too late":             {"/late", "", 504},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
				for {
					req, err := http.ReadRequest(r)
					if err != nil {
						return
					}
					io.Copy(io.Discard, req.Body)
					switch req.URL.Path {
					case "/ended":
						return
					case "/late":
						io.Copy(io.Discard, r)
					}
					ok(c)
				}
			})
			s := start(t, pool(at), impatient)
			c := s.dial()
			r := bufio.NewReader(c)
			s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
			request := "POST " + tc.path + " HTTP/1.1\r\nHost: a\r\nContent-Length: " + itoa(int64(len(tc.body))) + "\r\n\r\n" + tc.body
			if res, _ := s.ask(c, r, request, "POST"); res.StatusCode != tc.status {
				t.Errorf("%s, want %d", res.Status, tc.status)
			}
			if n := failures(s); n != 1 {
				t.Errorf("%d failures of the endpoint, want 1", n)
			}
		})
	}
}

// closedBefore is a connection whose other end is closed just before something is written for the second time: while a request is under way.
type closedBefore struct {
	net.Conn
	writes int
	other  chan net.Conn
}

func (c *closedBefore) Write(b []byte) (int, error) {
	if c.writes++; c.writes == 2 {
		(<-c.other).Close()
	}
	return c.Conn.Write(b)
}

func (c *closedBefore) NetConn() net.Conn { return c.Conn }

// An endpoint that closes a kept connection may do so while a request is under way: it has not failed, though the request may not be sent twice.
func TestKeptConnectionClosedMeanwhile(t *testing.T) {
	for _, body := range []string{"", "body", strings.Repeat("body", 100_000)} {
		other := make(chan net.Conn, 1)
		at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
			if _, err := readHead(r); err == nil {
				ok(c)
				other <- c
				io.Copy(io.Discard, r)
			}
		})
		s := start(t, pool(at), func(s *site, _ *config.Listener) {
			s.toEndpoint = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
				c, err := dial(ctx, to)
				return &closedBefore{Conn: c, other: other}, err
			}
		})
		c := s.dial()
		r := bufio.NewReader(c)
		s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
		if res, _ := s.ask(c, r, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: "+itoa(int64(len(body)))+"\r\n\r\n"+body, "POST"); res.StatusCode != 502 {
			t.Error(res.Status)
		}
		blameless(t, s)
	}
}

// streamsThat is an endpoint that speaks HTTP/2, answers its first request, and does something else with others.
func streamsThat(t *testing.T, answer func(f *http2.Framer, stream uint32)) *config.Pool {
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		io.CopyN(io.Discard, r, int64(len(http2.ClientPreface)))
		f := http2.NewFramer(c, r)
		f.WriteSettings()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if frame.Header().Flags.Has(http2.FlagDataEndStream) && frame.Header().StreamID == 1 {
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x88}, EndHeaders: true, EndStream: true}) // :status 200
			} else if frame.Header().Type == http2.FrameHeaders {
				answer(f, frame.Header().StreamID)
			}
		}
	})
	cfg := pool(at)
	cfg.Protocol = config.H2C
	return cfg
}

// The same over HTTP/2, where a connection carries many requests and only the first one used to count.
func TestKeptHTTP2ConnectionWithoutAnswer(t *testing.T) {
	t.Parallel()
	reset := func(code http2.ErrCode) func(f *http2.Framer, stream uint32) {
		return func(f *http2.Framer, stream uint32) { f.WriteRSTStream(stream, code) }
	}
	for name, tc := range map[string]struct {
		answer   func(f *http2.Framer, stream uint32)
		content  string
		status   string
		failures uint64
	}{
		"broken off":       {reset(http2.ErrCodeInternal), "text/plain", "502", 1},
		"refused":          {reset(http2.ErrCodeRefusedStream), "text/plain", "502", 0},
		"too late":         {func(*http2.Framer, uint32) {}, "text/plain", "504", 1},
		"the call is over": {reset(http2.ErrCodeCancel), "application/grpc", "200", 0},
		"the call is over midway": {func(f *http2.Framer, stream uint32) {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: []byte{0x88}, EndHeaders: true})
			f.WriteRSTStream(stream, http2.ErrCodeCancel)
		}, "application/grpc", "200", 0},
		"call broken off": {reset(http2.ErrCodeInternal), "application/grpc", "200", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := streamsThat(t, tc.answer)
			cfg.Retries = -1
			s := start(t, cfg, impatient)
			h := newRaw(s)
			h.headers(1, true, get("/")...)
			if status := h.answer(1); status != "200" {
				t.Fatal(status)
			}
			h.headers(3, true, post("/", "content-type", tc.content)...)
			if status := h.answer(3); status != tc.status {
				t.Errorf("%s, want %s", status, tc.status)
			}
			eventually(t, "the request ends", func() bool { return s.server.Stats("test").Active.Load() == 0 })
			if n := failures(s); n != tc.failures {
				t.Errorf("%d failures of the endpoint, want %d", n, tc.failures)
			}
		})
	}
}

// An endpoint says how large a header it takes: a larger one is the client's mistake, as with HTTP/1 endpoints, which say so themselves.
func TestHeaderLargerThanEndpointTakes(t *testing.T) {
	var asked atomic.Int64
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		io.CopyN(io.Discard, r, int64(len(http2.ClientPreface)))
		f := http2.NewFramer(c, r)
		f.WriteSettings(http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: 1000})
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			if frame.Header().Type == http2.FrameHeaders {
				asked.Add(1)
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: frame.Header().StreamID, BlockFragment: []byte{0x88}, EndHeaders: true, EndStream: true}) // :status 200
			}
		}
	})
	cfg := pool(at)
	cfg.Protocol = config.H2C
	s := start(t, cfg)
	c := s.dial()
	r := bufio.NewReader(c)
	for _, tc := range []struct{ size, status int }{{10, 200}, {2000, 431}, {10, 200}} {
		if res, _ := s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\nX-Large: "+strings.Repeat("x", tc.size)+"\r\n\r\n", "GET"); res.StatusCode != tc.status {
			t.Errorf("%d bytes: %s, want %d", tc.size, res.Status, tc.status)
		}
	}
	if asked.Load() != 2 {
		t.Errorf("%d requests at the endpoint, want 2", asked.Load())
	}
	blameless(t, s)
}

// That the balancer can open no connection is not the endpoint's fault.
func TestNoDescriptorsForEndpoint(t *testing.T) {
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		cfg := pool(netip.MustParseAddrPort("192.0.2.1:80"))
		cfg.Protocol = protocol
		s := start(t, cfg, func(s *site, _ *config.Listener) {
			s.toEndpoint = func(context.Context, netip.AddrPort) (net.Conn, error) {
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", unix.EMFILE)}
			}
		})
		c := s.dial()
		s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
		if n := s.pool("a").Endpoints()[0].Counters.ConnectFailures.Load(); n != 0 {
			t.Errorf("%s: %d failures of the endpoint", protocol, n)
		}
	}
}
