// Package nftest puts faults between a client of nf_tables and the kernel, for tests.
package nftest

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// Faults stands between a socket and the kernel.
type Faults struct {
	nf.Conn
	// Refuse returns the error for a message of a transaction, 0 for none. A transaction with a refused message doesn't reach
	// the kernel.
	Refuse func(m nf.Message) unix.Errno
	// Transactions counts those that were sent, Sent is the last of them.
	Transactions int
	Sent         []byte
	answers      []byte
}

// On puts faults between a socket and the kernel.
func On(s *nf.Socket) *Faults {
	f := &Faults{}
	s.Wrap(func(c nf.Conn) nf.Conn { f.Conn = c; return f })
	return f
}

// Send refuses what is to be refused, and sends everything else.
func (f *Faults) Send(msg []byte) error {
	first := true
	for m := range nf.Messages(msg) {
		if first && m.Type != unix.NFNL_MSG_BATCH_BEGIN {
			return f.Conn.Send(msg)
		}
		if first {
			f.Transactions++
			f.Sent = append(f.Sent[:0], msg...)
		}
		first = false
		if f.Refuse == nil || m.Type < unix.NLMSG_MIN_TYPE || m.Type == unix.NFNL_MSG_BATCH_BEGIN || m.Type == unix.NFNL_MSG_BATCH_END {
			continue
		}
		if errno := f.Refuse(m); errno != 0 {
			f.answers = append(f.answers, Error(m.Seq, errno)...)
		}
	}
	if len(f.answers) > 0 {
		return nil
	}
	return f.Conn.Send(msg)
}

// Receive returns refusals before answers of the kernel.
func (f *Faults) Receive(buf []byte, deadline time.Time) (int, error) {
	if n := copy(buf, f.answers); n > 0 {
		f.answers = nil
		return n, nil
	}
	return f.Conn.Receive(buf, deadline)
}

// Error is the kernel's message that a request failed, or, with 0, that it was done.
func Error(seq uint32, errno unix.Errno) []byte {
	return Message(unix.NLMSG_ERROR, 0, seq, append(binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))), make([]byte, unix.NLMSG_HDRLEN)...))
}

// Message is a netlink message.
func Message(typ, flags uint16, seq uint32, body []byte) []byte {
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	return append(b, body...)
}
