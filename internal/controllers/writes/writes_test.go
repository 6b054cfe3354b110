package writes

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
)

var key = queue.Key{Namespace: "ns", Name: "s"}

// rig is a tracker whose informer has what the test puts into it.
type rig struct {
	*Tracker
	t        *testing.T
	requeued []queue.Key
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t}
	informer := cache.NewSharedIndexInformer(nil, &corev1.ConfigMap{}, 0, nil)
	r.Tracker = New(informer, func(k queue.Key) { r.requeued = append(r.requeued, k) })
	return r
}

func object(name, version string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), ResourceVersion: version}}
}

func (r *rig) deliver(obj *corev1.ConfigMap) Origin {
	if err := r.informer.GetStore().Add(obj); err != nil {
		r.t.Fatal(err)
	}
	return r.Saw(obj)
}

func (r *rig) expect(behind bool, requeued int) {
	r.t.Helper()
	if got := r.Behind(key); got != behind {
		r.t.Errorf("behind: %t, want %t", got, behind)
	}
	if len(r.requeued) != requeued {
		r.t.Errorf("requeued %d times, want %d", len(r.requeued), requeued)
	}
}

func TestOrigins(t *testing.T) {
	r := newRig(t)
	var got []Origin
	got = append(got, r.deliver(object("a", "4")))
	r.Wrote(key, object("a", "7"))
	got = append(got, r.deliver(object("a", "5")), r.deliver(object("a", "7")), r.deliver(object("a", "8")))
	r.Wrote(key, object("a", "9"))
	got = append(got, r.deliver(object("a", "10")))
	if want := []Origin{Foreign, Old, Own, Foreign, Foreign}; !slices.Equal(got, want) {
		t.Errorf("origins %v, want %v", got, want)
	}
	r.expect(false, 0)
}

func TestAKeyIsRequeuedWhenTheInformerHasCaughtUp(t *testing.T) {
	r := newRig(t)
	r.expect(false, 0)
	r.Wrote(key, object("a", "1"))
	r.Wrote(key, object("b", "2"))
	r.expect(true, 0)
	r.deliver(object("a", "1"))
	r.expect(true, 0)
	r.deliver(object("b", "2"))
	r.expect(false, 1)
	// Nobody waits: nobody is called.
	r.Wrote(key, object("a", "3"))
	r.deliver(object("a", "3"))
	r.expect(false, 1)
	// What the informer has before the write was answered is not waited for.
	r.deliver(object("c", "4"))
	r.Wrote(key, object("c", "4"))
	r.expect(false, 1)
	r.Wrote(key, object("c", "9"))
	r.Forget(key)
	r.expect(false, 1)
	if len(r.keys) != 0 || len(r.pending) != 0 {
		t.Errorf("kept: %v %v", r.keys, r.pending)
	}
}

func TestDeletions(t *testing.T) {
	r := newRig(t)
	a := object("a", "1")
	r.deliver(a)
	r.Deleted(key, a)
	r.expect(true, 0)
	if r.deliver(object("a", "2")) != Old {
		t.Error("an update from before the deletion is not old")
	}
	if err := r.informer.GetStore().Delete(a); err != nil {
		t.Fatal(err)
	}
	if !r.Gone(object("a", "3")) {
		t.Error("the deletion is not ours")
	}
	r.expect(false, 1)
	if r.Gone(object("b", "3")) {
		t.Error("a deletion that nobody asked for is ours")
	}
	// Gone already, and one that finalizers keep.
	r.Deleted(key, a)
	r.expect(false, 1)
	kept := object("k", "1")
	r.deliver(kept)
	r.Deleted(key, kept)
	r.expect(true, 1)
	kept = object("k", "2")
	kept.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	if r.deliver(kept) != Own {
		t.Error("the mark of the deletion is not ours")
	}
	r.expect(false, 2)
}

// What the informer never delivers, because it was deleted between two watches, isn't waited for for ever.
func TestLostWrites(t *testing.T) {
	for _, c := range []struct {
		name, reached string
		limit         time.Duration
	}{{"informer up to date", "8", timeout}, {"informer behind", "6", longTimeout}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.Wrote(key, object("a", "7"))
				time.Sleep(c.limit - time.Millisecond)
				r.expire(c.reached)
				r.expect(true, 0)
				if r.TakeLost(key) {
					t.Error("lost before its time")
				}
				time.Sleep(time.Millisecond)
				r.expire(c.reached)
				r.expect(false, 1)
				if !r.TakeLost(key) || r.TakeLost(key) != (c.reached < "7") {
					t.Error("a lost write is told once, or as long as the informer is behind")
				}
				r.expire("7")
				r.expect(false, 1)
				if r.TakeLost(key) {
					t.Error("the informer has caught up, and is not relied on")
				}
				if len(r.keys) != 0 || len(r.pending) != 0 {
					t.Errorf("kept: %v %v", r.keys, r.pending)
				}
			})
		})
	}
}

// A write that comes after all ends the reading from the API server.
func TestOverdueWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.Wrote(key, object("a", "7"))
		time.Sleep(longTimeout)
		r.expire("6")
		r.Wrote(key, object("b", "8"))
		r.expect(true, 1)
		r.deliver(object("a", "7"))
		r.expect(true, 1)
		r.deliver(object("b", "8"))
		r.expect(false, 2)
		if !r.TakeLost(key) || r.TakeLost(key) {
			t.Error("what was lost before is told once")
		}
		if len(r.keys) != 0 || len(r.pending) != 0 {
			t.Errorf("kept: %v %v", r.keys, r.pending)
		}
	})
}
