package node

import (
	"context"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"portal/internal/intent"
)

const (
	// drainInterval is how often it is asked whether a Pod has left the endpoints.
	drainInterval = 50 * time.Millisecond
	// blindDrain is how long that is taken to last where no proxy of ours can tell.
	blindDrain = time.Second
)

// observeDrain finds out when a Pod that is deleted has left the endpoints of its Services.
func (w *worker) observeDrain(ctx context.Context, pod *corev1.Pod) {
	if pod.DeletionTimestamp == nil || w.observed.Drain.Endpoint || external(pod) || !isReady(&pod.Status) {
		return
	}
	services := w.agent.selecting(pod)
	if len(services) == 0 {
		return
	}
	w.observed.Drain.Endpoint = true
	addrs := w.observed.PodIPs
	w.do(ctx, "drain", func() {
		defer w.locked(func() { w.observed.Drain.Out = time.Now() })
		w.agent.awaitDrain(ctx, services, addrs)
	})
}

// awaitDrain waits until this node sends no new connections of the Services to the addresses.
func (a *Agent) awaitDrain(ctx context.Context, services []intent.Key, addrs []netip.Addr) {
	if a.Drained == nil {
		select {
		case <-ctx.Done():
		case <-time.After(blindDrain):
		}
		return
	}
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for _, s := range services {
		for !a.Drained(s, addrs) {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}
}

func isReady(s *corev1.PodStatus) bool {
	for _, c := range s.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// selecting are the Services that a Pod is behind.
func (a *Agent) selecting(pod *corev1.Pod) (out []intent.Key) {
	for _, obj := range a.services.GetStore().List() {
		s := obj.(*corev1.Service)
		if s.Namespace == pod.Namespace && len(s.Spec.Selector) > 0 && labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
			out = append(out, intent.Key{Namespace: s.Namespace, Name: s.Name})
		}
	}
	return out
}
