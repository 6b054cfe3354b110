package node

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// A node that is lost is tainted NoExecute, and its Pods are evicted. When many nodes are lost at once it is more likely that this server
// can't see them, and that their Pods go on serving: then it is done slowly, or not at all.

// zoneState is how a zone fares.
type zoneState int

const (
	zoneNormal zoneState = iota
	// zonePartial: so many nodes are lost that the zone's network may be.
	zonePartial
	// zoneFull: no node is ready.
	zoneFull
)

const (
	// lostShare of a zone's nodes, and more than lostFew, make it zonePartial.
	lostShare = 0.55
	lostFew   = 2
	// evictEvery is the time between two nodes of a zone whose Pods are evicted, evictSlowly that in a large zone that is partly lost. Small ones
	// wait until fewer nodes are lost.
	evictEvery  = 10 * time.Second
	evictSlowly = 100 * time.Second
	largeZone   = 50
)

// zone counts nodes that keep a Lease.
type zone struct{ ready, lost int }

func (z zone) state() zoneState {
	switch {
	case z.lost > 0 && z.ready == 0:
		return zoneFull
	case z.lost > lostFew && float64(z.lost) >= lostShare*float64(z.lost+z.ready):
		return zonePartial
	}
	return zoneNormal
}

// pause is the time between two evicted nodes of the zone; false: none is.
func (z zone) pause() (time.Duration, bool) {
	if z.state() != zonePartial {
		return evictEvery, true // also one that is lost as a whole, while others are well: there Pods find room
	}
	return evictSlowly, z.ready+z.lost > largeZone
}

// isolated says that no node of any zone is ready: it is this server that is cut off.
func isolated(zones map[string]zone) bool {
	lost := false
	for _, z := range zones {
		if z.ready > 0 {
			return false
		}
		lost = lost || z.lost > 0
	}
	return lost
}

// zoneOf is a node's region and zone.
func zoneOf(node *corev1.Node) string {
	return node.Labels[corev1.LabelTopologyRegion] + "/" + node.Labels[corev1.LabelTopologyZone]
}

// excluded are nodes that come and go as their owners like, and say nothing about the others.
func excluded(node *corev1.Node) bool {
	_, set := node.Labels["node.kubernetes.io/exclude-disruption"]
	return set
}
