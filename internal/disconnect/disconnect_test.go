package disconnect

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestGone: the context of a request whose connection was taken over ends with the client, and what was sent ahead is not lost.
func TestGone(t *testing.T) {
	ended := make(chan string, 1)
	server := httptest.NewServer(Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, buffered, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(buffered, "HTTP/1.1 101 Switching Protocols\r\n\r\n")
		_ = buffered.Flush()
		var got strings.Builder
		go func() { _, _ = io.Copy(&got, buffered) }()
		select {
		case <-r.Context().Done():
			ended <- got.String()
		case <-time.After(5 * time.Second):
			ended <- "the context does not end"
		}
	})))
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n\r\nahead")
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "101") {
		t.Fatal(line, err)
	}
	fmt.Fprint(conn, " and later")
	time.Sleep(50 * time.Millisecond)
	_ = conn.Close()
	if got := <-ended; got != "ahead and later" {
		t.Errorf("got %q", got)
	}
}

// TestNobodyReads: the end of a client is noticed also if whoever took the connection over does not read any more, as SPDY does not when the
// other side says that it goes; also over TLS, and not before it has gone.
func TestNobodyReads(t *testing.T) {
	began, ended := make(chan struct{}, 1), make(chan error, 1)
	handler := Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		began <- struct{}{}
		<-r.Context().Done()
		ended <- r.Context().Err()
	}))
	for _, secure := range []bool{false, true} {
		server := httptest.NewUnstartedServer(handler)
		var conn net.Conn
		var err error
		if secure {
			server.StartTLS()
			conn, err = tls.Dial("tcp", server.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // of the test
		} else {
			server.Start()
			conn, err = net.Dial("tcp", server.Listener.Addr().String())
		}
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n\r\n")
		<-began
		fmt.Fprint(conn, "what nobody reads")
		select {
		case <-ended:
			t.Errorf("TLS %v: it ended while its client was there", secure)
		case <-time.After(2*watchInterval + watchInterval/2):
		}
		_ = conn.Close()
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			t.Fatalf("TLS %v: it does not end", secure)
		}
		server.Close()
	}
}

// TestClosed: whoever took the connection over and closes it ends the request.
func TestClosed(t *testing.T) {
	ended := make(chan struct{})
	server := httptest.NewServer(Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = conn.Close()
		<-r.Context().Done()
		close(ended)
	})))
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Error("it does not end")
	}
}
