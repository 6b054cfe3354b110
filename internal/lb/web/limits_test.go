package web

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"portal/internal/lb/config"
)

// unharmed sees that another client is served.
func unharmed(t *testing.T, s *site) {
	t.Helper()
	c := s.dial()
	defer c.Close()
	if res, _ := s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); res.StatusCode != 200 {
		t.Error("another client gets ", res.Status)
	}
}

// A header that comes byte by byte ends after the time for headers, not after each byte's.
func TestSlowHeader(t *testing.T) {
	t.Parallel()
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) { l.Limits.HeaderTimeout = time.Second })
	c := s.dial()
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n")
		for i := 0; ; i++ {
			if _, err := fmt.Fprintf(c, "X-%d: y\r\n", i); err != nil {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	unharmed(t, s)
	res, _ := s.response(bufio.NewReader(c), "GET")
	if res.StatusCode != 408 {
		t.Error(res.Status)
	}
	c.Close()
	<-stop
}

func TestSlowBody(t *testing.T) {
	t.Parallel()
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) { l.Limits.HeaderTimeout = time.Second })
	for _, framing := range []string{"Content-Length: 1000000", "Transfer-Encoding: chunked"} {
		c := s.dial()
		stop := make(chan struct{})
		go func() {
			defer close(stop)
			fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\n%s\r\n\r\n", framing)
			for {
				if _, err := io.WriteString(c, "1\r\na\r\n"); err != nil {
					return
				}
				time.Sleep(100 * time.Millisecond)
			}
		}()
		unharmed(t, s)
		res, _ := s.response(bufio.NewReader(c), "POST")
		if res.StatusCode != 408 {
			t.Error(framing, res.Status)
		}
		c.Close()
		<-stop
	}
}

func TestIdleConnectionCloses(t *testing.T) {
	t.Parallel()
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
	c := s.dial()
	r := bufio.NewReader(c)
	s.ask(c, r, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET")
	if _, err := r.ReadByte(); err != io.EOF {
		t.Error(err)
	}
	// One that never sends anything, too.
	if _, err := s.dial().Read(make([]byte, 1)); err != io.EOF {
		t.Error(err)
	}
}

func TestStalledResponseEnds(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
		r.ReadByte()
		close(gone)
	})
	s := start(t, pool(at), func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
	c := s.dial()
	r := bufio.NewReader(c)
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	if _, err := readHead(r); err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(r); string(body) != "abc" {
		t.Errorf("%q %v", body, err)
	}
	<-gone
}

// A watch on which nothing happens is no failure of its endpoint, which would be ejected for it.
func TestQuietResponseIsNoFailure(t *testing.T) {
	t.Parallel()
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		cfg := endpoint(t, protocol, func(w http.ResponseWriter, r *http.Request) {
			http.NewResponseController(w).Flush()
			<-r.Context().Done()
		})
		s := start(t, cfg, func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second / 2 })
		res, err := http.Get(s.url("/"))
		if err != nil {
			t.Fatal(protocol, err)
		}
		if _, err := io.ReadAll(res.Body); err == nil {
			t.Error(protocol, ": the response looks complete")
		}
		e := s.pool("a").Endpoints()[0]
		eventually(t, "the request ends", func() bool { return e.Active() == 0 })
		if n := e.Counters.Failures.Load(); n != 0 {
			t.Errorf("%s: %d failures of the endpoint", protocol, n)
		}
	}
}

// A client that does not read must not hold an endpoint for ever.
func TestClientThatDoesNotRead(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		defer close(gone)
		readHead(r)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		piece := fmt.Sprintf("%x\r\n%s\r\n", 100_000, strings.Repeat("a", 100_000))
		for {
			if _, err := io.WriteString(c, piece); err != nil {
				return
			}
		}
	})
	s := start(t, pool(at), func(_ *site, l *config.Listener) { l.IdleTimeout = time.Second })
	c := s.dial()
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	select {
	case <-gone:
	case <-time.After(patience):
		t.Error("the endpoint is held")
	}
}

// A client that asks and asks and reads no answer must not hold its connection, also if no endpoint is behind the answers.
func TestClientThatDoesNotReadOwnAnswers(t *testing.T) {
	t.Parallel()
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) {
		l.IdleTimeout, l.Routes = time.Second, []config.Route{{Status: 404}}
	})
	c := s.dial()
	var err error
	for err == nil {
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection is held")
	}
}

// The same over HTTP/2, where a stream without a window keeps who writes waiting.
func TestHTTP2ClientThatDoesNotRead(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("a", 1<<20)
	for name, routes := range map[string][]config.Route{"endpoint": {{Pool: "a"}}, "own answer": {{Status: 404, Message: big}}} {
		s := start(t, pool(handler(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, big) })), func(_ *site, l *config.Listener) {
			l.IdleTimeout, l.Routes = time.Second, routes
		})
		h := newRaw(s)
		if err := h.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
			t.Fatal(err)
		}
		if err := h.headers(1, true, ":method", "GET", ":scheme", "http", ":path", "/", ":authority", "a.example"); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+": the request begins", func() bool { return s.server.Stats("test").Active.Load() == 1 })
		eventually(t, name+": the request ends", func() bool { return s.server.Stats("test").Active.Load() == 0 })
	}
}

