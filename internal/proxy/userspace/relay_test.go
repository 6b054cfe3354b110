package userspace

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/plan"
)

// pair is a connection over loopback, by both its ends.
func pair(tb testing.TB) (a, b *net.TCPConn) {
	tb.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	if a, err = net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr)); err == nil {
		b, err = l.AcceptTCP()
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

// opened is a server that nothing is led to.
func opened(tb testing.TB, source ...Source) *server {
	tb.Helper()
	o := Options{}
	if len(source) > 0 {
		o.Source = source[0]
	}
	return openedWith(tb, o)
}

func openedWith(tb testing.TB, o Options) *server {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("marking sockets needs root")
	}
	o.ConnectTimeout, o.Shun, o.UDPIdle = 300*time.Millisecond, time.Minute, time.Minute
	s, err := open(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// before returns a frontend of endpoints.
func before(endpoints ...net.Listener) *frontend {
	pool := &plan.Pool{}
	for _, l := range endpoints {
		pool.Endpoints = append(pool.Endpoints, plan.Endpoint{Addr: l.Addr().(*net.TCPAddr).AddrPort()})
	}
	f := &plan.Frontend{}
	f.Routes[plan.FromOutside].Pool = pool
	return newFrontend(f)
}

// call has a server take a new client, as if the kernel had led it there.
func call(tb testing.TB, s *server, to *frontend) *net.TCPConn {
	tb.Helper()
	c, client := taken(tb, to)
	s.loops[c.fd%len(s.loops)].post(c)
	return client
}

// taken is a client's connection as a loop gets it, and the client's end of it.
func taken(tb testing.TB, to *frontend) (caller, *net.TCPConn) {
	tb.Helper()
	client, in := pair(tb)
	raw, err := in.SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	c := caller{
		fd: -1, front: to, origin: plan.FromOutside,
		client: client.LocalAddr().(*net.TCPAddr).AddrPort(), to: netip.MustParseAddrPort("10.96.0.1:80"),
	}
	if e := raw.Control(func(fd uintptr) { c.fd, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }); e != nil || err != nil {
		tb.Fatal(e, err)
	}
	in.Close()
	client.SetDeadline(time.Now().Add(20 * time.Second))
	return c, client
}

// joined is a client and a server with a relay between them.
func joined(tb testing.TB, s *server) (client, server *net.TCPConn) {
	tb.Helper()
	l := listener(tb)
	client = call(tb, s, before(l))
	server, err := l.AcceptTCP()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { server.Close() })
	server.SetDeadline(time.Now().Add(20 * time.Second))
	return client, server
}

func listener(tb testing.TB) *net.TCPListener {
	tb.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { l.Close() })
	return l
}

// ends waits until nothing is relayed any more.
func ends(t *testing.T, s *server) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		sum := int64(0)
		for _, l := range s.loops {
			sum += l.load.Load()
		}
		if sum == 0 {
			return
		}
	}
	t.Fatal("the relay goes on")
}

// TestHalfClose: a client that has said all still hears the answer.
func TestHalfClose(t *testing.T) {
	s := opened(t)
	client, server := joined(t, s)
	question := make([]byte, 3<<20)
	rand.Read(question)
	go func() {
		client.Write(question)
		client.CloseWrite()
	}()
	heard, err := io.ReadAll(server)
	if err != nil || !bytes.Equal(heard, question) {
		t.Fatalf("heard %d bytes of %d: %v", len(heard), len(question), err)
	}
	server.Write([]byte("the answer"))
	server.Close()
	if answer, err := io.ReadAll(client); err != nil || string(answer) != "the answer" {
		t.Fatalf("%q, %v", answer, err)
	}
	ends(t, s)
}

// TestAnnounce: an endpoint hears of the client first, and then the client.
func TestAnnounce(t *testing.T) {
	s := opened(t, Announce)
	client, server := joined(t, s)
	client.Write([]byte("hello"))
	client.CloseWrite()
	want := append(header(client.LocalAddr().(*net.TCPAddr).AddrPort(), netip.MustParseAddrPort("10.96.0.1:80")), "hello"...)
	if heard, err := io.ReadAll(server); err != nil || !bytes.Equal(heard, want) {
		t.Errorf("heard %q instead of %q: %v", heard, want, err)
	}
}

// TestReset: an end that is none is not passed on as one.
func TestReset(t *testing.T) {
	s := opened(t)
	client, server := joined(t, s)
	client.Write([]byte("hello"))
	io.ReadFull(server, make([]byte, 5))
	server.SetLinger(0)
	server.Close()
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client saw %v", err)
	}
	ends(t, s)
}

// TestBackpressure: what the server does not take is not taken from the client.
func TestBackpressure(t *testing.T) {
	s := opened(t)
	client, server := joined(t, s)
	client.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
	sent := 0
	chunk := make([]byte, 64<<10)
	for {
		n, err := client.Write(chunk)
		sent += n
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil || sent > 64<<20 {
			t.Fatalf("%d bytes were taken, %v", sent, err)
		}
	}
	client.CloseWrite()
	if n, err := io.Copy(io.Discard, server); err != nil || int(n) != sent {
		t.Errorf("%d bytes arrived of %d: %v", n, sent, err)
	}
	server.Close()
	ends(t, s)
}

// TestManyAtOnce: each gets what is its own, small or large, whichever way, and nothing is left of them.
func TestManyAtOnce(t *testing.T) {
	s := opened(t)
	l := listener(t)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
	front, before := before(l), descriptors(t)
	var wg sync.WaitGroup
	for i := range 200 {
		client := call(t, s, front)
		wg.Go(func() {
			data := make([]byte, 1<<(i%22)+i)
			rand.Read(data)
			go func() {
				client.Write(data)
				client.CloseWrite()
			}()
			if back, err := io.ReadAll(client); err != nil || !bytes.Equal(back, data) {
				t.Errorf("%d bytes of %d came back: %v", len(back), len(data), err)
			}
			client.Close()
		})
	}
	wg.Wait()
	ends(t, s)
	// Spare pipes stay, of both loops.
	if now := descriptors(t); now > before+len(s.loops)*spare*2+20 {
		t.Errorf("%d descriptors were in use, and now %d", before, now)
	}
}

func descriptors(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// BenchmarkRelay moves data through a relay, and for comparison over one connection.
func BenchmarkRelay(b *testing.B) {
	s := opened(b)
	move := func(b *testing.B, from, to *net.TCPConn) {
		from.SetDeadline(time.Time{})
		to.SetDeadline(time.Time{})
		chunk := make([]byte, 256<<10)
		b.SetBytes(int64(len(chunk)))
		go func() {
			buf := make([]byte, 256<<10)
			for {
				if _, err := to.Read(buf); err != nil {
					return
				}
			}
		}()
		for b.Loop() {
			if _, err := from.Write(chunk); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.Run("direct", func(b *testing.B) { from, to := pair(b); move(b, from, to) })
	b.Run("relayed", func(b *testing.B) { client, server := joined(b, s); move(b, client, server) })
}
