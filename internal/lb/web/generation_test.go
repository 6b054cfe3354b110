package web

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"portal/internal/lb/config"
	"portal/internal/lb/engine"
)

// changing is a listener of the real engine that changes while it has connections.
type changing struct {
	t      *testing.T
	server *Server
	engine *engine.Engine
	at     netip.AddrPort
	pool   *config.Pool
	certs  map[string]*config.Certificate
}

func newChanging(t *testing.T, pool *config.Pool) *changing {
	s := New(Options{})
	s.sweepInterval, s.drainIdle = testSweepInterval, 500
	e := engine.New(engine.Options{Web: s.Web, Site: s.Site, Applied: s.Applied})
	t.Cleanup(e.Close)
	go s.Run(t.Context())
	c := &changing{t: t, server: s, engine: e, at: refused(t), pool: pool, certs: map[string]*config.Certificate{}}
	for _, name := range []string{"a", "b"} {
		pair := certificate(t)
		key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		c.certs[name] = &config.Certificate{
			Chain: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
		}
	}
	return c
}

func (c *changing) apply(protocol config.Protocol, change func(*config.Listener)) {
	c.t.Helper()
	l := config.Listener{Name: "l", Address: c.at, Protocol: protocol, Routes: []config.Route{{Pool: "a"}}}
	if protocol.Encrypted() {
		l.TLS = &config.TLS{Certificates: []string{"a"}}
	}
	p := *c.pool
	if !protocol.Parsed() {
		l.Pool, p.Protocol = "a", config.TCP
	}
	if change != nil {
		change(&l)
	}
	if err := c.engine.Apply(config.Config{Listeners: []config.Listener{l}, Pools: map[string]*config.Pool{"a": &p}, Certificates: c.certs}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *changing) dial(encrypted bool, protocols ...string) (net.Conn, *bufio.Reader) {
	c.t.Helper()
	nc, err := net.Dial("tcp", c.at.String())
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(patience))
	if encrypted {
		nc = tls.Client(nc, &tls.Config{InsecureSkipVerify: true, NextProtos: protocols})
	}
	return nc, bufio.NewReader(nc)
}

const plainGet = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"

func (c *changing) get(nc net.Conn, r *bufio.Reader) *http.Response {
	c.t.Helper()
	io.WriteString(nc, plainGet)
	return c.read(r)
}

func (c *changing) read(r *bufio.Reader) *http.Response {
	c.t.Helper()
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	if _, err := io.ReadAll(res.Body); err != nil {
		c.t.Fatal(err)
	}
	return res
}

// Connections of HTTP from before a listener spoke another protocol get their answer as the last one, idle ones are closed, and nobody goes on with the
// old protocol. Before that, requests are still answered as they were.
func TestListenerChangesProtocol(t *testing.T) {
	t.Parallel()
	trusting := func(l *config.Listener) { l.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} }
	for _, tc := range []struct {
		from, to config.Protocol
		change   func(*config.Listener)
	}{{config.HTTP, config.HTTPS, nil}, {config.HTTPS, config.HTTP, nil}, {config.HTTP, config.TCP, nil}, {config.HTTPS, config.SSL, nil}, {config.HTTP, config.HTTP, trusting}} {
		t.Run(fmt.Sprintf("%s to %s", tc.from, tc.to), func(t *testing.T) {
			t.Parallel()
			asked, release := make(chan struct{}, 1), make(chan struct{})
			c := newChanging(t, pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == "POST" {
					asked <- struct{}{}
					<-release
				}
				io.WriteString(w, "done")
			})))
			c.apply(tc.from, nil)
			encrypted := tc.from.Encrypted()
			idle, idleReader := c.dial(encrypted)
			next, nextReader := c.dial(encrypted)
			busy, busyReader := c.dial(encrypted)
			for _, one := range []struct {
				net.Conn
				*bufio.Reader
			}{{idle, idleReader}, {next, nextReader}, {busy, busyReader}} {
				if res := c.get(one.Conn, one.Reader); res.StatusCode != 200 || res.Close {
					t.Fatal(res)
				}
			}
			io.WriteString(busy, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
			<-asked
			c.apply(tc.to, tc.change)
			if res := c.get(next, nextReader); res.StatusCode != 200 || !res.Close {
				t.Errorf("a request after the change: %s, close %v", res.Status, res.Close)
			}
			if _, err := nextReader.ReadByte(); err != io.EOF {
				t.Error("after the last answer: ", err)
			}
			if _, err := idleReader.ReadByte(); err != io.EOF {
				t.Error("an idle connection: ", err)
			}
			close(release)
			if res := c.read(busyReader); res.StatusCode != 200 || !res.Close {
				t.Errorf("a request that was under way: %s, close %v", res.Status, res.Close)
			}
			eventually(t, "no connection is left", func() bool { return c.engine.Connections() == 0 })
			if fresh, r := c.dial(tc.to.Encrypted()); c.get(fresh, r).StatusCode != 200 {
				t.Error("a new connection is not served")
			}
		})
	}
}

