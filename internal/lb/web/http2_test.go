package web

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// certificate is a pair that httptest brings along.
func certificate(t testing.TB) tls.Certificate {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	return server.TLS.Certificates[0]
}

func withTLS(s *site, _ *config.Listener) {
	s.tls = &tls.Config{Certificates: []tls.Certificate{certificate(s.t)}, NextProtos: []string{"h2", "http/1.1", "http/1.0"}}
}

// client speaks HTTP/2 or only HTTP/1.1, over TLS without verifying.
func client(t testing.TB, http2 bool) *http.Client {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: http2}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// endpoint is an HTTP server that speaks a protocol of endpoints.
func endpoint(t testing.TB, protocol config.Protocol, f http.HandlerFunc) *config.Pool {
	server := httptest.NewUnstartedServer(f)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server.Config.Protocols = protocols
	switch protocol {
	case config.H2:
		protocols.SetHTTP2(true)
		server.EnableHTTP2 = true
		server.StartTLS()
	case config.HTTPS:
		server.StartTLS()
	default:
		server.Start()
	}
	t.Cleanup(server.Close)
	cfg := pool(netip.MustParseAddrPort(server.Listener.Addr().String()))
	cfg.Protocol = protocol
	return cfg
}

// TestProtocols passes bodies, trailers and fields between every pair of protocols.
func TestProtocols(t *testing.T) {
	for _, protocol := range []config.Protocol{config.HTTP, config.HTTPS, config.H2C, config.H2} {
		for _, two := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, client HTTP/2: %v", protocol, two), func(t *testing.T) {
				seen := make(chan *http.Request, 100)
				cfg := endpoint(t, protocol, func(w http.ResponseWriter, r *http.Request) {
					seen <- r
					if r.URL.Path == "/none" {
						w.WriteHeader(204)
						return
					}
					echo(w, r)
				})
				s := start(t, cfg, withTLS)
				c := client(t, two)
				for _, size := range []int{0, 10, 100_000, 3_000_000} {
					body := bytes.Repeat([]byte("0123456789"), size/10)
					req, _ := http.NewRequest("POST", s.url("/a//b%2Fc?d=|"), bytes.NewReader(body))
					if size > 10 {
						req.ContentLength = -1
					}
					req.Header.Set("X-Forwarded-Proto", "gopher")
					req.Header.Set("X-Kept", "yes")
					req.Host = "a.example"
					res, err := c.Do(req)
					if err != nil {
						t.Fatal(err)
					}
					got, err := io.ReadAll(res.Body)
					if err != nil || !bytes.Equal(got, body) {
						t.Fatalf("%d bytes: got %d, %v", size, len(got), err)
					}
					if res.Trailer.Get("X-Sum") != fmt.Sprint(size) {
						t.Errorf("%d bytes: trailer %v", size, res.Trailer)
					}
					if want := map[bool]int{false: 1, true: 2}[two]; res.ProtoMajor != want {
						t.Errorf("the client speaks %s", res.Proto)
					}
					r := <-seen
					if r.Host != "a.example" || r.RequestURI != "/a//b%2Fc?d=|" || r.Header.Get("X-Forwarded-Proto") != "https" || r.Header.Get("X-Kept") != "yes" ||
						r.Header.Get("X-Forwarded-For") != "127.0.0.1" || r.Header.Get("X-Forwarded-Port") != fmt.Sprint(s.address.Port()) {
						t.Errorf("%s %s %v", r.Host, r.RequestURI, r.Header)
					}
					if want := map[bool]int{false: 1, true: 2}[protocol == config.H2 || protocol == config.H2C]; r.ProtoMajor != want {
						t.Errorf("the endpoint is spoken to in %s", r.Proto)
					}
				}
				for _, method := range []string{"GET", "HEAD"} {
					req, _ := http.NewRequest(method, s.url("/none"), nil)
					res, err := c.Do(req)
					if err != nil || res.StatusCode != 204 {
						t.Error(method, res, err)
					}
					<-seen
				}
			})
		}
	}
}

func TestCleartextHTTP2(t *testing.T) {
	s := start(t, pool(named(t, "a")))
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: protocols}
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport}).Get(s.url("/"))
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	if res.ProtoMajor != 2 || string(body) != "a" {
		t.Error(res.Proto, string(body))
	}
}

