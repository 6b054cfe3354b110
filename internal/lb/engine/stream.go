package engine

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stream is one side of a connection, as far as passing bytes needs it: a *net.TCPConn or a socket.
type stream interface {
	SyscallConn() (syscall.RawConn, error)
	Write([]byte) (int, error)
	CloseWrite() error
	SetLinger(seconds int) error
	Close() error
}

// socket is a connection to an endpoint. A net.TCPConn would do too; but package net asks the kernel for addresses that nobody needs and
// starts a goroutine for each connection attempt, and connections are opened all the time.
type socket struct {
	*os.File
	raw syscall.RawConn
}

func (s *socket) SyscallConn() (syscall.RawConn, error) { return s.raw, nil }

func (s *socket) control(f func(fd int) error) error {
	var err error
	return errors.Join(s.raw.Control(func(fd uintptr) { err = f(int(fd)) }), err)
}

// CloseWrite ends one direction.
func (s *socket) CloseWrite() error {
	return s.control(func(fd int) error { return unix.Shutdown(fd, unix.SHUT_WR) })
}

// SetLinger chooses what closing does; 0: a reset.
func (s *socket) SetLinger(seconds int) error {
	return s.control(func(fd int) error {
		return unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: int32(seconds)})
	})
}

// connect opens a connection.
func connect(ctx context.Context, to netip.AddrPort, until time.Time) (*socket, error) {
	family := unix.AF_INET6
	var address unix.Sockaddr = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	if to.Addr().Is4() {
		family, address = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	at := unix.Connect(fd, address)
	if at != nil && at != unix.EINPROGRESS && at != unix.EINTR {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("connect", at)
	}
	s := &socket{File: os.NewFile(uintptr(fd), "endpoint")}
	// Within a machine it is there at once.
	if s.raw, err = s.File.SyscallConn(); err == nil && at != nil {
		err = s.connected(ctx, until)
	}
	if err != nil {
		_ = s.Close()
		return nil, err
	}
	return s, nil
}

// connected waits until the connection is there.
func (s *socket) connected(ctx context.Context, until time.Time) error {
	if err := s.SetWriteDeadline(until); err != nil {
		return err
	}
	if stop := ctx.Done(); stop != nil {
		// Those who wait are woken by a deadline that has passed.
		cancel := context.AfterFunc(ctx, func() { _ = s.SetWriteDeadline(time.Unix(1, 0)) })
		defer cancel()
	}
	var state error
	waited := false
	err := s.raw.Write(func(fd uintptr) bool {
		if _, state = syscall.Getpeername(int(fd)); state == nil {
			return true
		}
		if waited {
			code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
			if err != nil || code != 0 {
				state = os.NewSyscallError("connect", cmp.Or(err, error(unix.Errno(code))))
				return true
			}
		}
		waited = true
		return false
	})
	if err == nil {
		err = state
	}
	if err != nil {
		return err
	}
	return s.SetWriteDeadline(time.Time{})
}

// setups run the first part of connections in goroutines that are used again: their stacks have grown to what it needs.
type setups struct {
	work chan func()
	idle atomic.Int32
}

// mostSetups is how many goroutines wait for the next connection.
const mostSetups = 32

// do runs f, soon. Those that wait for the next one end with ctx.
func (s *setups) do(ctx context.Context, tasks *sync.WaitGroup, f func()) {
	select {
	case s.work <- f:
	default:
		tasks.Go(func() { s.run(ctx, f) })
	}
}

func (s *setups) run(ctx context.Context, f func()) {
	for {
		f()
		if s.idle.Add(1) > mostSetups {
			s.idle.Add(-1)
			return
		}
		select {
		case f = <-s.work:
			s.idle.Add(-1)
		case <-ctx.Done():
			s.idle.Add(-1)
			return
		}
	}
}
