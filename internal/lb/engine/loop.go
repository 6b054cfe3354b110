package engine

import (
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// loop waits for the descriptors of connections whose bytes are passed on as they are. A goroutine for each direction would cost more than
// a short connection does itself. The loop's own epoll descriptor is waited for by the runtime, so that an idle loop holds no thread.
type loop struct {
	epoll *os.File
	raw   syscall.RawConn
	fd    int

	// These are of the goroutine that runs the loop.
	events []unix.EpollEvent
	failed error
	again  []*link // have more to do than one turn allows
	buf    []byte

	mu      sync.Mutex
	watched []watched // by descriptor
	last    int32     // the number of the last one
}

// watched is whose a descriptor is. Descriptors are used again at once: the number tells what was reported of one from what is reported of the next.
type watched struct {
	link   *link
	number int32
}

// loops are as many as there are processors; they are started when the first connection needs one.
type loops struct {
	mu   sync.Mutex
	all  []*loop
	turn atomic.Uint32
}

// next is the loop for a new connection.
func (s *loops) next(tasks *sync.WaitGroup) (*loop, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		var all []*loop
		for range runtime.GOMAXPROCS(0) {
			l, err := newLoop()
			if err != nil {
				for _, l := range all {
					_ = l.epoll.Close()
				}
				return nil, err
			}
			all = append(all, l)
		}
		for _, l := range all {
			tasks.Go(l.run)
		}
		s.all = all
	}
	return s.all[s.turn.Add(1)%uint32(len(s.all))], nil
}

// close ends the loops, which have nothing to wait for any more.
func (s *loops) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.all {
		_ = l.epoll.Close()
	}
}

func newLoop() (*loop, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create", err)
	}
	// The runtime polls only descriptors that do not block.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	l := &loop{epoll: os.NewFile(uintptr(fd), "epoll"), fd: fd, events: make([]unix.EpollEvent, 128), buf: make([]byte, bufferSize)}
	if l.raw, err = l.epoll.SyscallConn(); err != nil {
		_ = l.epoll.Close()
		return nil, fmt.Errorf("wait for the connections' descriptors: %w", err)
	}
	return l, nil
}

// run passes bytes until the loop is closed. It never leaves the wait of the runtime: what is reported while a turn is under way ends the next wait at once, so
// that no turn needs to look twice.
func (l *loop) run() {
	_ = l.raw.Read(func(fd uintptr) bool {
		for l.turn(int(fd)) {
		}
		return l.failed != nil
	})
}

// turn does what has been reported, and says whether there may be more to do at once.
func (l *loop) turn(fd int) bool {
	n, err := reported(fd, l.events)
	if err == unix.EINTR {
		return true
	}
	l.failed = err
	for i := range n {
		at := &l.events[i]
		if k := l.find(int(at.Fd), at.Pad); k != nil {
			k.event(int(at.Fd), at.Events)
		}
	}
	more := l.again
	l.again = nil
	for _, k := range more {
		k.event(-1, 0)
	}
	return l.failed == nil && (n == len(l.events) || len(l.again) > 0)
}

// find is the link that something was reported for, or nil if it has closed the descriptor since.
func (l *loop) find(fd int, number int32) *link {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fd < len(l.watched) && l.watched[fd].number == number {
		return l.watched[fd].link
	}
	return nil
}

// watch has a descriptor waited for: every change is reported once.
func (l *loop) watch(k *link, fd int, events uint32) error {
	l.mu.Lock()
	for len(l.watched) <= fd {
		l.watched = append(l.watched, watched{})
	}
	l.last++
	number := l.last
	l.watched[fd] = watched{k, number}
	l.mu.Unlock()
	return unix.EpollCtl(l.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd), Pad: number})
}

// change has other events of a descriptor reported.
func (l *loop) change(fd int, events uint32) error {
	l.mu.Lock()
	number := l.watched[fd].number
	l.mu.Unlock()
	return unix.EpollCtl(l.fd, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd), Pad: number})
}

// forget is called before a descriptor is closed.
func (l *loop) forget(fd int) {
	l.mu.Lock()
	if fd < len(l.watched) {
		l.watched[fd] = watched{}
	}
	l.mu.Unlock()
}
