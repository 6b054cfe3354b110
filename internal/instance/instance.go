// Package instance makes sure that a part of Portal runs only once in a network namespace: two proxies would overwrite
// each other's rules, two DNS servers take each other's addresses away. It says who is in the way. It knows nothing of the parts
// themselves.
package instance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The parts that run once in a network namespace.
const (
	Proxy = "portal-proxy"
	DNS   = "portal-dns"
	LB    = "portal-lb"    // if it announces addresses
	Node  = "portal-node-" // and the name of its bridge
)

// Holder is the process that holds a lock.
type Holder struct {
	// PID is 0 if the process is in a PID namespace that this process can't see.
	PID int
	UID int
	// Command is its program and subcommand, empty if they are not known. Further arguments may be secrets.
	Command string
}

func (h Holder) String() string {
	switch {
	case h.PID == 0:
		return fmt.Sprintf("a process of another container, user %d", h.UID)
	case h.Command == "":
		return fmt.Sprintf("pid %d", h.PID)
	}
	return fmt.Sprintf("pid %d (%s)", h.PID, h.Command)
}

// HeldError says that another process holds the lock.
type HeldError struct {
	Name   string
	Holder Holder
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("another %s already runs in this network namespace: %v; stop it first", strings.ReplaceAll(e.Name, "-", " "), e.Holder)
}

// Lock is held until Release or the end of the process.
type Lock struct {
	listener *net.UnixListener // nil: see Acquire
	done     chan struct{}
}

const (
	// DefaultPatience is how long to wait for an earlier process that is about to end: a restart or an upgrade.
	DefaultPatience = 10 * time.Second

	pollInterval = 100 * time.Millisecond
)

// Acquire takes the lock of a part. While another process holds it, Acquire waits up to patience, and calls waiting, which
// may be nil, once when it begins to wait. If the lock is still held then, the error is a *HeldError.
//
// The lock is an abstract Unix socket: the kernel scopes it to the network namespace, whatever the mounts of a container,
// and drops it with the process. Every user can bind one, so root ignores a holder that is not root: only root or a process
// with capabilities can program the network, and nobody else may keep it from doing so.
func Acquire(ctx context.Context, name string, patience time.Duration, waiting func(Holder)) (*Lock, error) {
	deadline := time.Now().Add(patience)
	for {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + name, Net: "unix"})
		if err == nil {
			return hold(l), nil
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("lock %s: %w", name, err)
		}
		holder, known := holderOf(name)
		if known && os.Geteuid() == 0 && holder.UID != 0 {
			return &Lock{}, nil
		}
		if known && !time.Now().Before(deadline) {
			return nil, &HeldError{name, holder}
		}
		if known && waiting != nil {
			waiting(holder)
			waiting = nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(pollInterval):
		}
	}
}

// hold answers those who ask who holds the lock, by accepting their connections.
func hold(l *net.UnixListener) *Lock {
	lock := &Lock{listener: l, done: make(chan struct{})}
	go func() {
		defer close(lock.done)
		for {
			c, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of descriptors, for example
				time.Sleep(pollInterval)
				continue
			}
			c.Close()
		}
	}()
	return lock
}

// Release gives the lock up.
func (l *Lock) Release() {
	if l.listener != nil {
		l.listener.Close()
		<-l.done
	}
}

// holderOf asks the kernel who listens. It is not known if the holder has just ended.
func holderOf(name string) (Holder, bool) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + name, Net: "unix"})
	if err != nil {
		// The queue of a holder that is stopped or very busy may be full.
		return Holder{}, errors.Is(err, unix.EAGAIN)
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	if err != nil {
		return Holder{}, false
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil || err != nil {
		return Holder{}, false
	}
	h := Holder{PID: int(cred.Pid), UID: int(cred.Uid)}
	if h.PID > 0 {
		h.Command = commandOf(fmt.Sprintf("/proc/%d", h.PID))
	}
	return h, true
}
