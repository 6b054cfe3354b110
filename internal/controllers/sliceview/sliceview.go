// Package sliceview knows which EndpointSlices a Service has: those that an informer has seen, if it has seen all that
// was written here, and else those that the API server says. It decides nothing about them and writes none.
package sliceview

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	endpointsliceutil "k8s.io/endpointslice/util"

	"portal/internal/controllers/queue"
)

// ByService is the index of the slices informer: namespace/name of the Service that a slice is labelled with.
const ByService = "service"

// Patience is how long an informer may take to see what was written. A slice that was deleted again before the
// informer could see it never shows up, and waiting longer would mean to wait for ever. An informer that is behind with
// everything gets longer: to ask a busy API server about each Service would put it further behind.
const (
	Patience     = 3 * time.Second
	longPatience = 5 * Patience
)

// View is one controller's view of its slices.
type View struct {
	Client    kubernetes.Interface
	Slices    cache.SharedIndexInformer // with the index ByService
	ManagedBy string                    // the controller's name: others' slices are not in view
	Tracker   *endpointsliceutil.EndpointSliceTracker

	mu         sync.Mutex
	unseen     map[types.UID]write
	distrusted map[queue.Key]bool // Services whose informer's state is known to be wrong
}

// write is one that the informer has yet to see.
type write struct {
	key        queue.Key
	generation int64
	version    string
	at         time.Time
}

// IndexByService is the index function for ByService.
func IndexByService(obj any) ([]string, error) {
	slice, ok := obj.(*discovery.EndpointSlice)
	if !ok || slice.Labels[discovery.LabelServiceName] == "" {
		return nil, nil
	}
	return []string{ServiceOf(slice).String()}, nil
}

// ServiceOf is the Service that a slice is labelled with; without a name if it has no such label.
func ServiceOf(slice *discovery.EndpointSlice) queue.Key {
	return queue.Key{Namespace: slice.Namespace, Name: slice.Labels[discovery.LabelServiceName]}
}

// Mine tells whether a slice is this controller's.
func (v *View) Mine(slice *discovery.EndpointSlice) bool {
	return slice.Labels[discovery.LabelManagedBy] == v.ManagedBy
}

// Of are the slices of a Service that are this controller's, the oldest first. One that is being deleted counts as
// gone: its finalizers may take for ever. fresh is false if the informer is behind what was written here; its next
// event, or Overdue, says when to ask again.
func (v *View) Of(ctx context.Context, svc *corev1.Service) (list []*discovery.EndpointSlice, fresh bool, err error) {
	key := queue.Key{Namespace: svc.Namespace, Name: svc.Name}
	if v.takeDistrust(key) {
		list, err = v.live(ctx, key)
		return list, err == nil, err
	}
	if list, err = v.Cached(key); err != nil {
		return nil, false, err
	}
	return list, !v.Tracker.StaleSlices(svc, list), nil
}

// Cached are the slices that the informer has seen.
func (v *View) Cached(key queue.Key) ([]*discovery.EndpointSlice, error) {
	objs, err := v.Slices.GetIndexer().ByIndex(ByService, key.String())
	if err != nil {
		return nil, err
	}
	list := make([]*discovery.EndpointSlice, 0, len(objs))
	for _, obj := range objs {
		list = append(list, obj.(*discovery.EndpointSlice))
	}
	return v.mine(list), nil
}

// live asks the API server, and expects from then on what it said.
func (v *View) live(ctx context.Context, key queue.Key) ([]*discovery.EndpointSlice, error) {
	selector := labels.Set{discovery.LabelServiceName: key.Name, discovery.LabelManagedBy: v.ManagedBy}.String()
	answer, err := v.Client.DiscoveryV1().EndpointSlices(key.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		v.distrust(key)
		return nil, err
	}
	list := make([]*discovery.EndpointSlice, 0, len(answer.Items))
	for i := range answer.Items {
		list = append(list, &answer.Items[i])
	}
	list = v.mine(list)
	v.Tracker.DeleteService(key.Namespace, key.Name)
	for _, slice := range list {
		v.Tracker.Update(slice)
		v.Wrote(slice)
	}
	return list, nil
}

func (v *View) mine(list []*discovery.EndpointSlice) []*discovery.EndpointSlice {
	list = slices.DeleteFunc(list, func(s *discovery.EndpointSlice) bool { return !v.Mine(s) || s.DeletionTimestamp != nil })
	// The older of two that hold the same endpoint keeps it.
	slices.SortFunc(list, func(a, b *discovery.EndpointSlice) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	return list
}

// Wrote notes that a slice was written here, or that the API server has it so.
func (v *View) Wrote(slice *discovery.EndpointSlice) {
	v.mu.Lock()
	if v.unseen == nil {
		v.unseen = map[types.UID]write{}
	}
	v.unseen[slice.UID] = write{ServiceOf(slice), slice.Generation, slice.ResourceVersion, time.Now()}
	v.mu.Unlock()
	// The informer may have been faster than the answer to the write, and nothing comes twice. It stores first and tells
	// then, so what it tells from here on is told to somebody who waits.
	if obj, ok, err := v.Slices.GetStore().GetByKey(slice.Namespace + "/" + slice.Name); ok && err == nil {
		v.Saw(obj.(*discovery.EndpointSlice))
	}
}

// Saw notes that the informer has come to a state of a slice, its last one if it is gone.
func (v *View) Saw(slice *discovery.EndpointSlice) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if w, ok := v.unseen[slice.UID]; ok && slice.Generation >= w.generation {
		delete(v.unseen, slice.UID)
	}
}

// Forget forgets what was written for a Service.
func (v *View) Forget(key queue.Key) {
	v.Tracker.DeleteService(key.Namespace, key.Name)
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.distrusted, key)
}

// Watch calls dirty for every Service of which the informer should have seen something and has not; the next Of asks
// the API server. It returns when ctx ends.
func (v *View) Watch(ctx context.Context, dirty func(queue.Key)) {
	ticker := time.NewTicker(Patience / 3)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, key := range v.overdue() {
			dirty(key)
		}
	}
}

func (v *View) overdue() []queue.Key {
	reached := v.Slices.LastSyncResourceVersion()
	v.mu.Lock()
	defer v.mu.Unlock()
	var keys []queue.Key
	for uid, w := range v.unseen {
		if waited := time.Since(w.at); waited < Patience || waited < longPatience && before(reached, w.version) {
			continue
		}
		delete(v.unseen, uid)
		v.distrustLocked(w.key)
		keys = append(keys, w.key)
	}
	return keys
}

// before tells whether an informer that has reached one version has yet to come to another.
func before(reached, version string) bool {
	order, err := resourceversion.CompareResourceVersion(reached, version)
	return err == nil && order < 0
}

func (v *View) distrust(key queue.Key) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.distrustLocked(key)
}

func (v *View) distrustLocked(key queue.Key) {
	if v.distrusted == nil {
		v.distrusted = map[queue.Key]bool{}
	}
	v.distrusted[key] = true
}

func (v *View) takeDistrust(key queue.Key) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	defer delete(v.distrusted, key)
	return v.distrusted[key]
}
