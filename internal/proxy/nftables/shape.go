package nftables

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"

	"portal/internal/plan"
)

// shape is all about a frontend that rules must know and elements can't say. Frontends of one shape share a chain; there
// are about as many shapes in use as there are different numbers of endpoints.
type shape struct {
	routes [plan.Origins]leg
	// sticky is the affinity in milliseconds, 0 for none.
	sticky int64
	// ranged: only some sources may come.
	ranged bool
	// nodePort: the frontend's key has no address.
	nodePort bool
}

// leg is the route of one origin.
type leg struct {
	verdict    plan.Verdict
	masquerade bool
	// of is the number of endpoints, pool which of the port's pools they are.
	of   uint32
	pool uint32
}

func (l leg) String() string {
	switch l.verdict {
	case plan.Reject:
		return "reject"
	case plan.Drop:
		return "drop"
	}
	s := fmt.Sprint(l.of)
	if l.pool > 0 {
		s += fmt.Sprintf("p%d", l.pool)
	}
	if l.masquerade {
		s += "m"
	}
	return s
}

// chain is the name of the shape's chain: what Pods, this node and others get.
func (s *shape) chain() string {
	parts := []string{"to"}
	if s.nodePort {
		parts[0] = "nodeport-to"
	}
	for o, l := range s.routes {
		if o == 0 || !s.plain() {
			parts = append(parts, l.String())
		}
	}
	if s.sticky > 0 {
		parts = append(parts, fmt.Sprintf("for-%dms", s.sticky))
	}
	if s.ranged {
		parts = append(parts, "ranged")
	}
	return strings.Join(parts, "-")
}

// plain: it doesn't matter where a packet comes from.
func (s *shape) plain() bool { return s.routes[0] == s.routes[1] && s.routes[1] == s.routes[2] }

// idOf is the number of a Service's port in backends and affinity: the same after a restart, so that affinity lasts.
func idOf(p plan.PortID, salt byte) uint64 {
	b := make([]byte, 0, 128)
	b = append(append(b, p.Service.Namespace...), '/')
	b = append(append(b, p.Service.Name...), ':')
	b = append(append(b, p.Port...), 0, byte(p.Protocol), byte(p.Family), salt)
	sum := sha256.Sum256(b)
	return max(1, binary.BigEndian.Uint64(sum[:]))
}
