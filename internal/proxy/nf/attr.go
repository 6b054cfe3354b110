package nf

import (
	"encoding/binary"
	"strings"

	"golang.org/x/sys/unix"
)

// appendHeader begins a message of nf_tables; finish writes its length.
func appendHeader(b []byte, typ, flags uint16, seq uint32, family byte) []byte {
	return appendRawHeader(b, unix.NFNL_SUBSYS_NFTABLES<<8|typ, flags, seq, family, 0)
}

func appendRawHeader(b []byte, typ, flags uint16, seq uint32, family byte, resource uint16) []byte {
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, family, unix.NFNETLINK_V0)
	return binary.BigEndian.AppendUint16(b, resource)
}

// finish writes the length of the message that begins at start.
func finish(b []byte, start int) []byte {
	binary.NativeEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// AppendAttr writes an attribute, padded.
func AppendAttr(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return pad(append(b, value...))
}

func appendString(b []byte, typ uint16, s string) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(5+len(s)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return pad(append(append(b, s...), 0))
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	b = binary.NativeEndian.AppendUint16(b, 8)
	b = binary.NativeEndian.AppendUint16(b, typ)
	return binary.BigEndian.AppendUint32(b, v)
}

// appendNested writes an attribute that contains what fill writes.
func appendNested(b []byte, typ uint16, fill func([]byte) []byte) []byte {
	start := len(b)
	b = fill(append(b, 0, 0, 0, 0))
	return finishNested(b, start, typ)
}

// finishNested writes the header of a nested attribute that begins at start.
func finishNested(b []byte, start int, typ uint16) []byte {
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	binary.NativeEndian.PutUint16(b[start+2:], typ|unix.NLA_F_NESTED)
	return b
}

func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

func align(n int) int { return (n + 3) &^ 3 }

// Attributes walks over the attributes of a message.
func Attributes(b []byte) func(yield func(typ uint16, value []byte) bool) {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			size := int(binary.NativeEndian.Uint16(b))
			if size < 4 || size > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER), b[4:size]) {
				return
			}
			b = b[min(align(size), len(b)):]
		}
	}
}

// attr returns the value of the first attribute of a type, nil if there is none.
func attr(b []byte, typ uint16) []byte {
	for t, v := range Attributes(b) {
		if t == typ {
			return v
		}
	}
	return nil
}

func attrString(b []byte, typ uint16) string { return strings.TrimRight(string(attr(b, typ)), "\x00") }

func attrUint32(b []byte, typ uint16) uint32 {
	if v := attr(b, typ); len(v) == 4 {
		return binary.BigEndian.Uint32(v)
	}
	return 0
}

// Message is one netlink message.
type Message struct {
	Type, Flags uint16
	Seq         uint32
	Body        []byte
}

// errno is the error that an NLMSG_ERROR or NLMSG_DONE carries.
func (m *Message) errno() unix.Errno {
	if len(m.Body) < 4 {
		if m.Type == unix.NLMSG_DONE {
			return 0
		}
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
			m := Message{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:size]}
			if !yield(m) {
				return
			}
			b = b[min(align(size), len(b)):]
		}
	}
}
