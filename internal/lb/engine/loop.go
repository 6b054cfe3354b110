package engine

import (
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"portal/internal/lb/readiness"
)

// loop waits for the descriptors of connections whose bytes are passed on as they are. A goroutine for each direction would cost more than
// a short connection does itself.
type loop struct {
	poll *readiness.Poll

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
					l.poll.Close()
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
		l.poll.Close()
	}
}

func newLoop() (*loop, error) {
	poll, err := readiness.New()
	if err != nil {
		return nil, err
	}
	return &loop{poll: poll, events: make([]unix.EpollEvent, 128), buf: make([]byte, bufferSize)}, nil
}

// run passes bytes until the loop is closed.
func (l *loop) run() {
	l.poll.Run(func() bool {
		for l.turn() {
		}
		return l.failed == nil
	})
}

// turn does what has been reported, and says whether there may be more to do at once.
func (l *loop) turn() bool {
	n, err := l.poll.Reported(l.events)
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
	return unix.EpollCtl(l.poll.FD, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd), Pad: number})
}

// change has other events of a descriptor reported.
func (l *loop) change(fd int, events uint32) error {
	l.mu.Lock()
	number := l.watched[fd].number
	l.mu.Unlock()
	return unix.EpollCtl(l.poll.FD, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd), Pad: number})
}

// forget is called before a descriptor is closed.
func (l *loop) forget(fd int) {
	l.mu.Lock()
	if fd < len(l.watched) {
		l.watched[fd] = watched{}
	}
	l.mu.Unlock()
}
