package engine

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// sslConfig ends TLS at a listener with the given certificates.
func sslConfig(at netip.AddrPort, certs map[string]*config.Certificate, order []string, endpoints ...netip.AddrPort) config.Config {
	cfg := tcpConfig(at, endpoints...)
	cfg.Listeners[0].Protocol, cfg.Listeners[0].TLS = config.SSL, &config.TLS{Certificates: order}
	cfg.Certificates = certs
	return cfg
}

func handshake(t testing.TB, at netip.AddrPort, c *tls.Config) (*tls.Conn, error) {
	t.Helper()
	conn := tls.Client(dialTo(t, at), c)
	return conn, conn.Handshake()
}

func TestTLS(t *testing.T) {
	at, s, ca := unused(t), serve(t, echo), newAuthority(t)
	e := newEngine(t, Options{})
	certs := map[string]*config.Certificate{"a": ca.issue(t, "a.test"), "b": ca.issue(t, "b.test", "*.b.test"), "unused": ca.issue(t, "c.test")}
	cfg := sslConfig(at, certs, []string{"a", "b"}, s.address)
	cfg.Listeners[0].TLS.MinVersion = tls.VersionTLS12
	apply(t, e, cfg)
	for name, cert := range map[string]string{"a.test": "a.test", "A.Test": "a.test", "b.test": "b.test", "x.b.test": "b.test", "x.y.b.test": "a.test", "c.test": "a.test", "": "a.test"} {
		c, err := handshake(t, at, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		if got := c.ConnectionState().PeerCertificates[0].Subject.CommonName; got != cert {
			t.Errorf("asked for %q, got the certificate of %q, want that of %q", name, got, cert)
		}
		ask(t, c, "hello")
	}
	if _, err := handshake(t, at, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}); err == nil {
		t.Error("a client with TLS 1.1 was accepted")
	}

	// Half-closing, with the alert that says so.
	c, err := handshake(t, at, &tls.Config{ServerName: "a.test", RootCAs: ca.roots()})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, "last words")
	_ = c.CloseWrite()
	if got, err := io.ReadAll(c); err != nil || string(got) != "last words" {
		t.Errorf("got %q, %v", got, err)
	}

	// A new certificate is for new connections; the open ones and sessions to resume stay.
	open, err := handshake(t, at, &tls.Config{ServerName: "a.test", RootCAs: ca.roots()})
	if err != nil {
		t.Fatal(err)
	}
	before := e.listeners[at].state.Load().tls
	apply(t, e, cfg)
	if e.listeners[at].state.Load().tls != before {
		t.Error("TLS is configured anew although nothing changed")
	}
	next := cfg
	next.Certificates = map[string]*config.Certificate{"a": ca.issue(t, "new.test"), "b": certs["b"]}
	apply(t, e, next)
	ask(t, open, "goes on")
	c, err = handshake(t, at, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := c.ConnectionState().PeerCertificates[0].Subject.CommonName; got != "new.test" {
		t.Errorf("a new connection got the certificate of %q", got)
	}
	// A broken one changes nothing.
	next.Certificates = map[string]*config.Certificate{"a": {Chain: []byte("x"), Key: []byte("y")}, "b": certs["b"]}
	if e.Apply(next) == nil {
		t.Error("no error")
	}
	if _, err := handshake(t, at, &tls.Config{ServerName: "new.test", RootCAs: ca.roots()}); err != nil {
		t.Errorf("after a broken certificate was refused: %v", err)
	}
}

