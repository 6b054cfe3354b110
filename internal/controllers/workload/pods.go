// Package workload holds what the controllers have in common that make Pods from a template: when a workload is synced, which
// Pods are whose, which of them count, and which go first. It knows none of these controllers.
package workload

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/membership"
)

// ByController is an index by the UID of the controller of an object; Orphans are those of a namespace that have none.
const ByController = "controller"

// IndexByController is that index.
func IndexByController(obj any) ([]string, error) {
	o, ok := obj.(metav1.Object)
	if !ok {
		return nil, fmt.Errorf("%T has no metadata", obj)
	}
	if owner := metav1.GetControllerOfNoCopy(o); owner != nil {
		return []string{string(owner.UID)}, nil
	}
	return []string{orphansOf(o.GetNamespace())}, nil
}

func orphansOf(namespace string) string { return "orphans/" + namespace }

// Candidates are the objects that have the owner as their controller, and those of its namespace that have none.
func Candidates[T metav1.Object](index cache.Indexer, owner metav1.Object) ([]T, error) {
	var out []T
	for _, key := range []string{string(owner.GetUID()), orphansOf(owner.GetNamespace())} {
		found, err := index.ByIndex(ByController, key)
		if err != nil {
			return nil, err
		}
		for _, obj := range found {
			out = append(out, obj.(T))
		}
	}
	return out, nil
}

// Owned are the objects that have the owner as their controller.
func Owned[T metav1.Object](index cache.Indexer, owner types.UID) ([]T, error) {
	found, err := index.ByIndex(ByController, string(owner))
	if err != nil {
		return nil, err
	}
	out := make([]T, len(found))
	for i, obj := range found {
		out[i] = obj.(T)
	}
	return out, nil
}

// Finished says that a Pod has ended and will not run again.
func Finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// Active says that a Pod runs, or will.
func Active(pod *corev1.Pod) bool { return !Finished(pod) && pod.DeletionTimestamp == nil }

// Terminating says that a Pod is being deleted and has not ended yet.
func Terminating(pod *corev1.Pod) bool { return !Finished(pod) && pod.DeletionTimestamp != nil }

// Ready is the Pod's Ready condition.
func Ready(pod *corev1.Pod) bool { return membership.Ready(pod) }

func readySince(pod *corev1.Pod) time.Time {
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// Available says whether a Pod has been ready for long enough, and if it is ready but not for long enough, how long that
// takes.
func Available(pod *corev1.Pod, minReadySeconds int32, now time.Time) (bool, time.Duration) {
	if !Ready(pod) {
		return false, 0
	}
	if minReadySeconds == 0 {
		return true, 0
	}
	since := readySince(pod)
	left := since.Add(time.Duration(minReadySeconds) * time.Second).Sub(now)
	if since.IsZero() {
		left = time.Duration(minReadySeconds) * time.Second
	}
	if left <= 0 {
		return true, 0
	}
	return false, left
}

// Sooner is the earlier of two waits, of which 0 is none.
func Sooner(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// Hash is a short text that is the same for the same template. collisions tells apart those for which that went wrong. JSON
// is the stable form of an object: fields in their order, keys sorted, what is not set left out.
func Hash(template any, collisions *int32) (string, error) {
	data, err := json.Marshal(template)
	if err != nil {
		return "", err
	}
	h := fnv.New32a()
	h.Write(data) // never fails
	if collisions != nil {
		fmt.Fprint(h, *collisions)
	}
	return rand.SafeEncodeString(strconv.FormatUint(uint64(h.Sum32()), 10)), nil
}

// FirstToGo sorts Pods so that those come first which are missed the least. related are the Pods that share work with them,
// these included: where several are on one node, one of them goes first. Ages count by their order of magnitude only, so
// that not always the newest goes.
func FirstToGo(pods, related []*corev1.Pod, now time.Time) []*corev1.Pod {
	busy := map[string]int{}
	for _, pod := range related {
		if Active(pod) && Ready(pod) && pod.Spec.NodeName != "" {
			busy[pod.Spec.NodeName]++
		}
	}
	out := slices.Clone(pods)
	slices.SortStableFunc(out, func(a, b *corev1.Pod) int {
		return cmp.Or(
			lessIf(a.Spec.NodeName == "", b.Spec.NodeName == ""),
			cmp.Compare(phaseOrder[a.Status.Phase], phaseOrder[b.Status.Phase]),
			lessIf(!Ready(a), !Ready(b)),
			cmp.Compare(deletionCost(a), deletionCost(b)),
			cmp.Compare(busy[b.Spec.NodeName], busy[a.Spec.NodeName]),
			younger(readySince(a), readySince(b), now),
			cmp.Compare(restarts(b), restarts(a)),
			younger(a.CreationTimestamp.Time, b.CreationTimestamp.Time, now),
			cmp.Compare(a.UID, b.UID))
	})
	return out
}

var phaseOrder = map[corev1.PodPhase]int{corev1.PodPending: 0, corev1.PodUnknown: 1, corev1.PodRunning: 2}

func lessIf(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

func younger(a, b, now time.Time) int {
	if a.Equal(b) {
		return 0
	}
	if a.IsZero() || b.IsZero() {
		return lessIf(a.IsZero(), b.IsZero())
	}
	return cmp.Compare(magnitude(now.Sub(a)), magnitude(now.Sub(b)))
}

func magnitude(age time.Duration) int {
	if age <= 0 {
		return -1
	}
	return int(math.Log2(float64(age)))
}

func restarts(pod *corev1.Pod) (most int32) {
	for i := range pod.Status.ContainerStatuses {
		most = max(most, pod.Status.ContainerStatuses[i].RestartCount)
	}
	return most
}

func deletionCost(pod *corev1.Pod) int {
	cost, err := strconv.ParseInt(pod.Annotations[corev1.PodDeletionCost], 10, 32)
	if err != nil {
		return 0
	}
	return int(cost)
}
