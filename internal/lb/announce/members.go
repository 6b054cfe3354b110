package announce

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
)

const (
	// MemberLabel marks the Leases of members.
	MemberLabel = "portal.dev/lb-member"
	// holdsAnnotation has the addresses that a member announces.
	holdsAnnotation = "portal.dev/lb-addresses"
	// LeasePrefix and a node's name are the name of its Lease.
	LeasePrefix = "portal-lb-"
)

// members are those whose Leases run. A Lease runs for its duration from when this process saw it renewed: clocks of machines differ.
type members struct {
	seen map[string]*sighting
}

type sighting struct {
	renewal string // tells renewals apart
	at      time.Time
	lasts   time.Duration
	holds   map[netip.Addr]bool
}

// observe takes in the Leases as they are.
func (m *members) observe(leases []*coordinationv1.Lease, now time.Time) {
	found := map[string]bool{}
	for _, l := range leases {
		name, ok := strings.CutPrefix(l.Name, LeasePrefix)
		s := &l.Spec
		// A member that ended has released its Lease.
		if !ok || s.HolderIdentity == nil || *s.HolderIdentity == "" || s.LeaseDurationSeconds == nil || s.RenewTime == nil {
			continue
		}
		found[name] = true
		renewal := *s.HolderIdentity + s.RenewTime.String()
		known := m.seen[name]
		if known == nil {
			known = &sighting{}
			m.seen[name] = known
		}
		if known.renewal != renewal {
			known.renewal, known.at = renewal, now
		}
		known.lasts, known.holds = time.Duration(*s.LeaseDurationSeconds)*time.Second, parseHolds(l.Annotations[holdsAnnotation])
	}
	for name := range m.seen {
		if !found[name] {
			delete(m.seen, name)
		}
	}
}

// alive are the members whose Leases run, and when the next one ends. While the API is away nobody can be seen to renew: no Lease ends
// sooner than its duration after since, when the API was back; and who could not be seen to renew counts as lost only if the API is known to have been there at a
// time, answered, when a renewal was long due. Until that is known, doubt is true.
func (m *members) alive(now, since, answered time.Time) (out []Member, next time.Time, doubt bool) {
	for name, s := range m.seen {
		from := s.at
		if from.Before(since) {
			from = since
		}
		end := from.Add(s.lasts)
		ended := !now.Before(end)
		if ended && !answered.Before(end.Add(-s.lasts/2)) {
			continue
		}
		doubt = doubt || ended
		if !ended && (next.IsZero() || end.Before(next)) {
			next = end
		}
		out = append(out, Member{name, s.holds})
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return out, next, doubt
}

func parseHolds(text string) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for _, item := range strings.Split(text, ",") {
		if a, err := netip.ParseAddr(item); err == nil {
			out[a] = true
		}
	}
	return out
}

func writeHolds(addrs []netip.Addr) string {
	var out []string
	for _, a := range addrs {
		out = append(out, a.String())
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}
