package sliceview

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	endpointsliceutil "k8s.io/endpointslice/util"

	"portal/internal/controllers/queue"
)

var service = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "s"}}

func slice(name string, generation int64) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, UID: types.UID(name), Generation: generation,
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
	return &View{Client: client, Slices: informer, ManagedBy: "me", Tracker: endpointsliceutil.NewEndpointSliceTracker()}
}

func (v *View) see(t *testing.T, s *discovery.EndpointSlice) {
	t.Helper()
	if err := v.Slices.GetStore().Add(s); err != nil {
		t.Fatal(err)
	}
	v.Saw(s)
}

func (v *View) write(s *discovery.EndpointSlice) {
	v.Tracker.Update(s)
	v.Wrote(s)
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
	v.write(slice("a", 1))
	v.expect(t, "false []")
	v.see(t, slice("a", 1))
	v.expect(t, "true [a]")
	v.write(slice("a", 2))
	v.expect(t, "false [a]")
	v.see(t, slice("a", 2))
	v.expect(t, "true [a]")
	others, going := slice("b", 1), slice("c", 1)
	others.Labels[discovery.LabelManagedBy] = "somebody else"
	now := metav1.Now()
	going.DeletionTimestamp = &now
	v.see(t, others)
	v.see(t, going)
	v.expect(t, "true [a]")
}

// What the informer never sees, because it was deleted between two of its watches, isn't waited for for ever.
func TestTheInformerIsNotWaitedForForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newView(t, slice("b", 1)) // what is really there
		ctx, cancel := context.WithCancel(t.Context())
		dirty := make(chan queue.Key, 8)
		var done sync.WaitGroup
		done.Go(func() { v.Watch(ctx, func(k queue.Key) { dirty <- k }) })
		v.write(slice("a", 1))
		v.expect(t, "false []")
		time.Sleep(Patience - 2*time.Second)
		synctest.Wait()
		if len(dirty) != 0 {
			t.Errorf("no patience: %v", <-dirty)
		}
		time.Sleep(4 * time.Second)
		synctest.Wait()
		if len(dirty) != 1 {
			t.Fatalf("%d to be looked at again", len(dirty))
		}
		if key := <-dirty; key.Name != "s" {
			t.Errorf("to be looked at again: %v", key)
		}
		v.expect(t, "true [b]")
		v.expect(t, "false []") // the informer should see that one now
		v.see(t, slice("b", 1))
		v.expect(t, "true [b]")
		cancel()
		done.Wait()
	})
}

// An informer that was faster than the answer to the write has seen it; waiting for it would never end.
func TestTheInformerMayBeFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := newView(t, slice("a", 1))
		v.see(t, slice("a", 1))
		v.write(slice("a", 1))
		v.expect(t, "true [a]")
		time.Sleep(longPatience)
		if keys := v.overdue(); len(keys) != 0 {
			t.Errorf("still waited for: %v", keys)
		}
		// Nor is what the API server said of slices that the informer knows.
		v.distrust(queue.Key{Namespace: "ns", Name: "s"})
		v.expect(t, "true [a]")
		time.Sleep(longPatience)
		if keys := v.overdue(); len(keys) != 0 {
			t.Errorf("waited for after a look: %v", keys)
		}
	})
}
