package l2

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// The ICMPv6 types of RFC 4861.
const (
	solicitation  = 135
	advertisement = 136
)

// NDP is a neighbour solicitation or advertisement with its IPv6 header.
type NDP struct {
	Advertisement    bool
	Source, To       netip.Addr
	Target           netip.Addr
	LinkAddress      MAC  // the source's in a solicitation, the target's in an advertisement
	HasLinkAddress   bool // false: the option is not there
	Solicited        bool // of an advertisement: it is an answer
	Override, Router bool
}

var (
	// AllNodes is everybody on the link.
	AllNodes    = netip.MustParseAddr("ff02::1")
	allNodesMAC = MAC{0x33, 0x33, 0, 0, 0, 1}

	errNDP = errors.New("not a valid neighbour solicitation or advertisement")
)

const (
	headerSize = 40
	ndpSize    = headerSize + 24
)

// ParseNDP reads an IPv6 packet. It accepts what RFC 4861 7.1 has a node accept: a hop limit of 255, which shows that it comes from this link,
// a right checksum, a unicast target, and options that are not empty.
func ParseNDP(b []byte) (n NDP, err error) {
	if len(b) < ndpSize || b[0]>>4 != 6 || b[6] != 58 || b[7] != 255 {
		return n, errNDP
	}
	length := int(binary.BigEndian.Uint16(b[4:]))
	if length < ndpSize-headerSize || headerSize+length > len(b) {
		return n, errNDP
	}
	b = b[:headerSize+length]
	body := b[headerSize:]
	if body[1] != 0 || checksum(b) != 0 {
		return n, errNDP
	}
	n.Source, n.To = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	n.Target = netip.AddrFrom16([16]byte(body[8:24]))
	if n.Target.IsMulticast() || n.Source.IsMulticast() {
		return n, errNDP
	}
	wanted := byte(1) // source link-layer address
	switch body[0] {
	case solicitation:
	case advertisement:
		n.Advertisement, wanted = true, 2
		n.Router, n.Solicited, n.Override = body[4]&0x80 != 0, body[4]&0x40 != 0, body[4]&0x20 != 0
		if n.Solicited && n.To.IsMulticast() {
			return n, errNDP
		}
	default:
		return n, errNDP
	}
	for options := body[24:]; len(options) > 0; {
		if len(options) < 8 || options[1] == 0 || int(options[1])*8 > len(options) {
			return n, errNDP
		}
		if options[0] == wanted && options[1] == 1 {
			n.HasLinkAddress = true
			copy(n.LinkAddress[:], options[2:8])
		}
		options = options[int(options[1])*8:]
	}
	if !n.Advertisement && n.Source.IsUnspecified() && (n.HasLinkAddress || !n.To.IsMulticast()) {
		return n, errNDP // without an address of its own a node solicits a group, and sends no link address
	}
	return n, nil
}

// Append appends the packet with its header.
func (n NDP) Append(b []byte) []byte {
	start := len(b)
	length := ndpSize - headerSize
	if n.HasLinkAddress {
		length += 8
	}
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(length))
	b = append(b, 58, 255)
	source, to, target := n.Source.As16(), n.To.As16(), n.Target.As16()
	b = append(append(b, source[:]...), to[:]...)
	kind, flags, option := byte(solicitation), byte(0), byte(1)
	if n.Advertisement {
		kind, option = advertisement, 2
		for bit, set := range map[byte]bool{0x80: n.Router, 0x40: n.Solicited, 0x20: n.Override} {
			if set {
				flags |= bit
			}
		}
	}
	b = append(b, kind, 0, 0, 0, flags, 0, 0, 0)
	b = append(b, target[:]...)
	if n.HasLinkAddress {
		b = append(append(b, option, 1), n.LinkAddress[:]...)
	}
	binary.BigEndian.PutUint16(b[start+headerSize+2:], checksum(b[start:]))
	return b
}

// checksum is the ICMPv6 checksum of a packet with its header: 0 if one is there and right.
func checksum(b []byte) uint16 {
	sum := uint32(len(b)-headerSize) + 58
	add := func(b []byte) {
		for ; len(b) >= 2; b = b[2:] {
			sum += uint32(binary.BigEndian.Uint16(b))
		}
		if len(b) == 1 {
			sum += uint32(b[0]) << 8
		}
	}
	add(b[8:])
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// AnswerNDP is the answer to a solicitation for an address that this machine announces; from is an address of its own on the link. Who
// looks for a duplicate has no address to answer to.
func AnswerNDP(request NDP, own MAC, from netip.Addr) NDP {
	n := NDP{Advertisement: true, Source: from, To: request.Source, Target: request.Target, LinkAddress: own, HasLinkAddress: true, Solicited: true, Override: true}
	if request.Source.IsUnspecified() {
		n.To, n.Solicited = AllNodes, false
	}
	return n
}

// AnnounceNDP is the unsolicited advertisement by which all who know an address update its entry to this machine.
func AnnounceNDP(a netip.Addr, own MAC, from netip.Addr) NDP {
	return NDP{Advertisement: true, Source: from, To: AllNodes, Target: a, LinkAddress: own, HasLinkAddress: true, Override: true}
}

// solicitedNode is the group that solicitations for an address go to.
func solicitedNode(a netip.Addr) netip.Addr {
	raw := a.As16()
	out := [16]byte{0: 0xff, 1: 0x02, 11: 1, 12: 0xff, 13: raw[13], 14: raw[14], 15: raw[15]}
	return netip.AddrFrom16(out)
}
