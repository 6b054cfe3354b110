// Package disruption counts how many Pods of each PodDisruptionBudget may be evicted now, and writes it into the budget's
// status, from which evictions take it. How much that is, is decided by Count; the rest here reads and writes.
package disruption

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/writes"
)

// Name is this controller's.
const Name = "disruption"

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	Budgets  cache.SharedIndexInformer
	Pods     cache.SharedIndexInformer
	// Owners says how many Pods an owner wants.
	Owners  Owners
	Clock   clock.PassiveClock
	Workers int
}

// Controller writes the status of budgets.
type Controller struct {
	Deps
	budgets policylisters.PodDisruptionBudgetLister
	pods    corelisters.PodLister
	queue   *queue.Queue
	status  *writes.Tracker
	// marks are the Pods that are marked as disrupted.
	marks *queue.Queue
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{
		Deps: deps, budgets: policylisters.NewPodDisruptionBudgetLister(deps.Budgets.GetIndexer()), pods: corelisters.NewPodLister(deps.Pods.GetIndexer()),
	}
	c.queue = queue.New(queue.Options{Name: "disruption"}, c.sync)
	c.marks = queue.New(queue.Options{Name: "disruption-target"}, c.unmark)
	c.status = writes.New(deps.Budgets, c.queue.Add)
	if _, err := deps.Budgets.AddEventHandler(membership.Handlers(func(_, b *policyv1.PodDisruptionBudget) {
		c.status.Saw(b)
		c.queue.Add(queue.KeyOf(b))
	}, func(gone *policyv1.PodDisruptionBudget) {
		c.status.Gone(gone)
		c.queue.Add(queue.KeyOf(gone))
	})); err != nil {
		return nil, err
	}
	if _, err := deps.Pods.AddEventHandler(membership.Handlers(c.podChanged, c.wake)); err != nil {
		return nil, err
	}
	return c, deps.Owners.follow(c.ownerChanged)
}

func (c *Controller) podChanged(old, pod *corev1.Pod) {
	if old != nil {
		c.wake(old)
	}
	c.wake(pod)
	if stale, wait := staleTarget(pod, c.Clock.Now()); stale {
		c.marks.Add(queue.KeyOf(pod))
	} else if wait > 0 {
		c.marks.AddAfter(queue.KeyOf(pod), wait)
	}
}

// wake queues the budgets that a Pod is counted in.
func (c *Controller) wake(pod *corev1.Pod) {
	all, _ := c.budgets.PodDisruptionBudgets(pod.Namespace).List(labels.Everything()) // a cache of typed objects never fails
	for _, b := range all {
		if selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && selector.Matches(labels.Set(pod.Labels)) {
			c.queue.Add(queue.KeyOf(b))
		}
	}
}

