package disruption

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// TestOwnersThatFormARing: a ReplicaSet that says that it owns itself is asked once.
func TestOwnersThatFormARing(t *testing.T) {
	sets := cache.NewSharedIndexInformer(nil, &appsv1.ReplicaSet{}, 0, cache.Indexers{})
	ref := metav1.OwnerReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "ring", UID: "1", Controller: ptr.To(true)}
	if err := sets.GetIndexer().Add(&appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "ring", UID: "1", OwnerReferences: []metav1.OwnerReference{ref}},
		Spec:       appsv1.ReplicaSetSpec{Replicas: ptr.To[int32](3)},
	}); err != nil {
		t.Fatal(err)
	}
	top, wants, err := Owners{ReplicaSets: sets}.scale(t.Context(), "ns", &ref)
	if err != nil || top != "1" || wants != 3 {
		t.Errorf("%s wants %d, %v", top, wants, err)
	}
}