// A client that cancels must be heard by the endpoint, in each protocol.
func TestHTTP2Cancel(t *testing.T) {
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		begun, gone := make(chan bool, 1), make(chan bool, 1)
		cfg := endpoint(t, protocol, func(_ http.ResponseWriter, r *http.Request) {
			begun <- true
			<-r.Context().Done()
			gone <- true
		})
		s := start(t, cfg, withTLS)
		ctx, cancel := context.WithCancel(context.Background())
		req, _ := http.NewRequestWithContext(ctx, "GET", s.url("/"), nil)
		go client(t, true).Do(req)
		<-begun
		cancel()
		select {
		case <-gone:
		case <-time.After(patience):
			t.Error("the endpoint goes on: ", protocol)
		}
	}
}

func TestHTTP2CutOffResponseIsSeen(t *testing.T) {
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
	})
	s := start(t, pool(at), withTLS)
	res, err := client(t, true).Get(s.url("/"))
	if err != nil {
		return
	}
	if body, err := io.ReadAll(res.Body); err == nil {
		t.Errorf("a response that was cut off looks complete: %q", body)
	}
}

func TestDrain(t *testing.T) {
	t.Parallel()
	begun, end := make(chan bool, 10), make(chan bool)
	s := start(t, pool(handler(t, func(w http.ResponseWriter, _ *http.Request) {
		begun <- true
		<-end
		io.WriteString(w, "whole")
	})), withTLS)
	answers := make(chan string)
	for _, two := range []bool{false, true} {
		go func() {
			res, err := client(t, two).Get(s.url("/"))
			if err != nil {
				answers <- err.Error()
				return
			}
			body, err := io.ReadAll(res.Body)
			answers <- fmt.Sprint(string(body), " ", err, " ", !two && !res.Close)
		}()
		<-begun
	}
	s.drain()
	close(end)
	for range 2 {
		if got := <-answers; got != "whole <nil> false" {
			t.Error(got)
		}
	}
	// Every connection ends, although clients would keep theirs.
	s.conns.Wait()
}

// h2raw is a client that can break the rules of HTTP/2.
type h2raw struct {
	t *testing.T
	c net.Conn
	*http2.Framer
	enc *hpack.Encoder
	dec *hpack.Decoder
	buf bytes.Buffer
	// block and got are the header of the last response.
	block []byte
	got   []hpack.HeaderField
}

func newRaw(s *site) *h2raw { return newRawOver(s.t, s.dial()) }

func newRawOver(t *testing.T, c net.Conn) *h2raw {
	io.WriteString(c, wire.Preface)
	h := &h2raw{t: t, c: c, Framer: http2.NewFramer(c, c)}
	h.enc, h.dec = hpack.NewEncoder(&h.buf), hpack.NewDecoder(4096, nil)
	h.AllowIllegalWrites = true
	h.WriteSettings()
	return h
}

func (h *h2raw) headers(stream uint32, end bool, fields ...string) error {
	h.buf.Reset()
	for i := 0; i < len(fields); i += 2 {
		h.enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return h.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: h.buf.Bytes(), EndHeaders: true, EndStream: end})
}

// answer is the status of a stream, or how it or the connection ended.
func (h *h2raw) answer(stream uint32) string {
	for {
		frame, err := h.ReadFrame()
		if err != nil {
			return "closed"
		}
		switch f := frame.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				h.WriteSettingsAck()
			}
		case *http2.HeadersFrame:
			fields, err := h.dec.DecodeFull(f.HeaderBlockFragment())
			if err != nil {
				return err.Error()
			}
			h.block, h.got = slices.Clone(f.HeaderBlockFragment()), fields
			for _, field := range fields {
				if field.Name == ":status" && f.StreamID == stream {
					return field.Value
				}
			}
		case *http2.RSTStreamFrame:
			if f.StreamID == stream {
				return f.ErrCode.String()
			}
		case *http2.GoAwayFrame:
			return "GOAWAY " + f.ErrCode.String()
		}
	}
}

