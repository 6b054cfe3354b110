package garbage

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

// An owner that was deleted and made again between two watches is another one: what the first owned is looked at.
func TestAnOwnerThatWasMadeAgainIsAnother(t *testing.T) {
	namespaces := informers.NewSharedInformerFactory(fake.NewClientset(), 0).Core().V1().Namespaces().Informer()
	if err := namespaces.GetStore().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}}); err != nil {
		t.Fatal(err)
	}
	c, err := New(Deps{Namespaces: namespaces})
	if err != nil {
		t.Fatal(err)
	}
	first, second := &object{name: "s", namespace: "ns", uid: "1"}, &object{name: "s", namespace: "ns", uid: "2"}
	owned := &object{name: "s-x", namespace: "ns", uid: "3", owners: []metav1.OwnerReference{{Name: "s", UID: "1"}}}
	c.seen(first)
	c.graph.set(owned)
	if !c.ownersPresent(owned) {
		t.Fatal("its owner is there")
	}
	c.changed(first, second)
	if c.ownersPresent(owned) {
		t.Error("another object of the same name counts as its owner")
	}
	if c.queue.Len() != 1 {
		t.Errorf("%d objects are looked at, want the one that was owned", c.queue.Len())
	}
}
