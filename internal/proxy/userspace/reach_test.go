package userspace

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestReach: a client gets an endpoint that answers, however many do not, and the silent ones cost time only once.
func TestReach(t *testing.T) {
	s := opened(t)
	living, closed := listener(t), listener(t)
	closed.Close()
	front := before(closed, full(t), living)
	var late int
	for range 9 {
		start := time.Now()
		call(t, s, front)
		living.SetDeadline(time.Now().Add(5 * time.Second))
		peer, err := living.Accept()
		if err != nil {
			t.Fatal(err)
		}
		peer.Close()
		if time.Since(start) > 250*time.Millisecond {
			late++
		}
	}
	if late > 4 { // of a slow machine's own, some may be
		t.Errorf("%d of 9 clients waited for an endpoint that does not answer", late)
	}
	living.Close()
	if _, err := call(t, s, front).Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("where nobody is, the client saw %v", err)
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