// TestTLSNames: where the configuration says which certificate is shown for a name, the names in certificates do not count.
func TestTLSNames(t *testing.T) {
	at, s, ca := unused(t), serve(t, echo), newAuthority(t)
	e := newEngine(t, Options{})
	certs := map[string]*config.Certificate{"a": ca.issue(t, "wild", "*.a.test"), "b": ca.issue(t, "b.test", "x.a.test", "c.test"), "rest": ca.issue(t, "rest.test")}
	cfg := sslConfig(at, certs, []string{"rest", "a", "b"}, s.address)
	cfg.Listeners[0].TLS.Names = map[string][]string{"x.a.test": {"a"}, "*.w.test": {"a"}, "b.test": {"rest", "b"}}
	apply(t, e, cfg)
	for name, cert := range map[string]string{
		"x.a.test": "wild", "X.A.Test": "wild", "b.test": "b.test", "y.w.test": "wild", // shown although its names are others
		"y.a.test": "rest.test", "c.test": "rest.test", "x.y.w.test": "rest.test", "": "rest.test",
	} {
		c, err := handshake(t, at, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		if got := c.ConnectionState().PeerCertificates[0].Subject.CommonName; got != cert {
			t.Errorf("asked for %q, got the certificate of %q, want that of %q", name, got, cert)
		}
	}
	cfg.Listeners[0].TLS = &config.TLS{Certificates: []string{"rest"}, Names: map[string][]string{"x.a.test": {"a"}}}
	if err := e.Apply(cfg); err == nil || !strings.Contains(err.Error(), "x.a.test") {
		t.Errorf("error %v, want one about the name", err)
	}
}

// TestGarbage: what is no TLS ends soon, and what says nothing ends after the time for headers.
func TestGarbage(t *testing.T) {
	at, s, ca := unused(t), serve(t, echo), newAuthority(t)
	e := newEngine(t, Options{})
	cfg := sslConfig(at, map[string]*config.Certificate{"a": ca.issue(t, "a.test")}, []string{"a"}, s.address)
	cfg.Listeners[0].Limits.HeaderTimeout = 500 * time.Millisecond
	apply(t, e, cfg)
	c, quiet := dialTo(t, at), dialTo(t, at)
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
	_, _ = io.Copy(io.Discard, c)
	wantEnd(t, quiet)
	eventually(t, "both are counted and gone", func() bool {
		return e.listeners[at].counters.handshakeFailures.Load() == 2 && e.Connections() == 0
	})
	if s.count() != 0 {
		t.Error("garbage came to an endpoint")
	}
}

func TestBulkTLS(t *testing.T) {
	const size = 8 << 20
	at, s, ca := unused(t), serve(t, echo), newAuthority(t)
	e := newEngine(t, Options{})
	apply(t, e, sslConfig(at, map[string]*config.Certificate{"a": ca.issue(t, "a.test")}, []string{"a"}, s.address))
	c, err := handshake(t, at, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		buf := make([]byte, size)
		for i := range buf {
			buf[i] = byte(i >> 8)
		}
		_, _ = c.Write(buf)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || len(got) != size {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	for i, b := range got {
		if b != byte(i>>8) {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
}

// TestEndpointTLS: endpoints are verified if there is a CA, and by name if there is one.
func TestEndpointTLS(t *testing.T) {
	at, ca, other := unused(t), newAuthority(t), newAuthority(t)
	pair := ca.issue(t, "pod.test")
	cert, err := tls.X509KeyPair(pair.Chain, pair.Key)
	if err != nil {
		t.Fatal(err)
	}
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := serveAt(t, tls.NewListener(plain, &tls.Config{Certificates: []tls.Certificate{cert}}), echo)
	e := newEngine(t, Options{})
	for _, c := range []struct {
		what string
		tls  *config.EndpointTLS
		ok   bool
	}{
		{"not verified", nil, true},
		{"the right CA", &config.EndpointTLS{CA: ca.pem}, true},
		{"the right CA and name", &config.EndpointTLS{CA: ca.pem, ServerName: "pod.test"}, true},
		{"another name", &config.EndpointTLS{CA: ca.pem, ServerName: "other.test"}, false},
		{"another CA", &config.EndpointTLS{CA: other.pem}, false},
	} {
		cfg := tcpConfig(at, s.address)
		cfg.Pools["web"].Protocol, cfg.Pools["web"].TLS = config.SSL, c.tls
		apply(t, e, cfg)
		if c.ok {
			conn := dialTo(t, at)
			ask(t, conn, c.what)
			_ = conn.Close()
		} else {
			wantRefused(t, at, "")
		}
		eventually(t, "the endpoint has no connection left", func() bool { return e.Pool("web").Endpoints()[0].Active() == 0 })
	}
}

// TestHTTPSHandsTLSOver: whoever reads requests gets the connection after the handshake, with what was agreed.
func TestHTTPSHandsTLSOver(t *testing.T) {
	at, ca := unused(t), newAuthority(t)
	e := newEngine(t, Options{Web: func(_ context.Context, c net.Conn, info *ConnInfo, ended func()) {
		defer ended()
		_, _ = io.WriteString(c, info.TLS.NegotiatedProtocol+" "+info.TLS.ServerName)
	}})
	cfg := sslConfig(at, map[string]*config.Certificate{"a": ca.issue(t, "a.test")}, []string{"a"})
	cfg.Listeners[0].Protocol = config.HTTPS
	apply(t, e, cfg)
	c, err := handshake(t, at, &tls.Config{ServerName: "a.test", RootCAs: ca.roots(), NextProtos: []string{"http/1.1", "h2"}})
	if err != nil {
		t.Fatal(err)
	}
	want(t, c, "h2 a.test")
}
