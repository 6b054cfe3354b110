// Package wire reads DNS queries and writes responses in wire format without allocating: what the hot path needs and no
// more. It knows the format, not what is asked or answered.
package wire

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
)

// Record types, classes and response codes that are handled separately.
const (
	TypeA     = 1
	TypeNS    = 2
	TypeCNAME = 5
	TypeSOA   = 6
	TypePTR   = 12
	TypeTXT   = 16
	TypeAAAA  = 28
	TypeSRV   = 33
	TypeSIG   = 24 // in a query: SIG(0), a transaction signature
	TypeOPT   = 41
	TypeTSIG  = 250
	TypeIXFR  = 251
	TypeAXFR  = 252

	ClassIN = 1

	NoError  = 0
	FormErr  = 1
	ServFail = 2
	NXDomain = 3
	NotImp   = 4
	Refused  = 5
	BadVers  = 16
)

const (
	HeaderLen = 12
	// OPTLen is the length of an OPT record without options.
	OPTLen = 11
	// MaxName is the longest name, with the root's empty label.
	MaxName = 255

	flagQR = 1 << 15
	flagAA = 1 << 10
	flagTC = 1 << 9
	flagRD = 1 << 8
	flagRA = 1 << 7
	flagCD = 1 << 4
)

// Verdict is how a received message is handled.
type Verdict uint8

const (
	OK     Verdict = iota
	Drop           // no response: too short, or a response itself
	Reject         // respond with Query.Rcode
)

// Query is a parsed query. It is meant to be reused.
type Query struct {
	Raw     []byte // the message, not copied
	ID      uint16
	Flags   uint16
	QType   uint16
	QClass  uint16
	Rcode   uint8 // of a Reject
	EDNS    bool
	DO      bool
	Version uint8
	UDPSize uint16
	// End is where the question section ends in Raw.
	End int

	n      int // length of the name
	labels int
	name   [MaxName + 1]byte
	at     [128]uint8
}

// Name is the queried name, in lower case and wire form. It is valid until the next Parse.
func (q *Query) Name() []byte { return q.name[:q.n] }

// Asked is the name as the client wrote it.
func (q *Query) Asked() []byte { return q.Raw[HeaderLen : HeaderLen+q.n] }

// Labels is the number of labels, the root's not counted.
func (q *Query) Labels() int { return q.labels }

// Label is the i-th label from the left, in lower case.
func (q *Query) Label(i int) []byte {
	at := int(q.at[i])
	return q.name[at+1 : at+1+int(q.name[at])]
}

// LabelAt is the offset of the i-th label in the name.
func (q *Query) LabelAt(i int) int { return int(q.at[i]) }

// In reports whether the name is a zone's, given in wire form, or below it.
func (q *Query) In(zone string) bool {
	at := q.n - len(zone)
	if at < 0 || string(q.name[at:q.n]) != zone {
		return false
	}
	if at == q.n-1 { // the root
		return true
	}
	for i := range q.labels {
		if int(q.at[i]) == at {
			return true
		}
	}
	return false
}

// Opcode of the message.
func (q *Query) Opcode() uint8 { return uint8(q.Flags >> 11 & 15) }

// Parse parses a message. It accepts what RFC 1035 and RFC 6891 allow in a standard query and nothing else: one question,
// complete records, at most one OPT record with complete options, a transaction signature only at the end, no bytes after
// the last record.
func (q *Query) Parse(msg []byte) Verdict {
	if len(msg) < HeaderLen {
		return Drop
	}
	q.Raw, q.ID, q.Flags = msg, binary.BigEndian.Uint16(msg), binary.BigEndian.Uint16(msg[2:])
	q.EDNS, q.DO, q.Version, q.UDPSize, q.n, q.labels, q.End = false, false, 0, 512, 0, 0, HeaderLen
	if q.Flags&flagQR != 0 {
		return Drop // never respond to a response: two servers could do so forever
	}
	if q.Opcode() != 0 {
		q.Rcode = NotImp
		return Reject
	}
	q.Rcode = FormErr
	count := func(i int) int { return int(binary.BigEndian.Uint16(msg[4+2*i:])) }
	if count(0) != 1 || count(1) > 1 || count(2) > 1 || count(3) > 2 || !q.question(msg) {
		return Reject
	}
	at, signed := q.End, false
	for i := count(1) + count(2) + count(3); i > 0; i-- {
		if signed {
			return Reject // RFC 8945, RFC 2931: the signature is the last record
		}
		if at, signed = q.record(msg, at, i <= count(3)); at < 0 {
			return Reject
		}
	}
	if at != len(msg) {
		return Reject
	}
	return OK
}

