package alloc

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// addressRange is a prefix less the addresses that no Service may have: the network's own, and IPv4's broadcast.
type addressRange struct {
	*space
	prefix netip.Prefix
	first  netip.Addr
}

func newAddressRange(p netip.Prefix) *addressRange {
	p = p.Masked()
	hostBits := p.Addr().BitLen() - p.Bits()
	size := ^uint64(0)
	if hostBits < 64 {
		size = 1 << hostBits
	}
	size-- // the network's own address
	if p.Addr().Is4() && size > 0 {
		size-- // broadcast
	}
	return &addressRange{space: newSpace(size, reserve(size, 16, 256)), prefix: p, first: p.Addr().Next()}
}

// reserve is the part of a range that is chosen from last: a part-th of it, at least 16 and at most most places.
// It is Kubernetes' rule, so that people's habits about fixed addresses and ports carry over.
func reserve(size, part, most uint64) uint64 {
	if size < 16 {
		return 0
	}
	return min(max(16, size/part), most)
}

func (r *addressRange) usable(a netip.Addr) bool {
	return r.prefix.Contains(a) && r.offset(a) < r.size
}

// offset of an address from the first usable one; before that it wraps to a number past the end.
func (r *addressRange) offset(a netip.Addr) uint64 { return low64(a) - low64(r.first) }

func (r *addressRange) at(place uint64) netip.Addr {
	b := r.first.As16()
	binary.BigEndian.PutUint64(b[8:], binary.BigEndian.Uint64(b[8:])+place)
	a := netip.AddrFrom16(b)
	if r.first.Is4() {
		return a.Unmap()
	}
	return a
}

func (r *addressRange) occupy(a netip.Addr) {
	if a.IsValid() && r.usable(a) {
		r.space.occupy(r.offset(a))
	}
}

func (r *addressRange) leave(a netip.Addr) {
	if a.IsValid() && r.usable(a) {
		r.space.leave(r.offset(a))
	}
}

// low64 are an address' last 64 bits: no service range is wider than that.
func low64(a netip.Addr) uint64 {
	b := a.As16()
	return binary.BigEndian.Uint64(b[8:])
}

type portRange struct {
	*space
	first, last uint16
}

func newPortRange(first, last uint16) *portRange {
	size := uint64(last) - uint64(first) + 1
	return &portRange{space: newSpace(size, reserve(size, 32, 128)), first: first, last: last}
}

func (r *portRange) String() string { return fmt.Sprintf("%d-%d", r.first, r.last) }

func (r *portRange) contains(p uint16) bool { return p >= r.first && p <= r.last }

func (r *portRange) occupy(p uint16) {
	if r.contains(p) {
		r.space.occupy(uint64(p - r.first))
	}
}

func (r *portRange) leave(p uint16) {
	if r.contains(p) {
		r.space.leave(uint64(p - r.first))
	}
}
