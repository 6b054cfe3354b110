// Package readiness waits for many descriptors through one of epoll, which Go's runtime waits for: while nothing happens no thread is held, and no
// goroutine for each descriptor.
package readiness

import (
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Poll is an epoll descriptor.
type Poll struct {
	FD   int
	file *os.File
	raw  syscall.RawConn
}

// New opens one.
func New() (*Poll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create", err)
	}
	// The runtime polls only descriptors that do not block.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	p := &Poll{FD: fd, file: os.NewFile(uintptr(fd), "epoll")}
	if p.raw, err = p.file.SyscallConn(); err != nil {
		_ = p.file.Close()
		return nil, fmt.Errorf("wait for the connections' descriptors: %w", err)
	}
	return p, nil
}

// Close ends Run.
func (p *Poll) Close() { _ = p.file.Close() }

// Run calls turn whenever something may have been reported, until that returns false or Close is called. turn must take all there is. Run never leaves
// the wait of the runtime: what is reported while a turn is under way ends the next wait at once, so that no turn needs to look twice.
func (p *Poll) Run(turn func() bool) {
	_ = p.raw.Read(func(uintptr) bool { return !turn() })
}

// Reported takes what has been reported, without waiting, and without a word to Go's scheduler: the call never blocks.
func (p *Poll) Reported(events []unix.EpollEvent) (int, error) {
	n, _, code := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.FD), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if code != 0 {
		return 0, code
	}
	return int(n), nil
}
