package userspace

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// backlog is as long as the system lets it be.
const backlog = 65535

func domain(f intent.Family) int {
	if f == intent.IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// stream makes a socket for TCP, in the network namespace of the thread.
func stream(f intent.Family) (int, error) {
	return unix.Socket(domain(f), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
}

// listen opens a socket for connections to any address, on a port that is free. What is set here, connections inherit: a
// client that is gone without a word is noticed.
func listen(f intent.Family) (fd int, port uint16, err error) {
	if fd, err = stream(f); err != nil {
		return -1, 0, err
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
	var at unix.Sockaddr
	if err == nil {
		at, err = unix.Getsockname(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, 0, err
	}
	return fd, addrPort(at).Port(), nil
}

// connect begins a connection, from an address if that is valid.
func connect(to netip.AddrPort, from netip.Addr) (int, error) {
	f := intent.FamilyOf(to.Addr())
	fd, err := stream(f)
	if err != nil {
		return -1, err
	}
	if err = prepare(fd, f, from.IsValid()); err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
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
		return -1, err
	}
	return fd, nil
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

// abort makes the close of a socket a reset, so that the other side sees an abnormal end.
func abort(fd int) {
	unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
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
