package userspace

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/nettest"
	"portal/internal/plan"
)

// until waits for something that happens soon.
func until(tb testing.TB, what string, is func() bool) {
	tb.Helper()
	for end := time.Now().Add(10 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			tb.Fatalf("not after 10 s: %s", what)
		}
	}
}

// TestNoDescriptorForEndpoint: a client waits for the connection to its endpoint, which is not blamed, and comes before new clients.
func TestNoDescriptorForEndpoint(t *testing.T) {
	s, l := opened(t), listener(t)
	front := before(l)
	c, client := taken(t, front)
	release := nettest.Exhaust(t)
	s.loops[0].post(c)
	until(t, "a client waits", func() bool { return s.starving.Load() == 1 })
	release()
	server, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go server.Write([]byte("here"))
	var b [4]byte
	if _, err := io.ReadFull(client, b[:]); err != nil {
		t.Fatalf("the client was given up: %v", err)
	}
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	if len(s.memory.silent) != 0 || s.starving.Load() != 0 {
		t.Errorf("%d endpoints are shunned, %d clients wait", len(s.memory.silent), s.starving.Load())
	}
}

// TestLeaveWithoutDescriptors: a client that leaves while it waits for a descriptor keeps nobody from being accepted.
func TestLeaveWithoutDescriptors(t *testing.T) {
	s := opened(t)
	c, client := taken(t, before(listener(t)))
	release := nettest.Exhaust(t)
	s.loops[0].post(c)
	until(t, "a client waits", func() bool { return s.starving.Load() == 1 })
	client.SetLinger(0)
	client.Close()
	release()
	ends(t, s)
	until(t, "nobody waits", func() bool { return s.starving.Load() == 0 })
}

// TestNoDescriptorForClients: what comes while there are no descriptors is accepted when there are some, whatever else goes on, and no loop
// tries all the time.
func TestNoDescriptorForClients(t *testing.T) {
	s := opened(t)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	// A loop of its own, which nobody runs.
	l, err := newLoop(s)
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	door := s.acceptors[plan.FromOutside]
	release := nettest.Exhaust(t)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: int(s.ports[intent.IPv4].tcp[plan.FromOutside])}); err != nil {
		t.Fatal(err)
	}
	last := time.Duration(0)
	for range 8 {
		l.accept(door)
		if !l.shut || l.nap <= last && l.nap != maxNap {
			t.Fatalf("tries again after %v, and then %v", last, l.nap)
		}
		last = l.nap
		if l.recover(); !l.shut {
			t.Fatal("tries again at once because something else has happened")
		}
		if wait := l.timeout(); wait < 1 {
			t.Fatalf("waits for %d ms", wait)
		}
	}
	if last != maxNap {
		t.Errorf("waits for %v at last", last)
	}
	release()
	l.napUntil = time.Time{} // a connection has ended
	if l.recover(); l.shut {
		t.Error("accepts nobody though there are descriptors again")
	}
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20})
	if _, err := unix.Read(fd, make([]byte, 1)); err != unix.ECONNRESET {
		t.Errorf("a client that no rule led here sees %v, want a reset", err)
	}
}

