package userspace

import (
	"errors"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// wire is one side of a TCP connection. It does what net.TCPConn does with a third fewer system calls, which are most of
// what a short connection costs.
type wire struct {
	*os.File
	raw syscall.RawConn
}

func newWire(fd int) (*wire, error) {
	w := &wire{File: os.NewFile(uintptr(fd), "")}
	var err error
	w.raw, err = w.SyscallConn()
	return w, err
}

func (w *wire) control(f func(fd int) error) error {
	var err error
	if e := w.raw.Control(func(fd uintptr) { err = f(int(fd)) }); e != nil {
		return e
	}
	return err
}

// listen opens a socket for connections to any address, on a port that is free. What is set here, connections inherit: a
// client that is gone without a word is noticed.
func listen(f intent.Family) (*wire, uint16, error) {
	domain := unix.AF_INET
	if f == intent.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, 0, err
	}
	all := netip.IPv4Unspecified()
	if f == intent.IPv6 {
		all, err = netip.IPv6Unspecified(), unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1)
	}
	err = errors.Join(err,
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 120),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.Bind(fd, sockaddr(netip.AddrPortFrom(all, 0))),
		unix.Listen(fd, backlog))
	if err != nil {
		unix.Close(fd)
		return nil, 0, err
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return nil, 0, err
	}
	w, err := newWire(fd)
	return w, addrPort(at).Port(), err
}

// backlog is as long as the system lets it be.
const backlog = 65535

// CloseWrite says that nothing more will come.
func (w *wire) CloseWrite() error {
	return w.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// SetLinger with 0 makes Close a reset.
func (w *wire) SetLinger(seconds int) error {
	return w.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: int32(seconds)})
	})
}

// accept waits for a connection, and says who made it. Its error is os.ErrClosed once the wire is: what the poller
// returns then is known to nobody outside the library.
func (w *wire) accept() (*wire, netip.AddrPort, error) {
	var fd int
	var peer unix.Sockaddr
	var err error
	if e := w.raw.Read(func(listener uintptr) bool {
		fd, peer, err = unix.Accept4(int(listener), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		return err != unix.EAGAIN
	}); e != nil {
		return nil, netip.AddrPort{}, os.ErrClosed
	}
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	c, err := newWire(fd)
	return c, addrPort(peer), err
}

func addrPort(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr), uint16(s.Port))
	}
	return netip.AddrPort{}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// connect makes a connection, from an address if that is valid.
func connect(h home, to netip.AddrPort, from netip.Addr, within time.Duration) (*wire, error) {
	family, domain := intent.FamilyOf(to.Addr()), unix.AF_INET
	if family == intent.IPv6 {
		domain = unix.AF_INET6
	}
	var fd int
	err := h.do(func() (err error) {
		fd, err = unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	err = errors.Join(prepare(fd, family, from.IsValid()), unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	if err == nil && from.IsValid() {
		err = unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0)))
	}
	if err == nil {
		if err = unix.Connect(fd, sockaddr(to)); err == unix.EINPROGRESS {
			err = nil
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	w, err := newWire(fd)
	if err == nil {
		err = w.established(within)
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// established waits until the other side has answered.
func (w *wire) established(within time.Duration) error {
	if err := w.SetWriteDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	var err error
	if e := w.raw.Write(func(fd uintptr) bool {
		// The poller may have been told before this began, so that the socket is asked first, and waited for after.
		if _, err = unix.Getpeername(int(fd)); err == nil {
			return true
		}
		errno, e := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if e == nil && errno == 0 {
			return false
		}
		err = errors.Join(e, unix.Errno(errno))
		return true
	}); e != nil {
		return e
	}
	return errors.Join(err, w.SetWriteDeadline(time.Time{}))
}

// prepare makes a socket known as ours, and able to pose as somebody else.
func prepare(fd int, f intent.Family, pose bool) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, ownMark); err != nil || !pose {
		return err
	}
	level, name := unix.SOL_IP, unix.IP_TRANSPARENT
	if f == intent.IPv6 {
		level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	return errors.Join(unix.SetsockoptInt(fd, level, name, 1), unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1))
}
