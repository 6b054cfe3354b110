package top

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"portal/internal/intent"
)

// Entry is a connection as the kernel tracks it.
type Entry struct {
	Protocol intent.Protocol
	// To is where the client sent to, From whoever answers: the endpoint, if there is one.
	To, From netip.AddrPort
	// Client is who sends, Seen whom the other side sees instead.
	Client, Seen netip.AddrPort
	// State is TCP's; 0 where it is not known.
	State uint8
	// Answered: the other side has sent something.
	Answered bool
	// ID is the kernel's own name for the connection while it exists; At is when the event happened, in nanoseconds, or 0 if the kernel
	// does not take the time.
	ID uint32
	At uint64
	// Bytes are those of both directions; they are there only if accounting is on.
	Bytes    uint64
	Counters bool
}

// States of TCP in conntrack.
const (
	stateTimeWait = 7
	stateClose    = 8
)

// Open says whether data may still flow.
func (e *Entry) Open() bool { return e.State != stateTimeWait && e.State != stateClose }

// Reset says whether the connection was ended by a reset: a connection that ends well comes through other states.
func (e *Entry) Reset() bool { return e.Protocol == intent.TCP && e.State == stateClose }

// Attributes of ctnetlink.
const (
	ctaTupleOrig, ctaTupleReply, ctaStatus = 1, 2, 3
	ctaProtoInfo, ctaID, ctaTimestampEvent = 4, 12, 27
	ctaCountersOrig, ctaCountersReply      = 9, 10
	tupleIP, tupleProto                    = 1, 2
	ip4Src, ip4Dst, ip6Src, ip6Dst         = 1, 2, 3, 4
	protoNum, protoSrcPort, protoDstPort   = 1, 2, 3
	infoTCP, infoTCPState                  = 1, 1
	counterBytes                           = 2
	statusSeenReply                        = 1 << 1
)

// parse reads the attributes of a message; false: it is of no protocol with ports.
func (e *Entry) parse(attrs []byte) bool {
	*e = Entry{}
	var reply intent.Protocol
	for len(attrs) >= 4 {
		kind, value, rest := next(attrs)
		switch kind {
		case ctaTupleOrig:
			e.Protocol, e.Client, e.To = tuple(value)
		case ctaTupleReply:
			reply, e.From, e.Seen = tuple(value)
		case ctaProtoInfo:
			if s := find(find(value, infoTCP), infoTCPState); len(s) == 1 {
				e.State = s[0]
			}
		case ctaStatus:
			e.Answered = len(value) == 4 && binary.BigEndian.Uint32(value)&statusSeenReply != 0
		case ctaID:
			if len(value) == 4 {
				e.ID = binary.BigEndian.Uint32(value)
			}
		case ctaTimestampEvent:
			if len(value) == 8 {
				e.At = binary.BigEndian.Uint64(value)
			}
		case ctaCountersOrig, ctaCountersReply:
			if b := find(value, counterBytes); len(b) == 8 {
				e.Bytes, e.Counters = e.Bytes+binary.BigEndian.Uint64(b), true
			}
		}
		attrs = rest
	}
	return reply != 0 && e.To.IsValid() && e.From.IsValid()
}

// tuple reads one direction of a connection.
func tuple(b []byte) (p intent.Protocol, src, dst netip.AddrPort) {
	proto, ip := find(b, tupleProto), find(b, tupleIP)
	n, from, to := find(proto, protoNum), find(proto, protoSrcPort), find(proto, protoDstPort)
	if len(n) != 1 || len(from) != 2 || len(to) != 2 {
		return 0, src, dst
	}
	rawSrc, rawDst := find(ip, ip4Src), find(ip, ip4Dst)
	if rawSrc == nil {
		rawSrc, rawDst = find(ip, ip6Src), find(ip, ip6Dst)
	}
	a, ok1 := netip.AddrFromSlice(rawSrc)
	z, ok2 := netip.AddrFromSlice(rawDst)
	if !ok1 || !ok2 {
		return 0, src, dst
	}
	return intent.Protocol(n[0]), netip.AddrPortFrom(a, binary.BigEndian.Uint16(from)), netip.AddrPortFrom(z, binary.BigEndian.Uint16(to))
}

// next splits the first attribute off; a list that is cut off ends.
func next(b []byte) (kind uint16, value, rest []byte) {
	n := int(binary.NativeEndian.Uint16(b))
	if n < 4 || n > len(b) {
		return 0, nil, nil
	}
	kind = binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	return kind, b[4:n], b[min((n+3)&^3, len(b)):]
}

// find is what an attribute of a list holds; nil: there is none.
func find(b []byte, want uint16) []byte {
	for len(b) >= 4 {
		kind, value, rest := next(b)
		if kind == want {
			return value
		}
		b = rest
	}
	return nil
}
