package workload

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/writes"
)

// Owners are the objects that a controller syncs.
type Owners[O metav1.Object] struct {
	Kind     schema.GroupVersionKind
	Informer cache.SharedIndexInformer
	// Read gives an owner as the informer has it; nil: it is an O.
	Read func(any) O
	// Client reads and writes them at the API server.
	Client func(namespace string) OwnerClient[O]
	// Selector selects what an owner owns. If nil, they adopt nothing.
	Selector func(O) *metav1.LabelSelector
	// Ignore, if not nil, says which owners are left alone.
	Ignore func(O) bool
	// Gone, if not nil, is called for owners that don't exist, or are ignored.
	Gone func(queue.Key)
}

// OwnerClient is what is needed of a typed client.
type OwnerClient[O any] interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (O, error)
	UpdateStatus(ctx context.Context, obj O, opts metav1.UpdateOptions) (O, error)
}

// Dependents are the objects that owners own.
type Dependents[O, D metav1.Object] struct {
	// Informer is indexed by controller.
	Informer cache.SharedIndexInformer
	Client   func(namespace string) DependentClient[D]
	List     func(ctx context.Context, namespace string) (runtime.Object, error)
	// Fit, if not nil, says which of the orphans that an owner selects it adopts.
	Fit func(O, D) bool
	// Concerns says whether an owner is synced when an orphan has changed; nil: if the owner selects it.
	Concerns func(O, D) bool
	// Finalizer, if not "", is one that dependents have.
	Finalizer string
}

// DependentClient is what is needed of a typed client.
type DependentClient[D any] interface {
	Patch(ctx context.Context, name string, kind types.PatchType, data []byte, opts metav1.PatchOptions, subresources ...string) (D, error)
}

// PodsOf are dependents that are Pods.
func PodsOf[O metav1.Object](client kubernetes.Interface, informer cache.SharedIndexInformer) Dependents[O, *corev1.Pod] {
	return Dependents[O, *corev1.Pod]{
		Informer: informer,
		Client:   func(namespace string) DependentClient[*corev1.Pod] { return client.CoreV1().Pods(namespace) },
		List: func(ctx context.Context, namespace string) (runtime.Object, error) {
			return client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		},
	}
}

// Work is an owner to sync and what it owns, after it has adopted and released what it should.
type Work[O, D metav1.Object] struct {
	Key      queue.Key
	Owner    O
	Selector labels.Selector
	Own      []D
	// Stale says that the informers have lost a write: what is here was read from the API server.
	Stale bool
	// Live reads the owner from the API server.
	Live func(ctx context.Context) (metav1.Object, error)
}

// Reconciler syncs the owners of one kind whenever they or their dependents have changed. No sync begins before the informers
// have delivered what the one before it wrote; where they don't, it is given what the API server has.
type Reconciler[O, D metav1.Object] struct {
	Owners     Owners[O]
	Dependents Dependents[O, D]
	Workers    int
	Sync       func(ctx context.Context, work Work[O, D]) (queue.Result, error)

	// OwnerWrites and Writes track what was written to owners and dependents.
	OwnerWrites, Writes *writes.Tracker

	queue    *queue.Queue
	trackers []*writes.Tracker
}

// Attach makes the queue, which metrics know by a name, and feeds it from the informers. Run starts the work.
func (r *Reconciler[O, D]) Attach(name string) (err error) {
	r.queue = queue.New(queue.Options{Name: name}, r.sync)
	if r.OwnerWrites, err = r.Track(r.Owners.Informer, func(_, owner metav1.Object) { r.Add(owner) }); err != nil {
		return err
	}
	r.Writes, err = r.Track(r.Dependents.Informer, r.dependentChanged)
	return err
}

