package backendtest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// serve answers on all addresses of a host with who it is and whom it sees: at once on a TCP connection, which it then
// echoes until the client is done, and to every UDP datagram.
func (w *world) serve(h *host) error {
	for _, a := range h.addrs {
		for _, port := range []uint16{serverPort, otherPort} {
			at := netip.AddrPortFrom(a, port)
			if err := w.listen(h, at); err != nil {
				return err
			}
		}
	}
	return nil
}

// lifetime bounds how long a connection is kept for a client that never ends it.
const lifetime = time.Hour

func (w *world) listen(h *host, at netip.AddrPort) error {
	var l *net.TCPListener
	var u *net.UDPConn
	err := h.do(func() (err error) {
		if l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at)); err != nil {
			return err
		}
		u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		return err
	}
	w.closers = append(w.closers, func() { _ = l.Close(); _ = u.Close() })
	go func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(lifetime))
				fmt.Fprintf(c, "%s %s\n", at, c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap())
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	go func() {
		b := make([]byte, 16)
		for {
			_, from, err := u.ReadFromUDPAddrPort(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = u.WriteToUDPAddrPort(fmt.Appendf(nil, "%s %s\n", at, from.Addr().Unmap()), from)
			}
		}
	}()
	return nil
}

// outcome is what a client saw.
type outcome struct {
	what string // answered, refused, silence, or an error's name
	src  netip.Addr
	port uint16 // of the source
	// Of an answer: who gave it, and what source it saw.
	endpoint netip.AddrPort
	seen     netip.Addr
}

func (o outcome) String() string {
	if o.what == answered {
		return fmt.Sprintf("answered by %s, which saw %s", o.endpoint, o.seen)
	}
	return o.what
}

const (
	answered = "answered"
	refused  = "refused"
	silence  = "silence"
)

// flow is a connection as a client holds it.
type flow struct {
	fd  int
	tcp bool
	src netip.Addr
	// port is the source's.
	port uint16
}

// open begins a connection from an address of a host, or from any. The socket is made in the host's namespace and can be
// used from everywhere.
func (h *host) open(p intent.Protocol, src netip.Addr, dst netip.AddrPort) (*flow, error) {
	return h.openFrom(p, netip.AddrPortFrom(src, 0), dst)
}

// openFrom is open from a port; 0: one that no flow had before.
func (h *host) openFrom(p intent.Protocol, src, dst netip.AddrPort) (*flow, error) {
	f := &flow{fd: -1, tcp: p != intent.UDP}
	kind, protocol := unix.SOCK_DGRAM, 0
	if p == intent.SCTP {
		protocol = unix.IPPROTO_SCTP
	}
	if f.tcp {
		kind = unix.SOCK_STREAM
	}
	family := unix.AF_INET
	if dst.Addr().Is6() {
		family = unix.AF_INET6
	}
	err := h.do(func() (err error) {
		f.fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err = f.bind(h, src, dst); err == nil {
		if err = unix.Connect(f.fd, sockaddr(dst)); err == unix.EINPROGRESS {
			err = nil
		}
	}
	if local, e := unix.Getsockname(f.fd); e == nil {
		f.src, f.port = addrOf(local), portOf(local)
	}
	if err != nil {
		f.close()
		return f, err
	}
	return f, nil
}

// bind takes the port that is asked for, or one that no flow had before: the kernel remembers UDP flows longer than the suite keeps
// its Services.
func (f *flow) bind(h *host, from, dst netip.AddrPort) (err error) {
	src := from.Addr()
	if !src.IsValid() {
		src = netip.IPv4Unspecified()
		if dst.Addr().Is6() {
			src = netip.IPv6Unspecified()
		}
	}
	if from.Port() != 0 {
		return unix.Bind(f.fd, sockaddr(netip.AddrPortFrom(src, from.Port())))
	}
	for range 100 {
		port := 11000 + h.ports.Add(1)%49000 // a proxy on the node may listen at 10249 and 10256
		if err = unix.Bind(f.fd, sockaddr(netip.AddrPortFrom(src, uint16(port)))); err != unix.EADDRINUSE {
			return err
		}
	}
	return err
}

func (f *flow) close() {
	if f.fd >= 0 {
		_ = unix.Close(f.fd)
		f.fd = -1
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrOf(s unix.Sockaddr) netip.Addr {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(s.Addr)
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(s.Addr).Unmap()
	}
	return netip.Addr{}
}

func portOf(s unix.Sockaddr) uint16 {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return uint16(s.Port)
	case *unix.SockaddrInet6:
		return uint16(s.Port)
	}
	return 0
}

var errSilence = errors.New(silence)

// wait waits until the socket is ready, and returns its error.
func (f *flow) wait(event int16, until time.Time) error {
	for {
		// On a busy machine this may run for the first time when the time is over: what is there by then counts.
		left := max(0, time.Until(until))
		p := []unix.PollFd{{Fd: int32(f.fd), Events: event}}
		n, err := unix.Poll(p, int((left + time.Millisecond - 1).Milliseconds()))
		if err == nil && n == 0 && left == 0 {
			return errSilence
		}
		if err == unix.EINTR || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return err
		}
		if errno, err := unix.GetsockoptInt(f.fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || errno != 0 {
			return errors.Join(err, unix.Errno(errno))
		}
		return nil
	}
}

// greet completes a connection and reads the first answer.
func (f *flow) greet(until time.Time) (string, error) {
	if f.tcp {
		if err := f.wait(unix.POLLOUT, until); err != nil {
			return "", err
		}
	} else if err := f.say("?"); err != nil && err != unix.EPERM {
		// EPERM: it was dropped on its way out, and perhaps refused.
		return "", err
	}
	return f.hear(until)
}

func (f *flow) say(line string) error {
	_, err := unix.Write(f.fd, []byte(line))
	return err
}

func (f *flow) hear(until time.Time) (string, error) {
	if err := f.wait(unix.POLLIN, until); err != nil {
		return "", err
	}
	b := make([]byte, 256)
	n, err := unix.Read(f.fd, b)
	if err != nil {
		return "", err
	}
	line, err := bufio.NewReader(strings.NewReader(string(b[:n]))).ReadString('\n')
	if err != nil {
		return "", errors.New("the connection ended without an answer")
	}
	return strings.TrimSpace(line), nil
}

// try makes one connection or sends one datagram.
func (h *host) try(p intent.Protocol, src netip.Addr, dst netip.AddrPort, patience time.Duration) outcome {
	f, err := h.open(p, src, dst)
	var line string
	if err == nil {
		line, err = f.greet(time.Now().Add(patience))
	}
	o := read(line, err)
	if f != nil {
		o.src, o.port = f.src, f.port
		f.close()
	}
	return o
}

// answer waits for the answer to what was said.
func (f *flow) answer(patience time.Duration) outcome {
	return read(f.hear(time.Now().Add(patience)))
}

// read says what an answer, or none, means.
func read(line string, err error) (o outcome) {
	switch {
	case err == nil:
		var e error
		who, seen, _ := strings.Cut(line, " ")
		o.what = answered
		if o.endpoint, e = netip.ParseAddrPort(who); e == nil {
			o.seen, e = netip.ParseAddr(seen)
		}
		if e != nil {
			o.what = "an answer that can't be read: " + line
		}
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		o.what = refused
	case errors.Is(err, errSilence):
		o.what = silence
	default:
		o.what = err.Error()
	}
	return o
}
