// Package nf talks to the kernel's nf_tables over netlink: messages as bytes, and a socket that carries whole transactions.
// It knows nothing of Services.
package nf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// sendBuffer is how large a transaction may be. It is a limit, not memory: a transaction is one message to the kernel,
// about 45 bytes for each element of a set and 500 for a rule.
const sendBuffer = 256 << 20

// replyBuffer holds the kernel's complaints about one transaction.
const replyBuffer = 16 << 20

// Socket is a netlink socket to nf_tables of the network namespace in which it was opened.
type Socket struct {
	fd  int
	seq uint32
	in  []byte
}

// Dial opens a socket in the calling thread's network namespace.
func Dial() (*Socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket to nf_tables: %w", err)
	}
	s := &Socket{fd: fd, in: make([]byte, 64<<10)}
	// Without the privilege these fail, and so will the transaction, which has the clearer error.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, replyBuffer)
	// A complaint needn't carry the message that it is about.
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1); err != nil {
		s.Close()
		return nil, fmt.Errorf("setting up the netlink socket: %w", err)
	}
	return s, nil
}

// Spare keeps a socket from one use for the next. The kernel lets whoever closes one wait until all is gone that was removed
// before, and everybody else who would change something meanwhile.
type Spare struct{ socket *Socket }

// Take returns the socket that was put there, or a new one.
func (s *Spare) Take() (*Socket, error) {
	if kept := s.socket; kept != nil {
		s.socket = nil
		return kept, nil
	}
	return Dial()
}

// Put keeps a socket.
func (s *Spare) Put(one *Socket) {
	if s.socket != nil {
		_ = s.socket.Close()
	}
	s.socket = one
}

// Close closes it.
func (s *Socket) Close() error { return unix.Close(s.fd) }

// Refusal is what the kernel said about messages of a transaction, by their sequence numbers. None of it was done.
type Refusal map[uint32]unix.Errno

func (r Refusal) Error() string {
	first, found := uint32(0), false
	for seq := range r {
		if !found || seq < first {
			first, found = seq, true
		}
	}
	if !found {
		return "nf_tables refused nothing"
	}
	return fmt.Sprintf("nf_tables refused the transaction: message %d: %v", first, r[first])
}

func (r Refusal) Unwrap() []error {
	var out []error
	for _, errno := range r {
		out = append(out, errno)
	}
	return out
}

// Transact sends a whole transaction. The kernel works it off before send returns, so its replies are there at once.
func (s *Socket) Transact(msg []byte) error {
	if err := s.send(msg); err != nil {
		return err
	}
	bad := Refusal{}
	acknowledged := false
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EAGAIN:
			if len(bad) > 0 {
				return bad
			}
			if !acknowledged {
				return errors.New("nf_tables did not answer a transaction")
			}
			return nil
		case err == unix.EINTR:
			continue
		case err == unix.ENOBUFS:
			// More complaints than fit: those that were read must do.
			continue
		case err != nil:
			return fmt.Errorf("reading nf_tables' answer: %w", err)
		}
		for m := range Messages(s.in[:n]) {
			if m.Type != unix.NLMSG_ERROR {
				continue
			}
			if errno := m.errno(); errno != 0 {
				bad[m.Seq] = errno
			} else {
				acknowledged = true
			}
		}
	}
}

func (s *Socket) send(msg []byte) error {
	for {
		err := unix.Sendto(s.fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("sending to nf_tables", err)
		}
		return nil
	}
}

// Again does something once more if a list it reads was interrupted, some times, and then a little later.
func Again(list func() error) (err error) {
	for pause := time.Millisecond; ; pause *= 2 {
		if err = list(); !errors.Is(err, unix.EINTR) || pause > 100*time.Millisecond {
			return err
		}
		time.Sleep(pause)
	}
}

// Ask sends one request and calls got for each message of the answer. dump: the answer is a list. A list that may lack
// something, because somebody changed what is listed, ends with EINTR.
func (s *Socket) Ask(family byte, typ uint16, dump bool, body []byte, got func(attrs []byte)) error {
	s.seq++
	flags := uint16(unix.NLM_F_REQUEST)
	if dump {
		flags |= unix.NLM_F_DUMP
	} else {
		flags |= unix.NLM_F_ACK
	}
	msg := AppendHeader(nil, Kind(typ), flags, s.seq, family, 0)
	msg = append(msg, body...)
	binary.NativeEndian.PutUint32(msg, uint32(len(msg)))
	if err := s.send(msg); err != nil {
		return err
	}
	interrupted := false
	for {
		n, _, err := unix.Recvfrom(s.fd, s.in, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading nf_tables' answer: %w", err)
		}
		for m := range Messages(s.in[:n]) {
			if m.Seq != s.seq {
				continue
			}
			interrupted = interrupted || m.Interrupted
			switch m.Type {
			case unix.NLMSG_DONE:
				if interrupted {
					return unix.EINTR
				}
				return nil
			case unix.NLMSG_ERROR:
				if errno := m.errno(); errno != 0 {
					return errno
				}
				return nil
			default:
				if len(m.Body) >= 4 {
					got(m.Body[4:])
				}
			}
		}
	}
}

// Message is a netlink message.
type Message struct {
	Type uint16
	// Interrupted: the list that it is part of may lack something, since somebody changed what is listed.
	Interrupted bool
	Seq         uint32
	Body        []byte
}

func (m *Message) errno() unix.Errno {
	if len(m.Body) < 4 {
		return unix.EBADMSG
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.Body)))
}

// Messages walks over the messages in a buffer.
func Messages(b []byte) func(yield func(Message) bool) {
	return func(yield func(Message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.NLMSG_HDRLEN || size > len(b) {
				return
			}
			flags := binary.NativeEndian.Uint16(b[6:])
			m := Message{binary.NativeEndian.Uint16(b[4:]), flags&unix.NLM_F_DUMP_INTR != 0, binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:size]}
			if !yield(m) {
				return
			}
			b = b[min(Align(size), len(b)):]
		}
	}
}

// Attributes walks over the attributes of a message.
func Attributes(b []byte) func(yield func(typ uint16, value []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			size := int(binary.NativeEndian.Uint16(b))
			if size < 4 || size > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^unix.NLA_F_NESTED, b[4:size]) {
				return
			}
			b = b[min(Align(size), len(b)):]
		}
	}
}

// Align is how much room the kernel gives to a value of some size.
func Align(n int) int { return (n + 3) &^ 3 }
