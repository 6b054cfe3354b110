package userspace

import (
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/shortage"
)

const (
	// greed is how many clients are taken at once at most.
	greed = 16
	// slack is how many connections a loop may have more than another before it hands new ones over: to wake another
	// thread costs as much as a third of a short connection.
	slack = 4
)

// accept takes clients in. An accept that finds nobody costs more than waiting for the next event: where little happens, one is
// taken at a time.
func (l *loop) accept(d acceptor) {
	if l.starving.Load() > 0 { // clients that have been accepted come first
		l.pause()
		return
	}
	for range min(1+l.busy/4, greed) {
		if !l.linkFiles.take(linkFiles) { // clients wait in the listen queue
			l.pause()
			return
		}
		fd, peer, err := unix.Accept4(d.fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		if err != nil {
			l.linkFiles.give(linkFiles)
		}
		switch {
		case err == nil:
			l.nap = 0
		case err == unix.ECONNABORTED, err == unix.EINTR:
			continue
		case err == unix.EAGAIN: // another loop was faster
			return
		default: // above all, no descriptors
			l.pause()
			return
		}
		a := caller{fd: fd, origin: d.origin, client: addrPort(peer)}
		if !l.look(&a, d.family) {
			abort(fd) // a reset tells the client that nobody is there
			unix.Close(fd)
			l.linkFiles.give(linkFiles)
			continue
		}
		l.assign(a)
	}
}

// look finds out where a connection was addressed to, and who answers there.
func (l *loop) look(a *caller, f intent.Family) bool {
	to, err := originalTCP(a.fd, f)
	if err != nil {
		return false
	}
	a.to = to
	a.front = l.find(plan.FrontendKey{Addr: to.Addr(), Family: f, Protocol: intent.TCP, Port: to.Port()})
	return a.front != nil && a.front.Routes[a.origin].Verdict == plan.Forward
}

// assign gives a connection to this loop, unless another one has clearly less to do.
func (l *loop) assign(a caller) {
	least := l
	for _, o := range l.loops {
		if o.load.Load() < least.load.Load() {
			least = o
		}
	}
	if l.load.Load()-least.load.Load() < slack {
		l.load.Add(1)
		l.begin(a)
		return
	}
	least.post(a)
}

// post puts a connection into a loop's inbox.
func (l *loop) post(a caller) {
	l.load.Add(1)
	l.mu.Lock()
	l.inbox = append(l.inbox, a)
	l.mu.Unlock()
	l.call()
}

const (
	// minNap and maxNap are how long a loop accepts nothing when descriptors have run out, and connects to nothing: connections need
	// time to end. When one of its own does, it tries at once.
	minNap, maxNap = 10 * time.Millisecond, 320 * time.Millisecond
	// patience is how long a client waits for a descriptor for the connection to its endpoint.
	patience = 5 * time.Second
)

// pause accepts nothing for a while, each time longer until it succeeds.
func (l *loop) pause() {
	if !l.shut {
		l.closeDoors()
		l.shut = true
	}
	l.nap = min(max(2*l.nap, minNap), maxNap)
	l.napUntil = time.Now().Add(l.nap)
}

// starve keeps a link until there are descriptors again. Its endpoint has no part in it.
func (l *loop) starve(k *link) {
	l.pause()
	if k.until.IsZero() {
		k.until = time.Now().Add(patience)
	}
	k.attempt++
	l.starved = append(l.starved, attempt{k, k.attempt, k.until})
	l.starving.Add(1)
}

// recover tries again what failed for want of descriptors: clients that have been accepted first.
func (l *loop) recover() {
	if !l.shut || time.Now().Before(l.napUntil) {
		return
	}
	list := l.starved
	l.starved = nil
	l.starving.Add(-int32(len(list)))
	for i, w := range list {
		switch {
		case w.link.over || w.link.attempt != w.number:
		case time.Now().After(w.until):
			l.finish(w.link, true)
		default:
			if l.next(w.link); len(l.starved) > 0 { // nor will the others get one
				l.starved = append(l.starved, list[i+1:]...)
				l.starving.Add(int32(len(list) - i - 1))
				return
			}
		}
	}
	if l.starving.Load() > 0 || l.openDoors() != nil {
		l.pause()
		return
	}
	l.shut = false
}

// begin makes a link of a connection, and tries to reach an endpoint.
func (l *loop) begin(a caller) {
	k := &link{}
	if n := len(l.used); n > 0 {
		k, l.used = l.used[n-1], l.used[:n-1]
	}
	k.caller, k.open, k.over, k.queued, k.until = a, false, false, false, time.Time{}
	k.left = l.memory.order(k.left[:0], a.front, a.origin, a.client.Addr())
	k.near, k.far = side{link: k, fd: a.fd}, side{link: k, fd: -1}
	if l.watch(&k.near) != nil {
		l.finish(k, true)
		return
	}
	l.next(k)
}

// watch has the poller report every change of a socket.
func (l *loop) watch(s *side) error {
	for len(l.sides) <= s.fd {
		l.sides = append(l.sides, nil)
	}
	l.sides[s.fd] = s
	return l.add(s.fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET)
}

// next tries the endpoints that are left, until one can be waited for.
func (l *loop) next(k *link) {
	for len(k.left) > 0 {
		e := k.left[0]
		fd, err := l.dial.tcp(k.front, k.origin, e, k.client)
		if err == nil {
			k.far = side{link: k, fd: fd}
			k.attempt++
			if err = l.watch(&k.far); err == nil {
				l.waiting = append(l.waiting, attempt{k, k.attempt, time.Now().Add(l.ConnectTimeout)})
				return
			}
			l.sides[fd], k.far.fd = nil, -1
			unix.Close(fd) // the poller never knew it
		}
		switch {
		case ours(err):
			l.starve(k)
			return
		case err != unix.EADDRNOTAVAIL: // this machine has no port left for it
			l.memory.failed(e.Addr)
		}
		k.left = k.left[1:]
	}
	l.finish(k, true)
}

// ours: an endpoint has no part in the error; the poller has limits of its own.
func ours(err error) bool { return shortage.Is(err) || err == unix.ENOSPC }

// failed passes an endpoint over that did not answer.
func (l *loop) failed(k *link) {
	l.discard(&k.far)
	l.memory.failed(k.left[0].Addr)
	k.left = k.left[1:]
	l.next(k)
}

// established opens a link whose endpoint has answered.
func (l *loop) established(k *link) {
	l.memory.answered(k.front, k.client.Addr(), k.left[0].Addr)
	k.open = true
	if l.Source == Announce {
		// A new socket has room for it.
		if _, err := unix.Write(k.far.fd, header(k.client, k.to)); err != nil {
			l.finish(k, true)
			return
		}
	}
	l.pump(k)
}

// expire gives up on endpoints that take too long.
func (l *loop) expire() {
	if len(l.waiting) == 0 {
		return
	}
	var now time.Time
	i := 0
	for ; i < len(l.waiting); i++ {
		w := l.waiting[i]
		if w.link.over || w.link.open || w.link.attempt != w.number {
			continue
		}
		if now.IsZero() {
			now = time.Now()
		}
		if now.Before(w.until) {
			break
		}
		l.failed(w.link)
	}
	if i > 0 {
		l.waiting = append(l.waiting[:0], l.waiting[i:]...)
	}
}

// finish ends a link, with a reset where it was no proper end.
func (l *loop) finish(k *link, reset bool) {
	k.over = true
	for _, s := range []*side{&k.near, &k.far} {
		if s.fd >= 0 {
			if reset {
				abort(s.fd)
			}
			l.discard(s)
		}
		l.drop(s)
	}
	l.load.Add(-1)
	l.over = append(l.over, k)
}

// discard closes a socket at the end of the round.
func (l *loop) discard(s *side) {
	if s.fd < len(l.sides) {
		l.sides[s.fd] = nil
	}
	l.closing = append(l.closing, s.fd)
	s.fd = -1
}

// closePending closes the sockets that were discarded in this round, and recycles their links.
func (l *loop) closePending() {
	if len(l.closing) > 0 {
		l.napUntil = time.Time{}
	}
	for _, fd := range l.closing {
		unix.Close(fd)
	}
	l.closing = l.closing[:0]
	l.linkFiles.give(linkFiles * int64(len(l.over)))
	for _, k := range l.over {
		k.caller, k.near, k.far = caller{}, side{}, side{}
		if len(l.used) < 8*spare {
			l.used = append(l.used, k)
		}
	}
	l.over = l.over[:0]
}
