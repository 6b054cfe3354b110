package userspace

import (
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
)

// loop carries connections. It alone touches those that it has, so that they need no lock, and it waits for all of them
// at once: a connection that says little costs little more than its system calls.
type loop struct {
	*server
	epoll, wake int
	sides       []*side // by descriptor
	load        atomic.Int64
	// waiting are the connections being made, in the order of their deadlines.
	waiting []attempt
	again   []*link
	// closing are descriptors that end with the round: until then the poller may have spoken about them, and a new
	// connection must not be taken for the one it meant.
	closing []int
	used    []*link // that are over, for the next
	over    []*link // in this round
	busy    int     // how much happened in this round
	// shut: there are no descriptors for clients at the moment. They are tried again after a nap, and so are starved links, which
	// have none for their endpoint.
	shut     bool
	nap      time.Duration
	napUntil time.Time
	starved  []attempt
	pipes    pipes
	buf      []byte

	mu    sync.Mutex
	inbox []caller
}

// acceptor is a socket that accepts clients' connections.
type acceptor struct {
	fd     int
	family intent.Family
	origin plan.Origin
}

type attempt struct {
	link   *link
	number int
	until  time.Time
}

// small is what is moved by reading and writing.
const small = 32 << 10

// newLoop makes a loop that waits at the server's acceptors.
func newLoop(s *server) (*loop, error) {
	l := &loop{server: s, wake: -1, buf: make([]byte, small), pipes: pipes{files: &s.pipeFiles}}
	var err error
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, err
	}
	if l.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
		err = l.add(l.wake, unix.EPOLLIN)
	}
	if err == nil {
		err = l.openDoors()
	}
	if err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *loop) add(fd int, events uint32) error {
	return unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)})
}

// openDoors has one loop woken for a client, not all.
func (l *loop) openDoors() error {
	for _, d := range l.acceptors {
		if err := l.add(d.fd, unix.EPOLLIN|unix.EPOLLEXCLUSIVE); err != nil && err != unix.EEXIST {
			return err
		}
	}
	return nil
}

func (l *loop) closeDoors() {
	for _, d := range l.acceptors {
		unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, d.fd, nil)
	}
}

// close frees what the loop has, once nobody can call it any more.
func (l *loop) close() {
	for _, a := range l.takeInbox() {
		unix.Close(a.fd)
	}
	l.pipes.close()
	unix.Close(l.epoll)
	if l.wake >= 0 {
		unix.Close(l.wake)
	}
}

// call wakes the loop: something is in its inbox, or all is over.
func (l *loop) call() {
	unix.Write(l.wake, binary.NativeEndian.AppendUint64(nil, 1))
}

// run carries until the server ends.
func (l *loop) run() {
	if l.home.ns != nil {
		// Sockets are made in the namespace of the thread, which ends with it.
		runtime.LockOSThread()
		if err := unix.Setns(int(l.home.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			panic(err) // a descriptor of a namespace that we were in
		}
	}
	events := make([]unix.EpollEvent, 128)
	for l.ctx.Err() == nil {
		n, err := unix.EpollWait(l.epoll, events, l.timeout())
		if err != nil && err != unix.EINTR {
			panic(err) // nothing but a mistake of ours
		}
		l.busy = max(n, 0)
		for i := range l.busy {
			l.event(int(events[i].Fd), events[i].Events)
		}
		l.resume()
		l.expire()
		l.recover()
		l.closePending()
	}
	for _, s := range l.sides {
		if s != nil && !s.link.over {
			l.finish(s.link, false)
		}
	}
	l.closePending()
}

// timeout is how many milliseconds the loop may wait; -1: until something happens.
func (l *loop) timeout() int {
	if len(l.again) > 0 {
		return 0
	}
	var next time.Time
	if len(l.waiting) > 0 {
		next = l.waiting[0].until
	}
	if l.shut && (next.IsZero() || l.napUntil.Before(next)) {
		next = l.napUntil
	}
	if next.IsZero() && !l.shut {
		return -1
	}
	return int(max(time.Until(next), 0)/time.Millisecond) + 1
}

func (l *loop) event(fd int, events uint32) {
	if fd < len(l.sides) && l.sides[fd] != nil {
		s := l.sides[fd]
		s.note(events)
		l.attend(s, events)
		return
	}
	if fd == l.wake {
		var b [8]byte
		unix.Read(fd, b[:])
		for _, a := range l.takeInbox() {
			l.begin(a)
		}
		return
	}
	for _, d := range l.acceptors {
		if d.fd == fd {
			l.accept(d)
		}
	}
}

func (l *loop) takeInbox() []caller {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.inbox
	l.inbox = nil
	return list
}

// attend goes on with a link about one of whose sides something is new.
func (l *loop) attend(s *side, events uint32) {
	k := s.link
	failed := events&(unix.EPOLLERR|unix.EPOLLHUP) != 0
	switch {
	case k.over:
	case k.open:
		l.pump(k)
	case s == &k.near:
		if failed {
			l.finish(k, true)
		}
	case failed:
		l.failed(k)
	case events&unix.EPOLLOUT != 0:
		l.established(k)
	}
}

// resume gives another turn to links that have more to do.
func (l *loop) resume() {
	list := l.again
	l.again = nil
	for _, k := range list {
		k.queued = false
		if k.open && !k.over {
			l.pump(k)
		}
	}
}
