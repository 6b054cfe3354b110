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

// alive are the members whose Leases run, and when the next one ends. While the API was away nobody could be seen to renew: no Lease ends
// sooner than its duration after since.
func (m *members) alive(now, since time.Time) (out []Member, next time.Time) {
	for name, s := range m.seen {
		from := s.at
		if from.Before(since) {
			from = since
		}
		end := from.Add(s.lasts)
		if !now.Before(end) {
			continue
		}
		if next.IsZero() || end.Before(next) {
			next = end
		}
		out = append(out, Member{name, s.holds})
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return out, next
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
