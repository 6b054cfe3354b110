package web

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"portal/internal/lb/accesslog"
	"portal/internal/lb/balance"
	"portal/internal/lb/config"
	"portal/internal/lb/route"
)

// patience is for what must happen, however slow the machine is.
const patience = 60 * time.Second

// testSweepInterval is shorter than the real one, so that less is waited for.
const testSweepInterval = 25 * time.Millisecond

// atATime is how many tests run at a time at least: most of those that are marked for it wait for time-outs.
const atATime = 8

// TestMain has that many run, also on machines with fewer processors.
func TestMain(m *testing.M) {
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue && runtime.GOMAXPROCS(0) < atATime {
		flag.Set("test.parallel", strconv.Itoa(atATime))
	}
	m.Run()
}

// site is a balancer on loopback for one test.
type site struct {
	toEndpoint func(context.Context, netip.AddrPort) (net.Conn, error) // to endpoints; nil: as usual
	t          *testing.T
	server     *Server
	address    netip.AddrPort
	now        atomic.Pointer[Site]
	pools      atomic.Pointer[map[string]*balance.Pool]
	drain      context.CancelFunc
	trusted    bool
	tls        *tls.Config
	logged     chan *accesslog.Record
	conns      sync.WaitGroup
}

func pool(endpoints ...netip.AddrPort) *config.Pool {
	p := &config.Pool{Protocol: config.HTTP}
	for _, e := range endpoints {
		p.Endpoints = append(p.Endpoints, config.Endpoint{Address: e})
	}
	return p
}

// set makes a listener with these routes and pools the present one.
func (s *site) set(listener config.Listener, pools map[string]*config.Pool) {
	s.t.Helper()
	if listener.Name == "" {
		listener.Name = "test"
	}
	if listener.Routes == nil {
		listener.Routes = []config.Route{{Pool: "a"}}
	}
	table, err := route.Compile(listener.Routes)
	if err != nil {
		s.t.Fatal(err)
	}
	made := map[string]*balance.Pool{}
	for name, cfg := range pools {
		made[name] = balance.New(cfg, "", time.Now)
	}
	s.pools.Store(&made)
	s.now.Store(&Site{Listener: &listener, Routes: table})
}

// start runs a balancer in front of a pool named a.
func start(t *testing.T, cfg *config.Pool, change ...func(*site, *config.Listener)) *site {
	t.Helper()
	s := &site{t: t, logged: make(chan *accesslog.Record, 1000)}
	var listener config.Listener
	for _, f := range change {
		f(s, &listener)
	}
	s.set(listener, map[string]*config.Pool{"a": cfg})
	s.server = New(Options{Dial: s.toEndpoint, Log: func(_ *config.Listener, r *accesslog.Record) { s.logged <- r }})
	s.server.sweepInterval = testSweepInterval
	s.server.parkAfter, s.server.restAfter, s.server.drainIdle = 1, 100, 500 // every sweep parks what is idle
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.address = l.Addr().(*net.TCPAddr).AddrPort()
	ctx, cancel := context.WithCancel(context.Background())
	draining, drain := context.WithCancel(ctx)
	s.drain = drain
	var all sync.WaitGroup
	all.Go(func() { s.server.Run(ctx) })
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.conns.Add(1)
			go s.serve(draining, c)
			context.AfterFunc(ctx, func() { c.Close() })
		}
	})
	t.Cleanup(func() {
		l.Close()
		cancel()
		all.Wait()
		s.conns.Wait()
	})
	return s
}

func (s *site) serve(ctx context.Context, c net.Conn) {
	info := Info{Site: s.now.Load, Pool: s.pool, Client: c.RemoteAddr().(*net.TCPAddr).AddrPort(), Local: s.address, Trusted: s.trusted}
	if s.tls != nil {
		secured := tls.Server(c, s.tls)
		if secured.Handshake() != nil {
			c.Close()
			s.conns.Done()
			return
		}
		state := secured.ConnectionState()
		info.TLS = &state
		c = secured
	}
	s.server.Serve(ctx, c, info, s.conns.Done)
}

func (s *site) pool(name string) *balance.Pool { return (*s.pools.Load())[name] }

func (s *site) url(path string) string {
	if s.tls != nil {
		return "https://" + s.address.String() + path
	}
	return "http://" + s.address.String() + path
}

// dial opens a connection as a client.
func (s *site) dial() net.Conn {
	s.t.Helper()
	c, err := net.Dial("tcp", s.address.String())
	if err != nil {
		s.t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	s.t.Cleanup(func() { c.Close() })
	return c
}

// ask sends bytes and reads one response.
func (s *site) ask(c net.Conn, r *bufio.Reader, request, method string) (*http.Response, string) {
	s.t.Helper()
	if _, err := io.WriteString(c, request); err != nil {
		s.t.Fatal(err)
	}
	return s.response(r, method)
}

func (s *site) response(r *bufio.Reader, method string) (*http.Response, string) {
	s.t.Helper()
	res, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		s.t.Fatal(err)
	}
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal("body: ", err)
	}
	return res, string(body)
}

// handler is an endpoint that is an HTTP server.
func handler(t testing.TB, f http.HandlerFunc) netip.AddrPort {
	t.Helper()
	server := httptest.NewUnstartedServer(f)
	server.Config.DisableGeneralOptionsHandler = true
	server.Start()
	t.Cleanup(server.Close)
	return netip.MustParseAddrPort(server.Listener.Addr().String())
}

// named is an endpoint that answers with its name.
func named(t testing.TB, name string) netip.AddrPort {
	return handler(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, name)
	})
}

// raw is an endpoint that is a function on each connection.
func raw(t testing.TB, f func(n int, c net.Conn, r *bufio.Reader)) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				f(n, c, bufio.NewReader(c))
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// readHead reads a request's head as it is on the wire.
func readHead(r *bufio.Reader) (string, error) {
	var head bytes.Buffer
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return head.String(), err
		}
		head.WriteString(line)
		if line == "\r\n" {
			return head.String(), nil
		}
	}
}

// refused is an address at which nobody listens.
func refused(t testing.TB) netip.AddrPort {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: ", what)
		}
	}
}

func contains(t *testing.T, s string, wants ...string) {
	t.Helper()
	for _, want := range wants {
		if !strings.Contains(s, want) {
			t.Errorf("lacks %q:\n%s", want, s)
		}
	}
}

func lacks(t *testing.T, s string, unwanted ...string) {
	t.Helper()
	for _, bad := range unwanted {
		if strings.Contains(strings.ToLower(s), strings.ToLower(bad)) {
			t.Errorf("has %q:\n%s", bad, s)
		}
	}
}
