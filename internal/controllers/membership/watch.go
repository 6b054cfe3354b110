package membership

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// ByNode is an index of the Pods informer: the node that a Pod is on.
const ByNode = "node"

// IndexByNode is the index function for ByNode.
func IndexByNode(obj any) ([]string, error) {
	if pod, ok := obj.(*corev1.Pod); ok && pod.Spec.NodeName != "" {
		return []string{pod.Spec.NodeName}, nil
	}
	return nil, nil
}

// Watch keeps an Index up to date from informers, and then says which Services are affected. Subscribers are called
// after the Index has been updated.
type Watch struct {
	*Index
	subscribers []func(Key)
}

// NewWatch makes a watch of nothing yet.
func NewWatch() *Watch { return &Watch{Index: NewIndex()} }

// Subscribe has a function called for every Service that a change affects. It must not block. It is to be called before
// Attach.
func (w *Watch) Subscribe(affected func(Key)) { w.subscribers = append(w.subscribers, affected) }

// Attach feeds the watch from informers. The answer says when what was there at the beginning has been seen.
func (w *Watch) Attach(pods, services cache.SharedIndexInformer) (synced []cache.InformerSynced, err error) {
	p, err := pods.AddEventHandler(Handlers(w.podChanged, func(pod *corev1.Pod) { w.podChanged(pod, nil) }))
	if err != nil {
		return nil, err
	}
	s, err := services.AddEventHandler(Handlers(w.serviceChanged, func(svc *corev1.Service) {
		key := Key{Namespace: svc.Namespace, Name: svc.Name}
		w.DeleteService(key)
		w.notify(key)
	}))
	if err != nil {
		return nil, err
	}
	return []cache.InformerSynced{p.HasSynced, s.HasSynced}, nil
}

// Deleted is the object of a delete event, also when the event itself was missed; nil if it is of another type.
func Deleted[T any](obj any) T {
	t, _ := deleted[T](obj)
	return t
}

func deleted[T any](obj any) (T, bool) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = gone.Obj
	}
	t, ok := obj.(T)
	return t, ok
}

// Handlers call a function for each object that is new or has changed, and another one for each that is gone. old is nil for
// a new one.
func Handlers[T any](changed func(old, obj T), gone func(T)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			var none T
			changed(none, obj.(T))
		},
		UpdateFunc: func(old, obj any) { changed(old.(T), obj.(T)) },
		DeleteFunc: func(obj any) {
			if t, ok := deleted[T](obj); ok {
				gone(t)
			}
		},
	}
}

// LogWatchError logs why an informer failed, unless it was stopped.
func LogWatchError(ctx context.Context, r *cache.Reflector, err error) {
	if ctx.Err() == nil {
		cache.DefaultWatchErrorHandler(ctx, r, err)
	}
}

func (w *Watch) serviceChanged(_, svc *corev1.Service) {
	key := Key{Namespace: svc.Namespace, Name: svc.Name}
	w.SetService(key, svc.Spec.Selector)
	w.notify(key)
}

func (w *Watch) podChanged(old, pod *corev1.Pod) {
	var keys []Key
	if pod == nil {
		w.DeletePod(old.Namespace, old.Name)
		keys = w.Services(keys, old.Namespace, old.Labels)
	} else {
		w.SetPod(pod)
		if old != nil && SameEndpoint(old, pod) {
			return
		}
		keys = w.Services(keys, pod.Namespace, pod.Labels)
		if old != nil && !maps.Equal(old.Labels, pod.Labels) {
			keys = w.Services(keys, old.Namespace, old.Labels)
		}
	}
	for _, key := range keys {
		w.notify(key)
	}
}

func (w *Watch) notify(key Key) {
	for _, affected := range w.subscribers {
		affected(key)
	}
}

// SameEndpoint reports whether two states of a Pod mean the same to every Service: most writes to a Pod do.
func SameEndpoint(a, b *corev1.Pod) bool {
	return a.UID == b.UID &&
		(a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil) &&
		Ready(a) == Ready(b) &&
		a.Status.Phase == b.Status.Phase &&
		a.Status.PodIP == b.Status.PodIP &&
		slices.Equal(a.Status.PodIPs, b.Status.PodIPs) &&
		a.Spec.NodeName == b.Spec.NodeName &&
		a.Spec.Hostname == b.Spec.Hostname &&
		a.Spec.Subdomain == b.Spec.Subdomain &&
		maps.Equal(a.Labels, b.Labels)
}

// Shown are the Pods that a Service shows as endpoints, in the usual case, and whether as ready ones.
func Shown(pods []*corev1.Pod) map[types.UID]bool {
	out := make(map[types.UID]bool, len(pods))
	for _, pod := range pods {
		if pod.Status.PodIP != "" && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			out[pod.UID] = pod.DeletionTimestamp == nil && Ready(pod)
		}
	}
	return out
}

// Ready reports whether a Pod's Ready condition is true.
func Ready(pod *corev1.Pod) bool {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
