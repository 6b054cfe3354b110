package web

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/internal/lb/config"
	"portal/internal/lb/web/wire"
)

// get are the fields of a plain request.
func get(path string) []string {
	return []string{":method", "GET", ":scheme", "http", ":path", path, ":authority", "a.example"}
}

func post(path string, more ...string) []string {
	return append([]string{":method", "POST", ":scheme", "http", ":path", path, ":authority", "a.example"}, more...)
}

// next reads frames up to one that is wanted. Settings are acknowledged, windows are not opened.
func (h *h2raw) next(want func(http2.Frame) bool) http2.Frame {
	h.t.Helper()
	for {
		frame, err := h.ReadFrame()
		if err != nil {
			h.t.Fatal("no such frame before the end: ", err)
		}
		if s, is := frame.(*http2.SettingsFrame); is && !s.IsAck() {
			h.WriteSettingsAck()
		}
		if want(frame) {
			return frame
		}
	}
}

// body reads a stream's data, and lets more come as it does.
func (h *h2raw) body(stream uint32) string {
	h.t.Helper()
	var out bytes.Buffer
	for {
		f := h.next(func(f http2.Frame) bool { return f.Header().StreamID == stream })
		if data, is := f.(*http2.DataFrame); is {
			out.Write(data.Data())
			if n := uint32(len(data.Data())); n > 0 && !data.StreamEnded() {
				h.WriteWindowUpdate(0, n)
				h.WriteWindowUpdate(stream, n)
			}
			if data.StreamEnded() {
				return out.String()
			}
		}
	}
}

// A response goes no further than the client's windows, and goes on when they open.
func TestHTTP2FlowControl(t *testing.T) {
	text := strings.Repeat("0123456789", 30_000)
	s := start(t, pool(handler(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, text) })))
	h := newRaw(s)
	h.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1000})
	h.headers(1, true, get("/")...)
	got := 0
	for got < 1000 {
		f := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameData }).(*http2.DataFrame)
		if got += len(f.Data()); got > 1000 {
			t.Fatalf("%d bytes came through a window of 1000", got)
		}
	}
	// Whatever else is asked is answered meanwhile.
	h.WritePing(false, [8]byte{1})
	h.next(func(f http2.Frame) bool {
		if f.Header().Type == http2.FrameData {
			t.Fatal("more came than the window allows")
		}
		return f.Header().Type == http2.FramePing
	})
	h.WriteWindowUpdate(1, 200_000)
	for got < len(text) {
		f := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameData }).(*http2.DataFrame)
		got += len(f.Data())
		h.WriteWindowUpdate(0, uint32(len(f.Data())))
		h.WriteWindowUpdate(1, uint32(len(f.Data())))
	}
	if got != len(text) {
		t.Errorf("%d bytes, want %d", got, len(text))
	}
}

// A client that opens no window loses its request, and neither the endpoint nor other requests of the connection wait for it.
func TestHTTP2StalledClient(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	s := start(t, pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/large" {
			io.WriteString(w, "small")
			return
		}
		for {
			if _, err := w.Write(make([]byte, 10_000)); err != nil {
				close(gone)
				return
			}
		}
	})), func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
	h := newRaw(s)
	h.headers(1, true, get("/large")...)
	h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameData })
	h.WriteWindowUpdate(0, 1<<20)
	h.headers(3, true, get("/small")...)
	if got := h.body(3); got != "small" {
		t.Errorf("%q", got)
	}
	if f := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameRSTStream }); f.Header().StreamID != 1 {
		t.Error(f)
	}
	select {
	case <-gone:
	case <-time.After(patience):
		t.Error("the endpoint is held")
	}
}

