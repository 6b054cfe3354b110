package apiserver

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"

	restclient "k8s.io/client-go/rest"
)

// TestConnectionsLeaveFiles: what clients get, what is kept for etcd and what is for other parts of the process are never more than there is.
func TestConnectionsLeaveFiles(t *testing.T) {
	for _, files := range []int{256, 1024, 4096, 1 << 20} {
		for _, beside := range []float64{0, 1. / 8, 3. / 8} {
			got := connectionsOf(files, beside)
			if got < minConnections || got+max(reservedFiles, files/8)+int(float64(files)*beside) > files {
				t.Errorf("%d files, %v of them for other parts: %d connections", files, beside, got)
			}
		}
	}
	if got := connectionsOf(64, 1./8); got != minConnections {
		t.Errorf("hardly any files: %d connections, want %d", got, minConnections)
	}
}

// TestIdleConnectionsAreBounded: connections that ask for nothing are closed after a while, and at the limit they make room
// for those of clients; a client's own connection stays.
func TestIdleConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	s := start(t, testOptions(t))
	config, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	client, err := restclient.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	get := func() error {
		resp, err := client.Get(config.Host + servicesPath)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	if err := get(); err != nil {
		t.Fatal(err)
	}
	s.listener.mu.Lock()
	s.listener.max, s.listener.timeout = s.listener.open+5, time.Second
	limit := s.listener.max
	s.listener.mu.Unlock()
	var idle []net.Conn
	for range 50 {
		conn, err := net.Dial("tcp", s.Address())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		idle = append(idle, conn)
	}
	if err := get(); err != nil {
		t.Errorf("a client that was there: %v", err)
	}
	client.CloseIdleConnections()
	if err := get(); err != nil {
		t.Errorf("a client that comes: %v", err)
	}
	s.listener.mu.Lock()
	if s.listener.open > limit {
		t.Errorf("%d connections are open, want %d at most", s.listener.open, limit)
	}
	s.listener.mu.Unlock()
	for i, conn := range idle {
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := conn.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
			t.Fatalf("idle connection %d: %v, want it to be closed", i, err)
		}
	}
}

// TestOneClientAddressForSeveralConnections: a client that uses one address and port of its own for connections to two addresses of
// the server leaves nothing behind that is taken for a connection, and so does not get around the limit.
func TestOneClientAddressForSeveralConnections(t *testing.T) {
	t.Parallel()
	control := func(set func(fd int) error) func(string, string, syscall.RawConn) error {
		return func(_, _ string, raw syscall.RawConn) error {
			var failed error
			err := raw.Control(func(fd uintptr) { failed = set(int(fd)) })
			return errors.Join(err, failed)
		}
	}
	// All addresses of loopback, and of nothing else.
	config := net.ListenConfig{Control: control(func(fd int) error { return syscall.BindToDevice(fd, "lo") })}
	inner, err := config.Listen(t.Context(), "tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	l := limitConnections(inner, 2, 1, time.Minute, func() {})
	defer l.Close()
	accepted := make(chan net.Conn, 16)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	dialer := net.Dialer{Control: control(func(fd int) error { return syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) })}
	_, port, err := net.SplitHostPort(inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	dial := func(to string) net.Conn {
		conn, err := dialer.Dial("tcp4", net.JoinHostPort(to, port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	own := dial("127.0.0.1")
	dialer.LocalAddr = own.LocalAddr()
	dial("127.0.0.2")
	for _, conn := range []net.Conn{<-accepted, <-accepted} {
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	dialer.LocalAddr = nil
	for range 5 {
		dial("127.0.0.1")
	}
	for range 5 {
		<-accepted
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open > 2 || l.unauthenticated.Len() != l.open || len(l.byAddress) != l.open {
		t.Errorf("%d connections are open, want 2 at most; %d and %d are kept as unauthenticated", l.open, l.unauthenticated.Len(), len(l.byAddress))
	}
}

// TestKnownToOpenHandler: at the limit, the connection of somebody whom a handler beside the API knows stays, and that of somebody whom it
// does not know makes room.
func TestKnownToOpenHandler(t *testing.T) {
	t.Parallel()
	s, stop := startStoppable(t, testOptions(t), func(s *Server) {
		s.HandleOpen("/page/", http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Cookie") != "" {
				s.KnownClient(r)
			}
		}))
	})
	defer stop()
	get := func(conn *tls.Conn, header string) error {
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(conn, "GET /page/ HTTP/1.1\r\nHost: %s\r\n%s\r\n", s.Address(), header); err != nil {
			return err
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			return err
		}
		return resp.Body.Close()
	}
	page := func(header string) *tls.Conn {
		conn, err := tls.Dial("tcp", s.Address(), &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // loopback
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		if err := get(conn, header); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	stranger, known := page(""), page("Cookie: session=1\r\n")
	s.listener.mu.Lock()
	s.listener.max = s.listener.open + 5
	s.listener.mu.Unlock()
	for range 50 {
		conn, err := net.Dial("tcp", s.Address())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	eventually(t, func() error {
		if err := get(stranger, ""); err == nil {
			return errors.New("the connection of somebody unknown did not make room")
		}
		return nil
	})
	if err := get(known, ""); err != nil {
		t.Errorf("the connection of somebody known: %v, want it to stay", err)
	}
}

// TestTooManyRequestsAreRefused: administrators, too, get 429 with Retry-After beyond --max-requests-inflight; probes don't.
func TestTooManyRequestsAreRefused(t *testing.T) {
	t.Parallel()
	opts := testOptions(t)
	opts.MaxInFlight, opts.MaxMutatingInFlight = 1, 1
	s := start(t, opts)
	config, err := clientcmd.BuildConfigFromFlags("", s.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	client, err := restclient.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	// One whose body does not end holds the only place. It sends its body when the server, which has admitted it, asks for it.
	tlsConfig, err := restclient.TLSConfigFor(config)
	if err != nil {
		t.Fatal(err)
	}
	holder := &http.Transport{TLSClientConfig: tlsConfig, ExpectContinueTimeout: time.Minute}
	defer holder.CloseIdleConnections()
	reader, writer := io.Pipe()
	request, err := http.NewRequest(http.MethodPost, config.Host+servicesPath, reader)
	if err != nil {
		t.Fatal(err)
	}
	request.Header = http.Header{"Content-Type": {"application/json"}, "Expect": {"100-continue"}}
	held := make(chan error, 1)
	go func() {
		resp, err := holder.RoundTrip(request)
		if err == nil {
			_ = resp.Body.Close()
		}
		held <- err
	}()
	if _, err := io.WriteString(writer, `{"apiVersion":"v1",`); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		resp, err := client.Post(config.Host+servicesPath, "application/json", strings.NewReader("{}"))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") == "" {
			return fmt.Errorf("%s, Retry-After %q", resp.Status, resp.Header.Get("Retry-After"))
		}
		return nil
	})
	probe := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // loopback
	resp, err := probe.Get(config.Host + "/readyz")
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("a probe: %v %v", resp, err)
	}
	_ = writer.Close()
	if err := <-held; err != nil {
		t.Error(err)
	}
}
