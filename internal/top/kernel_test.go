package top

import (
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// ending is a connection to conntrack that ends each list in one way.
type ending struct {
	typ   uint16
	errno unix.Errno
	// off is how far the answer's sequence number is from that of the request.
	off    uint32
	answer []byte
}

func (e *ending) Send(msg []byte) error {
	for m := range nf.Messages(msg) {
		b := binary.NativeEndian.AppendUint32(nil, unix.NLMSG_HDRLEN+4)
		b = binary.NativeEndian.AppendUint16(b, e.typ)
		b = binary.NativeEndian.AppendUint16(b, 0)
		b = binary.NativeEndian.AppendUint32(b, m.Seq+e.off)
		b = binary.NativeEndian.AppendUint32(b, 0)
		e.answer = binary.NativeEndian.AppendUint32(b, uint32(-int32(e.errno)))
	}
	return nil
}

func (e *ending) Receive(buf []byte, deadline time.Time) (int, error) {
	if deadline.IsZero() || e.answer == nil {
		return 0, os.ErrDeadlineExceeded
	}
	n := copy(buf, e.answer)
	e.answer = nil
	return n, nil
}

func (e *ending) Close() error { return nil }

// TestDumpErrors: a list of connections that ends with an error, or not at all, is an error.
func TestDumpErrors(t *testing.T) {
	for _, c := range []struct {
		ending ending
		fails  bool
	}{
		{ending{typ: unix.NLMSG_DONE}, false},
		{ending{typ: unix.NLMSG_DONE, errno: unix.ENOMEM}, true},
		{ending{typ: unix.NLMSG_ERROR, errno: unix.EPERM}, true},
		{ending{typ: unix.NLMSG_DONE, off: ^uint32(0)}, true}, // of the request before
	} {
		k := Kernel{events: -1, dump: nf.NewClient(&c.ending, "conntrack")}
		err := k.Dump(func(*Entry) { t.Error("there is nothing") })
		if (err != nil) != c.fails || c.ending.errno != 0 && !errors.Is(err, c.ending.errno) {
			t.Errorf("%+v: %v", c.ending, err)
		}
	}
}
