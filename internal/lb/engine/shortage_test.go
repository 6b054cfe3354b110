package engine

import (
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/config"
)

// logged is what was written to a log.
type logged struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) count(what string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), what)
}

// noDescriptors keeps this process from opening any more, until the function that it returns is called.
func noDescriptors(t *testing.T) (enough func()) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	enough = sync.OnceFunc(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(enough)
	return enough
}

// Without descriptors, listeners try again more and more seldom and say so once; with descriptors, those who waited are served.
func TestNoDescriptors(t *testing.T) {
	const listeners = 3
	var log logged
	e := newEngine(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	// It accepts only when there are descriptors again.
	endpoint, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = endpoint.Close() })
	cfg := tcpConfig(unused(t), endpoint.Addr().(*net.TCPAddr).AddrPort())
	for len(cfg.Listeners) < listeners {
		l := cfg.Listeners[0]
		l.Name, l.Address = l.Name+"x"+string(rune('a'+len(cfg.Listeners))), unused(t)
		cfg.Listeners = append(cfg.Listeners, l)
	}
	// One of them looks at what comes first, and accepts in another way.
	cfg.Listeners[0].TrustedProxies = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	apply(t, e, cfg)
	// Those who come have their descriptors already.
	var clients []int
	for range listeners {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		timeout := unix.NsecToTimeval(patience.Nanoseconds())
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, fd)
	}
	enough := noDescriptors(t)
	for i, fd := range clients {
		at := cfg.Listeners[i].Address
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(1500 * time.Millisecond)
	for _, l := range e.listeners {
		if n := l.counters.refused.Load(); n == 0 || n > 7 {
			t.Errorf("%d attempts to accept in 1.5 s", n)
		}
	}
	if n := log.count("accepting a connection failed"); n != 1 {
		t.Errorf("logged %d times, want once", n)
	}
	enough()
	for range clients {
		c, err := endpoint.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, "here")
		t.Cleanup(func() { _ = c.Close() })
	}
	for _, fd := range clients {
		buf := make([]byte, 4)
		if n, err := unix.Read(fd, buf); err != nil || string(buf[:n]) != "here" {
			t.Errorf("a client that waited got %q, %v", buf[:max(n, 0)], err)
		}
	}
}

// That the balancer can open no connections is not its endpoints' fault: they must be there as soon as it can again.
func TestNoDescriptorsForEndpoints(t *testing.T) {
	for name, protocol := range map[string]config.Protocol{"passed": config.TCP, "encrypted": config.SSL} {
		at, s := unused(t), serve(t, echo)
		e := newEngine(t, Options{})
		cfg := tcpConfig(at, s.address)
		cfg.Pools["web"].Protocol = protocol
		cfg.Pools["web"].Outlier = &config.Outlier{Failures: 1, Ejection: time.Hour, MostEjected: 100}
		apply(t, e, cfg)
		p := (*e.pools.Load())["web"]
		l := e.listeners[at]
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fds[1]) })
		client := netip.MustParseAddrPort("127.0.0.1:1")
		if protocol == config.TCP {
			_, _ = e.loops.next(&e.waiting)
		}
		enough := noDescriptors(t)
		if protocol == config.TCP {
			l.beginPlain(fds[0], client, l.state.Load(), p)
		} else {
			c := &conn{listener: l, client: client}
			if use, _, _, why := c.connect(p, &ConnInfo{Client: client}); use != nil || why != endConnect {
				t.Errorf("%s: connected, or ended with %q", name, why)
			}
			_ = unix.Close(fds[0])
		}
		enough()
		if m := e.Pool("web").Endpoints()[0]; m.Ejected() || m.Counters.ConnectFailures.Load() > 0 {
			t.Errorf("%s: %d failures of the endpoint, ejected %v", name, m.Counters.ConnectFailures.Load(), m.Ejected())
		}
	}
}
