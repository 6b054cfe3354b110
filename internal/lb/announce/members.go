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
	// leavingAnnotation marks the Lease of a process that has ended, and keeps its addresses for the next one.
	leavingAnnotation = "portal.dev/lb-leaving"
	// LeasePrefix and a node's name are the name of its Lease.
	LeasePrefix = "portal-lb-"
)

// members are those whose Leases run. A Lease runs for its duration from when this process saw it renewed: clocks of machines differ.
//
// That nobody is seen to renew may be because nothing is seen at all: the API is away, or the watch not yet back. The proof that
// something is seen is this node's own Lease, whose renewals come by the same watch, in order with those of others.
type members struct {
	seen map[string]*sighting
	// longest is how long a Lease runs at most, whatever it says: a member that is lost must not stay.
	longest time.Duration
	// proven is when this node last saw its own renewal, and since from when on it did so without a gap.
	proven, since time.Time
}

type sighting struct {
	renewal string // differs from one renewal to the next
	at      time.Time
	lasts   time.Duration
	text    string // what holds was read from
	holds   map[netip.Addr]bool
	leaving bool
}

// observe takes in the Leases as they are.
func (m *members) observe(leases []*coordinationv1.Lease, self string, now time.Time) {
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
			if name == self {
				if m.proven.IsZero() || now.Sub(m.proven) >= known.lasts {
					m.since = now
				}
				m.proven = now
			}
			known.renewal, known.at = renewal, now
		}
		_, known.leaving = l.Annotations[leavingAnnotation]
		known.lasts = min(m.longest, max(0, time.Duration(*s.LeaseDurationSeconds)*time.Second))
		if text := l.Annotations[holdsAnnotation]; known.holds == nil || text != known.text {
			known.text, known.holds = text, parseHolds(text)
		}
	}
	for name := range m.seen {
		if !found[name] {
			delete(m.seen, name)
		}
	}
}

// alive are the members whose Leases run, and when the next one ends. No Lease ends sooner than its duration after a gap; and who has not been seen
// to renew counts as lost only if others were seen at a time when that was long due. Until then there is doubt.
func (m *members) alive(now time.Time) (out []Member, next time.Time, doubt bool) {
	for name, s := range m.seen {
		from := s.at
		if from.Before(m.since) {
			from = m.since
		}
		end := from.Add(s.lasts)
		ended := !now.Before(end)
		if ended && !m.proven.Before(end.Add(-s.lasts/2)) {
			continue
		}
		doubt = doubt || ended
		if !ended && (next.IsZero() || end.Before(next)) {
			next = end
		}
		out = append(out, Member{name, s.holds, s.leaving})
	}
	slices.SortFunc(out, func(a, b Member) int { return strings.Compare(a.Name, b.Name) })
	return out, next, doubt
}

// maxHolds is how much of the annotation is read: what the API lets an object's annotations have in all. A lower limit would cut off what
// a member with many addresses announces, and others would take it for theirs.
const maxHolds = 256 << 10

func parseHolds(text string) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	if len(text) > maxHolds {
		text = text[:max(0, strings.LastIndexByte(text[:maxHolds+1], ','))] // half an address may be another one
	}
	for item := range strings.SplitSeq(text, ",") {
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
