package web

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/lb/readiness"
)

// parkAfter is how long a goroutine waits for a client's next request. Then the connection is parked.
const parkAfter = 3 * time.Second

// errPark says that the sweeper has asked for a connection to be parked.
var errPark = errors.New("no request for a while")

// parking waits for idle connections in place of their goroutines, whose stacks are most of what an idle connection would need. A parked connection goes on in
// a goroutine of its own when its client sends something or leaves, when the sweeper ends it, or when it was closed.
type parking struct {
	mu     sync.Mutex
	poll   *readiness.Poll // nil before the first one is parked
	parked map[uint64]*watch
	last   uint64
	closed bool
}

// waiting says what the goroutine of a connection does that has no request under way.
type waiting = int32

const (
	waitsNot   waiting = iota
	waits              // for the client to send something
	waitsAsked         // the same, and the sweeper has asked it to stop
)

// beginWait is called before a goroutine waits for a client that has no request under way.
func (w *watch) beginWait() {
	if w.parks {
		w.waiting.Store(waits)
	}
}

// endWait is called after that, with the error of reading. It returns errPark if the connection is to be parked.
func (w *watch) endWait(err error) error {
	if !w.parks || w.waiting.Swap(waitsNot) != waitsAsked {
		return err
	}
	w.mu.Lock() // the sweeper holds it until it has set the deadline
	w.client.SetReadDeadline(time.Time{})
	w.mu.Unlock()
	if phase(w.state.Load()&7) == phaseFired || w.stopped != nil && w.stopped() {
		w.client.SetReadDeadline(past) // theirs may have been the one that is gone now
		return err
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errPark
	}
	return err
}

// rest is called by the sweeper when nothing has happened on a connection for some time.
func (w *watch) rest() {
	if w.place.Load() != 0 {
		// Nothing is reported of a descriptor that was closed.
		if w.raw.Control(func(uintptr) {}) != nil {
			w.unpark()
		}
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting.CompareAndSwap(waits, waitsAsked) {
		w.client.SetReadDeadline(past)
	}
}

// park parks a connection. If it returns true, the connection may go on already, and the caller must not touch it any more.
func (w *watch) park() bool {
	return w.claim() && w.arm()
}

// claim takes a place. From then on whoever interrupts the connection has it go on.
func (w *watch) claim() bool {
	p := &w.server.parking
	p.mu.Lock()
	if !p.open() {
		w.parks = false
		p.mu.Unlock()
		return false
	}
	p.last++
	place := p.last
	p.parked[place] = w
	w.place.Store(place)
	p.mu.Unlock()
	// Who fired before saw no place.
	return phase(w.state.Load()&7) != phaseFired || !w.leave(place)
}

// arm has the connection waited for.
func (w *watch) arm() bool {
	p := &w.server.parking
	place := w.place.Load()
	if place == 0 {
		return true // it goes on already
	}
	failed := net.ErrClosed
	_ = w.raw.Control(func(fd uintptr) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.closed {
			return
		}
		event := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLONESHOT, Fd: int32(uint32(place)), Pad: int32(uint32(place >> 32))}
		failed = unix.EpollCtl(p.poll.FD, unix.EPOLL_CTL_ADD, int(fd), &event)
		if failed == unix.EEXIST { // it has been parked before
			failed = unix.EpollCtl(p.poll.FD, unix.EPOLL_CTL_MOD, int(fd), &event)
		}
	})
	if failed == nil || !w.leave(place) {
		return true
	}
	w.parks = false // closed, or the kernel has no room: asking again would not help
	return false
}

// leave gives a place back. It returns false if somebody else was sooner, and has the connection go on.
func (w *watch) leave(place uint64) bool {
	if !w.place.CompareAndSwap(place, 0) {
		return false
	}
	p := &w.server.parking
	p.mu.Lock()
	delete(p.parked, place)
	p.mu.Unlock()
	// Packets of a busy connection should not ask for the locks of the parked ones.
	_ = w.raw.Control(func(fd uintptr) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if !p.closed {
			_ = unix.EpollCtl(p.poll.FD, unix.EPOLL_CTL_DEL, int(fd), nil)
		}
	})
	return true
}

// unpark has a connection go on, if it is parked.
func (w *watch) unpark() {
	if place := w.place.Load(); place != 0 && w.leave(place) {
		go w.resume()
	}
}

// open makes it ready, once, and says whether it is. The lock is held.
func (p *parking) open() bool {
	if p.closed || p.poll != nil {
		return !p.closed
	}
	poll, err := readiness.New()
	if err != nil {
		return false // connections keep their goroutines
	}
	p.poll, p.parked = poll, map[uint64]*watch{}
	go p.run(poll)
	return true
}

// run has connections go on whose clients have sent something or left.
func (p *parking) run(poll *readiness.Poll) {
	events := make([]unix.EpollEvent, 128)
	poll.Run(func() bool {
		for {
			n, err := poll.Reported(events)
			if err == unix.EINTR {
				continue
			}
			for _, event := range events[:n] {
				place := uint64(uint32(event.Fd)) | uint64(uint32(event.Pad))<<32
				p.mu.Lock()
				w := p.parked[place]
				p.mu.Unlock()
				if w != nil && w.leave(place) {
					go w.resume()
				}
			}
			if err != nil || n < len(events) {
				return err == nil
			}
		}
	})
	p.close()
}

// close has all go on, and none parked from then on.
func (p *parking) close() {
	p.mu.Lock()
	p.closed = true
	var all []*watch
	for _, w := range p.parked {
		all = append(all, w)
	}
	poll := p.poll
	p.mu.Unlock()
	for _, w := range all {
		w.unpark()
	}
	if poll != nil {
		poll.Close()
	}
}
