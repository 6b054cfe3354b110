package node

import (
	"fmt"
	"net/netip"
)

// Range is one family's addresses for Pods, cut into equal parts: one for each node.
type Range struct {
	Prefix netip.Prefix
	Bits   int // the length of a node's part
}

// pool hands out the parts of a Range, each to one owner at a time. Parts go round, so that the one just given back
// is the last to be handed out again.
type pool struct {
	Range
	owners  map[netip.Prefix]string // parts in use
	foreign map[netip.Prefix]string // anything else that is in use
	next    netip.Addr
}

func newPool(r Range) *pool {
	return &pool{Range: r, owners: map[netip.Prefix]string{}, foreign: map[netip.Prefix]string{}, next: r.Prefix.Masked().Addr()}
}

// occupy notes that a prefix is an owner's.
func (p *pool) occupy(prefix netip.Prefix, owner string) {
	if !p.Prefix.Overlaps(prefix) {
		return
	}
	in := p.owners
	if prefix.Bits() != p.Bits {
		in = p.foreign
	}
	if _, taken := in[prefix]; !taken {
		in[prefix] = owner
	}
}

// release gives a prefix back if it is that owner's.
func (p *pool) release(prefix netip.Prefix, owner string) {
	for _, in := range []map[netip.Prefix]string{p.owners, p.foreign} {
		if in[prefix] == owner {
			delete(in, prefix)
		}
	}
}

// allocate finds a free part and notes it as the owner's.
func (p *pool) allocate(owner string) (netip.Prefix, error) {
	start := p.next
	for {
		part := netip.PrefixFrom(p.next, p.Bits)
		p.next = p.after(part)
		if p.free(part) {
			p.owners[part] = owner
			return part, nil
		}
		if p.next == start {
			return netip.Prefix{}, fmt.Errorf("no free /%d is left in %s for node %s", p.Bits, p.Prefix, owner)
		}
	}
}

func (p *pool) free(part netip.Prefix) bool {
	if _, taken := p.owners[part]; taken {
		return false
	}
	for other := range p.foreign {
		if other.Overlaps(part) {
			return false
		}
	}
	return true
}

// after is the first address behind a part, or the range's first one behind the last part.
func (p *pool) after(part netip.Prefix) netip.Addr {
	raw := part.Addr().AsSlice()
	bit := p.Bits - 1
	for ; bit >= p.Prefix.Bits(); bit-- {
		mask := byte(1) << (7 - bit%8)
		raw[bit/8] ^= mask
		if raw[bit/8]&mask != 0 {
			break // no carry
		}
	}
	next, _ := netip.AddrFromSlice(raw)
	return next
}

// Ranges checks cluster CIDRs and gives each its part length: at most one of a family, and parts that fit.
func Ranges(clusterCIDRs []netip.Prefix, bitsIPv4, bitsIPv6 int) ([]Range, error) {
	var out []Range
	seen := map[bool]netip.Prefix{}
	for _, prefix := range clusterCIDRs {
		if other, ok := seen[prefix.Addr().Is6()]; ok {
			return nil, fmt.Errorf("cluster CIDRs %s and %s are of the same family: one IPv4 and one IPv6 range are possible", other, prefix)
		}
		seen[prefix.Addr().Is6()] = prefix
		bits := bitsIPv4
		if prefix.Addr().Is6() {
			bits = bitsIPv6
		}
		if bits < prefix.Bits() || bits > prefix.Addr().BitLen() {
			return nil, fmt.Errorf("node CIDR mask size %d doesn't fit into cluster CIDR %s: it must be from %d to %d", bits, prefix, prefix.Bits(), prefix.Addr().BitLen())
		}
		out = append(out, Range{Prefix: prefix.Masked(), Bits: bits})
	}
	return out, nil
}
