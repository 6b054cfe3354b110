package bgp

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
)

// Route is an address to announce.
type Route struct {
	Addr netip.Addr
	// Metric is the route's MED: of several nodes' routes to an address routers use the one with the lowest, and share packets among equal
	// ones. 0: none.
	Metric uint32
	Attributes
}

// Metric is that of a node's route to an address which one node is to have at a time. Each node has another one, whatever it knows of the others, and
// each address another order of nodes: routers find the first, and the next one as soon as that is lost.
func Metric(a netip.Addr, node string) uint32 {
	sum := sha256.Sum256([]byte(a.String() + " " + node))
	return binary.BigEndian.Uint32(sum[:])>>1 + 1
}
