package engine

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// deaf is an address at which connections are begun and never made: a queue of one that is full.
func deaf(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	at := localOfDescriptor(fd)
	for {
		c, err := net.DialTimeout("tcp", at.String(), time.Second)
		if err != nil {
			return at // it is full
		}
		t.Cleanup(func() { _ = c.Close() })
	}
}

// TestConnectTimeout: an endpoint that does not answer costs its time, and another one is tried.
func TestConnectTimeout(t *testing.T) {
	at, s := unused(t), serve(t, echo)
	mute := deaf(t)
	e := newEngine(t, Options{})
	cfg := tcpConfig(at, mute, s.address)
	cfg.Pools["web"].ConnectTimeout = time.Second
	apply(t, e, cfg)
	// One of two connections goes to the deaf one first.
	for range 2 {
		ask(t, dialTo(t, at), "hello")
	}
	if e.Pool("web").Counters.Retries.Load() == 0 {
		t.Error("no other endpoint was tried")
	}
	// A client that is waiting for its endpoint does not keep the engine from ending.
	apply(t, e, tcpConfig(at, mute))
	c := dialTo(t, at)
	eventually(t, "it is being connected", func() bool { return e.Pool("web").Endpoints()[0].Active() == 1 })
	e.Close()
	wantEnd(t, c)
}

// TestSlowReceiver: what the receiver does not take yet is waited for, and not read.
func TestSlowReceiver(t *testing.T) {
	const size = 20 << 20
	sent := make(chan int, 1)
	s := serve(t, func(c net.Conn) {
		n, _ := c.Write(bytes.Repeat([]byte("0123456789abcdef"), size/16))
		sent <- n
	})
	at := unused(t)
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	c := dialTo(t, at)
	_ = c.SetReadBuffer(64 << 10)
	var passed uint64
	eventually(t, "no more is taken", func() bool {
		before := passed
		passed = e.Pool("web").Endpoints()[0].Counters.BytesOut.Load()
		time.Sleep(100 * time.Millisecond)
		return passed > 0 && passed == before
	})
	if passed >= size {
		t.Fatalf("all of %d bytes went into buffers: this tests nothing", passed)
	}
	got, err := io.ReadAll(c)
	if err != nil || len(got) != size || !bytes.HasSuffix(got, []byte("0123456789abcdef")) {
		t.Errorf("%d bytes of %d, %v", len(got), size, err)
	}
	if n := <-sent; n != size {
		t.Errorf("the endpoint sent %d", n)
	}
}

// TestPipesAreBounded: what receivers don't take is held in pipes up to a bound for all connections together; beyond it bytes are copied, and arrive all the same.
func TestPipesAreBounded(t *testing.T) {
	const size = 8 << 20
	s := serve(t, func(c net.Conn) { _, _ = c.Write(bytes.Repeat([]byte("0123456789abcdef"), size/16)) })
	at := unused(t)
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	receive := func() {
		t.Helper()
		got, err := io.ReadAll(dialTo(t, at))
		if err != nil || len(got) != size || !bytes.HasSuffix(got, []byte("0123456789abcdef")) {
			t.Fatalf("%d bytes of %d, %v", len(got), size, err)
		}
	}
	// Others hold all that may be held.
	inPipes.Add(mostHeld)
	receive()
	inPipes.Add(-mostHeld)
	if n := e.copied.spliced.Load(); n > 0 {
		t.Errorf("%d bytes went into pipes", n)
	}
	receive()
	if e.copied.spliced.Load() == 0 {
		t.Error("nothing goes into pipes when there is room again")
	}
	// Whoever breaks off in the middle leaves nothing behind.
	c := dialTo(t, at)
	_ = c.SetReadBuffer(64 << 10)
	eventually(t, "something is held", func() bool { return inPipes.Load() > 0 })
	_ = c.Close()
	eventually(t, "nothing is held", func() bool { return inPipes.Load() == 0 })
}
