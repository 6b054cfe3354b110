package engine

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
	"portal/internal/nettest"
)

// patience is how long tests wait for what must come.
const patience = 45 * time.Second

// server is an endpoint: it serves connections with a function until the test ends.
type server struct {
	address netip.AddrPort
	l       net.Listener
	mu      sync.Mutex
	served  int
	conns   map[net.Conn]bool
}

func serve(t testing.TB, handle func(net.Conn)) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveAt(t, l, handle)
}

func serveAt(t testing.TB, l net.Listener, handle func(net.Conn)) *server {
	s := &server{l: l, address: l.Addr().(*net.TCPAddr).AddrPort(), conns: map[net.Conn]bool{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.served++
			s.conns[c] = true
			s.mu.Unlock()
			wg.Go(func() {
				handle(c)
				_ = c.Close()
				s.mu.Lock()
				delete(s.conns, c)
				s.mu.Unlock()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		s.mu.Lock()
		for c := range s.conns {
			_ = c.Close()
		}
		s.mu.Unlock()
		wg.Wait()
	})
	return s
}

func (s *server) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.served
}

func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}

// named answers every connection with a name and then echoes.
func named(name string) func(net.Conn) {
	return func(c net.Conn) {
		_, _ = io.WriteString(c, name)
		echo(c)
	}
}

// unused is an address at which nobody listens.
var unused = nettest.UnusedPort

func newEngine(t testing.TB, o Options) *Engine {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	e := New(o)
	t.Cleanup(e.Close)
	return e
}

func apply(t testing.TB, e *Engine, c config.Config) {
	t.Helper()
	if err := e.Apply(c); err != nil {
		t.Fatal(err)
	}
}

// tcpConfig is one listener before a pool of the given endpoints.
func tcpConfig(at netip.AddrPort, endpoints ...netip.AddrPort) config.Config {
	p := &config.Pool{Owner: config.Owner{Kind: "Service", Namespace: "shop", Name: "web"}, Port: "http", Protocol: config.TCP}
	for _, a := range endpoints {
		p.Endpoints = append(p.Endpoints, config.Endpoint{Address: a})
	}
	return config.Config{
		Listeners: []config.Listener{{Name: "shop/web:80", Owner: p.Owner, Address: at, Protocol: config.TCP, Pool: "web"}},
		Pools:     map[string]*config.Pool{"web": p},
	}
}

func dialTo(t testing.TB, at netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := net.DialTimeout("tcp", at.String(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// ask sends something and wants it back.
func ask(t testing.TB, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	want(t, c, text)
}

func want(t testing.TB, c io.Reader, text string) {
	t.Helper()
	buf := make([]byte, len(text))
	if _, err := io.ReadFull(c, buf); err != nil {
		t.Fatalf("got %q: %v", buf, err)
	}
	if string(buf) != text {
		t.Fatalf("got %q, want %q", buf, text)
	}
}

// wantEnd wants the connection to end, and says how.
func wantEnd(t testing.TB, c io.Reader) error {
	t.Helper()
	buf := make([]byte, 1)
	n, err := c.Read(buf)
	if n > 0 {
		t.Fatalf("got %q, want the end", buf)
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		t.Fatal("the connection did not end")
	}
	return err
}

// wantRefused connects and wants a reset, which may come before the connection is there.
func wantRefused(t testing.TB, at netip.AddrPort, from string) {
	t.Helper()
	d := net.Dialer{Timeout: patience}
	if from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c, err := d.Dial("tcp", at.String())
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		err = wantEnd(t, c)
	}
	if !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client saw %v, want a reset", err)
	}
}

// eventually waits for something to become true.
func eventually(t testing.TB, what string, true func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for !true() {
		select {
		case <-ctx.Done():
			t.Fatalf("waited in vain: %s", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (a *authority) issue(t testing.TB, names ...string) *config.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return &config.Certificate{
		Chain: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		Key:   pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}),
	}
}

func (a *authority) roots() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}
