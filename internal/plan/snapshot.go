package plan

import (
	"cmp"
	"net/netip"
	"reflect"
	"slices"

	"portal/internal/intent"
)

// Snapshot is all that this node is to do. One writer (the proxy's loop) changes it; a mode reads it during Apply.
// What its maps point to is never changed, only replaced.
type Snapshot struct {
	Facts    *Facts
	Services map[intent.Key]*Service
	// Frontends is who answers where. Of several Services that ask for one address and port (external IPs can be given
	// to many), a cluster IP comes before a load-balancer IP before an external IP, and then the one whose key is first.
	Frontends map[FrontendKey]*Frontend
	// ClusterIPs counts the Services that have an address.
	ClusterIPs map[netip.Addr]int
	// Sizes are how much there is of each family, for who makes room.
	Sizes map[intent.Family]*Size

	// rivals are the others that want a frontend, for when its holder leaves.
	rivals map[FrontendKey][]*Frontend

	// What has changed since the last acknowledgement, with what was acknowledged: nil, or not there.
	changed    map[FrontendKey]*Frontend
	changedIPs map[netip.Addr]bool
	facts      bool
	serving    bool
	full       bool
}

// NewSnapshot returns a snapshot of no Services, of which nothing has been acknowledged.
func NewSnapshot(f *Facts) *Snapshot {
	return &Snapshot{
		Facts: f, Services: map[intent.Key]*Service{}, Frontends: map[FrontendKey]*Frontend{}, ClusterIPs: map[netip.Addr]int{},
		Sizes:  map[intent.Family]*Size{intent.IPv4: {}, intent.IPv6: {}},
		rivals: map[FrontendKey][]*Frontend{}, changed: map[FrontendKey]*Frontend{}, changedIPs: map[netip.Addr]bool{}, full: true,
	}
}

// SetFacts replaces the node's facts. Services keep the plans that were made with the old ones until they are Set.
func (s *Snapshot) SetFacts(f *Facts) {
	if reflect.DeepEqual(s.Facts, f) {
		return
	}
	s.facts = s.facts || !s.Facts.sameRules(f)
	s.Facts = f
}

// sameRules says whether two nodes' facts make no difference to a mode beyond the plans of Services that follow from them.
func (f *Facts) sameRules(o *Facts) bool {
	a, b := *f, *o
	for _, x := range []*Facts{&a, &b} {
		x.Node, x.Zone, x.ProxyName, x.Exempt, x.Temporary = "", "", "", nil, nil
	}
	return reflect.DeepEqual(a, b)
}

// Set adds or replaces the plan of a Service; nil removes it. What is as before keeps its identity. It costs as much as
// the Service is large.
func (s *Snapshot) Set(key intent.Key, next *Service) {
	old := s.Services[key]
	if next == nil {
		s.Delete(key)
		return
	}
	if old != nil {
		s.serving = s.serving || !slices.EqualFunc(old.Serving, next.Serving, Serving.equal)
		keep(old, next)
		for _, f := range old.Frontends {
			if next.Frontend(f.FrontendKey) == nil {
				s.claim(f.FrontendKey, key, nil)
			}
		}
	}
	s.Services[key] = next
	s.measure(next, 1)
	s.measure(old, -1)
	for _, f := range next.Frontends {
		s.claim(f.FrontendKey, key, f)
	}
	for _, a := range next.ClusterIPs {
		s.countIP(a, 1)
	}
	if old != nil {
		for _, a := range old.ClusterIPs {
			s.countIP(a, -1)
		}
	}
}

// Size counts frontends, endpoints of pools, and cluster IPs; what several Services claim counts for each.
type Size struct{ Frontends, Endpoints, ClusterIPs int }

// measure counts a Service.
func (s *Snapshot) measure(service *Service, by int) {
	if service == nil {
		return
	}
	var pools [8]*Pool
	known := pools[:0]
	for _, f := range service.Frontends {
		size := s.Sizes[f.Family]
		size.Frontends += by
		for _, r := range f.Routes {
			if r.Pool != nil && !slices.Contains(known, r.Pool) {
				known = append(known, r.Pool)
				size.Endpoints += by * len(r.Pool.Endpoints)
			}
		}
	}
	for _, a := range service.ClusterIPs {
		s.Sizes[intent.FamilyOf(a)].ClusterIPs += by
	}
}

// Holds says whether a frontend of one of the Services is the one that answers.
func (s *Snapshot) Holds(f *Frontend) bool {
	return len(s.rivals) == 0 || s.Frontends[f.FrontendKey] == f
}