// ownerChanged queues the budgets of a namespace in which somebody wants more or fewer Pods.
func (c *Controller) ownerChanged(namespace string) {
	all, _ := c.budgets.PodDisruptionBudgets(namespace).List(labels.Everything()) // as in wake
	for _, b := range all {
		if NeedsScale(b) {
			c.queue.Add(queue.KeyOf(b))
		}
	}
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() {
	c.queue.Listed()
	c.marks.Listed()
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	var done sync.WaitGroup
	done.Go(func() { c.status.Run(ctx) })
	done.Go(func() { c.queue.Run(ctx, max(c.Workers, 1)) })
	done.Go(func() { c.marks.Run(ctx, 1) })
	done.Wait()
	return nil
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	b, err := c.budgets.PodDisruptionBudgets(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.status.Forget(key)
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if c.status.Behind(key) {
		return queue.Result{}, nil // requeued when the informer has caught up
	}
	c.status.TakeLost(key) // a write that is too old is refused
	plan, err := c.count(ctx, b)
	if err != nil {
		return queue.Result{}, c.uncounted(ctx, key, b, err)
	}
	for _, pod := range plan.Kept {
		c.Recorder.Eventf(pod, corev1.EventTypeWarning, "NotDeleted", "The Pod's eviction was allowed by PodDisruptionBudget %s, and it is still there", b.Name)
	}
	return queue.Result{Again: plan.Again}, c.write(ctx, key, b, plan.Status)
}

func (c *Controller) count(ctx context.Context, b *policyv1.PodDisruptionBudget) (Plan, error) {
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return Plan{}, fmt.Errorf("spec.selector: %w", err)
	}
	pods, err := c.pods.Pods(b.Namespace).List(selector)
	if err != nil {
		return Plan{}, err
	}
	state := State{Budget: b, Pods: pods, Now: c.Clock.Now()}
	if NeedsScale(b) {
		var alone int
		if state.Scale, alone, err = c.scale(ctx, pods); err != nil {
			return Plan{}, err
		}
		if alone > 0 {
			c.Recorder.Eventf(b, corev1.EventTypeWarning, "UnmanagedPods",
				"%d Pods of this budget have no owner that says how many there should be, and are not counted; a number in spec.minAvailable counts them", alone)
		}
	}
	return Count(state)
}

// scale is how many Pods the owners of Pods want together, and how many of the Pods have none.
func (c *Controller) scale(ctx context.Context, pods []*corev1.Pod) (sum int32, alone int, err error) {
	seen := map[types.UID]bool{}
	for _, pod := range pods {
		owner := metav1.GetControllerOfNoCopy(pod)
		if owner == nil {
			alone++
			continue
		}
		if seen[owner.UID] {
			continue
		}
		seen[owner.UID] = true
		top, wants, err := c.Owners.scale(ctx, pod.Namespace, owner)
		if err != nil {
			return 0, 0, fmt.Errorf("how many Pods %s %s wants, the owner of Pod %s: %w", owner.Kind, owner.Name, pod.Name, err)
		}
		if top == owner.UID || !seen[top] {
			sum = int32(min(int64(sum)+int64(wants), math.MaxInt32))
		}
		seen[top] = true
	}
	return sum, alone, nil
}

// uncounted lets nothing be evicted as long as nobody knows how much may be.
func (c *Controller) uncounted(ctx context.Context, key queue.Key, b *policyv1.PodDisruptionBudget, why error) error {
	c.Recorder.Eventf(b, corev1.EventTypeWarning, "CalculateExpectedPodCountFailed", "The Pods that may be evicted could not be counted: %v", why)
	status := b.Status.DeepCopy()
	status.DisruptionsAllowed = 0
	message := why.Error() // the API refuses a long one, and names in it can have any length
	message = strings.ToValidUTF8(message[:min(len(message), 1024)], "")
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason, Message: message,
		ObservedGeneration: status.ObservedGeneration,
	})
	if err := c.write(ctx, key, b, *status); err != nil {
		return err
	}
	klog.FromContext(ctx).Error(why, "the budget's Pods could not be counted", "budget", key)
	return why
}

func (c *Controller) write(ctx context.Context, key queue.Key, b *policyv1.PodDisruptionBudget, status policyv1.PodDisruptionBudgetStatus) error {
	if same(&b.Status, &status) {
		return nil
	}
	next := b.DeepCopy()
	next.Status = status
	// An eviction may have used up something meanwhile: then this is refused and counted anew.
	written, err := c.Client.PolicyV1().PodDisruptionBudgets(b.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	switch {
	case err == nil:
		c.status.Wrote(key, written)
	case apierrors.IsNotFound(err):
		return nil
	}
	return err
}

// unmark takes the mark from a Pod that was to be disrupted and was not.
func (c *Controller) unmark(ctx context.Context, key queue.Key) (queue.Result, error) {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	stale, wait := staleTarget(pod, c.Clock.Now())
	if !stale {
		return queue.Result{Again: wait}, nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "resourceVersion": pod.ResourceVersion},
		"status": map[string]any{"conditions": []corev1.PodCondition{{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionFalse, LastTransitionTime: metav1.NewTime(c.Clock.Now()),
		}}},
	})
	if err != nil {
		return queue.Result{}, err
	}
	_, err = c.Client.CoreV1().Pods(key.Namespace).Patch(ctx, key.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		err = nil // it is gone, or comes again as it is now
	}
	return queue.Result{}, err
}