// Bodies that came with the head are sent with it, and all others while they come; with their trailers.
func TestHTTP2Bodies(t *testing.T) {
	type seen struct {
		length  int64
		body    string
		trailer string
		cookie  string
	}
	requests := make(chan seen, 1)
	s := start(t, pool(handler(t, func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		requests <- seen{r.ContentLength, string(body), r.Trailer.Get("X-Sum"), r.Header.Get("Cookie")}
	})))
	h := newRaw(s)
	large := strings.Repeat("a", 50_000)
	stream := uint32(1)
	for _, tc := range []struct {
		name   string
		fields []string
		send   func(id uint32)
		want   seen
	}{
		{"none", post("/"), nil, seen{}},
		{"with the head", post("/"), func(id uint32) { h.WriteData(id, true, []byte("small")) }, seen{length: 5, body: "small"}},
		{"in pieces", post("/", "content-length", "6"), func(id uint32) {
			h.WriteData(id, false, []byte("abc"))
			h.WriteDataPadded(id, true, []byte("def"), make([]byte, 50))
		}, seen{length: 6, body: "abcdef"}},
		{"large", post("/"), func(id uint32) {
			for i := 0; i < len(large); i += 10_000 {
				h.WriteData(id, false, []byte(large[i:i+10_000]))
			}
			h.WriteData(id, true, nil)
		}, seen{length: -1, body: large}},
		{"with a trailer", post("/", "trailer", "x-sum"), func(id uint32) {
			h.WriteData(id, false, []byte("abc"))
			h.headers(id, true, "x-sum", "3")
		}, seen{length: -1, body: "abc", trailer: "3"}},
		{"empty after all", post("/", "cookie", "a=b", "cookie", "c=d"), func(id uint32) { h.WriteData(id, true, nil) }, seen{cookie: "a=b; c=d"}},
	} {
		h.headers(stream, tc.send == nil, tc.fields...)
		if tc.send != nil {
			tc.send(stream)
		}
		select {
		case got := <-requests:
			// What came after the head had to be passed on has no length.
			if got.length != tc.want.length && (got.length != -1 || tc.fields[len(tc.fields)-2] == "content-length") || got.body != tc.want.body || got.trailer != tc.want.trailer || got.cookie != tc.want.cookie {
				t.Errorf("%s: length %d, %d bytes, trailer %q, cookie %q", tc.name, got.length, len(got.body), got.trailer, got.cookie)
			}
		case <-time.After(patience):
			t.Fatal(tc.name, ": no request came")
		}
		if got := h.answer(stream); got != "200" {
			t.Errorf("%s: %s", tc.name, got)
		}
		stream += 2
	}
}

// What breaks the rules of HTTP/2 ends the stream or the connection, with the reason that RFC 9113 has for it.
func TestHTTP2Violations(t *testing.T) {
	s := start(t, pool(named(t, "a")))
	for _, tc := range []struct {
		name string
		do   func(h *h2raw)
		want string
	}{
		{"length is not the body's", func(h *h2raw) {
			h.headers(1, false, post("/", "content-length", "5")...)
			h.WriteData(1, true, []byte("abc"))
		}, "PROTOCOL_ERROR"},
		{"more than the length", func(h *h2raw) {
			h.headers(1, false, post("/", "content-length", "2")...)
			h.WriteData(1, false, []byte("abc"))
		}, "PROTOCOL_ERROR"},
		{"trailer with a pseudo field", func(h *h2raw) {
			h.headers(1, false, post("/")...)
			h.headers(1, true, ":path", "/")
		}, "PROTOCOL_ERROR"},
		{"trailer with a length", func(h *h2raw) {
			h.headers(1, false, post("/")...)
			h.headers(1, true, "content-length", "1")
		}, "PROTOCOL_ERROR"},
		{"trailer without the end", func(h *h2raw) {
			h.headers(1, false, post("/")...)
			h.headers(1, false, "a", "b")
		}, "PROTOCOL_ERROR"},
		{"even stream", func(h *h2raw) { h.headers(2, true, get("/")...) }, "GOAWAY PROTOCOL_ERROR"},
		{"stream that went down", func(h *h2raw) {
			h.headers(5, true, get("/")...)
			h.headers(3, true, get("/")...)
		}, "GOAWAY PROTOCOL_ERROR"},
		{"data for nothing", func(h *h2raw) { h.WriteData(1, true, nil) }, "GOAWAY PROTOCOL_ERROR"},
		{"window of a stream too large", func(h *h2raw) {
			h.headers(1, false, post("/")...)
			h.WriteWindowUpdate(1, 1<<31-1)
		}, "FLOW_CONTROL_ERROR"},
		{"window too large", func(h *h2raw) { h.WriteWindowUpdate(0, 1<<31-1) }, "GOAWAY FLOW_CONTROL_ERROR"},
		{"push", func(h *h2raw) {
			h.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true})
		}, "GOAWAY PROTOCOL_ERROR"},
		{"garbage for a header", func(h *h2raw) {
			h.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
		}, "GOAWAY COMPRESSION_ERROR"},
	} {
		h := newRaw(s)
		tc.do(h)
		if got := h.answer(1); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
		h.c.Close()
	}
}

