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
}

// statusKey is that of the write under way.
const statusKey = "status"

// settled says whether the API has what was last decided.
func (w *worker) settled() bool {
	return !w.busy[statusKey] && equality.Semantic.DeepEqual(w.writer.last, w.writer.written)
}

// write has a status written. It is called with the worker's lock held.
func (w *worker) write(ctx context.Context, status *corev1.PodStatus) {
	w.writer.last = status.DeepCopy()
	if w.busy[statusKey] || w.deleted || equality.Semantic.DeepEqual(w.writer.last, w.writer.written) {
		return
	}
	written := w.writer.written
	pod, next := w.pod, w.writer.last.DeepCopy()
	w.do(ctx, statusKey, func() {
		defer w.locked(func() {
			if w.writer.written = written; w.pod != pod {
				w.writer.written = observed(written, &w.pod.Status) // somebody else wrote at the same time
			}
		})
		err := w.agent.patchStatus(ctx, pod, written, next)
		replaced := apierrors.IsNotFound(err)
		if apierrors.IsConflict(err) {
			replaced = w.agent.replaced(ctx, pod)
		}
		if err == nil || replaced { // or the Pod is gone, or another one has its name: the watch says so soon
			written = next
			return
		}
		w.retry(ctx, "the Pod's status could not be written", err)
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
