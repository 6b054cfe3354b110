package pool

import (
	"fmt"
	"net/netip"
)

// Reserved is a range that has a purpose of its own, so that balancers get no addresses of it.
type Reserved struct {
	netip.Prefix
	// What it is: "the Service range", "the Pod range of Node a".
	What string
}

func (r Reserved) String() string { return r.What + " " + r.Prefix.String() }

func (r Reserved) addresses() Range { return Range{r.Masked().Addr(), lastOf(r.Masked())} }

// Overlap is the first of some ranges that the pool has addresses of, and which of the pool's own ranges these are in.
func (p *Pool) Overlap(reserved []Reserved) (index int, with Reserved, found bool) {
	for i, own := range p.Ranges {
		for _, r := range reserved {
			if own.overlaps(r.addresses()) {
				return i, r, true
			}
		}
	}
	return 0, Reserved{}, false
}

// OverlapError says that a pool has addresses that are others', and what would be right.
func OverlapError(own Range, with Reserved) error {
	return fmt.Errorf("%s overlaps %s: a pool needs addresses of its own", own, with)
}

// Apart says whether pools of a ConfigMap, in the order in which it has them, keep apart from some ranges.
func Apart(list []*Pool, reserved []Reserved) error {
	for i, p := range list {
		if j, with, found := p.Overlap(reserved); found {
			return fmt.Errorf("pools[%d].addresses[%d]: %w", i, j, OverlapError(p.Ranges[j], with))
		}
	}
	return nil
}

// reserved says why nobody gets an address that is free; empty: somebody may.
func (t *Table) reserved(a netip.Addr) string {
	if why := t.Reserved[a]; why != "" {
		return why
	}
	if r, found := t.rangeOf(a); found {
		return "in " + r.String()
	}
	return ""
}

func (t *Table) rangeOf(a netip.Addr) (Reserved, bool) {
	for _, r := range t.ReservedRanges {
		if r.Contains(a) {
			return r, true
		}
	}
	return Reserved{}, false
}

// exhausted says why a pool has no address left.
func (t *Table) exhausted(p *Pool) string {
	if i, with, found := p.Overlap(t.ReservedRanges); found {
		return fmt.Sprintf("all addresses of pool %s are in use or not given: %s overlaps %s", p.Name, p.Ranges[i], with)
	}
	return fmt.Sprintf("all addresses of pool %s are in use", p.Name)
}
