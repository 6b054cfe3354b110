package plan

import (
	"net/netip"
	"slices"
)

// Delta is how a snapshot differs from the one that a mode acknowledged last.
type Delta struct {
	// Full: nothing is known about what the kernel does; all of the snapshot counts, and the lists below are empty.
	Full bool
	// Facts: those of the node's facts have changed that rules beside those of Services depend on.
	Facts bool
	// Frontends are those that came, changed (both set) or went, in the order of their keys.
	Frontends []FrontendChange
	// Serving: which endpoints of UDP or SCTP ports still serve has changed, perhaps of such as no frontend leads to any more.
	Serving bool
	// ClusterIPs that came or went, in order.
	AddedIPs, RemovedIPs []netip.Addr
}

// Empty says that there is nothing to do.
func (d *Delta) Empty() bool {
	return !d.Full && !d.Facts && !d.Serving && len(d.Frontends)+len(d.AddedIPs)+len(d.RemovedIPs) == 0
}

// FrontendChange is one changed frontend. Old is what was acknowledged, New what is wanted; nil: not there.
type FrontendChange struct {
	FrontendKey
	Old, New *Frontend
}

// Delta is how the snapshot differs from what was acknowledged. It costs as much as there is changed.
func (s *Snapshot) Delta() *Delta {
	d := &Delta{Full: s.full, Facts: s.facts, Serving: s.serving}
	if s.full {
		return d
	}
	for k, old := range s.changed {
		// There and back again is no change.
		if now := s.Frontends[k]; !now.Equal(old) {
			d.Frontends = append(d.Frontends, FrontendChange{k, old, now})
		}
	}
	slices.SortFunc(d.Frontends, func(a, b FrontendChange) int { return a.FrontendKey.Compare(b.FrontendKey) })
	for a, had := range s.changedIPs {
		switch has := s.ClusterIPs[a] > 0; {
		case has && !had:
			d.AddedIPs = append(d.AddedIPs, a)
		case had && !has:
			d.RemovedIPs = append(d.RemovedIPs, a)
		}
	}
	slices.SortFunc(d.AddedIPs, netip.Addr.Compare)
	slices.SortFunc(d.RemovedIPs, netip.Addr.Compare)
	return d
}

// Acknowledge says that the kernel is in sync with the snapshot but for the frontends refused, which stay as they were
// acknowledged before, and count as not there if they were not.
func (s *Snapshot) Acknowledge(refused ...FrontendKey) {
	left := map[FrontendKey]*Frontend{}
	for _, k := range refused {
		left[k] = nil
		if old := s.changed[k]; !s.Frontends[k].Equal(old) {
			left[k] = old // it refused a change
		}
	}
	s.changed, s.facts, s.serving, s.full = left, false, false, false
	s.changedIPs = map[netip.Addr]bool{} // one that was emptied would keep its room
}

// Forget says that nothing is known any more about what the kernel has.
func (s *Snapshot) Forget() {
	s.full = true
	clear(s.changed)
	clear(s.changedIPs)
}

// Equal says whether two frontends mean the same; nil is equal to nil only.
func (f *Frontend) Equal(o *Frontend) bool {
	if f == o || f == nil || o == nil {
		return f == o
	}
	if f.FrontendKey != o.FrontendKey || f.ID != o.ID || f.Kind != o.Kind || f.Affinity != o.Affinity ||
		(f.Sources == nil) != (o.Sources == nil) || !slices.Equal(f.Sources, o.Sources) {
		return false
	}
	for i := range f.Routes {
		a, b := &f.Routes[i], &o.Routes[i]
		if a.Verdict != b.Verdict || a.Masquerade != b.Masquerade || !a.Pool.Equal(b.Pool) {
			return false
		}
	}
	return true
}

// Equal says whether two pools mean the same; nil is equal to nil only.
func (p *Pool) Equal(o *Pool) bool {
	if p == o || p == nil || o == nil {
		return p == o
	}
	return p.ID == o.ID && p.Local == o.Local && slices.Equal(p.Endpoints, o.Endpoints)
}
