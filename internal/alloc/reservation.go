package alloc

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Hold is one request's hold on claims, from its choice to its end. It is used by one goroutine.
type Hold struct {
	book   *Book
	chosen map[Claim]bool
	// trial holds nothing in the book: the request will store nothing.
	trial bool
}

// Begin starts a request. With trial nothing is held for it beyond its own choices.
func (b *Book) Begin(trial bool) *Hold {
	return &Hold{book: b, chosen: map[Claim]bool{}, trial: trial}
}

// Address chooses a free address, an IPv6 one if six.
func (h *Hold) Address(six bool) (netip.Addr, error) {
	b := h.book
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(false)
	var full []string
	for _, r := range b.ranges {
		if r.prefix.Addr().Is6() != six {
			continue
		}
		place, ok := r.pick(b.random)
		if !ok {
			full = append(full, r.prefix.String())
			continue
		}
		addr := r.at(place)
		h.hold(Claim{Addr: addr})
		return addr, nil
	}
	if len(full) == 0 {
		return netip.Addr{}, fmt.Errorf("there is no range of %s service addresses: add a ServiceCIDR", family(six))
	}
	return netip.Addr{}, &FullError{What: "address in " + strings.Join(full, ", ")}
}

// CheckAddress says whether an address that was asked for may be had at all; whether it is free the store will say.
func (h *Hold) CheckAddress(addr netip.Addr) error {
	b := h.book
	b.mu.Lock()
	defer b.mu.Unlock()
	var ranges []string
	for _, r := range b.ranges {
		if r.prefix.Contains(addr) {
			if !r.usable(addr) {
				return fmt.Errorf("%s is the first or last address of %s, which no Service can have", addr, r.prefix)
			}
			return nil
		}
		ranges = append(ranges, r.prefix.String())
	}
	if len(ranges) == 0 {
		ranges = []string{"any range: there is no ServiceCIDR"}
	}
	return &OutsideError{What: addr.String(), Ranges: strings.Join(ranges, ", ")}
}

// Port chooses a free node port.
func (h *Hold) Port() (uint16, error) {
	b := h.book
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sweep(false)
	place, ok := b.ports.pick(b.random)
	if !ok {
		return 0, &FullError{What: "port in " + b.ports.String()}
	}
	port := b.ports.first + uint16(place)
	h.hold(Claim{Port: port})
	return port, nil
}

// CheckPort says whether a port that was asked for is in the range.
func (h *Hold) CheckPort(port int32) error {
	if r := h.book.ports; port < int32(r.first) || port > int32(r.last) {
		return &OutsideError{What: fmt.Sprintf("port %d", port), Ranges: "the node port range " + r.String()}
	}
	return nil
}

// Chose says whether the claim was chosen here, and not asked for by the user.
func (h *Hold) Chose(c Claim) bool { return h.chosen[c] }

// Keep ends the hold of a request whose claims were stored: they stay held until the book hears of them.
func (h *Hold) Keep() { h.end(true) }

// Drop ends the hold of a request that stored nothing.
func (h *Hold) Drop() { h.end(false) }

func (h *Hold) hold(c Claim) {
	h.chosen[c] = true
	h.book.held[c] = time.Time{}
	h.book.mark(c)
}

func (h *Hold) end(stored bool) {
	b := h.book
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range h.chosen {
		if _, held := b.held[c]; !held {
			continue // the book has heard of it
		}
		if stored && !h.trial {
			b.held[c] = b.now().Add(keepFor)
			continue
		}
		b.release(c)
	}
}

func family(six bool) string {
	if six {
		return "IPv6"
	}
	return "IPv4"
}
