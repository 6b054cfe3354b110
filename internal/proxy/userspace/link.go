package userspace

import (
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/plan"
	"portal/internal/shortage"
)

// caller is a client's connection whose frontend is known.
type caller struct {
	fd         int
	front      *frontend
	origin     plan.Origin
	client, to netip.AddrPort
}

// link is a client's connection and the one to its endpoint.
type link struct {
	caller
	// near is the client's side, far the endpoint's.
	near, far side
	// left are the endpoints yet to be tried, beginning with the one that is being tried until the link is open.
	left []plan.Endpoint
	open bool
	// attempt counts connections begun, so that a time-out knows whether it is still about the same one.
	attempt int
	until   time.Time // when it gives up waiting for a descriptor; zero: it has not waited for one
	over    bool
	queued  bool // it has more to do than one turn allowed
}

// side is one of a link's sockets, with the direction in which data leaves it.
type side struct {
	link *link
	fd   int
	// What the poller has said and no call has refuted since.
	readable, writable bool
	// closing: the poller has seen the end of what comes, though there may be data before it.
	closing bool
	// ended: there is nothing more to read. passedOn: the other side has got the end, too.
	ended, passedOn bool
	// bulk: so much came at once that it is not worth to look at it. It goes through a pipe, which then holds some of it.
	bulk bool
	pipe *pipe
	held int
	// rest is what the other side did not take of what was read.
	rest []byte
}

// note takes over what the poller says.
func (s *side) note(events uint32) {
	const end = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	s.readable = s.readable || events&(unix.EPOLLIN|end) != 0
	s.writable = s.writable || events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0
	s.closing = s.closing || events&end != 0
}

// turn is how many calls one direction may make before others have theirs.
const turn = 16

// pump moves data in both directions as far as that goes without waiting. An end of data is passed on alone, so that the
// other direction goes on; an error ends both, and is passed on as a reset.
func (l *loop) pump(k *link) {
	if !l.move(&k.near, &k.far) || !l.move(&k.far, &k.near) {
		l.finish(k, true)
		return
	}
	if k.near.passedOn && k.far.passedOn {
		l.finish(k, false)
	}
}

// move moves what leaves a side; false: that can't go on. It reads no more than the other side takes.
func (l *loop) move(from, to *side) bool {
	for range turn {
		var err error
		switch {
		case from.held > 0 || len(from.rest) > 0:
			if !to.writable {
				return true
			}
			err = l.drain(from, to)
		case from.ended:
			if !from.passedOn && !to.passedOn {
				unix.Shutdown(to.fd, unix.SHUT_WR)
			}
			from.passedOn = true // where both directions have ended, closing does that
			return true
		case !from.readable:
			return true
		case from.bulk:
			err = l.fill(from)
		default:
			err = l.pass(from, to)
		}
		if err != nil {
			return false
		}
	}
	if k := from.link; !k.queued {
		k.queued = true
		l.again = append(l.again, k)
	}
	return true
}

// pass reads a little and writes it at once, which is cheaper than a pipe.
func (l *loop) pass(from, to *side) error {
	n, err := unix.Read(from.fd, l.buf)
	switch {
	case err == unix.EAGAIN:
		from.readable = false
		return nil
	case err != nil:
		return err
	case n == 0:
		from.ended = true
		return nil
	}
	from.bulk = n == len(l.buf)
	// Less than was asked for is all that there was; the poller reports more, and the end.
	from.readable = from.bulk || from.closing
	m := 0
	if to.writable {
		if m, err = unix.Write(to.fd, l.buf[:n]); err == unix.EAGAIN {
			m, to.writable = 0, false
		} else if err != nil {
			return err
		}
	}
	if m < n {
		from.rest = slices.Clone(l.buf[m:n])
	}
	return nil
}

// fill moves data from a socket to a pipe.
func (l *loop) fill(from *side) (err error) {
	if from.pipe == nil {
		if from.pipe, err = l.pipes.take(); shortage.Is(err) {
			from.bulk = false // it goes through our memory then
			return nil
		} else if err != nil {
			return err
		}
	}
	from.held, err = splice(from.fd, from.pipe.w, pipeSize)
	switch {
	case err == unix.EAGAIN:
		from.readable, err = false, nil
	case err == nil && from.held == 0:
		from.ended = true
	}
	if from.held == 0 {
		l.pipes.give(from.pipe)
		from.pipe = nil
	}
	return err
}

// drain moves what waits to the other side's socket.
func (l *loop) drain(from, to *side) error {
	var n int
	var err error
	if len(from.rest) > 0 {
		n, err = unix.Write(to.fd, from.rest)
	} else {
		n, err = splice(from.pipe.r, to.fd, from.held)
	}
	switch {
	case err == unix.EAGAIN:
		to.writable = false
		return nil
	case err != nil:
		return err
	case n == 0:
		return unix.EPIPE
	case len(from.rest) > 0:
		if from.rest = from.rest[n:]; len(from.rest) == 0 {
			from.rest = nil
		}
		return nil
	}
	if from.held -= n; from.held == 0 {
		l.pipes.give(from.pipe)
		from.pipe = nil
	}
	return nil
}

// drop lets go of what a side holds. A pipe with data in it is of no use to others.
func (l *loop) drop(s *side) {
	if s.pipe != nil {
		l.pipes.discard(s.pipe)
	}
}
