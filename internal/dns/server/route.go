package server

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"portal/internal/dns/forward"
	"portal/internal/dns/wire"
)

// stub is a zone that is forwarded elsewhere.
type stub struct {
	zone    string // wire form
	forward *forward.Forwarder
}

// newStubs orders stub zones, the longest first.
func newStubs(zones map[string]*forward.Forwarder) ([]stub, error) {
	var out []stub
	for name, f := range zones {
		w, err := wire.PackName(name)
		if err != nil {
			return nil, fmt.Errorf("stub zone %q: %w", name, err)
		}
		out = append(out, stub{w, f})
	}
	slices.SortFunc(out, func(a, b stub) int {
		return cmp.Or(cmp.Compare(len(b.zone), len(a.zone)), cmp.Compare(a.zone, b.zone))
	})
	return out, nil
}

// stub returns the longest stub zone that a name is in, nil for none.
func (s *Server) stub(q *wire.Query) *stub {
	for i := range s.stubs {
		if q.In(s.stubs[i].zone) {
			return &s.stubs[i]
		}
	}
	return nil
}

// IsOwn reports whether a query to an address would come back to a server that listens on some. local are the machine's addresses.
func IsOwn(a netip.AddrPort, listen []netip.AddrPort, local []netip.Addr) bool {
	to := a.Addr().Unmap().WithZone("")
	return slices.ContainsFunc(listen, func(l netip.AddrPort) bool {
		at := l.Addr().Unmap().WithZone("")
		switch {
		case a.Port() != l.Port():
			return false
		case at == to:
			return true
		case to.IsUnspecified(): // a client that queries that address queries its own machine
			return at.IsLoopback() && at.Is4() == to.Is4() || at.IsUnspecified() && (at.Is6() || to.Is4())
		case at.IsUnspecified() && (at.Is6() || to.Is4()): // IPv6's wildcard covers IPv4
			return to.IsLoopback() || slices.Contains(local, to)
		}
		return false
	})
}

// stubbed reports whether a name is in a stub zone that is longer than any of the cluster's zones that contains it.
func (s *Server) stubbed(q *wire.Query) bool {
	if len(s.stubs) == 0 {
		return false
	}
	st := s.stub(q)
	if st == nil {
		return false
	}
	origin, _, _ := s.zones.Origin(q)
	return len(st.zone) > len(origin)
}

// fromHosts answers a query from a hosts table.
func (s *Server) fromHosts(dst []byte, q *wire.Query, limit int) ([]byte, bool) {
	if len(s.opts.Hosts) == 0 {
		return nil, false
	}
	stubLen := 0
	if st := s.stub(q); st != nil {
		stubLen = len(st.zone)
	}
	for _, h := range s.opts.Hosts {
		if n := h.Zone(q); n > 0 && n >= stubLen {
			if out, ok := h.Answer(dst, q, limit, s.recursive); ok {
				return out, true
			}
		}
	}
	return nil, false
}

// forwarder returns what resolves a name outside the cluster, nil for nothing.
func (s *Server) forwarder(q *wire.Query) *forward.Forwarder {
	if st := s.stub(q); st != nil {
		return st.forward
	}
	return s.forward
}

// forwarders returns each forwarder once.
func (s *Server) forwarders() (out []*forward.Forwarder) {
	if s.forward != nil {
		out = append(out, s.forward)
	}
	for _, st := range s.stubs {
		if st.forward != nil && !slices.Contains(out, st.forward) {
			out = append(out, st.forward)
		}
	}
	return out
}