// With HTTP/2, clients are asked to go away; the request under way is answered.
func TestListenerChangesProtocolOfHTTP2(t *testing.T) {
	t.Parallel()
	asked, release := make(chan struct{}), make(chan struct{})
	c := newChanging(t, pool(handler(t, func(w http.ResponseWriter, r *http.Request) {
		close(asked)
		<-release
		io.WriteString(w, "done")
	})))
	c.apply(config.HTTPS, nil)
	nc, _ := c.dial(true, "h2")
	conn, err := (&http2.Transport{}).NewClientConn(nc)
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		req, _ := http.NewRequest("POST", "https://a/", nil)
		res, err := conn.RoundTrip(req)
		if err == nil {
			_, err = io.ReadAll(res.Body)
		}
		answered <- err
	}()
	<-asked
	c.apply(config.HTTP, nil)
	eventually(t, "GOAWAY", func() bool { return !conn.CanTakeNewRequest() })
	close(release)
	if err := <-answered; err != nil {
		t.Error(err)
	}
	eventually(t, "no connection is left", func() bool { return c.engine.Connections() == 0 })
}

// What has been upgraded goes on for the draining time, or that of a request if this is longer.
func TestListenerChangesProtocolOfTunnel(t *testing.T) {
	t.Parallel()
	cfg := pool(raw(t, func(_ int, c net.Conn, r *bufio.Reader) {
		readHead(r)
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		io.Copy(c, r)
	}))
	cfg.Draining = 2 * time.Second
	c := newChanging(t, cfg)
	limits := func(l *config.Listener) { l.Limits.RequestTimeout = time.Second }
	c.apply(config.HTTP, limits)
	nc, r := c.dial(false)
	io.WriteString(nc, "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	if res, err := http.ReadResponse(r, nil); err != nil || res.StatusCode != 101 {
		t.Fatal(res, err)
	}
	changed := time.Now()
	c.apply(config.HTTPS, limits)
	io.WriteString(nc, "x")
	if b, err := r.ReadByte(); b != 'x' || err != nil {
		t.Fatal(b, err)
	}
	if _, err := r.ReadByte(); err == nil {
		t.Error("a byte came")
	}
	if took := time.Since(changed); took < cfg.Draining || took > patience/2 {
		t.Error("the tunnel ended after ", took)
	}
}

// What is not about the protocol, other certificates and stricter versions of TLS among it, lets every connection go on.
func TestListenerChangesOtherwise(t *testing.T) {
	t.Parallel()
	c := newChanging(t, pool(named(t, "one"), named(t, "two")))
	c.apply(config.HTTPS, nil)
	nc, r := c.dial(true)
	h2, _ := c.dial(true, "h2")
	conn, err := (&http2.Transport{}).NewClientConn(h2)
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*config.Listener){
		"certificate":  func(l *config.Listener) { l.TLS.Certificates = []string{"b"} },
		"versions":     func(l *config.Listener) { l.TLS.MinVersion = tls.VersionTLS13 },
		"idle timeout": func(l *config.Listener) { l.IdleTimeout = patience },
		"routes": func(l *config.Listener) {
			l.Routes = append(l.Routes, config.Route{Path: "/x", Match: config.Exact, Status: 418})
		},
		"limits":    func(l *config.Listener) { l.Limits.BodyBytes = 10 },
		"endpoints": func(*config.Listener) { c.pool = pool(named(t, "three")) },
	} {
		c.apply(config.HTTPS, change)
		if res := c.get(nc, r); res.StatusCode != 200 || res.Close {
			t.Errorf("%s: %s, close %v", what, res.Status, res.Close)
		}
		req, _ := http.NewRequest("GET", "https://a/", nil)
		res, err := conn.RoundTrip(req)
		if err != nil {
			t.Fatal(what, ": ", err)
		}
		res.Body.Close()
		if !conn.CanTakeNewRequest() {
			t.Errorf("%s: the client is asked to go away", what)
		}
	}
}
