package userspace

import (
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/plan"
)

// TestReach: a client gets an endpoint that answers, however many do not, and the silent ones cost time only once.
func TestReach(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("marking sockets needs root")
	}
	s, err := open(Options{ConnectTimeout: 300 * time.Millisecond, Shun: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	living, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer living.Close()
	closed, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	pool := &plan.Pool{}
	for _, l := range []net.Listener{closed, full(t), living} {
		pool.Endpoints = append(pool.Endpoints, plan.Endpoint{Addr: l.Addr().(*net.TCPAddr).AddrPort()})
	}
	f := &plan.Frontend{}
	f.Routes[plan.FromOutside].Pool = pool
	front := newFrontend(f)
	client, to := netip.MustParseAddrPort("192.0.2.1:1000"), netip.MustParseAddrPort("10.96.0.1:80")
	var late int
	for range 9 {
		start := time.Now()
		up := s.reach(front, plan.FromOutside, client, to)
		if up == nil {
			t.Fatal("nobody was reached")
		}
		peer, err := living.Accept()
		if err != nil {
			t.Fatal(err)
		}
		peer.Close()
		up.Close()
		if time.Since(start) > 250*time.Millisecond {
			late++
		}
	}
	if late > 1 {
		t.Errorf("%d of 9 clients waited for an endpoint that does not answer", late)
	}
	living.Close()
	if s.reach(front, plan.FromOutside, client, to) != nil {
		t.Error("somebody was reached where nobody is")
	}
}

// full is a listener that answers nobody: its queue is full.
func full(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	shrink(t, raw)
	for range 8 {
		c, err := net.DialTimeout("tcp4", l.Addr().String(), 200*time.Millisecond)
		if err != nil {
			return l
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("a queue of one took eight connections")
	return nil
}

// shrink makes a listener's queue as small as it gets: to listen again changes its length.
func shrink(t *testing.T, raw syscall.RawConn) {
	t.Helper()
	var err error
	if e := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
}
