package nf

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Kind is the number of a kind of message.
func Kind(typ uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | typ }

// AppendHeader begins a message, whose length is yet to be written.
func AppendHeader(b []byte, typ, flags uint16, seq uint32, family byte, resource uint16) []byte {
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, family, unix.NFNETLINK_V0)
	return binary.BigEndian.AppendUint16(b, resource)
}

// AppendAttr writes an attribute.
func AppendAttr(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// AppendString writes an attribute with text.
func AppendString(b []byte, typ uint16, s string) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(5+len(s)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(append(b, s...), 0)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// AppendUint32 writes an attribute with a number.
func AppendUint32(b []byte, typ uint16, v uint32) []byte {
	b = binary.NativeEndian.AppendUint16(b, 8)
	b = binary.NativeEndian.AppendUint16(b, typ)
	return binary.BigEndian.AppendUint32(b, v)
}

// AppendNested writes an attribute that contains what fill writes.
func AppendNested(b []byte, typ uint16, fill func([]byte) []byte) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	b = fill(b)
	binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at))
	binary.NativeEndian.PutUint16(b[at+2:], typ|unix.NLA_F_NESTED)
	return b
}

// AppendBracket writes the beginning or the end of a transaction.
func AppendBracket(b []byte, typ uint16) []byte {
	at := len(b)
	b = AppendHeader(b, typ, unix.NLM_F_REQUEST, 1, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	binary.NativeEndian.PutUint32(b[at:], uint32(len(b)-at))
	return b
}

// Text reads a string that ends with a zero.
func Text(v []byte) string {
	for len(v) > 0 && v[len(v)-1] == 0 {
		v = v[:len(v)-1]
	}
	return string(v)
}

// Names returns two names that a message carries: mostly of a table, and of what is in it.
func Names(m []byte, first, second uint16) (a, b string) {
	for typ, v := range Attributes(m) {
		switch typ {
		case first:
			a = Text(v)
		case second:
			b = Text(v)
		}
	}
	return a, b
}