// TestNoDescriptorForPipe: what is much goes on without a pipe.
func TestNoDescriptorForPipe(t *testing.T) {
	s := opened(t)
	client, server := joined(t, s)
	until(t, "connected", func() bool {
		_, err := client.Write([]byte("x"))
		return err == nil
	})
	if _, err := io.ReadFull(server, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	defer nettest.Exhaust(t)()
	transfer(t, client, server)
}

// transfer sends much from the client, and wants all of it at the server.
func transfer(t *testing.T, client *net.TCPConn, server io.Reader) {
	t.Helper()
	much := make([]byte, 4<<20)
	rand.Read(much)
	go func() {
		client.Write(much)
		client.CloseWrite()
	}()
	if heard, err := io.ReadAll(server); err != nil || !bytes.Equal(heard, much) {
		t.Fatalf("heard %d bytes of %d: %v", len(heard), len(much), err)
	}
}

// udpFront is a frontend of UDP endpoints on loopback, which the server finds.
func udpFront(s *server, name string, to netip.AddrPort, endpoints ...netip.AddrPort) {
	pool := &plan.Pool{}
	for _, a := range endpoints {
		pool.Endpoints = append(pool.Endpoints, plan.Endpoint{Addr: a})
	}
	f := &plan.Frontend{FrontendKey: plan.FrontendKey{Addr: to.Addr(), Family: intent.IPv4, Protocol: intent.UDP, Port: to.Port()}, ID: plan.PortID{Port: name}}
	for o := range f.Routes {
		f.Routes[o] = plan.Route{Verdict: plan.Forward, Pool: pool}
	}
	s.set([]*plan.Frontend{f})
}

func clientFlow(n int) flow {
	return flow{client: netip.MustParseAddrPort(fmt.Sprintf("192.0.2.1:%d", n)), us: netip.MustParseAddrPort("127.0.0.1:1")}
}

// TestNoDescriptorForSession: without descriptors no UDP endpoint is blamed, and the oldest session makes room.
func TestNoDescriptorForSession(t *testing.T) {
	s := opened(t)
	d, to := s.udp[plan.FromOutside], netip.MustParseAddrPort("10.96.0.1:53")
	udpFront(s, "dns", to, netip.MustParseAddrPort("127.0.0.2:53"))
	if d.begin(clientFlow(1), to) == nil {
		t.Fatal("no session began")
	}
	defer nettest.Exhaust(t)()
	began := false
	until(t, "a session in the place of another", func() bool {
		began = began || d.begin(clientFlow(2), to) != nil
		return began
	})
	s.memory.mu.Lock()
	defer s.memory.mu.Unlock()
	if len(s.memory.silent) != 0 {
		t.Errorf("%d endpoints are shunned", len(s.memory.silent))
	}
}

// TestSessionsAreBounded: a Service's new clients take the places of its own that have been idle the longest.
func TestSessionsAreBounded(t *testing.T) {
	s := opened(t)
	d, to, other := s.udp[plan.FromOutside], netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("10.96.0.2:53")
	d.most = 3
	udpFront(s, "dns", to, netip.MustParseAddrPort("127.0.0.2:53"))
	udpFront(s, "other", other, netip.MustParseAddrPort("127.0.0.2:53"))
	d.begin(clientFlow(100), other)
	for n := range 3 {
		d.begin(clientFlow(n), to)
	}
	d.session(clientFlow(0)) // which is in use
	d.begin(clientFlow(3), to)
	d.mu.Lock()
	defer d.mu.Unlock()
	for n, want := range map[int]bool{0: true, 1: false, 2: true, 3: true, 100: true} {
		if got := d.sessions[clientFlow(n)] != nil; got != want {
			t.Errorf("client %d has a session: %v, want %v", n, got, want)
		}
	}
}

// TestFilesAreBounded: at the bound of its descriptors a loop lets clients wait in the listen queue, until a connection has ended, and moves
// data without pipes. Connections that there are go on.
func TestFilesAreBounded(t *testing.T) {
	s := openedWith(t, Options{FileShare: 1 << 30})
	most := s.linkFiles.most / linkFiles
	for range most - 1 {
		s.linkFiles.take(linkFiles)
	}
	s.linkFiles.take(linkFiles) // as accept does
	client, server := joined(t, s)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20})
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: int(s.ports[intent.IPv4].tcp[plan.FromOutside])}); err != nil {
		t.Fatal(err)
	}
	s.pipeFiles.take(s.pipeFiles.most)
	transfer(t, client, server)
	if _, _, err := unix.Recvfrom(fd, make([]byte, 1), unix.MSG_DONTWAIT); err != unix.EAGAIN {
		t.Fatalf("a client at the bound sees %v, want that it waits", err)
	}
	if used := s.linkFiles.used.Load(); used != s.linkFiles.most {
		t.Errorf("%d descriptors are used, want %d", used, s.linkFiles.most)
	}
	server.Close()
	ends(t, s)
	if _, err := unix.Read(fd, make([]byte, 1)); err != unix.ECONNRESET {
		t.Errorf("a client that no rule led here sees %v when there is room, want a reset", err)
	}
	until(t, "all descriptors are given back", func() bool { return s.linkFiles.used.Load() == linkFiles*(most-1) })
}

// TestSessionsOfAllServicesAreBounded: a new session takes the place of the oldest one of the Service that has the most.
func TestSessionsOfAllServicesAreBounded(t *testing.T) {
	s := opened(t)
	d, to, other := s.udp[plan.FromOutside], netip.MustParseAddrPort("10.96.0.1:53"), netip.MustParseAddrPort("10.96.0.2:53")
	s.mostSessions = 3
	udpFront(s, "dns", to, netip.MustParseAddrPort("127.0.0.2:53"))
	udpFront(s, "other", other, netip.MustParseAddrPort("127.0.0.2:53"))
	d.begin(clientFlow(0), to)
	d.begin(clientFlow(1), to)
	d.begin(clientFlow(100), other)
	d.begin(clientFlow(101), other)
	d.mu.Lock()
	defer d.mu.Unlock()
	for n, want := range map[int]bool{0: false, 1: true, 100: true, 101: true} {
		if got := d.sessions[clientFlow(n)] != nil; got != want {
			t.Errorf("client %d has a session: %v, want %v", n, got, want)
		}
	}
}