func (s Serving) equal(o Serving) bool {
	return s.ID == o.ID && slices.Equal(s.Endpoints, o.Endpoints)
}

// Delete removes a Service.
func (s *Snapshot) Delete(key intent.Key) {
	old := s.Services[key]
	if old == nil {
		return
	}
	delete(s.Services, key)
	s.measure(old, -1)
	for _, f := range old.Frontends {
		s.claim(f.FrontendKey, key, nil)
	}
	for _, a := range old.ClusterIPs {
		s.countIP(a, -1)
	}
}

// StillServing returns the endpoints of a port of UDP or SCTP that still serve, chosen or not; false: there is no such port.
func (s *Service) StillServing(id PortID) (Serving, bool) {
	if s != nil {
		for _, o := range s.Serving {
			if o.ID == id {
				return o, true
			}
		}
	}
	return Serving{}, false
}

// Has says whether an endpoint still serves.
func (s Serving) Has(endpoint netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(s.Endpoints, endpoint, netip.AddrPort.Compare)
	return found
}

// Endpoints are those of all pools of the Service, each once.
func (s *Service) Endpoints() (out []netip.AddrPort) {
	var pools []*Pool
	for _, f := range s.Frontends {
		for _, r := range f.Routes {
			if r.Pool == nil || slices.Contains(pools, r.Pool) {
				continue
			}
			pools = append(pools, r.Pool)
			for _, e := range r.Pool.Endpoints {
				out = append(out, e.Addr)
			}
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return slices.Compact(out)
}

// Frontend finds a frontend; nil: there is none.
func (s *Service) Frontend(k FrontendKey) *Frontend {
	if s == nil {
		return nil
	}
	i, found := slices.BinarySearchFunc(s.Frontends, k, func(f *Frontend, k FrontendKey) int { return f.FrontendKey.Compare(k) })
	if !found {
		return nil
	}
	return s.Frontends[i]
}

// keep puts into next those frontends and pools of old that are equal, so that pointers tell what has changed.
func keep(old, next *Service) {
	var pools []*Pool
	for _, f := range old.Frontends {
		for _, r := range f.Routes {
			if r.Pool != nil && !slices.Contains(pools, r.Pool) {
				pools = append(pools, r.Pool)
			}
		}
	}
	for i, f := range next.Frontends {
		for o := range f.Routes {
			if p := &f.Routes[o].Pool; *p != nil {
				*p = sameIn(pools, *p)
			}
		}
		if was := old.Frontend(f.FrontendKey); f.Equal(was) {
			next.Frontends[i] = was
		}
	}
}

func sameIn(pools []*Pool, p *Pool) *Pool {
	for _, q := range pools {
		if p.Equal(q) {
			return q
		}
	}
	return p
}

// claim records what a Service wants of a key, nil for nothing, and finds out who has it now.
func (s *Snapshot) claim(k FrontendKey, service intent.Key, want *Frontend) {
	holder := s.Frontends[k]
	if others := s.rivals[k]; len(others) == 0 && (holder == nil || holder.ID.Service == service) {
		s.hold(k, want)
		return
	}
	all := slices.Clone(s.rivals[k])
	if holder != nil {
		all = append(all, holder)
	}
	all = slices.DeleteFunc(all, func(f *Frontend) bool { return f.ID.Service == service })
	if want != nil {
		all = append(all, want)
	}
	slices.SortFunc(all, byClaim)
	delete(s.rivals, k)
	if len(all) > 1 {
		s.rivals[k] = all[1:]
	}
	s.hold(k, all[0])
}

func byClaim(a, b *Frontend) int {
	x, y := a.ID.Service, b.ID.Service
	return cmp.Or(cmp.Compare(a.Kind.rank(), b.Kind.rank()), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
}

// hold gives a key to a frontend, nil for none, and remembers what was acknowledged before it.
func (s *Snapshot) hold(k FrontendKey, next *Frontend) {
	was := s.Frontends[k]
	if was == next {
		return
	}
	if _, noted := s.changed[k]; !noted && !s.full {
		s.changed[k] = was
	}
	if next == nil {
		delete(s.Frontends, k)
	} else {
		s.Frontends[k] = next
	}
}

func (s *Snapshot) countIP(a netip.Addr, by int) {
	was := s.ClusterIPs[a]
	if now := was + by; now > 0 {
		s.ClusterIPs[a] = now
	} else {
		delete(s.ClusterIPs, a)
	}
	if _, noted := s.changedIPs[a]; !noted && !s.full {
		s.changedIPs[a] = was > 0
	}
}
