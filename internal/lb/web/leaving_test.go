package web

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lb/config"
)

// swept waits until the sweeper has looked at everything once more.
func (s *site) swept() {
	s.t.Helper()
	for range 2 {
		before := s.server.now()
		eventually(s.t, "a sweep", func() bool { return s.server.now() > before })
	}
}

// without is a pool that its endpoints have left.
func without(cfg *config.Pool) *config.Pool {
	empty := *cfg
	empty.Endpoints = nil
	return &empty
}

// A stream of HTTP/2 lasts for the draining time after its endpoint has left, whether it is answered already or only sent.
func TestHTTP2StreamEndsWithDraining(t *testing.T) {
	t.Parallel()
	for _, early := range []bool{true, false} {
		t.Run(fmt.Sprint("answered ", early), func(t *testing.T) {
			t.Parallel()
			began := make(chan struct{})
			answer := converse(early)
			cfg := endpoint(t, config.H2C, func(w http.ResponseWriter, r *http.Request) {
				close(began)
				answer(w, r)
			})
			cfg.Draining = 2 * time.Second
			s := start(t, cfg, withTLS)
			body, sent := io.Pipe()
			defer sent.Close()
			go io.WriteString(sent, "hello")
			req, _ := http.NewRequest("POST", s.url("/"), body)
			req.Header.Set("Content-Type", "application/grpc")
			left := make(chan time.Time, 1)
			go func() {
				<-began
				left <- time.Now()
				s.pool("a").Update(without(cfg), "")
			}()
			res, err := client(t, true).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.ReadAll(res.Body)
			if took := time.Since(<-left); took < cfg.Draining || took > patience/2 {
				t.Error("the stream ends after ", took)
			}
			if early && err == nil || !early && res.Header.Get("Grpc-Status") != grpcDeadlineExceeded {
				t.Error(err, res.Header)
			}
		})
	}
}

// If an endpoint returns in time, its streams stay, and its connection is used for others.
func TestHTTP2StreamStaysIfEndpointReturns(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	cfg := endpoint(t, config.H2C, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			http.NewResponseController(w).Flush()
			<-release
		}
		io.WriteString(w, "done")
	})
	cfg.Draining = 4 * time.Second
	var dials atomic.Int64
	s := start(t, cfg, func(s *site, _ *config.Listener) {
		s.toEndpoint = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			dials.Add(1)
			return dial(ctx, to)
		}
	})
	res, err := http.Get(s.url("/stream"))
	if err != nil {
		t.Fatal(err)
	}
	s.pool("a").Update(without(cfg), "")
	s.swept()
	s.pool("a").Update(cfg, "")
	time.Sleep(cfg.Draining)
	s.swept()
	c := s.dial()
	if res, body := s.ask(c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET"); res.StatusCode != 200 || body != "done" {
		t.Error(res.Status, body)
	}
	close(release)
	if body, err := io.ReadAll(res.Body); string(body) != "done" || err != nil {
		t.Errorf("%q %v", body, err)
	}
	if n := dials.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// The connections of an endpoint that leaves and returns while a request is under way are found again: they are used, counted and closed.
func TestEndpointReturnsDuringRequest(t *testing.T) {
	t.Parallel()
	for _, protocol := range []config.Protocol{config.HTTP, config.H2C} {
		t.Run(string(protocol), func(t *testing.T) {
			asked, release := make(chan struct{}, 2), make(chan struct{})
			cfg := endpoint(t, protocol, func(http.ResponseWriter, *http.Request) {
				asked <- struct{}{}
				<-release
			})
			cfg.EndpointConnections = 1
			s := start(t, cfg)
			const request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n"
			c := s.dial()
			r := bufio.NewReader(c)
			io.WriteString(c, request)
			<-asked
			s.pool("a").Update(without(cfg), "")
			s.swept()
			s.pool("a").Update(cfg, "")
			close(release)
			s.response(r, "GET")
			if res, _ := s.ask(c, r, request, "GET"); res.StatusCode != 200 {
				t.Error(res.Status)
			}
			e := s.pool("a").Endpoints()[0]
			s.pool("a").Update(without(cfg), "")
			eventually(t, "the connection is closed", func() bool { return e.OpenConnections() == 0 })
			eventually(t, "the endpoint is forgotten", func() bool { _, has := s.server.conns.Load(e); return !has })
		})
	}
}
