package alloc

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Reservation is what one request has reserved, from its choice to its end. It is used by one goroutine.
type Reservation struct {
	allocator *Allocator
	chosen    map[Claim]bool
	// dryRun is a request that will store nothing.
	dryRun bool
}

// Begin starts a request. What a dry run has chosen is free again when it ends.
func (a *Allocator) Begin(dryRun bool) *Reservation {
	return &Reservation{allocator: a, chosen: map[Claim]bool{}, dryRun: dryRun}
}

// Address reserves a free address, an IPv6 one if six.
func (r *Reservation) Address(six bool) (netip.Addr, error) {
	a := r.allocator
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire()
	var full []string
	for _, one := range a.ranges {
		if one.prefix.Addr().Is6() != six {
			continue
		}
		place, ok := one.pick(a.random)
		if !ok {
			full = append(full, one.prefix.String())
			continue
		}
		addr := one.at(place)
		r.reserve(Claim{Addr: addr})
		return addr, nil
	}
	if len(full) == 0 {
		return netip.Addr{}, fmt.Errorf("there is no range of %s service addresses: add a ServiceCIDR", family(six))
	}
	return netip.Addr{}, &FullError{What: "address in " + strings.Join(full, ", ")}
}

// CheckAddress says whether an address that the user asked for can be allocated at all. Whether it is free, the store
// decides.
func (r *Reservation) CheckAddress(addr netip.Addr) error {
	a := r.allocator
	a.mu.Lock()
	defer a.mu.Unlock()
	var ranges []string
	var edge error
	for _, one := range a.ranges { // which may overlap: the edge of one may be in the middle of another
		switch {
		case one.usable(addr):
			return nil
		case one.prefix.Contains(addr) && edge == nil:
			edge = fmt.Errorf("%s is the first or last address of %s, which no Service can have", addr, one.prefix)
		}
		ranges = append(ranges, one.prefix.String())
	}
	if edge != nil {
		return edge
	}
	if len(ranges) == 0 {
		ranges = []string{"any range: there is no ServiceCIDR"}
	}
	return &OutsideError{What: addr.String(), Ranges: strings.Join(ranges, ", ")}
}

// Port reserves a free node port.
func (r *Reservation) Port() (uint16, error) {
	a := r.allocator
	a.mu.Lock()
	defer a.mu.Unlock()
	a.expire()
	place, ok := a.ports.pick(a.random)
	if !ok {
		return 0, &FullError{What: "port in " + a.ports.String()}
	}
	port := a.ports.first + uint16(place)
	r.reserve(Claim{Port: port})
	return port, nil
}

// CheckPort says whether a port that the user asked for is in the range.
func (r *Reservation) CheckPort(port int32) error {
	if ports := r.allocator.ports; port < int32(ports.first) || port > int32(ports.last) {
		return &OutsideError{What: "port", Ranges: "the valid range " + ports.String() + " of node ports"}
	}
	return nil
}

// Chose says whether the claim was chosen here, and not by the user.
func (r *Reservation) Chose(c Claim) bool { return r.chosen[c] }

// Commit ends the reservation of a request whose claims were stored: they stay reserved until the allocator is told of
// them.
func (r *Reservation) Commit() { r.end(true) }

// Release ends the reservation of a request that failed. If it was stored nevertheless, because etcd's answer was lost, the
// watch says so; until then the store refuses the claim to others.
func (r *Reservation) Release() { r.end(false) }

func (r *Reservation) reserve(c Claim) {
	r.chosen[c] = true
	r.allocator.reserved[c] = time.Time{}
	r.allocator.mark(c)
}

func (r *Reservation) end(stored bool) {
	a := r.allocator
	a.mu.Lock()
	defer a.mu.Unlock()
	for c := range r.chosen {
		if _, reserved := a.reserved[c]; !reserved {
			continue // the allocator knows that it is stored
		}
		if stored && !r.dryRun {
			a.reserved[c] = a.now().Add(commitGrace)
			continue
		}
		a.release(c)
	}
}

func family(six bool) string {
	if six {
		return "IPv6"
	}
	return "IPv4"
}
