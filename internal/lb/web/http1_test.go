package web

import (
	"bufio"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// heads is an endpoint that answers with the head that it got.
func heads(t testing.TB) func() *config.Pool {
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		for {
			head, err := readHead(r)
			if err != nil {
				return
			}
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(head), head)
		}
	})
	return func() *config.Pool { return pool(at) }
}

func TestHeadersForwarded(t *testing.T) {
	s := start(t, heads(t)())
	c := s.dial()
	r := bufio.NewReader(c)
	_, head := s.ask(c, r, "GET /a//b?x=%20|&y HTTP/1.1\r\nHost: Example.com:81\r\nX-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\nx_forwarded_proto: https\r\nX-Forwarded_For: 9.9.9.9\r\nX-Forwarded-Port: 1\r\n"+
		"Connection: keep-alive, X-Secret\r\nX-Secret: 1\r\nKeep-Alive: 5\r\nTE: gzip\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nProxy-Connection: x\r\nProxy-Authorization: x\r\nX-Kept:  v \r\n\r\n", "GET")
	contains(t, head, "GET /a//b?x=%20|&y HTTP/1.1\r\nHost: Example.com:81\r\n", "X-Forwarded-For: 1.2.3.4, 127.0.0.1\r\n", "X-Forwarded-Proto: http\r\n",
		fmt.Sprintf("X-Forwarded-Port: %d\r\n", s.address.Port()), "X-Kept: v\r\n")
	lacks(t, head, "x-secret", "keep-alive", "te:", "upgrade", "http2-settings", "proxy-", "https", "Connection", "9.9.9.9")
	// The same connection serves the next request; HTTP/1.0 has no host.
	_, head = s.ask(c, r, "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "GET")
	contains(t, head, "GET / HTTP/1.1\r\nHost: "+s.address.String()+"\r\n")
	_, head = s.ask(c, r, "GET http://example.com/x HTTP/1.1\r\nHost: example.com\r\n\r\n", "GET")
	contains(t, head, "GET /x HTTP/1.1\r\nHost: example.com\r\n")
}

func TestTrustedProxy(t *testing.T) {
	s := start(t, heads(t)(), func(s *site, _ *config.Listener) { s.trusted = true })
	c := s.dial()
	_, head := s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 1.2.3.4\r\nX-Forwarded-Proto: https\r\n\r\n", "GET")
	contains(t, head, "X-Forwarded-For: 1.2.3.4, 127.0.0.1\r\n", "X-Forwarded-Proto: https\r\n", fmt.Sprintf("X-Forwarded-Port: %d\r\n", s.address.Port()))
	lacks(t, head, "X-Forwarded-Proto: http\r\n")
}

func TestConnectionsKept(t *testing.T) {
	var conns atomic.Int64
	at := raw(t, func(n int, c net.Conn, r *bufio.Reader) {
		conns.Add(1)
		for {
			if _, err := readHead(r); err != nil {
				return
			}
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
		}
	})
	s := start(t, pool(at))
	c := s.dial()
	r := bufio.NewReader(c)
	for range 3 {
		// Two requests at once are answered one after the other.
		if _, body := s.ask(c, r, strings.Repeat("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 2), "GET"); body != "x" {
			t.Fatal(body)
		}
		if _, body := s.response(r, "GET"); body != "x" {
			t.Fatal(body)
		}
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections to the endpoint for requests one after the other", n)
	}
}

func TestResponseFraming(t *testing.T) {
	for _, tc := range []struct {
		name, method, minor, response string
		status                        int
		body                          string
		header                        string // expected
		closes                        bool
	}{
		{"length", "GET", "1", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", 200, "abc", "", false},
		{"empty reason", "GET", "1", "HTTP/1.1 200 \r\nContent-Length: 3\r\n\r\nabc", 200, "abc", "", false},
		{"chunked", "GET", "1", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;x=y\r\nd\r\n0\r\n\r\n", 200, "abcd", "", false},
		{"chunked to 1.0", "GET", "0", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 200, "abc", "", true},
		{"until close", "GET", "1", "HTTP/1.1 200 OK\r\n\r\nabc", 200, "abc", "", false},
		{"until close, 1.0", "GET", "1", "HTTP/1.0 200 OK\r\n\r\nabc", 200, "abc", "", false},
		{"until close to 1.0", "GET", "0", "HTTP/1.1 200 OK\r\n\r\nabc", 200, "abc", "", true},
		{"head", "HEAD", "1", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", 200, "", "Content-Length: 3", false},
		{"head without length", "HEAD", "1", "HTTP/1.1 200 OK\r\n\r\n", 200, "", "", false},
		{"204", "GET", "1", "HTTP/1.1 204 No Content\r\n\r\n", 204, "", "", false},
		{"304", "GET", "1", "HTTP/1.1 304 Not Modified\r\nContent-Length: 3\r\n\r\n", 304, "", "Content-Length: 3", false},
		{"interim", "GET", "1", "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 103, "", "Link: x", false},
		{"both framings", "GET", "1", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 502, "", "", false},
		{"two lengths", "GET", "1", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 502, "", "", false},
		{"fold", "GET", "1", "HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 0\r\n\r\n", 502, "", "", false},
		{"bare LF", "GET", "1", "HTTP/1.1 200 OK\nContent-Length: 0\n\n", 502, "", "", false},
		{"not HTTP", "GET", "1", "220 smtp.example.com ready\r\n\r\n", 502, "", "", false},
		{"101 unasked", "GET", "1", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 502, "", "", false},
		{"nothing", "POST", "1", "", 502, "", "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
				if _, err := readHead(r); err == nil {
					io.WriteString(c, tc.response)
				}
			})
			s := start(t, pool(at))
			c := s.dial()
			r := bufio.NewReader(c)
			connection := ""
			if tc.minor == "0" {
				connection = "Connection: keep-alive\r\n"
			}
			fmt.Fprintf(c, "%s / HTTP/1.%s\r\nHost: a\r\n%s\r\n", tc.method, tc.minor, connection)
			res, err := http.ReadResponse(r, &http.Request{Method: tc.method})
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != tc.status || tc.status != 502 && string(body) != tc.body || res.Close != tc.closes {
				t.Errorf("%d %q close=%v", res.StatusCode, body, res.Close)
			}
			if name, value, _ := strings.Cut(tc.header, ": "); res.Header.Get(name) != value && name != "" {
				t.Errorf("%s is %q", name, res.Header.Get(name))
			}
		})
	}
}

func TestTruncatedResponseIsSeen(t *testing.T) {
	for _, response := range []string{"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"} {
		at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
			readHead(r)
			io.WriteString(c, response)
		})
		s := start(t, pool(at))
		res, err := http.Get(s.url("/"))
		if err != nil {
			continue // the reset came first
		}
		if body, err := io.ReadAll(res.Body); err == nil {
			t.Errorf("a response that was cut off looks complete: %q", body)
		}
	}
}

// HTTP/1.0 has a response of unknown length end with the connection: over TLS, one that was cut off must not end in good order.
func TestTruncatedResponseIsSeenOverTLS(t *testing.T) {
	s := start(t, pool(raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
	})), withTLS)
	c := tls.Client(s.dial(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.0"}})
	io.WriteString(c, "GET / HTTP/1.0\r\nHost: a\r\n\r\n")
	if answer, err := io.ReadAll(c); err == nil {
		t.Errorf("a response that was cut off looks complete: %q", answer)
	}
}

// echo answers with the body that it reads, as it reads it.
func echo(w http.ResponseWriter, r *http.Request) {
	http.NewResponseController(w).EnableFullDuplex()
	w.Header().Set("Trailer", "X-Sum")
	n, _ := io.Copy(flushing{w}, r.Body)
	w.Header().Set("X-Sum", fmt.Sprint(n, r.Trailer.Get("X-Client")))
}

type flushing struct{ http.ResponseWriter }

func (f flushing) Write(p []byte) (int, error) {
	n, err := f.ResponseWriter.Write(p)
	f.ResponseWriter.(http.Flusher).Flush()
	return n, err
}

func TestBodies(t *testing.T) {
	s := start(t, pool(handler(t, echo)))
	for _, size := range []int{0, 1, 1000, 20_000, 5 << 20} {
		for _, chunked := range []bool{false, true} {
			body := make([]byte, size)
			rand.Read(body)
			req, _ := http.NewRequest("POST", s.url("/"), strings.NewReader(string(body)))
			if chunked {
				req.ContentLength = -1
				req.Trailer = http.Header{"X-Client": {"+yes"}}
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(res.Body)
			if err != nil || string(got) != string(body) {
				t.Fatalf("%d bytes, chunked %v: got %d bytes, %v", size, chunked, len(got), err)
			}
			want := fmt.Sprint(size)
			if chunked && size > 0 { // without a body the client sends no trailer
				want += "+yes"
			}
			if sum := res.Trailer.Get("X-Sum"); sum != want {
				t.Errorf("%d bytes, chunked %v: trailer %q", size, chunked, sum)
			}
		}
	}
}

// Each piece must come through before the next is sent.
func TestStreamingBothWays(t *testing.T) {
	s := start(t, pool(handler(t, echo)))
	r, w := io.Pipe()
	req, _ := http.NewRequest("POST", s.url("/"), r)
	got := make(chan *http.Response)
	go func() {
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
		}
		got <- res
	}()
	io.WriteString(w, "0")
	res := <-got
	for i := range 5 {
		one := make([]byte, 1)
		if _, err := io.ReadFull(res.Body, one); err != nil || one[0] != byte('0'+i) {
			t.Fatalf("%q %v", one, err)
		}
		fmt.Fprint(w, i+1)
	}
	w.Close()
	io.Copy(io.Discard, res.Body)
}

func TestExpectContinue(t *testing.T) {
	s := start(t, pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refuse" {
			w.WriteHeader(403)
			return
		}
		io.Copy(w, r.Body)
	})))
	c := s.dial()
	r := bufio.NewReader(c)
	io.WriteString(c, "PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
	if line, _ := r.ReadString('\n'); line != "HTTP/1.1 100 Continue\r\n" {
		t.Fatalf("%q", line)
	}
	r.ReadString('\n')
	if res, body := s.ask(c, r, "abc", "PUT"); res.StatusCode != 200 || body != "abc" {
		t.Error(res.Status, body)
	}
	// Without 100 the client sends no body, so the connection can't go on.
	res, _ := s.ask(c, r, "PUT /refuse HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n", "PUT")
	if res.StatusCode != 403 {
		t.Error(res.Status)
	}
	if _, err := r.ReadByte(); err == nil {
		t.Error("the connection stays open")
	}
}

