// Package nf is a client of the kernel's nf_tables over netlink: typed rules and sets, transactions that the kernel carries
// out all or none, and reading back what is there. Its requests are also those of other clients over netlink. It knows
// nothing of Services.
package nf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Socket asks nf_tables of one network namespace, and changes it.
type Socket struct {
	*Client
	// verified is the generation in which all tables were known to be as they were written; 0: none.
	verified uint32
}

// Dial opens a socket in the calling thread's network namespace.
func Dial() (*Socket, error) {
	c, err := Connect(unix.NETLINK_NETFILTER, sendBuffer)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket to nf_tables: %w", err)
	}
	return NewSocket(c), nil
}

// sendBuffer is how large a transaction may be. It is a limit, not memory: a transaction is one datagram, with about 45
// bytes for each element of a set and 500 for a rule.
const sendBuffer = 256 << 20

// NewSocket returns a socket on a connection.
func NewSocket(c Conn) *Socket { return &Socket{Client: NewClient(c, "nf_tables")} }

// Wrap puts something between the socket and its connection, for tests.
func (s *Socket) Wrap(wrap func(Conn) Conn) { s.conn = wrap(s.conn) }

// Spare keeps a socket from one use for the next: whoever closes a socket waits in the kernel until everything is freed
// that was deleted before, and so does everybody else who would change something meanwhile.
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

// Refusal is what the kernel says about messages of a transaction, of which nothing was done.
type Refusal []Cause

// Cause is a message that the kernel refused.
type Cause struct {
	unix.Errno
	// Owner is whom the message was for, What what it was about.
	Owner int
	What  string
}

func (r Refusal) Error() string {
	if len(r) == 1 {
		return fmt.Sprintf("nf_tables refused %s: %v", r[0].What, r[0].Errno)
	}
	return fmt.Sprintf("nf_tables refused %s: %v (and %d more)", r[0].What, r[0].Errno, len(r)-1)
}

// Unwrap lets errors.Is find the numbers.
func (r Refusal) Unwrap() (out []error) {
	for _, c := range r {
		out = append(out, c.Errno)
	}
	return out
}

// Commit carries out a transaction, all or nothing.
func (s *Socket) Commit(b *Batch) error {
	before := s.verified
	if b.generation != 0 {
		before = b.generation
	}
	s.verified = 0
	b.closeElements()
	if !b.Empty() {
		if err := s.transact(b); err != nil {
			return err
		}
	}
	now, err := s.Generation()
	if err != nil {
		return fmt.Errorf("reading the generation of nf_tables: %w", err)
	}
	// Each transaction counts the generation up by one: if it is the next one, nobody else has changed anything.
	if !b.Empty() && before != 0 {
		if before++; before == 0 {
			before++
		}
	}
	if now == before {
		s.verified = now
	}
	b.acknowledge()
	return nil
}

// syncAttempts bounds how often a full sync is made anew because somebody else changed something meanwhile.
const syncAttempts = 4

// Sync carries out the transaction that build puts together from what it reads. If somebody else changes anything in between, it
// is built anew; the last time it is carried out nevertheless.
func (s *Socket) Sync(build func(*Batch) error) (err error) {
	for n := range syncAttempts {
		b := NewBatch()
		if n < syncAttempts-1 {
			generation, err := s.Generation()
			if err != nil {
				return fmt.Errorf("reading the generation of nf_tables: %w", err)
			}
			b.OnlyAt(generation)
		}
		if err := build(b); err != nil {
			return err
		}
		if err = s.Commit(b); !errors.Is(err, unix.ERESTART) {
			return err
		}
	}
	return err
}

func (s *Socket) transact(b *Batch) error {
	base := s.seq + 1
	s.seq += uint32(b.count) + 1
	if err := s.send(b.bytes(base)); err != nil {
		return err
	}
	// The kernel has worked it off when send returns, and queued all of its answers.
	deadline := time.Now().Add(timeout)
	var bad Refusal
	acknowledged := false
	for {
		wait := deadline
		if acknowledged || bad != nil {
			wait = time.Time{}
		}
		n, err := s.conn.Receive(s.in, wait)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && bad != nil:
			return bad
		case errors.Is(err, os.ErrDeadlineExceeded) && acknowledged:
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("nf_tables has not answered a transaction within %v", timeout)
		case errors.Is(err, unix.ENOBUFS) && bad != nil:
			continue // more complaints than fit: those that were read must do
		case err != nil:
			return fmt.Errorf("reading the answer of nf_tables: %w", err)
		}
		for m := range Messages(s.in[:n]) {
			number := int(int32(m.Seq - base))
			if m.Type != unix.NLMSG_ERROR || number < 0 || number > b.count {
				continue
			}
			if errno := m.errno(); errno != 0 {
				bad = append(bad, Cause{errno, b.owners[number], b.describe(number, m.errorOffset())})
			} else {
				acknowledged = true
			}
		}
	}
}

// errorOffset is where in a message the kernel found a mistake, 0 if it does not say.
func (m *Message) errorOffset() int {
	const head, capped, offset = 4 + unix.NLMSG_HDRLEN, unix.NLM_F_CAPPED, 2 // NLMSGERR_ATTR_OFFS
	if m.Flags&unix.NLM_F_ACK_TLVS == 0 || m.Flags&capped == 0 || len(m.Body) < head {
		return 0
	}
	if v := attr(m.Body[head:], offset); len(v) == 4 {
		return int(binary.NativeEndian.Uint32(v))
	}
	return 0
}

// get asks for one thing.
func (s *Socket) get(family byte, typ uint16, body []byte, got func(attrs []byte)) error {
	return s.ask(family, typ, unix.NLM_F_ACK, body, got)
}

// dump asks for a list. One that was interrupted, since somebody changed what is listed, is read again after reset, some
// times, and then fails with EINTR.
func (s *Socket) dump(family byte, typ uint16, body []byte, reset func(), got func(attrs []byte)) (err error) {
	for pause := time.Millisecond; ; pause *= 2 {
		reset()
		if err = s.ask(family, typ, unix.NLM_F_DUMP, body, got); !errors.Is(err, unix.EINTR) || pause > 100*time.Millisecond {
			return err
		}
		time.Sleep(pause)
	}
}

func (s *Socket) ask(family byte, typ, flags uint16, body []byte, got func(attrs []byte)) error {
	head := append(make([]byte, 0, 4+len(body)), family, unix.NFNETLINK_V0, 0, 0)
	return s.Ask(unix.NFNL_SUBSYS_NFTABLES<<8|typ, flags, append(head, body...), got)
}

// unsupported says whether an error means that the kernel has no nf_tables, or not for a family.
func unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EINVAL)
}
