package workload

import (
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/controllers/queue"
)

const (
	// A Pod that fails at this age or younger has failed at once. Older ones are replaced at once: they can't fail often.
	atOnce = 30 * time.Second
	// The wait before the first replacement, and the longest.
	firstWait, lastWait = time.Second, 5 * time.Minute
	// quietTime without a Pod that failed at once, after the last one was replaced, ends the waiting: the replacement lives.
	quietTime = 2 * atOnce
)

// Failures holds back replacements of Pods that failed as soon as they were created: what a node has rejected, it is likely to reject again, and
// every try leaves a Pod behind. The waits double while replacements fail as well. Other Pods are created without waiting. Workloads are
// synced by several workers, each by one at a time.
type Failures struct {
	mu       sync.Mutex
	backoffs map[queue.Key]*podBackoff
}

// podBackoff is how replacements for one workload wait.
type podBackoff struct {
	owner types.UID
	delay time.Duration
	until time.Time               // the end of the last wait
	due   map[types.UID]time.Time // when failed Pods are replaced; those that have been are here until they are too old to be counted again
}

// Wait is what has to wait now.
type Wait struct {
	// Held are the failed Pods whose replacements have to wait.
	Held map[types.UID]bool
	// Left is when the first of them is due; 0: there is none.
	Left time.Duration
	// Cause is the Pod because of which a wait has begun just now, or nil.
	Cause *corev1.Pod
	delay time.Duration
}

// Message tells people why there is a wait. There is one only with a Cause.
func (w Wait) Message() string {
	reason := ""
	if w.Cause.Status.Reason != "" {
		reason = " (" + w.Cause.Status.Reason + ")"
	}
	return fmt.Sprintf("Pod %s failed right after it was created%s: it is replaced in %s", w.Cause.Name, reason, w.delay)
}

// Backoff is the reason of Events about a Wait.
const Backoff = "FailedPodBackoff"

// Wait looks at the Pods of a workload.
func (f *Failures) Wait(key queue.Key, owner metav1.Object, own []*corev1.Pod, now time.Time) Wait {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.backoffs[key]
	if b == nil || b.owner != owner.GetUID() {
		b = &podBackoff{owner: owner.GetUID()}
	}
	wait := b.next(own, now)
	switch {
	case len(b.due) > 0 || now.Sub(b.until) <= quietTime:
		if f.backoffs == nil {
			f.backoffs = map[queue.Key]*podBackoff{}
		}
		f.backoffs[key] = b
	default:
		delete(f.backoffs, key)
	}
	return wait
}

// Forget is for workloads that are gone.
func (f *Failures) Forget(key queue.Key) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.backoffs, key)
}

func (b *podBackoff) next(own []*corev1.Pod, now time.Time) Wait {
	var wait Wait
	due := map[types.UID]time.Time{}
	for _, pod := range own {
		// Somebody who deletes a failed Pod wants another one now.
		if pod.Status.Phase != corev1.PodFailed || pod.DeletionTimestamp != nil {
			continue
		}
		at, known := b.due[pod.UID]
		young := now.Sub(pod.CreationTimestamp.Time) <= atOnce
		if !known && young {
			if b.failed(pod.CreationTimestamp.Time, now) {
				wait.Cause, wait.delay = pod, b.delay
			}
			at = b.until
		}
		if left := at.Sub(now); left > 0 {
			if wait.Held == nil {
				wait.Held = map[types.UID]bool{}
			}
			wait.Held[pod.UID] = true
			wait.Left = Sooner(wait.Left, left)
		} else if !young {
			continue
		}
		due[pod.UID] = at
	}
	b.due = due
	return wait
}

// failed is called for each Pod that failed at once. It says whether a wait has begun with it: those that fail meanwhile share that one.
func (b *podBackoff) failed(created, now time.Time) bool {
	if now.Before(b.until) {
		return false
	}
	switch {
	case now.Sub(b.until) > quietTime:
		b.delay = firstWait
	case !created.Before(b.until.Truncate(time.Second)): // times in the API have no fractions of a second
		b.delay = min(2*b.delay, lastWait)
	}
	// Otherwise the Pod is as old as the ones that were replaced, and only slower to fail.
	b.until = now.Add(b.delay)
	return true
}
