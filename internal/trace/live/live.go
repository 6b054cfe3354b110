package live

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
	"portal/internal/proxy/nf"
	"portal/internal/top"
)

// Options are a packet, and where to look.
type Options struct {
	// Sender runs a function in the sender's network namespace, Node in that of the node that decides; nil: that can't be looked at.
	Sender, Node func(func() error) error
	To           netip.AddrPort
	Protocol     intent.Protocol
	// Patience is how long to wait for an answer.
	Patience time.Duration
}

// Outcome is what the sender noticed.
type Outcome string

const (
	// Connected: somebody took the connection. With UDP it is Sent: nobody need answer.
	Connected   Outcome = "connected"
	Sent        Outcome = "sent"
	Refused     Outcome = "refused"
	NoAnswer    Outcome = "no answer"
	Unreachable Outcome = "unreachable"
)

// Result is what became of the packet.
type Result struct {
	Outcome Outcome        `json:"outcome"`
	Source  netip.AddrPort `json:"source"`
	// Endpoint and Seen are from conntrack of the node: where the packet was sent on to, and with which source. Zero: there was no such
	// connection.
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
	Seen     netip.AddrPort `json:"seen,omitzero"`
	// Looked: the node's kernel was looked at.
	Looked bool `json:"looked"`
	// Rules are those of nf_tables that the packet met there.
	Rules []nf.Traced `json:"rules,omitempty"`
	// Differences are what is otherwise than the plan has it.
	Differences []string `json:"differences,omitempty"`
}

// Run sends the packet.
func Run(o Options) (*Result, error) {
	if o.Protocol != intent.TCP && o.Protocol != intent.UDP {
		return nil, fmt.Errorf("a packet of %s can't be sent: only TCP and UDP", o.Protocol)
	}
	r := &Result{}
	fd := -1
	if err := o.Sender(func() (err error) {
		fd, r.Source, err = bound(o.Protocol, o.To)
		return err
	}); err != nil {
		return nil, fmt.Errorf("make a socket for the sender: %w", err)
	}
	defer unix.Close(fd)
	var watcher *watcher
	var tracked *top.Kernel
	if o.Node != nil {
		if err := o.Node(func() (err error) {
			if tracked, err = top.Open(); err != nil {
				return err
			}
			watcher, err = watch(r.Source, o.To, o.Protocol)
			return err
		}); err != nil {
			return nil, err
		}
		r.Looked = true
		defer tracked.Close()
		defer watcher.close()
	}
	var err error
	if r.Outcome, err = send(fd, o.Protocol, o.To, o.Patience); err != nil {
		return nil, err
	}
	if watcher == nil {
		return r, nil
	}
	if r.Rules, err = watcher.read(); err != nil {
		return nil, err
	}
	return r, r.find(tracked, &o)
}

// find reads the connection from conntrack. It may be gone by now, and is then in the events.
func (r *Result) find(k *top.Kernel, o *Options) error {
	take := func(e *top.Entry) {
		if e.Protocol == o.Protocol && e.Client == r.Source && e.To == o.To {
			r.Endpoint, r.Seen = e.From, e.Seen
		}
	}
	if _, err := k.ReadEvents(func(e *top.Entry, _ top.Happened) { take(e) }); err != nil {
		return err
	}
	if r.Endpoint.IsValid() {
		return nil
	}
	return k.Dump(take)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPort(s unix.Sockaddr) netip.AddrPort {
	switch s := s.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr), uint16(s.Port))
	}
	return netip.AddrPort{}
}

// bound makes a socket whose source is known before it sends: the kernel's choice for the destination, and a port of its own.
func bound(p intent.Protocol, to netip.AddrPort) (fd int, from netip.AddrPort, err error) {
	family := unix.AF_INET
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	probe, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, from, err
	}
	defer unix.Close(probe)
	// This sends nothing: it only looks up the route.
	if err := unix.Connect(probe, sockaddr(to)); err != nil {
		return -1, from, fmt.Errorf("there is no route to %s: %w", to.Addr(), err)
	}
	local, err := unix.Getsockname(probe)
	if err != nil {
		return -1, from, err
	}
	kind := unix.SOCK_STREAM
	if p == intent.UDP {
		kind = unix.SOCK_DGRAM
	}
	if fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, from, err
	}
	err = unix.Bind(fd, sockaddr(netip.AddrPortFrom(addrPort(local).Addr(), 0)))
	if err == nil {
		local, err = unix.Getsockname(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, from, err
	}
	return fd, addrPort(local), nil
}

// send sends the first packet, and waits for what becomes of it. With UDP that is an empty datagram.
func send(fd int, p intent.Protocol, to netip.AddrPort, patience time.Duration) (Outcome, error) {
	err := unix.Connect(fd, sockaddr(to))
	if p == intent.UDP && err == nil {
		if _, err = unix.Write(fd, nil); errors.Is(err, unix.EPERM) {
			err = nil // it was dropped on its way out, and perhaps rejected
		}
	}
	if errors.Is(err, unix.EINPROGRESS) {
		err = nil
	}
	event := int16(unix.POLLOUT)
	if p == intent.UDP {
		event = unix.POLLIN
	}
	if err == nil {
		err = poll(fd, event, time.Now().Add(patience))
	}
	switch {
	case err == nil:
		return Connected, nil
	case errors.Is(err, os.ErrDeadlineExceeded) && p == intent.UDP:
		return Sent, nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return NoAnswer, nil
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		return Refused, nil
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return Unreachable, nil
	}
	return "", fmt.Errorf("send to %s: %w", to, err)
}

// poll waits until the socket is ready, and returns its error.
func poll(fd int, event int16, until time.Time) error {
	for {
		left := max(0, time.Until(until))
		p := []unix.PollFd{{Fd: int32(fd), Events: event}}
		n, err := unix.Poll(p, int((left + time.Millisecond - 1).Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n > 0:
			errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && errno != 0 {
				err = unix.Errno(errno)
			}
			return err
		case left == 0:
			return os.ErrDeadlineExceeded
		}
	}
}
