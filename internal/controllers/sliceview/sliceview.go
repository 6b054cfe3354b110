// Package sliceview knows which EndpointSlices a Service has: those of an informer, if it has delivered all that was
// written here, and else those that the API server has. It decides nothing about them and writes none.
package sliceview

import (
	"cmp"
	"context"
	"slices"
	"strings"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/writes"
)

// ByService is the index of the slices informer: namespace/name of the Service that a slice is labelled with.
const ByService = "service"

// View is one controller's view of its slices.
type View struct {
	Client    kubernetes.Interface
	Slices    cache.SharedIndexInformer // with the index ByService
	ManagedBy string                    // the controller's name: others' slices are not in view
	Writes    *writes.Tracker           // of Slices, by Service
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

// Mine reports whether a slice is this controller's.
func (v *View) Mine(slice *discovery.EndpointSlice) bool {
	return slice.Labels[discovery.LabelManagedBy] == v.ManagedBy
}

// Of are the slices of a Service that are this controller's, the oldest first. One that is being deleted counts as
// gone: its finalizers may take for ever. fresh is false if the informer is behind what was written here; the Service
// is requeued when it no longer is.
func (v *View) Of(ctx context.Context, key queue.Key) (list []*discovery.EndpointSlice, fresh bool, err error) {
	if v.Writes.TakeLost(key) {
		list, err = v.live(ctx, key)
		return list, err == nil, err
	}
	if v.Writes.Behind(key) {
		return nil, false, nil
	}
	list, err = v.Cached(key)
	return list, err == nil, err
}

// Cached are the slices that the informer has.
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

// live asks the API server. The informer counts as behind until it has delivered the same.
func (v *View) live(ctx context.Context, key queue.Key) ([]*discovery.EndpointSlice, error) {
	selector := labels.Set{discovery.LabelServiceName: key.Name, discovery.LabelManagedBy: v.ManagedBy}.String()
	answer, err := v.Client.DiscoveryV1().EndpointSlices(key.Namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		v.Writes.Lost(key)
		return nil, err
	}
	cached, err := v.Cached(key)
	if err != nil {
		return nil, err
	}
	there := map[string]bool{}
	list := make([]*discovery.EndpointSlice, 0, len(answer.Items))
	for i := range answer.Items {
		list = append(list, &answer.Items[i])
		there[answer.Items[i].Name] = true
		v.Writes.Wrote(key, &answer.Items[i])
	}
	for _, slice := range cached {
		if !there[slice.Name] {
			v.Writes.Deleted(key, slice)
		}
	}
	return v.mine(list), nil
}

func (v *View) mine(list []*discovery.EndpointSlice) []*discovery.EndpointSlice {
	list = slices.DeleteFunc(list, func(s *discovery.EndpointSlice) bool { return !v.Mine(s) || s.DeletionTimestamp != nil })
	// The older of two that hold the same endpoint keeps it.
	slices.SortFunc(list, func(a, b *discovery.EndpointSlice) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	return list
}
