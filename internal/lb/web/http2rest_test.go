package web

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"portal/internal/lb/config"
)

// TestHTTP2Rests: a connection without requests keeps no streams and no goroutine that writes, and answers the next request all the same.
func TestHTTP2Rests(t *testing.T) {
	for _, secure := range []bool{true, false} {
		cfg := endpoint(t, config.HTTP, echo)
		s := start(t, cfg, func(s *site, l *config.Listener) {
			if secure {
				withTLS(s, l)
			}
		})
		transport := &http.Transport{TLSClientConfig: client(t, true).Transport.(*http.Transport).TLSClientConfig, Protocols: new(http.Protocols)}
		transport.Protocols.SetHTTP2(secure)
		transport.Protocols.SetUnencryptedHTTP2(!secure)
		defer transport.CloseIdleConnections()
		for round := range 3 {
			reused := false
			trace := &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { reused = i.Reused }}
			body := strings.Repeat("x", 40_000) // more than a buffer
			req, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), "POST", s.url("/"), strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			res, err := transport.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(res.Body)
			if err != nil || !strings.Contains(string(text), body) || res.ProtoMajor != 2 || reused != (round > 0) {
				t.Fatalf("secure %v, round %d: %d bytes by %s over the same connection: %v; %v", secure, round, len(text), res.Proto, reused, err)
			}
			for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
				s.server.watched.mu.Lock()
				watched := len(s.server.watched.all)
				s.server.watched.mu.Unlock()
				if watched == 1 && !runs("(*http2Client).write") {
					break
				}
				if time.Now().After(end) {
					t.Fatalf("secure %v, round %d: %d are watched, want the connection alone; a goroutine writes: %v", secure, round, watched, runs("(*http2Client).write"))
				}
			}
		}
	}
}

// TestHTTP2RestsWithHeaderTables: header fields mean the same to both sides after any rests, whatever sizes of their table the client asks for between.
func TestHTTP2RestsWithHeaderTables(t *testing.T) {
	n := 0
	cfg := endpoint(t, config.HTTP, func(w http.ResponseWriter, _ *http.Request) {
		n++
		w.Header().Set("X-Number", strconv.Itoa(n))
		w.Header().Set("X-Third", strconv.Itoa(n/3))
		w.Header().Set("X-Long", strings.Repeat("x", 10*n))
	})
	h := newRaw(start(t, cfg))
	stream := uint32(1)
	for _, sizes := range [][]uint32{nil, nil, {100}, nil, {4096}, {0, 4096}, {200}, {0, 3000}} {
		for _, size := range sizes {
			if err := h.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: size}); err != nil {
				t.Fatal(err)
			}
			h.dec.SetAllowedMaxDynamicTableSize(size)
		}
		for range 5 {
			if err := h.headers(stream, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/"); err != nil {
				t.Fatal(err)
			}
			if got := h.answer(stream); got != "200" {
				t.Fatalf("request %d, sizes %d: %s", n, sizes, got)
			}
			for name, value := range map[string]string{"x-number": strconv.Itoa(n), "x-third": strconv.Itoa(n / 3), "x-long": strings.Repeat("x", 10*n)} {
				if !slices.Contains(h.got, hpack.HeaderField{Name: name, Value: value}) {
					t.Fatalf("request %d, sizes %d: %v, want %s: %q", n, sizes, h.got, name, value)
				}
			}
			stream += 2
		}
		eventually(t, "the connection rests", func() bool { return !runs("(*http2Client).write") })
	}
}

// TestHTTP2RestsBetweenTableSizes: the next header announces the smallest size that the client has asked for, also if the connection rests before its next request.
func TestHTTP2RestsBetweenTableSizes(t *testing.T) {
	h := newRaw(start(t, pool(named(t, "one"))))
	ask := func(stream uint32) {
		t.Helper()
		if err := h.headers(stream, true, ":method", "GET", ":scheme", "http", ":authority", "a", ":path", "/"); err != nil {
			t.Fatal(err)
		}
		if got := h.answer(stream); got != "200" {
			t.Fatal(got)
		}
	}
	rest := func() { eventually(t, "the connection rests", func() bool { return !runs("(*http2Client).write") }) }
	ask(1)
	rest()
	for _, size := range []uint32{0, 4096} {
		if err := h.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: size}); err != nil {
			t.Fatal(err)
		}
	}
	for acks := 0; acks < 2; {
		frame, err := h.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if f, is := frame.(*http2.SettingsFrame); is && f.IsAck() {
			acks++
		}
	}
	rest()
	ask(3)
	if want := []byte{0x20, 0x3f, 0xe1, 0x1f}; !bytes.HasPrefix(h.block, want) {
		t.Errorf("the header begins with % x, want the sizes 0 and 4096: % x", h.block[:4], want)
	}
}

// runs says whether a goroutine is in a function.
func runs(name string) bool {
	buf := make([]byte, 1<<20)
	return strings.Contains(string(buf[:runtime.Stack(buf, true)]), name+"(")
}

// pieces is a connection that is read from a reader.
type pieces struct {
	net.Conn
	r io.Reader
}

func (p pieces) Read(b []byte) (int, error) { return p.r.Read(b) }

// TestFrameReader: nothing is lost, in whatever pieces it comes and however often the buffer is given back.
func TestFrameReader(t *testing.T) {
	text := strings.Repeat("0123456789abcdef", 5000)
	for name, from := range map[string]io.Reader{
		"whole": strings.NewReader(text), "bytes": iotest.OneByteReader(strings.NewReader(text)), "halves": iotest.HalfReader(strings.NewReader(text)),
		"with the end": iotest.DataErrReader(strings.NewReader(text)),
	} {
		for _, secure := range []bool{true, false} {
			if !secure {
				from = strings.NewReader(text)
			}
			f := newFrameReader(pieces{r: from}, secure)
			var got strings.Builder
			for size := 1; ; size = size*3%(bufferSize+100) + 1 {
				p := make([]byte, size)
				n, err := f.Read(p)
				got.Write(p[:n])
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				f.rest()
				if empty := len(f.buffered()) == 0; empty && secure && f.buf != nil {
					t.Fatalf("%s: an empty buffer is kept", name)
				}
			}
			if got.String() != text {
				t.Errorf("%s, secure %v: %d bytes of %d", name, secure, got.Len(), len(text))
			}
		}
	}
}
