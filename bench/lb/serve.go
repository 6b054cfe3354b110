package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"runtime/debug"

	"portal/internal/lb/config"
	"portal/internal/lb/engine"
	"portal/internal/lb/process"
)

// serving is what a process that is a subject itself needs.
type serving struct {
	kind, listen, endpoint string
	cert, key              string
	hosts                  int
}

// Listeners are on this and the following ports of the address: HTTP, HTTPS, TCP.
const (
	plainPort = iota
	securePort
	tcpPort
	ports
)

func (s serving) address(port int) (netip.AddrPort, error) {
	first, err := netip.ParseAddrPort(s.listen)
	return netip.AddrPortFrom(first.Addr(), first.Port()+uint16(port)), err
}

func (s serving) open(port int) (net.Listener, error) {
	at, err := s.address(port)
	if err != nil {
		return nil, err
	}
	return net.Listen("tcp", at.String())
}

// serve is a subject: Portal's balancer, Go's ReverseProxy, or TLS without a balancer. It runs until it is killed.
func serve(s serving) error {
	switch s.kind {
	case "portal":
		return servePortal(s)
	case "reverseproxy":
		return serveReverseProxy(s)
	case "gotls":
		return serveTLS(s)
	case "asker":
		return runAsker(s.endpoint)
	}
	return fmt.Errorf("-serve %s: want portal, reverseproxy, gotls or asker", s.kind)
}

func servePortal(s serving) error {
	endpoint, err := netip.ParseAddrPort(s.endpoint)
	if err != nil {
		return err
	}
	chain, err := os.ReadFile(s.cert)
	if err != nil {
		return err
	}
	key, err := os.ReadFile(s.key)
	if err != nil {
		return err
	}
	routes := []config.Route{{Pool: "http"}}
	for h := range s.hosts {
		for p := range 10 {
			routes = append(routes, config.Route{Host: fmt.Sprintf("host-%d.example.com", h), Path: fmt.Sprintf("/app/%d", p), Match: config.Prefix, Pool: "http"})
		}
	}
	endpoints := []config.Endpoint{{Address: endpoint}}
	c := config.Config{
		Pools: map[string]*config.Pool{
			"http": {Protocol: config.HTTP, Endpoints: endpoints},
			"tcp":  {Protocol: config.TCP, Endpoints: endpoints},
		},
		Certificates: map[string]*config.Certificate{"a": {Chain: chain, Key: key}},
	}
	for port, protocol := range map[int]config.Protocol{plainPort: config.HTTP, securePort: config.HTTPS, tcpPort: config.TCP} {
		at, err := s.address(port)
		if err != nil {
			return err
		}
		l := config.Listener{Name: string(protocol), Address: at, Protocol: protocol, Limits: config.Limits{ClientConnections: config.DefaultConnections}}
		switch protocol {
		case config.TCP:
			l.Pool = "tcp"
		case config.HTTPS:
			l.TLS = &config.TLS{Certificates: []string{"a"}}
			l.Routes = routes
		default:
			l.Routes = routes
		}
		c.Listeners = append(c.Listeners, l)
	}
	// What the balancing process of `portal lb` consists of.
	parts := process.New(slog.New(slog.DiscardHandler))
	var options engine.Options
	parts.Into(&options)
	e := engine.New(options)
	if err := e.Apply(c); err != nil {
		return err
	}
	parts.Run(context.Background())
	return errors.New("it ended by itself")
}

func serveReverseProxy(s serving) error {
	to, err := url.Parse("http://" + s.endpoint)
	if err != nil {
		return err
	}
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.SetXForwarded()
		},
		// The default keeps two connections to an endpoint.
		Transport: &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true},
		ErrorLog:  log.New(os.Stderr, "", 0),
		// Clients that are cut off at the end of a measurement are no error.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}
	pair, err := tls.LoadX509KeyPair(s.cert, s.key)
	if err != nil {
		return err
	}
	failed := make(chan error, 2)
	for _, port := range []int{plainPort, securePort} {
		l, err := s.open(port)
		if err != nil {
			return err
		}
		h := &http.Server{Handler: proxy}
		if port == securePort {
			h.TLSConfig = &tls.Config{Certificates: []tls.Certificate{pair}}
			go func() { failed <- h.ServeTLS(l, "", "") }()
			continue
		}
		go func() { failed <- h.Serve(l) }()
	}
	return <-failed
}

// serveTLS answers a request for each connection by itself, after a handshake.
func serveTLS(s serving) error {
	pair, err := tls.LoadX509KeyPair(s.cert, s.key)
	if err != nil {
		return err
	}
	// Collecting garbage is no part of a handshake.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(256 << 20)
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}}
	failed := make(chan error, 2)
	for _, port := range []int{plainPort, securePort} {
		l, err := s.open(port)
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					failed <- err
					return
				}
				if port == securePort {
					c = tls.Server(c, cfg)
				}
				go answerOnce(c)
			}
		}()
	}
	return <-failed
}

// answerOnce answers a request that comes in one piece.
func answerOnce(c net.Conn) {
	defer c.Close()
	if n, _ := c.Read(make([]byte, 4<<10)); n > 0 {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 13\r\nConnection: close\r\n\r\nhello, world\n")
	}
}
