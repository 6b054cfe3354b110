package engine

import (
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// acceptor accepts connections as descriptors. What one attempt needs is kept for the next.
type acceptor struct {
	raw  syscall.RawConn
	try  func(socket uintptr) bool
	fd   int
	from netip.AddrPort
	err  error
}

// acceptPlain accepts a connection as a descriptor.
func (l *listener) acceptPlain() (fd int, from netip.AddrPort, err error) {
	a := &l.acceptor
	if a.raw == nil {
		if a.raw, err = l.plainSocket(); err != nil {
			return -1, from, err
		}
		a.try = func(socket uintptr) bool {
			a.fd, a.from, a.err = accept(int(socket))
			return a.err != unix.EAGAIN
		}
	}
	if a.raw.Read(a.try) != nil {
		return -1, from, net.ErrClosed // nothing else makes waiting fail
	}
	if a.err != nil {
		return -1, from, os.NewSyscallError("accept", a.err)
	}
	return a.fd, a.from, nil
}

// plainSocket is the listening socket as a file, which package net does not let wait for connections otherwise.
func (l *listener) plainSocket() (syscall.RawConn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, net.ErrClosed
	}
	if l.plain == nil {
		f, err := l.socket.File()
		if err != nil {
			return nil, err
		}
		l.plain = f
		// What is set here, connections have too.
		if raw, err := f.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) })
		}
	}
	return l.plain.SyscallConn()
}

// beginPlain admits a connection if there is room, and has its bytes passed.
func (l *listener) beginPlain(fd int, from netip.AddrPort, state *listenerState, p *pool) {
	now := time.Now()
	// One piece of memory for all that a connection needs.
	all := &struct {
		conn conn
		link link
		info ConnInfo
	}{conn: conn{listener: l, generation: state.generation, client: from}}
	c := &all.conn
	c.last.Store(now.UnixNano())
	if !l.admit(c, state.cfg.Limits) {
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		_ = unix.Close(fd)
		return
	}
	l.counters.total.Add(1)
	l.engine.conns.add(c)
	all.info.Client, all.info.Local = from, state.cfg.Address
	if all.info.Local.Addr().IsUnspecified() {
		all.info.Local = localOfDescriptor(fd)
	}
	c.begin(&all.link, fd, &all.info, now, state.cfg, p)
}

func localOfDescriptor(fd int) netip.AddrPort {
	at, _ := syscall.Getsockname(fd) // package unix would ask for the socket's protocol, too
	switch at := at.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
	case *syscall.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(at.Addr).Unmap(), uint16(at.Port))
	}
	return netip.AddrPort{}
}
