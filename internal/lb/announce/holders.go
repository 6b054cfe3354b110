package announce

import (
	"net/netip"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Holders are the nodes that announce addresses, as the members' Leases say. While an address moves two may have it: the later one counts.
// Clocks are not asked: an address whose node is lost is still led there, until another one announces it.
func Holders(leases []coordinationv1.Lease) map[netip.Addr]string {
	out, since := map[netip.Addr]string{}, map[netip.Addr]*metav1.MicroTime{}
	for i := range leases {
		l := &leases[i]
		node, ok := strings.CutPrefix(l.Name, LeasePrefix)
		if s := &l.Spec; !ok || l.Labels[MemberLabel] == "" || s.HolderIdentity == nil || *s.HolderIdentity == "" || s.RenewTime == nil {
			continue
		}
		for a := range parseHolds(l.Annotations[holdsAnnotation]) {
			if before := since[a]; before == nil || before.Before(l.Spec.RenewTime) {
				out[a], since[a] = node, l.Spec.RenewTime
			}
		}
	}
	return out
}
