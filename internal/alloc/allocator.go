// Package alloc allocates cluster IPs and node ports. It keeps in memory what is allocated, as far as it has been told, and
// what requests under way have reserved; whether an allocation stands is decided by the store, in the transaction that
// claims it. It knows neither etcd nor the API.
package alloc

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"
)

// Claim is an address or a port (of all protocols together) that one Service has for itself.
type Claim struct {
	Addr netip.Addr
	Port uint16
}

// commitGrace is how long a stored claim stays reserved until the allocator has seen it. It only has to
// outlast the watch's delay: one that is allocated again too early is refused by the store, and another is chosen.
const commitGrace = 15 * time.Second

// Allocator knows what is allocated. Its methods may be called concurrently.
type Allocator struct {
	mu     sync.Mutex
	random *rand.Rand
	now    func() time.Time

	ranges    []*addressRange
	ports     *portRange
	allocated map[Claim]struct{}
	// reserved are the claims of requests under way. A time says when the reservation expires; the zero time, that the
	// request ends it.
	reserved map[Claim]time.Time
	expired  time.Time
}

// New makes an allocator that knows of no claims. Node ports are first to last; the caller gives randomness and clock.
func New(firstPort, lastPort uint16, random *rand.Rand, now func() time.Time) *Allocator {
	return &Allocator{
		random: random, now: now,
		ports:     newPortRange(firstPort, lastPort),
		allocated: map[Claim]struct{}{}, reserved: map[Claim]time.Time{},
	}
}

// SetRanges sets the ranges that addresses are allocated from, in order of preference.
func (a *Allocator) SetRanges(prefixes []netip.Prefix) {
	a.mu.Lock()
	defer a.mu.Unlock()
	known := map[netip.Prefix]*addressRange{}
	for _, r := range a.ranges {
		known[r.prefix] = r
	}
	a.ranges = nil
	for _, p := range prefixes {
		r := known[p]
		if r == nil {
			r = newAddressRange(p)
			for c := range a.allocated {
				r.occupy(c.Addr)
			}
			for c := range a.reserved {
				r.occupy(c.Addr)
			}
		}
		a.ranges = append(a.ranges, r)
	}
}

// Ranges are the ranges that addresses are allocated from.
func (a *Allocator) Ranges() []netip.Prefix {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]netip.Prefix, len(a.ranges))
	for i, r := range a.ranges {
		out[i] = r.prefix
	}
	return out
}

// Reset replaces everything that is known to be allocated by a full list.
func (a *Allocator) Reset(claims []Claim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := make(map[Claim]struct{}, len(claims))
	for _, c := range claims {
		next[c] = struct{}{}
		delete(a.reserved, c)
	}
	for c := range a.allocated {
		if _, still := next[c]; !still {
			delete(a.allocated, c)
			a.freeUnlessReserved(c)
		}
	}
	for c := range next {
		a.allocated[c] = struct{}{}
		a.mark(c)
	}
}

// Taken tells the allocator that a claim was stored.
func (a *Allocator) Taken(c Claim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.reserved, c)
	a.allocated[c] = struct{}{}
	a.mark(c)
}

// Freed tells the allocator that a claim was removed.
func (a *Allocator) Freed(c Claim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.allocated, c)
	a.freeUnlessReserved(c)
}

// InUse counts the allocated addresses of a range, for metrics, and those that it has. There may be claims on others, such as the
// network's own address; they don't count, so that used is never more than size.
func (a *Allocator) InUse(p netip.Prefix) (used, size uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := newAddressRange(p)
	for c := range a.allocated {
		if c.Addr.IsValid() && r.usable(c.Addr) {
			used++
		}
	}
	return used, r.size
}

// PortsInUse counts the allocated node ports of the range, for metrics, and those that it has. Services keep ports of an earlier
// range, which don't count.
func (a *Allocator) PortsInUse() (used, size uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range a.allocated {
		if a.ports.contains(c.Port) {
			used++
		}
	}
	return used, a.ports.size
}

func (a *Allocator) mark(c Claim) {
	a.ports.occupy(c.Port)
	for _, r := range a.ranges {
		r.occupy(c.Addr)
	}
}

func (a *Allocator) freeUnlessReserved(c Claim) {
	if _, reserved := a.reserved[c]; reserved {
		return
	}
	a.ports.leave(c.Port)
	for _, r := range a.ranges {
		r.leave(c.Addr)
	}
}

// release ends a reservation. The claim stays occupied if it has been stored meanwhile.
func (a *Allocator) release(c Claim) {
	delete(a.reserved, c)
	if _, allocated := a.allocated[c]; !allocated {
		a.freeUnlessReserved(c)
	}
}

// expire ends the reservations of committed claims that no watch has confirmed in time. Requests run it now and then.
func (a *Allocator) expire() {
	now := a.now()
	if now.Sub(a.expired) < commitGrace {
		return
	}
	a.expired = now
	for c, until := range a.reserved {
		if !until.IsZero() && now.After(until) {
			a.release(c)
		}
	}
}

// FullError says that nothing is left to choose from.
type FullError struct{ What string }

func (e *FullError) Error() string { return "no free " + e.What + " is left" }

// OutsideError says that what the user asked for is in no range.
type OutsideError struct{ What, Ranges string }

func (e *OutsideError) Error() string { return fmt.Sprintf("%s is not in %s", e.What, e.Ranges) }
