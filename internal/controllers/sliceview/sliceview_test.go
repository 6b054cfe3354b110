package sliceview

import (
	"context"
	"fmt"
	"testing"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/writes"
)

var service = queue.Key{Namespace: "ns", Name: "s"}

func slice(name, version string) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, UID: types.UID(name), ResourceVersion: version,
		Labels: map[string]string{discovery.LabelServiceName: "s", discovery.LabelManagedBy: "me"},
	}}
}

// newView is a view whose informer sees what the test puts into it, of an API server that has some slices.
func newView(t *testing.T, there ...*discovery.EndpointSlice) *View {
	t.Helper()
	client := fake.NewClientset()
	for _, s := range there {
		if err := client.Tracker().Add(s); err != nil {
			t.Fatal(err)
		}
	}
	informer := cache.NewSharedIndexInformer(nil, &discovery.EndpointSlice{}, 0, cache.Indexers{ByService: IndexByService})
	return &View{Client: client, Slices: informer, ManagedBy: "me", Writes: writes.New(informer, func(queue.Key) {})}
}

func (v *View) see(t *testing.T, s *discovery.EndpointSlice) {
	t.Helper()
	if err := v.Slices.GetStore().Add(s); err != nil {
		t.Fatal(err)
	}
	v.Writes.Saw(s)
}

func (v *View) expect(t *testing.T, want string) {
	t.Helper()
	list, fresh, err := v.Of(context.Background(), service)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, s := range list {
		names = append(names, s.Name)
	}
	if got := fmt.Sprint(fresh, names); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestTheInformerIsWaitedFor(t *testing.T) {
	v := newView(t)
	v.expect(t, "true []")
	v.Writes.Wrote(service, slice("a", "1"))
	v.expect(t, "false []")
	v.see(t, slice("a", "1"))
	v.expect(t, "true [a]")
	others, going := slice("b", "2"), slice("c", "3")
	others.Labels[discovery.LabelManagedBy] = "somebody else"
	now := metav1.Now()
	going.DeletionTimestamp = &now
	v.see(t, others)
	v.see(t, going)
	v.expect(t, "true [a]")
}

// When the informer has lost a write the API server is asked, and the informer is behind until it says the same.
func TestTheServerIsAsked(t *testing.T) {
	v := newView(t, slice("b", "7"))
	v.see(t, slice("a", "1"))
	v.Writes.Lost(service)
	v.expect(t, "true [b]")
	v.expect(t, "false []")
	v.see(t, slice("b", "7"))
	v.expect(t, "false []")
	if err := v.Slices.GetStore().Delete(slice("a", "1")); err != nil {
		t.Fatal(err)
	}
	v.Writes.Gone(slice("a", "1"))
	v.expect(t, "true [b]")
}
