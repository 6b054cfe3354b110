// Package alloc chooses cluster IPs and node ports. It keeps a book of what is taken, as far as it has heard, and of
// what requests under way hold; whether a choice stands is decided by the store, in the transaction that claims it.
// It knows neither etcd nor the API.
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

// keepFor is how long a claim that was stored is held while the book has not yet heard of it. It only has to outlast
// the watch's delay: what is held too short is refused by the store and chosen anew.
const keepFor = 15 * time.Second

// Book knows what is taken. Its methods may be called at the same time.
type Book struct {
	mu     sync.Mutex
	random *rand.Rand
	now    func() time.Time

	ranges []*addressRange
	ports  *portRange
	taken  map[Claim]struct{}
	// held are claims of requests under way; a time says until when, the zero time that the request will say.
	held  map[Claim]time.Time
	swept time.Time
}

// New makes an empty book. The node ports are first to last; the seed and the clock are the caller's.
func New(firstPort, lastPort uint16, random *rand.Rand, now func() time.Time) *Book {
	return &Book{
		random: random, now: now,
		ports: newPortRange(firstPort, lastPort),
		taken: map[Claim]struct{}{}, held: map[Claim]time.Time{},
	}
}

// SetRanges says from which ranges addresses may be had, in order of preference.
func (b *Book) SetRanges(prefixes []netip.Prefix) {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := map[netip.Prefix]*addressRange{}
	for _, r := range b.ranges {
		known[r.prefix] = r
	}
	b.ranges = nil
	for _, p := range prefixes {
		r := known[p]
		if r == nil {
			r = newAddressRange(p)
			for c := range b.taken {
				r.occupy(c.Addr)
			}
			for c := range b.held {
				r.occupy(c.Addr)
			}
		}
		b.ranges = append(b.ranges, r)
	}
}

// Ranges are those that addresses are had from.
func (b *Book) Ranges() []netip.Prefix {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]netip.Prefix, len(b.ranges))
	for i, r := range b.ranges {
		out[i] = r.prefix
	}
	return out
}

// Reset replaces all that was heard by a full list.
func (b *Book) Reset(claims []Claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := make(map[Claim]struct{}, len(claims))
	for _, c := range claims {
		next[c] = struct{}{}
		delete(b.held, c)
	}
	for c := range b.taken {
		if _, still := next[c]; !still {
			delete(b.taken, c)
			b.clearUnlessHeld(c)
		}
	}
	for c := range next {
		b.taken[c] = struct{}{}
		b.mark(c)
	}
}

// Taken says that a claim was stored.
func (b *Book) Taken(c Claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.held, c)
	b.taken[c] = struct{}{}
	b.mark(c)
}

// Freed says that a claim was removed.
func (b *Book) Freed(c Claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.taken, c)
	b.clearUnlessHeld(c)
}

// InUse counts the claims in a range, for metrics.
func (b *Book) InUse(p netip.Prefix) (used, size uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.taken {
		if c.Addr.IsValid() && p.Contains(c.Addr) {
			used++
		}
	}
	return used, newAddressRange(p).size
}

// PortsInUse counts the node ports taken.
func (b *Book) PortsInUse() (used, size uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.taken {
		if c.Port != 0 {
			used++
		}
	}
	return used, b.ports.size
}

func (b *Book) mark(c Claim) {
	b.ports.occupy(c.Port)
	for _, r := range b.ranges {
		r.occupy(c.Addr)
	}
}

func (b *Book) clearUnlessHeld(c Claim) {
	if _, held := b.held[c]; held {
		return
	}
	b.ports.leave(c.Port)
	for _, r := range b.ranges {
		r.leave(c.Addr)
	}
}

// release ends a hold; the place stays occupied if the claim was heard of meanwhile.
func (b *Book) release(c Claim) {
	delete(b.held, c)
	if _, taken := b.taken[c]; !taken {
		b.clearUnlessHeld(c)
	}
}

// sweep lets go of what was kept for too long. It runs now and then, on the way of a request.
func (b *Book) sweep(force bool) {
	now := b.now()
	if !force && now.Sub(b.swept) < keepFor {
		return
	}
	b.swept = now
	for c, until := range b.held {
		if !until.IsZero() && now.After(until) {
			b.release(c)
		}
	}
}

// FullError says that nothing is left to choose from.
type FullError struct{ What string }

func (e *FullError) Error() string { return "no free " + e.What + " is left" }

// OutsideError says that what was asked for is in no range.
type OutsideError struct{ What, Ranges string }

func (e *OutsideError) Error() string { return fmt.Sprintf("%s is not in %s", e.What, e.Ranges) }
