package nf

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// Field is a part of a key or of data; it takes whole registers of four bytes.
type Field struct {
	// magic is the number of the type in the nft tool, so that it can print elements.
	magic, size uint32
}

// The types of fields.
var (
	IPv4Field  = Field{7, 4}
	IPv6Field  = Field{8, 16}
	ProtoField = Field{12, 1}
	PortField  = Field{13, 2}
	// InterfaceField is an interface's name, filled up with zeros.
	InterfaceField = Field{41, unix.IFNAMSIZ}
	// NumberField is a number without a meaning to others: nft prints a mark in hexadecimal.
	NumberField = Field{19, 4}
)

// Set is a set or, with data or verdicts, a map.
type Set struct {
	Table     *Table
	Name      string
	Key, Data []Field
	Verdicts  bool
	// Intervals: elements have an end.
	Intervals bool
	// Dynamic: packets add elements, which expire.
	Dynamic bool
	// Size is the largest number of elements; 0: no limit.
	Size uint32
}

// setConcat is NFT_SET_CONCAT, which package unix lacks: the set knows where the fields of its intervals are.
const setConcat = 0x80

func (s *Set) flags() (f uint32) {
	if s.Verdicts || s.Data != nil {
		f |= unix.NFT_SET_MAP
	}
	if s.Intervals {
		f |= unix.NFT_SET_INTERVAL
		if len(s.Key) > 1 {
			f |= setConcat
		}
	}
	if s.Dynamic {
		f |= unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL
	}
	return f
}

// KeyLen is the size of a key in bytes.
func (s *Set) KeyLen() int { return length(s.Key) }

func length(fields []Field) (n int) {
	if len(fields) == 1 {
		return int(fields[0].size) // alone, it is not padded: the nft tool aborts otherwise
	}
	for _, f := range fields {
		n += align(int(f.size))
	}
	return n
}

func magic(fields []Field) (n uint32) {
	for _, f := range fields {
		n = n<<6 | f.magic
	}
	return n
}

// form is all of a set that can't be changed.
type form struct{ flags, key, data, size uint32 }

func (s *Set) form() form {
	return form{s.flags(), uint32(length(s.Key)), uint32(length(s.Data)), s.Size}
}

func (s *Set) append(b []byte, id uint32) []byte {
	b = appendString(b, unix.NFTA_SET_TABLE, s.Table.Name)
	b = appendString(b, unix.NFTA_SET_NAME, s.Name)
	b = appendUint32(b, unix.NFTA_SET_FLAGS, s.flags())
	b = appendUint32(b, unix.NFTA_SET_KEY_TYPE, magic(s.Key))
	b = appendUint32(b, unix.NFTA_SET_KEY_LEN, uint32(length(s.Key)))
	b = appendUint32(b, unix.NFTA_SET_ID, id)
	switch {
	case s.Verdicts:
		b = appendUint32(b, unix.NFTA_SET_DATA_TYPE, unix.NFT_DATA_VERDICT)
	case s.Data != nil:
		b = appendUint32(b, unix.NFTA_SET_DATA_TYPE, magic(s.Data))
		b = appendUint32(b, unix.NFTA_SET_DATA_LEN, uint32(length(s.Data)))
	}
	if len(s.Key) == 1 && s.Key[0] == NumberField {
		const keyByteOrder, hostByteOrder = 0, 1 // for the nft tool: NFTNL_UDATA_SET_KEYBYTEORDER
		b = AppendAttr(b, unix.NFTA_SET_USERDATA, append([]byte{keyByteOrder, 4}, Number(hostByteOrder)...))
	}
	return appendNested(b, unix.NFTA_SET_DESC, s.describe)
}

func (s *Set) describe(b []byte) []byte {
	if s.Size != 0 {
		b = appendUint32(b, unix.NFTA_SET_DESC_SIZE, s.Size)
	}
	if s.flags()&setConcat == 0 {
		return b
	}
	const descConcat, fieldLen = 2, 1 // NFTA_SET_DESC_CONCAT, NFTA_SET_FIELD_LEN
	return appendNested(b, descConcat, func(b []byte) []byte {
		for _, f := range s.Key {
			b = appendNested(b, unix.NFTA_LIST_ELEM, func(b []byte) []byte { return appendUint32(b, fieldLen, f.size) })
		}
		return b
	})
}

// Element is an element of a set. End is for intervals, Data for maps, Verdict for verdict maps.
type Element struct {
	Key, End, Data []byte
	Verdict        Verdict
	// Timeout is how long an element of a dynamic set stays; of one that was read, how long it will still.
	Timeout time.Duration
}

// elemKeyEnd is NFTA_SET_ELEM_KEY_END, which package unix lacks.
const elemKeyEnd = 10

// appendElement is written flat, since a full sync writes tens of thousands.
func (s *Set) appendElement(b []byte, e *Element, withData bool) []byte {
	start := len(b)
	b = append(b, 0, 0, 0, 0)
	b = appendValue(b, unix.NFTA_SET_ELEM_KEY, e.Key)
	if e.End != nil {
		b = appendValue(b, elemKeyEnd, e.End)
	}
	switch {
	case !withData:
	case s.Verdicts:
		b = e.Verdict.appendData(b, unix.NFTA_SET_ELEM_DATA)
	case s.Data != nil:
		b = appendValue(b, unix.NFTA_SET_ELEM_DATA, e.Data)
	}
	if withData && e.Timeout > 0 {
		b = AppendAttr(b, unix.NFTA_SET_ELEM_TIMEOUT, binary.BigEndian.AppendUint64(nil, uint64(e.Timeout.Milliseconds())))
	}
	return finishNested(b, start, unix.NFTA_LIST_ELEM)
}

func appendValue(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(8+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ|unix.NLA_F_NESTED)
	return AppendAttr(b, unix.NFTA_DATA_VALUE, value)
}

// readElement reads one as the kernel lists it.
func readElement(m []byte) (e Element) {
	value := func(v []byte) []byte { return attr(v, unix.NFTA_DATA_VALUE) }
	for typ, v := range Attributes(m) {
		switch typ {
		case unix.NFTA_SET_ELEM_EXPIRATION:
			if len(v) == 8 {
				e.Timeout = time.Duration(binary.BigEndian.Uint64(v)) * time.Millisecond
			}
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = value(v)
		case elemKeyEnd:
			e.End = value(v)
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = value(v)
			if verdict := attr(v, unix.NFTA_DATA_VERDICT); verdict != nil {
				e.Verdict = Verdict{int32(attrUint32(verdict, unix.NFTA_VERDICT_CODE)), attrString(verdict, unix.NFTA_VERDICT_CHAIN)}
			}
		}
	}
	return e
}

// appendKey and appendContent are an element as bytes to compare.
func (e *Element) appendKey(b []byte) []byte { return append(append(b, e.Key...), e.End...) }

func (s *Set) appendContent(b []byte, e *Element) []byte {
	if s.Verdicts {
		return append(AppendNumber(b, uint32(e.Verdict.Code)), e.Verdict.Chain...)
	}
	return append(b, e.Data...)
}