// Streams that the server has to reset count like those that the client resets: both let a client begin more than it waits for.
func TestHTTP2ResetsByServer(t *testing.T) {
	s := start(t, pool(named(t, "a")))
	h := newRaw(s)
	h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameSettings }) // nothing is written from here after this
	go func() {
		for id := uint32(1); ; id += 2 {
			if h.headers(id, false, post("/")...) != nil || h.WriteWindowUpdate(id, 1<<31-1) != nil {
				return
			}
		}
	}()
	frame := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameGoAway })
	if code := frame.(*http2.GoAwayFrame).ErrCode; code != http2.ErrCodeEnhanceYourCalm {
		t.Error(code)
	}
	unharmed(t, s)
	eventually(t, "no request is left over", func() bool { return s.server.Stats("test").Active.Load() == 0 })
}

func TestHTTP2IdleEnds(t *testing.T) {
	t.Parallel()
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
	h := newRaw(s)
	h.headers(1, true, get("/")...)
	f := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameGoAway }).(*http2.GoAwayFrame)
	if f.ErrCode != http2.ErrCodeNo || f.LastStreamID != 1 {
		t.Error(f)
	}
	// One that sends only the preface has the time of a header.
	s.set(config.Listener{Limits: config.Limits{HeaderTimeout: time.Second}}, map[string]*config.Pool{"a": pool(named(t, "a"))})
	c := s.dial()
	io.WriteString(c, wire.Preface)
	if _, err := io.Copy(io.Discard, c); err != nil {
		t.Error(err)
	}
}

// A listener that drains asks first for no more requests, and ends the connection after those that came nevertheless.
func TestHTTP2GoAway(t *testing.T) {
	t.Parallel()
	end := make(chan bool)
	s := start(t, pool(handler(t, func(w http.ResponseWriter, _ *http.Request) {
		<-end
		io.WriteString(w, "whole")
	})))
	h := newRaw(s)
	h.headers(1, true, get("/")...)
	eventually(t, "the request has begun", func() bool { return s.server.Stats("test").Active.Load() == 1 })
	s.drain()
	goAway := func() *http2.GoAwayFrame {
		return h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameGoAway }).(*http2.GoAwayFrame)
	}
	if f := goAway(); f.LastStreamID != 1<<31-1 || f.ErrCode != http2.ErrCodeNo {
		t.Error("first ", f)
	}
	h.headers(3, true, get("/")...)
	if f := goAway(); f.LastStreamID != 3 || f.ErrCode != http2.ErrCodeNo {
		t.Error("second ", f)
	}
	close(end)
	for range 2 {
		h.next(func(f http2.Frame) bool { d, is := f.(*http2.DataFrame); return is && d.StreamEnded() })
	}
	s.conns.Wait()
}

// Responses of many streams at once arrive whole and unmixed.
func TestHTTP2ManyStreams(t *testing.T) {
	cfg := pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, strings.Repeat(r.URL.Path, 1+len(r.URL.Path)*500))
	}))
	cfg.ConnectTimeout = patience
	s := start(t, cfg, withTLS)
	c := client(t, true)
	var wg sync.WaitGroup
	for i := range 400 {
		wg.Go(func() {
			path := fmt.Sprintf("/%d", i)
			res, err := c.Get(s.url(path))
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			if body, err := io.ReadAll(res.Body); err != nil || string(body) != strings.Repeat(path, 1+len(path)*500) {
				t.Errorf("%s: %d bytes, %v", path, len(body), err)
			}
		})
	}
	wg.Wait()
}

// A header that does not fit into a frame goes on in others.
func TestHTTP2LargeResponseHeader(t *testing.T) {
	value := strings.Repeat("x", 40_000)
	s := start(t, pool(handler(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Large", value) })))
	h := newRaw(s)
	h.headers(1, true, get("/")...)
	f := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameHeaders }).(*http2.HeadersFrame)
	block := bytes.Clone(f.HeaderBlockFragment())
	for ended := f.HeadersEnded(); !ended; {
		more := h.next(func(f http2.Frame) bool { return f.Header().Type == http2.FrameContinuation }).(*http2.ContinuationFrame)
		block = append(block, more.HeaderBlockFragment()...)
		ended = more.HeadersEnded()
	}
	fields, err := hpack.NewDecoder(4096, nil).DecodeFull(block)
	if err != nil {
		t.Fatal(err)
	}
	for _, field := range fields {
		if field.Name == "large" && field.Value == value {
			return
		}
	}
	t.Error("the field is not there")
}
