package nf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Conn carries datagrams to the kernel and back.
type Conn interface {
	Send(msg []byte) error
	// Receive waits for a datagram until the deadline, and returns os.ErrDeadlineExceeded if none has come.
	Receive(buf []byte, deadline time.Time) (int, error)
	Close() error
}

// timeout is how long the kernel may take to answer, and to go on with a list.
const timeout = 10 * time.Second

// Client asks a part of the kernel over netlink. A message of its answers has a header of 4 bytes before its attributes, as
// those of nf_tables and of all families of generic netlink have.
type Client struct {
	conn Conn
	// part is the kernel's part, for errors.
	part string
	seq  uint32
	in   []byte
}

// NewClient returns a client on a connection. The name of the kernel's part is for errors.
func NewClient(c Conn, part string) *Client {
	return &Client{conn: c, part: part, in: make([]byte, 64<<10)}
}

// Close closes the connection.
func (c *Client) Close() error { return c.conn.Close() }

// Ask sends a request, the header of 4 bytes included, and passes on the attributes of each message of the answer. The
// kernel's error is an Errno; EINTR means that a list was interrupted, since somebody changed what is listed.
func (c *Client) Ask(typ, flags uint16, request []byte, got func(attrs []byte)) error {
	c.seq++
	msg := make([]byte, 0, unix.NLMSG_HDRLEN+len(request))
	msg = binary.NativeEndian.AppendUint32(msg, uint32(unix.NLMSG_HDRLEN+len(request)))
	msg = binary.NativeEndian.AppendUint16(msg, typ)
	msg = binary.NativeEndian.AppendUint16(msg, unix.NLM_F_REQUEST|flags)
	msg = binary.NativeEndian.AppendUint32(msg, c.seq)
	msg = binary.NativeEndian.AppendUint32(msg, 0)
	if err := c.send(append(msg, request...)); err != nil {
		return err
	}
	interrupted := false
	deadline := time.Now().Add(timeout)
	for {
		n, err := c.conn.Receive(c.in, deadline)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("%s has not answered a request within %v", c.part, timeout)
		}
		if err != nil {
			return fmt.Errorf("reading the answer of %s: %w", c.part, err)
		}
		for m := range Messages(c.in[:n]) {
			if m.Seq != c.seq {
				continue // of a request that nobody waits for any more
			}
			deadline = time.Now().Add(timeout)
			interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
			switch m.Type {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				if errno := m.errno(); errno != 0 {
					return errno
				}
				if interrupted {
					return unix.EINTR
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

func (c *Client) send(msg []byte) error {
	if err := c.conn.Send(msg); err != nil {
		return fmt.Errorf("sending to %s: %w", c.part, err)
	}
	return nil
}

// kernelConn is a netlink socket.
type kernelConn struct{ fd int }

// replyBuffer holds the kernel's complaints about one transaction.
const replyBuffer = 16 << 20

// Connect opens a netlink socket in the calling thread's network namespace, for messages of up to some size; 0: of the usual
// one.
func Connect(protocol, size int) (Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, err
	}
	// Without the privilege these fail, and so will the transaction, which has the clearer error.
	if size > 0 {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, replyBuffer)
	// A complaint needn't carry the message that it is about, but should say where in it the mistake is.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return &kernelConn{fd}, nil
}

func (c *kernelConn) Close() error { return unix.Close(c.fd) }

func (c *kernelConn) Send(msg []byte) error {
	for {
		if err := unix.Sendto(c.fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != unix.EINTR {
			return err
		}
	}
}

func (c *kernelConn) Receive(buf []byte, deadline time.Time) (int, error) {
	for {
		n, _, err := unix.Recvfrom(c.fd, buf, unix.MSG_DONTWAIT)
		if err == nil {
			return n, nil
		}
		if err == unix.EINTR {
			continue
		}
		if err != unix.EAGAIN {
			return 0, err
		}
		left := time.Until(deadline).Milliseconds()
		if deadline.IsZero() || left <= 0 {
			return 0, os.ErrDeadlineExceeded
		}
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, int(left)); err != nil && err != unix.EINTR {
			return 0, err
		}
	}
}