func (q *Query) question(msg []byte) bool {
	at := HeaderLen
	for {
		if at >= len(msg) {
			return false
		}
		n := int(msg[at])
		if n > 63 || at+1+n >= len(msg) || at-HeaderLen+n+2 > MaxName && n > 0 { // this covers a pointer: there is nothing before it to point to
			return false
		}
		if n == 0 {
			break
		}
		q.at[q.labels] = uint8(at - HeaderLen)
		q.labels++
		at += 1 + n
	}
	at++
	if at+4 > len(msg) {
		return false
	}
	q.n = at - HeaderLen
	lower(q.name[:], msg[HeaderLen:at])
	q.QType, q.QClass = binary.BigEndian.Uint16(msg[at:]), binary.BigEndian.Uint16(msg[at+2:])
	q.End = at + 4
	return true
}

// lower copies a name in lower case, eight bytes at a time. The bytes that say how long labels are stay as they are:
// they are all below the letters.
func lower(dst, name []byte) {
	const ones = 0x0101010101010101
	i := 0
	for ; i+8 <= len(name); i += 8 {
		w := binary.LittleEndian.Uint64(name[i:])
		low := w & (0x7f * ones)
		// The top bit of each byte says: at least 'A', not more than 'Z', and plain ASCII.
		upper := (low + (0x80-'A')*ones) &^ (low + (0x7f-'Z')*ones) &^ w & (0x80 * ones)
		binary.LittleEndian.PutUint64(dst[i:], w|upper>>2)
	}
	for ; i < len(name); i++ {
		c := name[i]
		if c >= 'A' && c <= 'Z' {
			c += 'a' - 'A'
		}
		dst[i] = c
	}
}

// record reads a record: it keeps what an OPT record says, and skips others. It returns where the record ends, -1 if it is
// malformed, and whether it is a transaction signature.
func (q *Query) record(msg []byte, at int, additional bool) (end int, signature bool) {
	start := at
	if at = checkName(msg, at); at < 0 || at+10 > len(msg) {
		return -1, false
	}
	typ, class := binary.BigEndian.Uint16(msg[at:]), binary.BigEndian.Uint16(msg[at+2:])
	ttl, length := binary.BigEndian.Uint32(msg[at+4:]), int(binary.BigEndian.Uint16(msg[at+8:]))
	end = at + 10 + length
	if end > len(msg) {
		return -1, false
	}
	switch typ {
	case TypeOPT:
		// RFC 6891: one OPT record, among the additional ones, owned by the root.
		if !additional || q.EDNS || msg[start] != 0 || !completeOptions(msg[at+10:end]) {
			return -1, false
		}
		q.EDNS, q.UDPSize, q.DO, q.Version = true, max(class, 512), ttl&0x8000 != 0, uint8(ttl>>16)
	case TypeTSIG, TypeSIG:
		if !additional {
			return -1, false
		}
		return end, true
	}
	return end, false
}

// completeOptions reports whether the options of an OPT record end where the record does.
func completeOptions(data []byte) bool {
	for len(data) >= 4 {
		n := 4 + int(binary.BigEndian.Uint16(data[2:]))
		if n > len(data) {
			return false
		}
		data = data[n:]
	}
	return len(data) == 0
}

// checkName returns where a name ends, -1 if it is malformed: too long, cut off, or with a pointer that does not lead
// backwards, which could loop.
func checkName(msg []byte, at int) int {
	end, length, before := -1, 1, at
	for at < len(msg) {
		n := int(msg[at])
		switch {
		case n == 0:
			if end < 0 {
				end = at + 1
			}
			return end
		case n >= 0xC0:
			if at+2 > len(msg) {
				return -1
			}
			if end < 0 {
				end = at + 2
			}
			to := int(binary.BigEndian.Uint16(msg[at:]) & 0x3FFF)
			if to >= before || to < HeaderLen {
				return -1
			}
			at, before = to, to
			continue
		case n > 63:
			return -1
		}
		if length += 1 + n; length > MaxName {
			return -1
		}
		at += 1 + n
	}
	return -1
}

// SkipName returns where a name ends, -1 if it is cut off. It does not follow pointers.
func SkipName(msg []byte, at int) int {
	for at < len(msg) {
		n := int(msg[at])
		switch {
		case n == 0:
			return at + 1
		case n >= 0xC0:
			if at+2 > len(msg) {
				return -1
			}
			return at + 2
		case n > 63:
			return -1
		}
		at += 1 + n
	}
	return -1
}

