package ipvs

import (
	"encoding/binary"
	"net/netip"
	"time"

	"portal/internal/intent"
	"portal/internal/plan"
	"portal/internal/proxy/nf"
)

// The sets and maps of our table, one of each in a family.
const (
	vipsSet    = "vips"    // the addresses on our device
	hairpinSet = "hairpin" // endpoint . endpoint
	rangedSet  = "ranged"  // frontends that only some sources may use
	sourcesSet = "sources" // frontend . source, as intervals
	ledSet     = "led"     // frontends whose address is not on our device
	goneSet    = "gone"    // addresses on our device that no Service has any more
	goingSet   = "going"   // 0 . endpoint's address . frontend's address . its port . endpoint's port: of UDP, where IPVS still leads flows

	stickySet   = "sticky"   // pool's mark : what to do for a client that may have an endpoint
	learnSet    = "learn"    // pool's mark : what to do once an endpoint has been chosen
	membersSet  = "members"  // marks of endpoints that are there
	slotsSet    = "slots"    // pool's mark . endpoint : pool's mark . endpoint's mark
	affinitySet = "affinity" // client . pool's mark : endpoint's mark, for a time
)

// routes and marks are maps by origin: the verdict on a frontend, and the mark by which IPVS finds its pool.
var (
	routesMap = [plan.Origins]string{"from-pod", "from-node", "from-outside"}
	marksMap  = [plan.Origins]string{"pod-marks", "node-marks", "outside-marks"}
)

// element is one element of a set or map, comparable.
type element struct {
	set string
	// key and end are bytes; end is for intervals.
	key, end string
	verdict  verdict
	mark     uint32
	// affinity is for how long, in the two maps that lead to chains by it.
	affinity time.Duration
}

// verdict is what becomes of a packet in a routes map.
type verdict uint8

const (
	none verdict = iota
	forward
	masquerade
	refuse
	drop
)

func frontendBytes(k plan.FrontendKey) []byte {
	a := k.Addr
	if !a.IsValid() {
		a = netip.IPv4Unspecified()
		if k.Family == intent.IPv6 {
			a = netip.IPv6Unspecified()
		}
	}
	b := append(a.AsSlice(), byte(k.Protocol), 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(b, k.Port), 0, 0)
}

// elements are those of a frontend.
func (e *encoded) elements() (out []element) {
	k := string(frontendBytes(e.FrontendKey))
	marks := e.marks()
	for o, r := range e.Routes {
		out = append(out, element{set: routesMap[o], key: k, verdict: verdictOf(r)})
		if marks[o] != 0 {
			out = append(out, element{set: marksMap[o], key: k, mark: marks[o]})
		}
	}
	if e.led {
		out = append(out, element{set: ledSet, key: k})
	}
	if e.Sources == nil {
		return out
	}
	out = append(out, element{set: rangedSet, key: k})
	for _, p := range nf.Disjoint(e.Sources) {
		out = append(out, element{set: sourcesSet, key: k + string(p.Addr().AsSlice()), end: k + string(nf.Last(p).AsSlice())})
	}
	return out
}

func verdictOf(r plan.Route) verdict {
	switch {
	case r.Verdict == plan.Reject:
		return refuse
	case r.Verdict == plan.Drop:
		return drop
	case r.Masquerade:
		return masquerade
	}
	return forward
}

// elements are those of a pool with affinity.
func (t *target) elements(at key) map[element]bool {
	out := map[element]bool{}
	if t == nil || t.affinity == 0 {
		return out
	}
	pool := string(nf.Number(at.mark))
	out[element{set: stickySet, key: pool, affinity: t.affinity}] = true
	out[element{set: learnSet, key: pool, affinity: t.affinity}] = true
	for to, slot := range t.slots {
		out[element{set: membersSet, key: string(nf.Number(at.mark | slot))}] = true
		out[element{set: slotsSet, key: pool + string(endpointBytes(to)), mark: at.mark | slot}] = true
	}
	return out
}

func endpointBytes(a netip.AddrPort) []byte {
	return append(binary.BigEndian.AppendUint16(a.Addr().AsSlice(), a.Port()), 0, 0)
}

func goingElement(f flow) element {
	to, from := string(endpointBytes(f.to)), string(frontendBytes(f.from))
	width := len(to) - 4
	return element{set: goingSet, key: string(make([]byte, 4)) + to[:width] + from[:width] + from[width+4:] + to[width:]}
}

func goneElement(a netip.Addr) element { return element{set: goneSet, key: string(a.AsSlice())} }

func vipElement(a netip.Addr) element { return element{set: vipsSet, key: string(a.AsSlice())} }

func hairpinElement(a netip.Addr) element {
	b := a.AsSlice()
	return element{set: hairpinSet, key: string(append(b, b...))}
}

// decodeSlot reads a key of slots back.
func decodeSlot(b []byte, f intent.Family) (pool key, to netip.AddrPort, ok bool) {
	width := 4
	if f == intent.IPv6 {
		width = 16
	}
	if len(b) != width+8 {
		return pool, to, false
	}
	a, _ := netip.AddrFromSlice(b[4 : 4+width])
	return marked(binary.NativeEndian.Uint32(b), f), netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[4+width:])), true
}

// decodeFrontend reads a key back.
func decodeFrontend(b []byte, f intent.Family) (k plan.FrontendKey, ok bool) {
	width := 4
	if f == intent.IPv6 {
		width = 16
	}
	if len(b) != width+8 {
		return k, false
	}
	k = plan.FrontendKey{Family: f, Protocol: intent.Protocol(b[width]), Port: binary.BigEndian.Uint16(b[width+4:])}
	if a, _ := netip.AddrFromSlice(b[:width]); !a.IsUnspecified() {
		k.Addr = a
	}
	return k, true
}
