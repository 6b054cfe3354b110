package top

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// Messages of ctnetlink, and where they are sent to.
const (
	msgGet, msgDelete                   = 1, 2
	groupNew, groupUpdate, groupDestroy = 1, 2, 3
	nfgenLen                            = 4
)

// Kernel is the connection tracking of one network namespace, seen through sockets that were opened there.
type Kernel struct {
	events   int
	dump     *nf.Client
	room     []byte
	messages []message
	vectors  []unix.Iovec
	// Accounting: the kernel counts bytes. Events: it reports what begins and ends. Timestamps: events have the time.
	Accounting, Events, Timestamps bool
}

// Happened is what an event says of a connection.
type Happened uint8

// What events say. Changed ones come only with Timestamps.
const (
	Begun Happened = iota
	Changed
	Ended
)

// message is a struct mmsghdr.
type message struct {
	header unix.Msghdr
	n      uint32
	_      uint32
}

const (
	// batch is how many events are read with one system call, each of at most eventLen.
	batch, eventLen = 256, 1024
	// eventRoom is how much the kernel keeps for us between two readings.
	eventRoom = 32 << 20
)

// Open opens sockets to the network namespace of the calling thread. Events are kept from then on.
func Open() (*Kernel, error) {
	k := &Kernel{events: -1, room: make([]byte, batch*eventLen), messages: make([]message, batch), vectors: make([]unix.Iovec, batch)}
	for i := range k.messages {
		k.vectors[i].Base = &k.room[i*eventLen]
		k.vectors[i].SetLen(eventLen)
		k.messages[i].header.Iov = &k.vectors[i]
		k.messages[i].header.SetIovlen(1)
	}
	var err error
	k.Timestamps = setting("nf_conntrack_timestamp") == "1"
	groups := uint32(1<<(groupNew-1) | 1<<(groupDestroy-1))
	if k.Timestamps { // then an answer's time says something
		groups |= 1 << (groupUpdate - 1)
	}
	if k.events, err = follow(groups); err != nil {
		return nil, err
	}
	conn, err := nf.Connect(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		k.Close()
		return nil, fmt.Errorf("open a netlink socket to conntrack: %w", err)
	}
	k.dump = nf.NewClient(conn, "conntrack")
	// Without the right to force it, the kernel's limit has to do.
	if unix.SetsockoptInt(k.events, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, eventRoom) != nil {
		_ = unix.SetsockoptInt(k.events, unix.SOL_SOCKET, unix.SO_RCVBUF, eventRoom)
	}
	k.Accounting = setting("nf_conntrack_acct") == "1"
	k.Events = setting("nf_conntrack_events") != "0"
	return k, nil
}

func setting(name string) string {
	data, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// follow opens a socket that gets events.
func follow(groups uint32) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return -1, fmt.Errorf("open a netlink socket to conntrack: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		_ = unix.Close(fd)
		if errors.Is(err, unix.EPERM) {
			return -1, errors.New("connection tracking can be read by root only: run this as root")
		}
		return -1, fmt.Errorf("follow conntrack: %w", err)
	}
	return fd, nil
}

// Close closes the sockets. The kernel stops making events for us.
func (k *Kernel) Close() {
	if k.events >= 0 {
		_ = unix.Close(k.events)
	}
	if k.dump != nil {
		_ = k.dump.Close()
	}
	k.events, k.dump = -1, nil
}

// Sample has the kernel keep one event in so many; it must be a power of two.
func (k *Kernel) Sample(oneIn uint32) error {
	if oneIn <= 1 {
		err := unix.SetsockoptInt(k.events, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		if errors.Is(err, unix.ENOENT) {
			err = nil
		}
		return err
	}
	const random = 0xfffff000 + 56 // SKF_AD_OFF + SKF_AD_RANDOM
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: random},
		{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: oneIn - 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 18},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
	}
	return unix.SetsockoptSockFprog(k.events, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
}

// ReadEvents reads what has come so far, without waiting. lost: there was more than the kernel could keep.
func (k *Kernel) ReadEvents(got func(e *Entry, what Happened)) (lost bool, err error) {
	var e Entry
	for {
		n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(k.events), uintptr(unsafe.Pointer(&k.messages[0])), batch, unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		case unix.ENOBUFS:
			lost = true
			continue
		case unix.EAGAIN:
			return lost, nil
		default:
			return lost, fmt.Errorf("read events of conntrack: %w", errno)
		}
		for i := range int(n) {
			each(k.room[i*eventLen:][:min(k.messages[i].n, eventLen)], func(typ, flags uint16, attrs []byte) {
				if e.parse(attrs) {
					got(&e, happened(typ, flags))
				}
			})
		}
		if n < batch {
			return lost, nil
		}
	}
}

// happened: a connection that is new and one that has changed come as the same message, with and without a flag.
func happened(typ, flags uint16) Happened {
	switch {
	case typ&0xff == msgDelete:
		return Ended
	case flags&unix.NLM_F_CREATE != 0:
		return Begun
	}
	return Changed
}

// each goes through messages; the function is not called for the kernel's own.
func each(b []byte, do func(typ, flags uint16, attrs []byte)) {
	for m := range nf.Messages(b) {
		if m.Type>>8 == unix.NFNL_SUBSYS_CTNETLINK && len(m.Body) >= nfgenLen {
			do(m.Type, m.Flags, m.Body[nfgenLen:])
		}
	}
}

// Dump reads all that is tracked. What comes or goes meanwhile may be missing.
func (k *Kernel) Dump(got func(*Entry)) error {
	var e Entry
	err := k.dump.Ask(unix.NFNL_SUBSYS_CTNETLINK<<8|msgGet, unix.NLM_F_DUMP, []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}, func(attrs []byte) {
		if e.parse(attrs) {
			got(&e)
		}
	})
	if err != nil {
		return fmt.Errorf("read conntrack: %w", err)
	}
	return nil
}