func TestBodyLimit(t *testing.T) {
	s := start(t, pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			panic(http.ErrAbortHandler)
		}
	})), func(s *site, l *config.Listener) {
		withTLS(s, l)
		l.Limits.BodyBytes = 1000
	})
	for _, two := range []bool{false, true} {
		for _, chunked := range []bool{false, true} {
			for size, want := range map[int]int{1000: 200, 1001: 413, 100_000: 413} {
				req, _ := http.NewRequest("POST", s.url("/"), strings.NewReader(strings.Repeat("a", size)))
				if chunked {
					req.ContentLength = -1
				}
				res, err := client(t, two).Do(req)
				if err != nil {
					t.Fatal(err)
				}
				if res.StatusCode != want {
					t.Errorf("HTTP/2 %v, chunked %v, %d bytes: %s; want %d", two, chunked, size, res.Status, want)
				}
			}
		}
	}
}

// A client that sends far more than it may still gets to read why.
func TestRefusalIsReadable(t *testing.T) {
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) { l.Limits.BodyBytes = 1000 })
	for range 20 {
		c := s.dial()
		go func() {
			fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", 5<<20)
			c.Write(make([]byte, 5<<20))
		}()
		if res, _ := s.response(bufio.NewReader(c), "POST"); res.StatusCode != 413 {
			t.Error(res.Status)
		}
		c.Close()
	}
	// Refusals of HEAD have no body.
	c := s.dial()
	r := bufio.NewReader(c)
	io.WriteString(c, "HEAD / HTTP/1.1\r\nHost : a\r\n\r\n")
	res, err := http.ReadResponse(r, &http.Request{Method: "HEAD"})
	if err != nil || res.StatusCode != 400 {
		t.Fatal(res, err)
	}
	if rest, err := io.ReadAll(r); len(rest) > 0 || err != nil {
		t.Errorf("%q %v", rest, err)
	}
}

func TestHeaderLimit(t *testing.T) {
	s := start(t, pool(named(t, "a")), func(_ *site, l *config.Listener) { l.Limits.HeaderBytes = 40_000 })
	for size, want := range map[int]int{20_000: 200, 39_000: 200, 41_000: 431} {
		c := s.dial()
		res, _ := s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\nA: "+strings.Repeat("a", size)+"\r\n\r\n", "GET")
		if res.StatusCode != want {
			t.Errorf("%d bytes: %s; want %d", size, res.Status, want)
		}
	}
}

// Idle connections keep no buffers: they are counted in memory of this process, which is also the client.
func TestIdleConnectionsAreSmall(t *testing.T) {
	const n = 2000
	s := start(t, pool(named(t, "a")))
	before := used()
	for range n {
		c := s.dial()
		if res, _ := s.ask(c, bufio.NewReaderSize(c, 512), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); res.StatusCode != 200 {
			t.Fatal(res.Status)
		}
	}
	eventually(t, "all connections are parked", func() bool { return s.parked() == n })
	each := (used() - before) / n
	t.Logf("%d bytes for each of %d idle connections, with the client's part", each, n)
	if each > slack*8<<10 {
		t.Errorf("%d bytes for each", each)
	}
}

// used is the memory of this process in bytes.
func used() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// Tunnels are idle most of the time, too: WebSockets of thousands of browsers.
func TestIdleTunnelsAreSmall(t *testing.T) {
	const n = 500
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		io.CopyBuffer(struct{ io.Writer }{c}, struct{ io.Reader }{c}, make([]byte, 512))
	})
	for name, change := range map[string]func(*site, *config.Listener){"plain": func(*site, *config.Listener) {}, "TLS": withTLS} {
		s := start(t, pool(at), change)
		before := used()
		for range n {
			c := s.dial()
			if s.tls != nil {
				c = tls.Client(c, &tls.Config{InsecureSkipVerify: true})
			}
			r := bufio.NewReaderSize(c, 512)
			io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			if _, err := readHead(r); err != nil {
				t.Fatal(err)
			}
			word := make([]byte, 5)
			io.WriteString(c, "hello")
			if _, err := io.ReadFull(r, word); err != nil || string(word) != "hello" {
				t.Fatalf("%q %v", word, err)
			}
		}
		each := (used() - before) / n
		t.Logf("%s: %d bytes for each of %d idle tunnels, with the client's and the endpoint's part", name, each, n)
		if most := uint64(slack * 40 << 10); each > most {
			t.Errorf("%s: %d bytes for each, want at most %d", name, each, most)
		}
	}
}
