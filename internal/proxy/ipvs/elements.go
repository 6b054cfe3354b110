package ipvs

import (
	"encoding/binary"
	"net/netip"

	"portal/internal/intent"
	"portal/internal/plan"
)

// The sets and maps of our table, one of each in a family.
const (
	vipsSet    = "vips"    // the addresses on our device
	hairpinSet = "hairpin" // endpoint . endpoint
	rangedSet  = "ranged"  // frontends that only some sources may use
	sourcesSet = "sources" // frontend . source, as intervals
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
	if e.Sources == nil {
		return out
	}
	out = append(out, element{set: rangedSet, key: k})
	for _, p := range disjoint(e.Sources) {
		out = append(out, element{set: sourcesSet, key: k + string(p.Addr().AsSlice()), end: k + string(lastOf(p).AsSlice())})
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

func vipElement(a netip.Addr) element { return element{set: vipsSet, key: string(a.AsSlice())} }

func hairpinElement(a netip.Addr) element {
	b := a.AsSlice()
	return element{set: hairpinSet, key: string(append(b, b...))}
}

// disjoint leaves out prefixes that others contain: the kernel's intervals may not overlap.
func disjoint(list []netip.Prefix) (out []netip.Prefix) {
next:
	for i, p := range list {
		p = p.Masked()
		for j, q := range list {
			q = q.Masked()
			if j != i && q.Bits() <= p.Bits() && q.Contains(p.Addr()) && (q != p || j < i) {
				continue next
			}
		}
		out = append(out, p)
	}
	return out
}

// lastOf is the last address of a prefix.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
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
