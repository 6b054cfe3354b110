package web

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"portal/internal/lb/accesslog"
	"portal/internal/lb/config"
	"portal/internal/lb/engine"
)

// TestEngine serves HTTP and HTTPS on listeners of the real engine, through changes of the configuration and its end.
func TestEngine(t *testing.T) {
	var refusedRoutes []string
	records := make(chan *accesslog.Record, 10)
	s := New(Options{Refused: func(_ *config.Listener, err error) { refusedRoutes = append(refusedRoutes, err.Error()) }})
	e := engine.New(engine.Options{Web: s.Web, Site: s.Site, Applied: s.Applied, Record: func(r *engine.Record) { records <- Record(r) }})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	defer func() {
		cancel()
		<-ended
		e.Close()
	}()
	pair := certificate(t)
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	owner := config.Owner{Kind: "Service", Namespace: "default", Name: "web"}
	plain, secure, bytes := refused(t), refused(t), refused(t)
	configuration := func(endpoint netip.AddrPort, routes ...config.Route) config.Config {
		return config.Config{
			Listeners: []config.Listener{
				{Name: "http", Owner: owner, Address: plain, Protocol: config.HTTP, Routes: routes},
				{Name: "https", Owner: owner, Address: secure, Protocol: config.HTTPS, Routes: routes, TLS: &config.TLS{Certificates: []string{"a"}}},
				{Name: "tcp", Owner: owner, Address: bytes, Protocol: config.TCP, Pool: "bytes", AccessLog: &config.AccessLog{Balancer: "lb"}},
			},
			Pools: map[string]*config.Pool{"a": pool(endpoint), "bytes": {Protocol: config.TCP, Endpoints: []config.Endpoint{{Address: endpoint}}}},
			Certificates: map[string]*config.Certificate{"a": {
				Chain: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), Key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}),
			}},
		}
	}
	if err := e.Apply(configuration(named(t, "one"), config.Route{Pool: "a"}, config.Route{Path: "bad", Pool: "a"})); err != nil {
		t.Fatal(err)
	}
	if len(refusedRoutes) != 2 || !strings.Contains(refusedRoutes[0], "routes[1].path") {
		t.Errorf("%q", refusedRoutes)
	}
	h1, h2 := client(t, false), client(t, true)
	ask := func(c *http.Client, url string) string {
		t.Helper()
		res, err := c.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return res.Proto + " " + string(body)
	}
	for _, tc := range []struct {
		c         *http.Client
		url, want string
	}{
		{h1, "http://" + plain.String(), "HTTP/1.1 one"},
		{h1, "https://" + secure.String(), "HTTP/1.1 one"},
		{h2, "https://" + secure.String(), "HTTP/2.0 one"},
		{h1, "http://" + bytes.String(), "HTTP/1.1 one"},
	} {
		if got := ask(tc.c, tc.url); got != tc.want {
			t.Errorf("%s: %q; want %q", tc.url, got, tc.want)
		}
	}
	// Open connections see the new configuration.
	if err := e.Apply(configuration(named(t, "two"), config.Route{Pool: "a"})); err != nil {
		t.Fatal(err)
	}
	if got := ask(h1, "http://"+plain.String()); got != "HTTP/1.1 two" {
		t.Error(got)
	}
	if got := ask(h2, "https://"+secure.String()); got != "HTTP/2.0 two" {
		t.Error(got)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(s)
	families, err := registry.Gather()
	if err != nil || len(families) != 5 {
		t.Error(families, err)
	}
	h1.CloseIdleConnections()
	if r := <-records; r.Balancer != "lb" || r.Received == 0 || r.Sent == 0 || !r.Endpoint.IsValid() || !strings.Contains(string(r.AppendELB(nil)), `"- - - "`) {
		t.Errorf("%+v", r)
	}
	// A request that is under way when the balancer drains is finished.
	slow, err := net.Dial("tcp", plain.String())
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	slow.SetDeadline(time.Now().Add(patience))
	io.WriteString(slow, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na")
	eventually(t, "the request is under way", func() bool { return s.Stats("http").Active.Load() == 1 })
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		limit, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		e.Drain(limit)
	}()
	eventually(t, "nobody is accepted", func() bool {
		c, err := net.Dial("tcp", plain.String())
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	io.WriteString(slow, "bc")
	res, err := http.ReadResponse(bufio.NewReader(slow), nil)
	if err != nil || res.StatusCode != 200 || !res.Close {
		t.Error(res, err)
	}
	<-drained
}

// TestRoutesGoWithTheListener: routes hold as long as the listener that they were applied with. A configuration that can't be carried out changes none, and a
// connection that outlives its listener is not answered that nothing was ever here.
func TestRoutesGoWithTheListener(t *testing.T) {
	s := New(Options{})
	e := engine.New(engine.Options{Web: s.Web, Site: s.Site, Applied: s.Applied})
	defer e.Close()
	at := refused(t)
	listener := func(message string, change func(*config.Listener)) config.Config {
		l := config.Listener{Name: "http", Address: at, Protocol: config.HTTP, Routes: []config.Route{{Status: 418, Message: message}}}
		if change != nil {
			change(&l)
		}
		return config.Config{Listeners: []config.Listener{l}}
	}
	if err := e.Apply(listener("first", nil)); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	r := bufio.NewReader(c)
	ask := func(when, want string) {
		t.Helper()
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(when, ": ", err)
		}
		body, _ := io.ReadAll(res.Body)
		if got := res.Status + " " + string(body); !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	ask("at first", "first")
	err = e.Apply(listener("second", func(l *config.Listener) {
		l.Protocol, l.TLS = config.HTTPS, &config.TLS{Certificates: []string{"missing"}}
	}))
	if err == nil {
		t.Fatal("a listener without its certificate was applied")
	}
	ask("after what can't be carried out", "first")
	if err := e.Apply(listener("third", nil)); err != nil {
		t.Fatal(err)
	}
	ask("after what can", "third")
	if err := e.Apply(config.Config{}); err != nil {
		t.Fatal(err)
	}
	ask("after the listener is gone", "third")
}

// A PROXY header says who the client is; it does not make the client's own fields more credible. Only a client that is itself one of the
// trusted proxies is believed.
func TestProxyHeaderIsNoTrust(t *testing.T) {
	s := New(Options{})
	e := engine.New(engine.Options{Web: s.Web, Site: s.Site, Applied: s.Applied})
	defer e.Close()
	at := refused(t)
	if err := e.Apply(config.Config{
		Listeners: []config.Listener{{
			Name: "http", Address: at, Protocol: config.HTTP, Routes: []config.Route{{Pool: "a"}}, TrustedProxies: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
		}},
		Pools: map[string]*config.Pool{"a": heads(t)()},
	}); err != nil {
		t.Fatal(err)
	}
	for header, want := range map[string][]string{
		"": {"X-Forwarded-For: 127.0.0.1\r\n", "X-Forwarded-Proto: https\r\n", "X-Forwarded-Port: 8443\r\n"},
		"PROXY TCP4 192.0.2.1 192.0.2.2 1000 80\r\n": {"X-Forwarded-For: 192.0.2.1\r\n", "X-Forwarded-Proto: http\r\n", "X-Forwarded-Port: 80\r\n"},
		"PROXY TCP4 127.0.0.9 192.0.2.2 1000 80\r\n": {"X-Forwarded-For: 127.0.0.9\r\n", "X-Forwarded-Proto: https\r\n", "X-Forwarded-Port: 8443\r\n"},
	} {
		c, err := net.Dial("tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		io.WriteString(c, header+"GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Port: 8443\r\nConnection: close\r\n\r\n")
		answer, err := io.ReadAll(c)
		if err != nil {
			t.Fatal(err)
		}
		contains(t, string(answer), want...)
	}
}