// Track makes a tracker of writes to the objects of an informer, which syncs wait for as well. changed, if not nil, is called
// with what the informer delivers; old is nil if the object is new, or gone.
func (r *Reconciler[O, D]) Track(informer cache.SharedIndexInformer, changed func(old, obj metav1.Object)) (*writes.Tracker, error) {
	tracker := writes.New(informer, r.queue.Add)
	r.trackers = append(r.trackers, tracker)
	if changed == nil {
		changed = func(_, _ metav1.Object) {}
	}
	_, err := informer.AddEventHandler(membership.Handlers(func(old, obj metav1.Object) {
		tracker.Saw(obj)
		changed(old, obj)
	}, func(gone metav1.Object) {
		tracker.Gone(gone)
		changed(nil, gone)
	}))
	return tracker, err
}

// Add queues an owner.
func (r *Reconciler[O, D]) Add(owner metav1.Object) { r.queue.Add(queue.KeyOf(owner)) }

// Listed says that the informers have seen everything.
func (r *Reconciler[O, D]) Listed() { r.queue.Listed() }

// Run works until ctx ends.
func (r *Reconciler[O, D]) Run(ctx context.Context) error {
	var done sync.WaitGroup
	for _, tracker := range r.trackers {
		done.Go(func() { tracker.Run(ctx) })
	}
	done.Go(func() { r.queue.Run(ctx, max(r.Workers, 1)) })
	done.Wait()
	return nil
}

// InNamespace are the owners of a namespace; "": of all.
func (r *Reconciler[O, D]) InNamespace(namespace string) []O {
	var out []O
	// A cache of objects with metadata never fails.
	_ = cache.ListAllByNamespace(r.Owners.Informer.GetIndexer(), namespace, labels.Everything(), func(obj any) { out = append(out, r.read(obj)) })
	return out
}

// Cached is an owner as the informer has it.
func (r *Reconciler[O, D]) Cached(key queue.Key) (owner O, ok bool) {
	obj, ok, err := r.Owners.Informer.GetIndexer().GetByKey(key.String())
	if !ok || err != nil { // a cache in memory never fails
		return owner, false
	}
	return r.read(obj), true
}

func (r *Reconciler[O, D]) read(obj any) O {
	if r.Owners.Read != nil {
		return r.Owners.Read(obj)
	}
	return obj.(O)
}

func (r *Reconciler[O, D]) dependentChanged(old, obj metav1.Object) {
	if old != nil && ControllerUID(old) != ControllerUID(obj) {
		r.wake(old)
	}
	r.wake(obj)
}

// wake queues whom a dependent concerns: its owner, or if it has none those who would adopt it.
func (r *Reconciler[O, D]) wake(obj metav1.Object) {
	if ref := metav1.GetControllerOfNoCopy(obj); ref != nil {
		if ref.Kind == r.Owners.Kind.Kind {
			r.queue.Add(queue.Key{Namespace: obj.GetNamespace(), Name: ref.Name})
		}
		return
	}
	concerns := r.Dependents.Concerns
	if concerns == nil {
		if r.Owners.Selector == nil || obj.GetDeletionTimestamp() != nil {
			return
		}
		concerns = func(owner O, dependent D) bool {
			selector, ok := r.selector(owner)
			return ok && selector.Matches(labels.Set(dependent.GetLabels()))
		}
	}
	for _, owner := range r.InNamespace(obj.GetNamespace()) {
		if concerns(owner, obj.(D)) {
			r.Add(owner)
		}
	}
}

// selector of an owner. The API takes none that is wrong or selects everything.
func (r *Reconciler[O, D]) selector(owner O) (labels.Selector, bool) {
	selector, err := metav1.LabelSelectorAsSelector(r.Owners.Selector(owner))
	return selector, err == nil && !selector.Empty()
}

func (r *Reconciler[O, D]) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	owner, ok := r.Cached(key)
	if !ok || r.ignored(owner) {
		r.forget(key)
		return queue.Result{}, nil
	}
	if r.behind(key) {
		return queue.Result{}, nil // requeued when the informer has caught up
	}
	lost := r.takeLost(key)
	work, err := r.work(ctx, key, owner, lost)
	if err != nil || work == nil {
		if lost && err != nil {
			r.Writes.Lost(key) // the next try reads from the API server again
		}
		return queue.Result{}, err
	}
	return r.Sync(ctx, *work)
}