// Requests that would mean something else in HTTP/1 never get there.
func TestHTTP2Smuggling(t *testing.T) {
	w := &witness{}
	s := start(t, pool(handler(t, w.ServeHTTP)))
	base := []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a.example"}
	with := func(change ...string) []string { return append(append([]string{}, base...), change...) }
	instead := func(name, value string) []string {
		out := append([]string{}, base...)
		for i := 0; i < len(out); i += 2 {
			if out[i] == name {
				out[i+1] = value
			}
		}
		return out
	}
	for _, tc := range []struct {
		name   string
		fields []string
		passes bool
	}{
		{"plain", base, true},
		{"cookies", with("cookie", "a=b", "cookie", "c=d"), true},
		{"te trailers", with("te", "trailers"), true},
		{"transfer-encoding", with("transfer-encoding", "chunked"), false},
		{"connection", with("connection", "close"), false},
		{"keep-alive", with("keep-alive", "1"), false},
		{"proxy-connection", with("proxy-connection", "close"), false},
		{"upgrade", with("upgrade", "websocket"), false},
		{"te other", with("te", "gzip"), false},
		{"CRLF in a value", with("a", "b\r\nTransfer-Encoding: chunked"), false},
		{"LF in a value", with("a", "b\nc: d"), false},
		{"NUL in a value", with("a", "b\x00"), false},
		{"colon in a name", with("a:b", "c"), false},
		{"space in a name", with("a b", "c"), false},
		{"CRLF in a name", with("a\r\nb", "c"), false},
		{"capital in a name", with("A", "b"), false},
		{"unknown pseudo field", with(":foo", "b"), false},
		{"second path", with(":path", "/b"), false},
		{"path without slash", instead(":path", "x"), false},
		{"empty path", instead(":path", ""), false},
		{"space in the path", instead(":path", "/ HTTP/1.1"), false},
		{"CRLF in the path", instead(":path", "/ HTTP/1.1\r\nHost: b"), false},
		{"climbing path", instead(":path", "/a/../b"), false},
		{"high byte in the path", instead(":path", "/\xff"), false},
		{"fragment", instead(":path", "/#a"), false},
		{"space in the method", instead(":method", "GET /smuggled HTTP/1.1"), false},
		{"CRLF in the method", instead(":method", "GET\r\n"), false},
		{"CONNECT", instead(":method", "CONNECT"), false},
		{"TRACE", instead(":method", "TRACE"), false},
		{"authority with a path", instead(":authority", "a/b"), false},
		{"authority with a user", instead(":authority", "u@a"), false},
		{"authority with CRLF", instead(":authority", "a\r\nX: y"), false},
		{"empty authority", instead(":authority", ""), false},
		{"other host", with("host", "b.example"), false},
		{"negative length", with("content-length", "-1"), false},
		{"length of nothing", with("content-length", "5"), false},
		{"two lengths", with("content-length", "0", "content-length", "5"), false},
		{"many fields", with(strings.Split(strings.Repeat("a,b,", 200)+"a,b", ",")...), false},
	} {
		h := newRaw(s)
		h.headers(1, true, tc.fields...)
		got := h.answer(1)
		if seen := w.take(); (got == "200") != tc.passes || len(seen) != 0 != tc.passes {
			t.Errorf("%s: %s, the endpoint saw %q", tc.name, got, seen)
		}
		h.c.Close()
	}
}

// Floods end with the connection, or are answered; in no case do they pile up here, nor harm another client.
func TestHTTP2Floods(t *testing.T) {
	s := start(t, pool(named(t, "a")))
	other := client(t, false)
	well := func(when string) {
		res, err := other.Get(s.url("/"))
		if err != nil || res.StatusCode != 200 {
			t.Fatalf("another client, %s: %v %v", when, res, err)
		}
		io.Copy(io.Discard, res.Body)
	}
	fields := []string{":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a.example"}
	for name, flood := range map[string]func(h *h2raw, i int) error{
		"rapid reset": func(h *h2raw, i int) error {
			stream := uint32(2*i + 1)
			if err := h.headers(stream, true, fields...); err != nil {
				return err
			}
			return h.WriteRSTStream(stream, http2.ErrCodeCancel)
		},
		"settings": func(h *h2raw, _ int) error {
			return h.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 100})
		},
		"ping":         func(h *h2raw, _ int) error { return h.WritePing(false, [8]byte{}) },
		"continuation": func(h *h2raw, i int) error { return continuation(h, i) },
		"empty data": func(h *h2raw, i int) error {
			if i == 0 {
				return h.headers(1, false, fields...)
			}
			return h.WriteData(1, false, nil)
		},
	} {
		h := newRaw(s)
		// Nothing is read: what the server wants to say must not grow without bound.
		var err error
		sent := 0
		for end := time.Now().Add(patience); err == nil && time.Now().Before(end); sent++ {
			err = flood(h, sent)
		}
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: goes on without end", name)
		}
		t.Logf("%s: %d frames before the end", name, sent)
		well("during " + name)
		h.c.Close()
	}
	eventually(t, "no request is left over", func() bool {
		stats := s.server.Stats("test")
		return stats.Active.Load() == 0 && stats.HTTP2.Load() == 0
	})
}

// continuation sends a header that never ends.
func continuation(h *h2raw, i int) error {
	h.buf.Reset()
	h.enc.WriteField(hpack.HeaderField{Name: fmt.Sprint("a", i), Value: strings.Repeat("x", 1000), Sensitive: true})
	if i == 0 {
		return h.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: h.buf.Bytes()})
	}
	return h.WriteContinuation(1, false, h.buf.Bytes())
}
