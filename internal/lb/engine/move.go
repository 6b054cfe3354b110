package engine

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// pass reads once and writes at once, which is cheaper than a pipe for little. The lock is held, as for all that follow.
func (k *link) pass(from, to *end, inbound bool) error {
	buf := k.loop.buf
	n, err := read(from.fd, buf)
	switch {
	case err == unix.EAGAIN:
		from.readable = false
		return nil
	case err == unix.EINTR:
		return nil
	case err != nil:
		return err
	case n == 0:
		from.ended = true
		return nil
	}
	from.bulk = n == len(buf)
	// Less than was asked for is all that there was: the kernel reports what comes next, and the end.
	from.readable = from.bulk || from.closing
	from.ended = !from.bulk && from.complete
	k.conn.listener.engine.copied.copied.Add(uint64(n))
	m := 0
	if !to.blocked {
		if m, err = k.write(to, buf[:n], from.ended); err != nil {
			return err
		}
	}
	if m < n {
		from.rest = slices.Clone(buf[m:n])
		k.conn.last.Store(time.Now().UnixNano())
	}
	if m > 0 {
		k.relay.passed(m, inbound)
	}
	return nil
}

// write writes what is taken. An end that takes no more is reported when it does again. last: the end follows at once, so that both can go in one packet.
func (k *link) write(to *end, p []byte, last bool) (n int, err error) {
	to.prompt()
	flags := 0
	if last {
		flags = unix.MSG_MORE
	}
	for {
		n, err = send(to.fd, p, flags)
		switch err {
		case nil:
			return n, nil
		case unix.EINTR:
		case unix.EAGAIN:
			return 0, k.block(to)
		default:
			return 0, err
		}
	}
}

// prompt is called before something is sent, which is not to wait for an acknowledgement of what was sent before. What is sent first never does, and short
// connections send nothing else.
func (s *end) prompt() {
	if s.delays && s.sent {
		_ = unix.SetsockoptInt(s.fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		s.delays = false
	}
	s.sent = true
}

func (k *link) block(to *end) error {
	to.blocked = true
	return k.loop.change(to.fd, arrivals|unix.EPOLLOUT)
}

// fill moves bytes into a pipe, without copying them.
func (k *link) fill(from *end) error {
	if from.pipe == nil {
		if inPipes.Load() < mostHeld {
			from.pipe = takePipe()
		}
		if from.pipe == nil {
			from.bulk = false // none is to be had: bytes are copied
			return nil
		}
	}
	n, err := unix.Splice(from.fd, nil, from.pipe.w, nil, pipeSize, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	switch {
	case err == unix.EAGAIN:
		from.readable, err = false, nil
	case err == unix.EINTR:
		err = nil
	case err == nil && n == 0:
		from.ended = true
	case err == nil:
		from.hold(int(n))
		from.bulk = n >= leastSplice
		k.conn.listener.engine.copied.spliced.Add(uint64(n))
		k.conn.last.Store(time.Now().UnixNano())
	}
	if from.held == 0 {
		givePipe(from.pipe)
		from.pipe = nil
	}
	return err
}

// hold counts what is in the pipe.
func (s *end) hold(n int) {
	s.held += n
	inPipes.Add(int64(n))
}

// drain passes on what was read before.
func (k *link) drain(from, to *end, inbound bool) error {
	if len(from.rest) > 0 {
		n, err := k.write(to, from.rest, false)
		if from.rest = from.rest[n:]; len(from.rest) == 0 {
			from.rest = nil
		}
		if n > 0 {
			k.relay.passed(n, inbound)
		}
		return err
	}
	to.prompt()
	n, err := unix.Splice(from.pipe.r, nil, to.fd, nil, from.held, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	switch {
	case err == unix.EAGAIN:
		return k.block(to)
	case err == unix.EINTR:
		return nil
	case err != nil:
		return err
	case n == 0:
		return unix.EPIPE
	}
	k.relay.passed(int(n), inbound)
	if from.hold(-int(n)); from.held == 0 {
		givePipe(from.pipe)
		from.pipe = nil
	}
	return nil
}

// zoneOf is the number of an address's zone, as sockets want it; 0: it has none, or there is no such interface.
func zoneOf(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	if n, err := strconv.ParseUint(a.Zone(), 10, 32); err == nil {
		return uint32(n)
	}
	if i, err := net.InterfaceByName(a.Zone()); err == nil {
		return uint32(i.Index)
	}
	return 0
}
