package plan

import (
	"net/netip"

	"portal/internal/intent"
)

// Snapshot is all that this node is to do. One writer (the proxy's loop) changes it; a mode reads it during Apply.
// What its maps point to is never changed, only replaced.
type Snapshot struct {
	Facts    *Facts
	Services map[intent.Key]*Service
	// Frontends is who answers where. Of several Services that ask for one address and port (external IPs can be given
	// to many), the one whose key comes first has it.
	Frontends map[FrontendKey]*Frontend
	// ClusterIPs counts the Services that have an address.
	ClusterIPs map[netip.Addr]int

	// rivals are the others that want a frontend, for when its holder leaves.
	rivals map[FrontendKey][]*Frontend
}

// Delta is how a snapshot differs from the one that a mode acknowledged last.
type Delta struct {
	// Full: nothing is known about what the kernel has; the lists below are empty, all of the snapshot counts.
	Full bool
	// Facts: the node's facts have changed.
	Facts bool
	// Frontends are those that came, changed (both set) or went.
	Frontends []FrontendChange
	// ClusterIPs that came or went.
	AddedIPs, RemovedIPs []netip.Addr
}

// FrontendChange is one changed frontend. Old is what was acknowledged, New what is wanted; nil: not there.
type FrontendChange struct {
	FrontendKey
	Old, New *Frontend
}
