package lb

import (
	"context"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// replica is what this process knows of one kind of object. Shared informers wait up to half a minute after an absence of the API until they watch
// again, and for as long no lost node would be noticed: this one tries every second.
type replica struct {
	cache.Indexer
	source  cache.ListerWatcher
	example runtime.Object
	trim    func(any)
	// changed gets an object as it was and as it is: nil before it was made, and after it is gone.
	changed func(old, now any)
	synced  atomic.Bool
}

var retries = wait.Backoff{Duration: 200 * time.Millisecond, Factor: 1.5, Jitter: 0.5, Steps: 8, Cap: time.Second}

// typed is the API of one kind of object.
type typed[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// follow makes a replica of some objects; what trim takes away is not kept.
func follow[L runtime.Object](api typed[L], example runtime.Object, narrow func(*metav1.ListOptions), trim func(any), indexers cache.Indexers) *replica {
	return &replica{
		Indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, indexers), example: example, trim: trim,
		source: &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				narrow(&o)
				return api.List(ctx, o)
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				narrow(&o)
				return api.Watch(ctx, o)
			},
		},
	}
}

// run follows the API until the context ends.
func (r *replica) run(ctx context.Context) {
	backoff := retries
	cache.NewReflectorWithOptions(r.source, r.example, r, cache.ReflectorOptions{Name: "lb", Backoff: &backoff}).RunWithContext(ctx)
}

func (r *replica) hasSynced() bool { return r.synced.Load() }

func (r *replica) trimmed(object any) any {
	if m, ok := object.(metav1.Object); ok {
		m.SetManagedFields(nil)
		r.trim(object)
	}
	return object
}

// Add and the others are called by the reflector.
func (r *replica) Add(object any) error { return r.Update(object) }

// Update keeps an object.
func (r *replica) Update(object any) error {
	old, _, err := r.Get(object)
	if err != nil {
		return err
	}
	if err := r.Indexer.Update(r.trimmed(object)); err != nil {
		return err
	}
	r.changed(old, object)
	return nil
}

// Delete forgets an object.
func (r *replica) Delete(object any) error {
	if err := r.Indexer.Delete(object); err != nil {
		return err
	}
	r.changed(object, nil)
	return nil
}

// Replace keeps what a list has, and nothing else.
func (r *replica) Replace(list []any, version string) error {
	before := map[string]any{}
	for _, object := range r.List() {
		if key, err := cache.MetaNamespaceKeyFunc(object); err == nil {
			before[key] = object
		}
	}
	for _, object := range list {
		r.trimmed(object)
	}
	if err := r.Indexer.Replace(list, version); err != nil {
		return err
	}
	for _, object := range list {
		key, err := cache.MetaNamespaceKeyFunc(object)
		if err != nil {
			return err
		}
		r.changed(before[key], object)
		delete(before, key)
	}
	for _, object := range before {
		r.changed(object, nil)
	}
	r.synced.Store(true) // not before all was taken in: who waits for it reads what changed has set
	return nil
}
