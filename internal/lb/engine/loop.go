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
	count  int
	failed error
	again  []*link // have more to do than one turn allows
	buf    []byte

	mu    sync.Mutex
	links []*link // by descriptor
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

// run passes bytes until the loop is closed.
func (l *loop) run() {
	poll := l.poll
	for {
		if len(l.again) > 0 {
			l.poll(uintptr(l.fd))
		} else if l.raw.Read(poll) != nil {
			return
		}
		for i := range max(l.count, 0) {
			fd := int(l.events[i].Fd)
			if k := l.find(fd); k != nil {
				k.event(fd, l.events[i].Events)
			}
		}
		more := l.again
		l.again = nil
		for _, k := range more {
			k.event(-1, 0)
		}
	}
}

// poll takes what is ready, and says whether something is.
func (l *loop) poll(fd uintptr) bool {
	l.count, l.failed = unix.EpollWait(int(fd), l.events, 0)
	return l.count > 0 || l.failed != nil && l.failed != unix.EINTR
}

func (l *loop) find(fd int) *link {
	l.mu.Lock()
	defer l.mu.Unlock()
	if fd < len(l.links) {
		return l.links[fd]
	}
	return nil
}

// watch has a descriptor waited for: every change is reported once.
func (l *loop) watch(k *link, fd int, events uint32) error {
	l.mu.Lock()
	for len(l.links) <= fd {
		l.links = append(l.links, nil)
	}
	l.links[fd] = k
	l.mu.Unlock()
	return unix.EpollCtl(l.fd, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd)})
}

func (l *loop) change(fd int, events uint32) error {
	return unix.EpollCtl(l.fd, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd)})
}

// forget is called before a descriptor is closed.
func (l *loop) forget(fd int) {
	l.mu.Lock()
	if fd < len(l.links) {
		l.links[fd] = nil
	}
	l.mu.Unlock()
}
