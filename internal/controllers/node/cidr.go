package node

import (
	"fmt"
	"net/netip"
	"slices"
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
	owners  map[netip.Prefix][]string // parts in use; more than one owner is a mistake of somebody else's
	foreign map[netip.Prefix][]string // anything else that is in use
	next    netip.Addr
}

func newPool(r Range) *pool {
	return &pool{Range: r, owners: map[netip.Prefix][]string{}, foreign: map[netip.Prefix][]string{}, next: r.Prefix.Masked().Addr()}
}

// occupy notes that a prefix is an owner's. If that is new, and somebody else has some of it, it says who: both keep it until
// they are gone, since the addresses of a node can't be changed.
func (p *pool) occupy(prefix netip.Prefix, owner string) (rival string) {
	if !p.Prefix.Overlaps(prefix) {
		return ""
	}
	in := p.owners
	if prefix.Bits() != p.Bits {
		in = p.foreign
	}
	if slices.Contains(in[prefix], owner) {
		return ""
	}
	rival = p.rival(prefix, owner)
	in[prefix] = append(in[prefix], owner)
	return rival
}

// rival is another owner of something that overlaps; "" if there is none.
func (p *pool) rival(prefix netip.Prefix, owner string) string {
	other := func(owners []string) string {
		for _, o := range owners {
			if o != owner {
				return o
			}
		}
		return ""
	}
	if prefix.Bits() == p.Bits {
		if o := other(p.owners[prefix]); o != "" {
			return o
		}
	} else {
		for part, owners := range p.owners {
			if o := other(owners); o != "" && part.Overlaps(prefix) {
				return o
			}
		}
	}
	for part, owners := range p.foreign {
		if o := other(owners); o != "" && part.Overlaps(prefix) {
			return o
		}
	}
	return ""
}

// release gives a prefix back, as far as it is that owner's.
func (p *pool) release(prefix netip.Prefix, owner string) {
	for _, in := range []map[netip.Prefix][]string{p.owners, p.foreign} {
		if i := slices.Index(in[prefix], owner); i < 0 {
			continue
		} else if in[prefix] = slices.Delete(in[prefix], i, i+1); len(in[prefix]) == 0 {
			delete(in, prefix)
		}
	}
}

// allocate finds a free part and notes it as the owner's.
func (p *pool) allocate(owner string) (netip.Prefix, error) {
	start, rounds := p.next, 0
	for {
		part := netip.PrefixFrom(p.next, p.Bits)
		other, taken := p.taken(part)
		if !taken {
			p.next = p.after(part)
			p.owners[part] = []string{owner}
			return part, nil
		}
		if p.next = p.after(other); !part.Addr().Less(p.next) {
			rounds++
		}
		if rounds == 2 || rounds == 1 && !p.next.Less(start) {
			return netip.Prefix{}, fmt.Errorf("no free /%d is left in %s for node %s", p.Bits, p.Prefix, owner)
		}
	}
}

// taken says whether a part is in use, and how much of the range around it is by the same prefix: where that is wide, its parts
// need not be tried one by one.
func (p *pool) taken(part netip.Prefix) (netip.Prefix, bool) {
	if _, taken := p.owners[part]; taken {
		return part, true
	}
	for other := range p.foreign {
		if !other.Overlaps(part) {
			continue
		}
		bits := min(max(other.Bits(), p.Prefix.Bits()), p.Bits)
		return netip.PrefixFrom(part.Addr(), bits).Masked(), true
	}
	return netip.Prefix{}, false
}

// after is the first address behind a prefix of the range, or the range's first one behind the last.
func (p *pool) after(prefix netip.Prefix) netip.Addr {
	raw := prefix.Addr().AsSlice()
	bit := prefix.Bits() - 1
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
