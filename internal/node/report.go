package node

import (
	"context"
	"encoding/json"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// statusWriter writes a Pod's status when it has changed, one write at a time: what is decided meanwhile is in the next one.
type statusWriter struct {
	last    *corev1.PodStatus // decided
	written *corev1.PodStatus // known to be in the API
	busy    bool
}

// settled says whether the API has what was last decided.
func (s *statusWriter) settled() bool {
	return !s.busy && equality.Semantic.DeepEqual(s.last, s.written)
}

// write has a status written. It is called with the worker's lock held.
func (w *worker) write(ctx context.Context, status *corev1.PodStatus) {
	w.writer.last = status.DeepCopy()
	if w.writer.busy || w.deleted || equality.Semantic.DeepEqual(w.writer.last, w.writer.written) {
		return
	}
	w.writer.busy = true
	before := w.writer.written
	pod, next := w.pod, w.writer.last.DeepCopy()
	w.helpers.Go(func() {
		err := w.agent.patchStatus(ctx, pod, before, next)
		replaced := apierrors.IsNotFound(err)
		if apierrors.IsConflict(err) {
			replaced = w.agent.replaced(ctx, pod)
		}
		wait := time.Duration(0)
		w.mu.Lock()
		w.writer.busy = false
		switch {
		case err == nil:
			w.writer.written = next
			if w.pod != pod {
				w.writer.written = observed(next, &w.pod.Status) // somebody else wrote at the same time
			}
		case replaced:
			// The Pod is gone, or another one has its name: the watch says so soon.
			w.writer.written = next
		default:
			wait = retryDelay
			if ctx.Err() == nil {
				w.agent.Log.Warn("a Pod's status could not be written, retrying", "pod", pod.Name, "namespace", pod.Namespace, "err", err)
			}
		}
		w.mu.Unlock()
		if wait > 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
		}
		w.poke()
	})
}

// replaced says whether a Pod is gone, or another one has its name.
func (a *Agent) replaced(ctx context.Context, pod *corev1.Pod) bool {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	now, err := a.Client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	return apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID
}

// observed is what was written, with those conditions that others have changed since: the node controller does while it does not hear
// from the node. They are then written again.
func observed(written, now *corev1.PodStatus) *corev1.PodStatus {
	out := written.DeepCopy()
	for i, c := range out.Conditions {
		if !ours(c.Type) {
			continue
		}
		for _, n := range now.Conditions {
			if n.Type == c.Type && n.Status != c.Status {
				out.Conditions[i] = n
			}
		}
	}
	return out
}

// patchStatus writes the difference between two statuses. Others' conditions are left alone.
func (a *Agent) patchStatus(ctx context.Context, pod *corev1.Pod, before, after *corev1.PodStatus) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	old, err := json.Marshal(&corev1.Pod{Status: *before})
	if err != nil {
		return err
	}
	next, err := json.Marshal(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: pod.UID}, Status: *after})
	if err != nil {
		return err
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(old, next, &corev1.Pod{})
	if err != nil {
		return err
	}
	_, err = a.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}
