package announce

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestHolders: who announced an address last has it; Leases that are released, or nobody's who announces, say nothing.
func TestHolders(t *testing.T) {
	lease := func(name, identity, holds string, renewed int64) coordinationv1.Lease {
		at := metav1.NewMicroTime(time.Unix(renewed, 0))
		return coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{MemberLabel: "true"}, Annotations: map[string]string{holdsAnnotation: holds}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &identity, RenewTime: &at},
		}
	}
	foreign := lease(LeasePrefix+"n5", "e", "192.0.2.5", 9)
	foreign.Labels = nil
	got := Holders([]coordinationv1.Lease{
		lease(LeasePrefix+"n1", "a", "192.0.2.1,2001:db8::1,nonsense", 5), lease(LeasePrefix+"n2", "b", "192.0.2.1,192.0.2.2", 6),
		lease(LeasePrefix+"n3", "c", "192.0.2.1", 4), lease(LeasePrefix+"n4", "", "192.0.2.4", 9), lease("other", "d", "192.0.2.6", 9), foreign, {},
	})
	want := map[netip.Addr]string{netip.MustParseAddr("192.0.2.1"): "n2", netip.MustParseAddr("192.0.2.2"): "n2", netip.MustParseAddr("2001:db8::1"): "n1"}
	if !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
