package proxy

import (
	"net/netip"
	"slices"

	"portal/internal/intent"
)

// Drained says whether endpoints of a Service at these addresses are out of service here: none of them is ready any more, or they are
// gone, and the kernel is in sync with that. New connections reach them only if the Service has no other endpoint.
func (p *Proxy) Drained(k intent.Key, addrs []netip.Addr) bool {
	e := p.Cluster.Entry(k)
	if e == nil {
		e = &intent.Entry{}
	}
	for _, slice := range e.Slices {
		for i := range slice.Endpoints {
			end := &slice.Endpoints[i]
			if slices.Contains(addrs, end.Addr) && end.Is(intent.Ready) && !end.Is(intent.Terminating) {
				return false
			}
		}
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	r, known := p.known[k]
	if !known {
		return e.Service == nil && len(e.Slices) == 0
	}
	// A removed slice has no version, so the number of slices counts, too.
	if r.newest != e.Newest() || int(r.slices) != len(e.Slices) {
		return false
	}
	s := p.snap.Services[k]
	return s == nil || len(s.Frontends) == 0 || r.acked != 0 // a headless Service has nothing to be in sync with
}
