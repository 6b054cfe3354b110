package zone

import "strings"

// block is the decoded form of what a packer writes.
type block struct {
	n4, n6  int
	count   int // of members
	nsets   int
	sets    string
	index   string // empty if there are few members
	members string
}

func uvarint(s string, at int) (v, next int) {
	for shift := 0; ; shift += 7 {
		c := s[at]
		at++
		v |= int(c&0x7f) << shift
		if c < 0x80 {
			return v, at
		}
	}
}

func readBlock(s string) (b block) {
	if s == "" {
		return b
	}
	length, at := 0, 0
	b.n4, at = uvarint(s, 0)
	b.n6, at = uvarint(s, at)
	b.count, at = uvarint(s, at)
	b.nsets, at = uvarint(s, at)
	length, at = uvarint(s, at)
	b.sets, at = s[at:at+length], at+length
	if b.count > fewMembers {
		b.index, at = s[at:at+4*b.count], at+4*b.count
	}
	b.members = s[at:]
	return b
}

// host is a member of a block.
type host struct {
	label  string
	set    int
	v4, v6 string
}

func (h *host) has(a string) bool {
	list := h.v6
	if len(a) == 4 {
		list = h.v4
	}
	for ; len(list) > 0; list = list[len(a):] {
		if list[:len(a)] == a {
			return true
		}
	}
	return false
}

// host decodes the member at an offset, and returns the offset of the next.
func (b *block) host(at int) (h host, next int) {
	n := int(b.members[at])
	h.label = b.members[at+1 : at+1+n]
	at += 1 + n
	h.set = int(b.members[at])
	n4, n6 := 4*int(b.members[at+1]), 16*int(b.members[at+2])
	at += 3
	h.v4, h.v6 = b.members[at:at+n4], b.members[at+n4:at+n4+n6]
	return h, at + n4 + n6
}

// find returns the offset of the member with a label, -1 for none.
func (b *block) find(label []byte) int {
	if b.index == "" {
		for at, i := 0, 0; i < b.count; i++ {
			h, next := b.host(at)
			if h.label == string(label) {
				return at
			}
			at = next
		}
		return -1
	}
	for low, high := 0, b.count; low < high; {
		middle := (low + high) / 2
		at := int(be32(b.index[4*middle:]))
		h, _ := b.host(at)
		switch strings.Compare(h.label, string(label)) {
		case 0:
			return at
		case -1:
			low = middle + 1
		default:
			high = middle
		}
	}
	return -1
}

func be32(s string) uint32 {
	return uint32(s[0])<<24 | uint32(s[1])<<16 | uint32(s[2])<<8 | uint32(s[3])
}

// set returns the count of addresses of a set, and its ports.
func (b *block) set(i int) (addrs int, ports string) {
	for at := 0; ; i-- {
		length, next := uvarint(b.sets, at)
		if i == 0 {
			addrs, at = uvarint(b.sets, next)
			return addrs, b.sets[at : next+length]
		}
		at = next + length
	}
}

// nextPort reads the first of a list of ports.
func nextPort(ports string) (p port, rest string) {
	n := int(ports[2] & 0x7f)
	return port{number: uint16(ports[0])<<8 | uint16(ports[1]), repeat: ports[2]&0x80 != 0, pair: ports[3 : 3+n]}, ports[3+n:]
}