func TestEarlyResponse(t *testing.T) {
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		io.WriteString(c, "HTTP/1.1 413 Too Much\r\nContent-Length: 2\r\n\r\nno")
		io.Copy(io.Discard, r)
	})
	s := start(t, pool(at))
	c := s.dial()
	res, body := s.ask(c, bufio.NewReader(c), "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nabc", "POST")
	if res.StatusCode != 413 || body != "no" {
		t.Error(res.Status, body)
	}
}

func TestClientGone(t *testing.T) {
	t.Parallel()
	gone := make(chan error, 1)
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		_, err := r.ReadByte() // until the balancer gives up
		gone <- err
	})
	s := start(t, pool(at))
	c := s.dial()
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	eventually(t, "a request under way", func() bool { return s.server.Stats("test").Active.Load() == 1 })
	c.Close()
	select {
	case <-gone:
	case <-time.After(patience):
		t.Fatal("the endpoint goes on with a request that nobody waits for")
	}
}

func TestUpgrade(t *testing.T) {
	at := raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		head, _ := readHead(r)
		if !strings.Contains(head, "Upgrade: echo\r\n") || !strings.Contains(head, "Connection: Upgrade\r\n") {
			io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
			return
		}
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nhello")
		io.Copy(c, r)
		io.WriteString(c, "bye")
	})
	s := start(t, pool(at))
	c := s.dial()
	r := bufio.NewReader(c)
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nearly")
	head, err := readHead(r)
	if err != nil {
		t.Fatal(err)
	}
	contains(t, head, "101 Switching", "Upgrade: echo")
	both := make([]byte, len("helloearly"))
	io.ReadFull(r, both)
	if string(both) != "helloearly" {
		t.Fatalf("%q", both)
	}
	io.WriteString(c, "more")
	c.(*net.TCPConn).CloseWrite()
	rest, err := io.ReadAll(r)
	if string(rest) != "morebye" || err != nil {
		t.Fatalf("%q %v", rest, err)
	}
}
