package engine

import (
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// System calls on sockets that never block, without a word to Go's scheduler: it would be prepared for each of them to last, and a thread of the runtime would look
// every 20 µs whether one does. A connection of a hundred bytes needs a dozen of them: without these precautions it costs 7 % less CPU time.

func result(n uintptr, code unix.Errno) (int, error) {
	if code != 0 {
		return 0, code
	}
	return int(n), nil
}

// read reads into a buffer, which is not empty.
func read(fd int, p []byte) (int, error) {
	n, _, code := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return result(n, code)
}

// send sends something, which is not empty.
func send(fd int, p []byte, flags int) (int, error) {
	n, _, code := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), uintptr(flags|unix.MSG_NOSIGNAL), 0, 0)
	return result(n, code)
}

func closeSocket(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// shutdownWrite ends what is sent.
func shutdownWrite(fd int) error {
	_, err := result(0, second(unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)))
	return err
}

func second(_, _ uintptr, code unix.Errno) unix.Errno { return code }

// accept accepts a connection, which does not block.
func accept(socket int) (fd int, from netip.AddrPort, err error) {
	var peer unix.RawSockaddrInet6 // one of IPv4 is smaller
	size := uint32(unsafe.Sizeof(peer))
	n, _, code := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(socket), uintptr(unsafe.Pointer(&peer)), uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if fd, err = result(n, code); err != nil {
		return -1, from, err
	}
	port := (*[2]byte)(unsafe.Pointer(&peer.Port))
	number := uint16(port[0])<<8 | uint16(port[1])
	if peer.Family == unix.AF_INET {
		four := (*unix.RawSockaddrInet4)(unsafe.Pointer(&peer))
		return fd, netip.AddrPortFrom(netip.AddrFrom4(four.Addr), number), nil
	}
	return fd, netip.AddrPortFrom(netip.AddrFrom16(peer.Addr).Unmap(), number), nil
}

// startConnect begins a connection.
func startConnect(to netip.AddrPort) (fd int, err error) {
	family := unix.AF_INET6
	if to.Addr().Is4() {
		family = unix.AF_INET
	}
	if fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil { // it is such a call already
		return -1, os.NewSyscallError("socket", err)
	}
	var code unix.Errno
	if to.Addr().Is4() {
		address := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: to.Addr().As4()}
		putPort(&address.Port, to.Port())
		_, _, code = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&address)), unsafe.Sizeof(address))
	} else {
		address := unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: to.Addr().As16(), Scope_id: zoneOf(to.Addr())}
		putPort(&address.Port, to.Port())
		_, _, code = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&address)), unsafe.Sizeof(address))
	}
	switch code {
	case 0, unix.EINPROGRESS, unix.EINTR:
		return fd, nil
	}
	closeSocket(fd)
	return -1, os.NewSyscallError("connect", code)
}

// putPort writes a port in the order of the network.
func putPort(to *uint16, port uint16) {
	*(*[2]byte)(unsafe.Pointer(to)) = [2]byte{byte(port >> 8), byte(port)}
}
