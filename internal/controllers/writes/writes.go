// Package writes remembers what a controller wrote until its informer has delivered it, so that no decision is based on a
// state older than the controller's own last write. It knows objects by name, UID and version alone.
package writes

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
)

// timeout is how long an informer may take to deliver a write. An object that was deleted again between two watches is
// never delivered, so waiting has to end. An informer that is behind with everything gets longer: asking a busy API
// server about each key would put it further behind.
const (
	timeout     = 3 * time.Second
	longTimeout = 5 * timeout
)

// Origin is where a state that an informer delivers comes from.
type Origin int

const (
	Foreign Origin = iota // somebody else wrote it
	Own                   // the last write here
	Old                   // from before the last write here
)

// Tracker tracks the writes of one controller to the objects of one informer. Each write belongs to a key of the
// controller's queue.
type Tracker struct {
	informer cache.SharedIndexInformer
	requeue  func(queue.Key)

	mu      sync.Mutex
	pending map[types.NamespacedName]write
	keys    map[queue.Key]*state
}

type write struct {
	key     queue.Key
	uid     types.UID
	version string // empty: the object is to be deleted
	at      time.Time
	overdue bool // it is waited for no more, but the informer has not got as far either
}

// state is what is known of a key that has, or had, pending writes.
type state struct {
	pending int
	overdue int
	waiting bool // the key's sync waits for the informer
	lost    bool // a write was not delivered in time: the informer's state can't be relied on
}

// New makes a tracker. requeue is called for a key that waits when the informer has delivered all its writes, or should
// have. It must not block.
func New(informer cache.SharedIndexInformer, requeue func(queue.Key)) *Tracker {
	return &Tracker{informer: informer, requeue: requeue, pending: map[types.NamespacedName]write{}, keys: map[queue.Key]*state{}}
}

// Wrote notes a state that was written here, or that the API server is known to have.
func (t *Tracker) Wrote(key queue.Key, obj metav1.Object) {
	t.add(obj, write{key: key, uid: obj.GetUID(), version: obj.GetResourceVersion(), at: time.Now()})
	// The informer may have been faster than the answer to the write, and delivers nothing twice. It stores first and
	// calls handlers then, so what it delivers from here on finds the write.
	if seen, there, err := t.informer.GetStore().GetByKey(nameOf(obj).String()); there && err == nil {
		t.Saw(seen.(metav1.Object))
	}
}

// Deleted notes that an object was deleted here.
func (t *Tracker) Deleted(key queue.Key, obj metav1.Object) {
	t.add(obj, write{key: key, uid: obj.GetUID(), at: time.Now()})
	seen, there, err := t.informer.GetStore().GetByKey(nameOf(obj).String())
	switch {
	case err != nil:
	case there:
		t.Saw(seen.(metav1.Object))
	default:
		t.Gone(obj)
	}
}

func (t *Tracker) add(obj metav1.Object, w write) {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := nameOf(obj)
	if before, ok := t.pending[name]; ok {
		t.remove(name, before)
	}
	t.pending[name] = w
	if t.keys[w.key] == nil {
		t.keys[w.key] = &state{}
	}
	t.keys[w.key].pending++
}

// Saw notes what the informer has delivered, and says where it comes from.
func (t *Tracker) Saw(obj metav1.Object) Origin {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := nameOf(obj)
	w, ok := t.pending[name]
	if !ok {
		return Foreign
	}
	origin := w.origin(obj)
	if origin != Old {
		t.remove(name, w)
	}
	return origin
}

func (w write) origin(obj metav1.Object) Origin {
	if w.version == "" {
		switch {
		case obj.GetUID() != w.uid:
			return Foreign
		case obj.GetDeletionTimestamp() != nil: // finalizers may keep it for ever
			return Own
		}
		return Old
	}
	order, err := resourceversion.CompareResourceVersion(obj.GetResourceVersion(), w.version)
	switch {
	case err == nil && order < 0:
		return Old
	case err == nil && order > 0:
		return Foreign
	}
	return Own
}

// Gone notes that the informer has delivered an object's deletion, and says whether that was asked for here.
func (t *Tracker) Gone(obj metav1.Object) (own bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	name := nameOf(obj)
	w, ok := t.pending[name]
	if !ok || w.uid != obj.GetUID() {
		return false
	}
	t.remove(name, w)
	return w.version == ""
}

// remove takes a write out, and requeues its key if that was the last one that it waited for.
func (t *Tracker) remove(name types.NamespacedName, w write) {
	delete(t.pending, name)
	s := t.keys[w.key]
	if w.overdue {
		s.overdue--
	} else {
		t.settle(w.key, s)
	}
	if !s.lost && s.pending+s.overdue == 0 {
		delete(t.keys, w.key)
	}
}

// settle has a key wait for one write less.
func (t *Tracker) settle(key queue.Key, s *state) {
	if s.pending--; s.pending == 0 && s.waiting {
		s.waiting = false
		t.requeue(key)
	}
}

// Behind reports whether the informer has yet to deliver a write of a key. If so the key is requeued when it has.
func (t *Tracker) Behind(key queue.Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.keys[key]
	if s == nil || s.pending == 0 {
		return false
	}
	s.waiting = true
	return true
}

// TakeLost reports that a write of a key was not delivered in time: the caller should read from the API server. It does so once,
// or as long as the informer has not got as far as the write.
func (t *Tracker) TakeLost(key queue.Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.keys[key]
	if s == nil || !s.lost && s.overdue == 0 {
		return false
	}
	s.lost = false
	if s.pending+s.overdue == 0 {
		delete(t.keys, key)
	}
	return true
}

// Lost has the next TakeLost of a key say yes.
func (t *Tracker) Lost(key queue.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keys[key] == nil {
		t.keys[key] = &state{}
	}
	t.keys[key].lost = true
}

// Forget forgets the writes of a key.
func (t *Tracker) Forget(key queue.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keys[key] == nil {
		return
	}
	for name, w := range t.pending {
		if w.key == key {
			delete(t.pending, name)
		}
	}
	delete(t.keys, key)
}

// Run ends the waiting for writes that were not delivered in time, until ctx ends.
func (t *Tracker) Run(ctx context.Context) {
	ticker := time.NewTicker(timeout / 3)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			t.expire(t.informer.LastSyncResourceVersion())
		}
	}
}

// expire ends the waiting for the writes that an informer which has reached a version should have delivered.
func (t *Tracker) expire(reached string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, w := range t.pending {
		waited := time.Since(w.at)
		order, err := resourceversion.CompareResourceVersion(reached, w.version)
		behind := err == nil && order < 0
		if waited < timeout || behind && (w.overdue || waited < longTimeout) {
			continue
		}
		s := t.keys[w.key]
		if !w.overdue {
			s.lost, s.waiting = true, true // requeued even if nothing waits: no event may follow
		}
		if behind {
			w.overdue = true
			t.pending[name] = w
			s.overdue++
			t.settle(w.key, s)
			continue
		}
		t.remove(name, w)
	}
}

func nameOf(obj metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: obj.GetNamespace(), Name: obj.GetName()}
}