func (r *Reconciler[O, D]) ignored(owner O) bool {
	return r.Owners.Ignore != nil && r.Owners.Ignore(owner)
}

func (r *Reconciler[O, D]) forget(key queue.Key) {
	for _, tracker := range r.trackers {
		tracker.Forget(key)
	}
	if r.Owners.Gone != nil {
		r.Owners.Gone(key)
	}
}

func (r *Reconciler[O, D]) behind(key queue.Key) bool {
	behind := false
	for _, tracker := range r.trackers {
		behind = tracker.Behind(key) || behind
	}
	return behind
}

func (r *Reconciler[O, D]) takeLost(key queue.Key) bool {
	lost := false
	for _, tracker := range r.trackers {
		lost = tracker.TakeLost(key) || lost
	}
	return lost
}

// work reads what a sync needs: from the informers, or from the API server if they have lost a write. It is nil if there is
// nothing to do.
func (r *Reconciler[O, D]) work(ctx context.Context, key queue.Key, owner O, lost bool) (*Work[O, D], error) {
	client := r.Owners.Client(key.Namespace)
	if lost {
		var err error
		if owner, err = client.Get(ctx, key.Name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
			return nil, nil
		} else if err != nil {
			return nil, err
		}
		if r.ignored(owner) {
			return nil, nil
		}
	}
	work := &Work[O, D]{Key: key, Owner: owner, Selector: labels.Everything(), Stale: lost, Live: func(ctx context.Context) (metav1.Object, error) {
		return client.Get(ctx, key.Name, metav1.GetOptions{})
	}}
	if r.Owners.Selector != nil {
		var ok bool
		if work.Selector, ok = r.selector(owner); !ok {
			return nil, nil
		}
	}
	candidates, err := r.candidates(ctx, owner, lost)
	if err != nil {
		return nil, err
	}
	work.Own, err = r.claim(ctx, work, candidates)
	return work, err
}

// candidates are the dependents that an owner has or may adopt.
func (r *Reconciler[O, D]) candidates(ctx context.Context, owner O, lost bool) (out []D, err error) {
	if !lost {
		return Candidates[D](r.Dependents.Informer.GetIndexer(), owner)
	}
	list, err := r.Dependents.List(ctx, owner.GetNamespace())
	if err != nil {
		return nil, err
	}
	err = meta.EachListItem(list, func(obj runtime.Object) error {
		dependent := obj.(D)
		if uid := ControllerUID(dependent); uid == "" || uid == owner.GetUID() {
			out = append(out, dependent)
		}
		return nil
	})
	return out, err
}

func (r *Reconciler[O, D]) claim(ctx context.Context, work *Work[O, D], candidates []D) ([]D, error) {
	return Sort(ctx, &Claim{
		Owner: work.Owner, Kind: r.Owners.Kind, Selector: work.Selector, Live: work.Live, Finalizer: r.Dependents.Finalizer,
		Patch: func(ctx context.Context, name string, patch []byte) error {
			written, err := r.Dependents.Client(work.Key.Namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			if err == nil {
				r.Writes.Wrote(work.Key, written)
			}
			return err
		},
		Fit: func(obj metav1.Object) bool {
			return r.Owners.Selector != nil && (r.Dependents.Fit == nil || r.Dependents.Fit(work.Owner, obj.(D)))
		},
	}, candidates)
}

// UpdateStatus writes the status of an owner.
func (r *Reconciler[O, D]) UpdateStatus(ctx context.Context, key queue.Key, next O) (O, error) {
	written, err := r.Owners.Client(key.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if err == nil {
		r.OwnerWrites.Wrote(key, written)
	}
	return written, err
}