// ReverseAddr is the address that the name, of in-addr.arpa or ip6.arpa, stands for.
func (q *Query) ReverseAddr() (netip.Addr, bool) {
	switch n := q.Labels(); {
	case n == 4+2 && q.In("\x07in-addr\x04arpa\x00"):
		var v [4]byte
		for i := range v {
			n := 0
			label := q.Label(i)
			for _, c := range label {
				if c < '0' || c > '9' {
					return netip.Addr{}, false
				}
				n = 10*n + int(c-'0')
			}
			if len(label) > 3 || n > 255 || len(label) > 1 && label[0] == '0' {
				return netip.Addr{}, false
			}
			v[3-i] = byte(n)
		}
		return netip.AddrFrom4(v), true
	case n == 32+2 && q.In("\x03ip6\x04arpa\x00"):
		var v [16]byte
		for i := range 32 {
			label := q.Label(i)
			if len(label) != 1 {
				return netip.Addr{}, false
			}
			c := label[0]
			switch {
			case c >= '0' && c <= '9':
				c -= '0'
			case c >= 'a' && c <= 'f':
				c -= 'a' - 10
			default:
				return netip.Addr{}, false
			}
			v[15-i/2] |= c << (4 * (i % 2))
		}
		return netip.AddrFrom16(v), true
	}
	return netip.Addr{}, false
}

// Header writes a response's header for q into the first 12 bytes of msg.
func (q *Query) Header(msg []byte, rcode uint8, authoritative, recursive, truncated bool, qd, an, ns, ar int) {
	flags := flagQR | q.Flags&(0x7800|flagRD|flagCD) | uint16(rcode&15)
	if authoritative {
		flags |= flagAA
	}
	if recursive {
		flags |= flagRA
	}
	if truncated {
		flags |= flagTC
	}
	binary.BigEndian.PutUint16(msg, q.ID)
	binary.BigEndian.PutUint16(msg[2:], flags)
	binary.BigEndian.PutUint16(msg[4:], uint16(qd))
	binary.BigEndian.PutUint16(msg[6:], uint16(an))
	binary.BigEndian.PutUint16(msg[8:], uint16(ns))
	binary.BigEndian.PutUint16(msg[10:], uint16(ar))
}

// Begin appends room for the header, and the question as it was received.
func (q *Query) Begin(dst []byte) []byte {
	return append(dst[:0], q.Raw[:q.End]...)
}

// AppendOPT appends the server's OPT record.
func (q *Query) AppendOPT(dst []byte, rcode int, size uint16) []byte {
	var do byte
	if q.DO {
		do = 0x80
	}
	return append(dst, 0, 0, TypeOPT, byte(size>>8), byte(size), byte(rcode>>4), 0, do, 0, 0, 0)
}

// Advertised is the UDP payload size in the server's OPT records: what passes nearly every network unfragmented.
const Advertised = 1232

// Error appends a response without records: just a header if the question is malformed.
func (q *Query) Error(dst []byte, rcode int, authoritative, recursive bool) []byte {
	dst = append(dst[:0], q.Raw[:HeaderLen]...)
	qd, ar := 0, 0
	if q.End > HeaderLen {
		dst, qd = q.Begin(dst), 1
	}
	if q.EDNS {
		dst, ar = q.AppendOPT(dst, rcode, Advertised), 1
	}
	q.Header(dst, uint8(rcode&15), authoritative, recursive, false, qd, 0, 0, ar)
	return dst
}

var errName = errors.New("not a domain name")

// PackName turns a dotted name without escapes into wire form, in lower case.
func PackName(name string) (string, error) {
	name = strings.TrimSuffix(strings.ToLower(name), ".")
	out := make([]byte, 0, len(name)+2)
	if name != "" {
		for label := range strings.SplitSeq(name, ".") {
			if len(label) == 0 || len(label) > 63 {
				return "", errName
			}
			out = append(out, byte(len(label)))
			out = append(out, label...)
		}
	}
	if len(out)+1 > MaxName {
		return "", errName
	}
	return string(append(out, 0)), nil
}

// UnpackName turns a name in wire form into its dotted form, escaping special characters.
func UnpackName(name []byte) string {
	var b strings.Builder
	for i := 0; i < len(name) && name[i] != 0; i += 1 + int(name[i]) {
		if i+1+int(name[i]) > len(name) {
			break
		}
		for _, c := range name[i+1 : i+1+int(name[i])] {
			if c > 0x20 && c < 0x7f && c != '.' && c != '\\' && c != '"' {
				b.WriteByte(c)
			} else {
				b.WriteString("\\" + string([]byte{'0' + c/100, '0' + c/10%10, '0' + c%10}))
			}
		}
		b.WriteByte('.')
	}
	if b.Len() == 0 {
		return "."
	}
	return b.String()
}
