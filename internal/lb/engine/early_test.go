package engine

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// early is a client that has done everything before the engine accepts its connection: what it did is reported all at once.
func early(t *testing.T, endpoint netip.AddrPort, change func(*Options), client func(*net.TCPConn)) (*Engine, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	c := dialTo(t, at)
	client(c)
	o := Options{Inherited: map[netip.AddrPort]*os.File{at: f}}
	if change != nil {
		change(&o)
	}
	e := newEngine(t, o)
	apply(t, e, tcpConfig(at, endpoint))
	return e, c
}

// received is what an endpoint got of its connection, and how that ended.
type received struct {
	text string
	err  error
}

// receive serves connections by reading all; each answers with what it got.
func receive(t *testing.T) (*server, <-chan received) {
	t.Helper()
	got := make(chan received, 1)
	return serve(t, func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(patience))
		text, err := io.ReadAll(c)
		got <- received{string(text), err}
		_, _ = io.WriteString(c, "answer to "+string(text))
	}), got
}

func sendFlags(t *testing.T, c *net.TCPConn, text string, flags int) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := errors.Join(raw.Control(func(fd uintptr) { failed = unix.Sendto(int(fd), []byte(text), flags, nil) }), failed); err != nil {
		t.Fatal(err)
	}
}

// TestDataWithEnd: what comes together with its end arrives whole, and so does the answer after that end.
func TestDataWithEnd(t *testing.T) {
	s, got := receive(t)
	records := make(chan *Record, 1)
	_, c := early(t, s.address, func(o *Options) { o.Record = func(r *Record) { records <- r } }, func(c *net.TCPConn) {
		sendFlags(t, c, "hello", 0)
		_ = c.CloseWrite()
	})
	if r := <-got; r.text != "hello" || r.err != nil {
		t.Errorf("the endpoint got %q, %v", r.text, r.err)
	}
	if text, err := io.ReadAll(c); string(text) != "answer to hello" || err != nil {
		t.Errorf("the client got %q, %v", text, err)
	}
	if r := <-records; r.BytesIn != 5 || r.BytesOut != 15 || r.End != "" {
		t.Errorf("%+v", r)
	}
}

// TestUrgentDataWithEnd: the kernel stops reading where urgent data was, which is not the end.
func TestUrgentDataWithEnd(t *testing.T) {
	s, got := receive(t)
	early(t, s.address, nil, func(c *net.TCPConn) {
		sendFlags(t, c, "before", 0)
		sendFlags(t, c, "!", unix.MSG_OOB) // it is no part of the stream
		sendFlags(t, c, "after", 0)
		_ = c.CloseWrite()
	})
	if r := <-got; r.text != "beforeafter" || r.err != nil {
		t.Errorf("the endpoint got %q, %v", r.text, r.err)
	}
}

// TestDataWithReset: a client that breaks off has not ended what it sent.
func TestDataWithReset(t *testing.T) {
	s, got := receive(t)
	early(t, s.address, nil, func(c *net.TCPConn) {
		sendFlags(t, c, "hel", 0)
		_ = c.SetLinger(0)
		_ = c.Close()
	})
	if r := <-got; !errors.Is(r.err, unix.ECONNRESET) {
		t.Errorf("the endpoint got %q and saw %v, want a reset", r.text, r.err)
	}
}

// TestEndpointSpeaksFirst: what an endpoint says when it accepts is passed on, though its client says nothing.
func TestEndpointSpeaksFirst(t *testing.T) {
	s := serve(t, named("220 ready"))
	at := unused(t)
	e := newEngine(t, Options{})
	apply(t, e, tcpConfig(at, s.address))
	for range 100 {
		c := dialTo(t, at)
		want(t, c, "220 ready")
		ask(t, c, "QUIT")
		_ = c.Close()
	}
	// With what was said as early as it can be: in the same report as that it is connected.
	k := &link{loop: newTestLoop(t)}
	k.far.note(unix.EPOLLOUT | unix.EPOLLIN)
	if !k.far.readable {
		t.Error("what was reported with the connection is forgotten")
	}
}

// TestSmallWritesAreNotDelayed: many small pieces to an endpoint that does not answer are not held back until those before are acknowledged.
func TestSmallWritesAreNotDelayed(t *testing.T) {
	a, b, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(a)
	defer unix.Close(b)
	prompt := func(fd int) bool {
		t.Helper()
		on, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY)
		if err != nil {
			t.Fatal(err)
		}
		return on != 0
	}
	k, to := &link{}, &end{fd: a, delays: true}
	for i := range 3 {
		if _, err := k.write(to, []byte("x"), false); err != nil {
			t.Fatal(err)
		}
		if prompt(a) != (i > 0) {
			t.Errorf("after write %d: sent at once: %v", i+1, prompt(a))
		}
	}
}

// TestStaleReport: what was reported of a descriptor that was closed and used again says nothing of the next connection.
func TestStaleReport(t *testing.T) {
	l := newTestLoop(t)
	a, b, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(b)
	first, second := &link{}, &link{}
	if err := l.watch(first, a, arrivals); err != nil {
		t.Fatal(err)
	}
	number := l.watched[a].number
	if l.find(a, number) != first {
		t.Error("the connection itself is not found")
	}
	l.forget(a)
	if l.find(a, number) != nil {
		t.Error("a connection that was closed is found")
	}
	_ = unix.Close(a)
	if err := unix.Dup3(b, a, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(a)
	if err := l.watch(second, a, arrivals); err != nil {
		t.Fatal(err)
	}
	if l.find(a, number) != nil || l.find(a, l.watched[a].number) != second {
		t.Error("what was reported before is taken for the next connection's")
	}
}

func newTestLoop(t *testing.T) *loop {
	t.Helper()
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.poll.Close() })
	return l
}

// socketPair is both ends of a TCP connection.
func socketPair() (a, b int, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return -1, -1, err
	}
	defer l.Close()
	if a, err = startConnect(l.Addr().(*net.TCPAddr).AddrPort()); err != nil {
		return -1, -1, err
	}
	c, err := l.Accept()
	if err != nil {
		return -1, -1, err
	}
	defer c.Close()
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		return -1, -1, err
	}
	defer f.Close()
	b, err = unix.Dup(int(f.Fd()))
	return a, b, err
}
