package disruption

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	budgets "k8s.io/component-helpers/apps/poddisruptionbudget"

	"portal/internal/controllers/workload"
)

// gone is how long a Pod that was evicted may still be there: after that it is taken for one that stays.
const gone = 2 * time.Minute

// State is what a budget is counted from.
type State struct {
	Budget *policyv1.PodDisruptionBudget
	// Pods are those that the budget selects.
	Pods []*corev1.Pod
	// Scale is how many Pods their owners want together. It is only needed if NeedsScale says so.
	Scale int32
	Now   time.Time
}

// Plan is what becomes of a budget.
type Plan struct {
	Status policyv1.PodDisruptionBudgetStatus
	// Kept are the Pods whose eviction was allowed and that did not go.
	Kept []*corev1.Pod
	// Again is when to count again although nothing changes; 0: never.
	Again time.Duration
}

// NeedsScale says whether a budget depends on how many Pods their owners want, and not on those alone that there are.
func NeedsScale(budget *policyv1.PodDisruptionBudget) bool {
	least := budget.Spec.MinAvailable
	return budget.Spec.MaxUnavailable != nil || least != nil && least.Type == intstr.String
}

// Count counts how many Pods of a budget may be evicted now.
func Count(s State) (Plan, error) {
	expected, desired, err := wanted(s)
	if err != nil {
		return Plan{}, err
	}
	plan := Plan{}
	pending := map[string]metav1.Time{}
	var healthy int32
	for _, pod := range s.Pods {
		if pod.DeletionTimestamp != nil {
			continue
		}
		if since, evicted := s.Budget.Status.DisruptedPods[pod.Name]; evicted {
			if left := since.Add(gone).Sub(s.Now); left > 0 {
				pending[pod.Name] = since
				plan.Again = workload.Sooner(plan.Again, left)
				continue
			}
			plan.Kept = append(plan.Kept, pod)
		}
		if workload.Ready(pod) {
			healthy++
		}
	}
	next := s.Budget.DeepCopy()
	next.Status = policyv1.PodDisruptionBudgetStatus{
		ObservedGeneration: s.Budget.Generation,
		CurrentHealthy:     healthy,
		DesiredHealthy:     desired,
		ExpectedPods:       expected,
		Conditions:         next.Status.Conditions,
	}
	if len(pending) > 0 {
		next.Status.DisruptedPods = pending
	}
	// As long as there are no Pods none may go: the first ones are not unguarded until they are counted.
	if expected > 0 {
		next.Status.DisruptionsAllowed = max(healthy-desired, 0)
	}
	if !budgets.ConditionsAreUpToDate(next) {
		budgets.UpdateDisruptionAllowedCondition(next)
	}
	plan.Status = next.Status
	return plan, nil
}

// wanted is how many Pods there should be, and how many of them must be healthy.
func wanted(s State) (expected, healthy int32, err error) {
	spec := &s.Budget.Spec
	switch {
	case spec.MaxUnavailable != nil:
		missing, err := intstr.GetScaledValueFromIntOrPercent(spec.MaxUnavailable, int(s.Scale), true)
		return s.Scale, max(s.Scale-int32(missing), 0), err
	case spec.MinAvailable == nil:
		return 0, 0, nil
	case spec.MinAvailable.Type == intstr.Int:
		return int32(len(s.Pods)), spec.MinAvailable.IntVal, nil
	}
	least, err := intstr.GetScaledValueFromIntOrPercent(spec.MinAvailable, int(s.Scale), true)
	return s.Scale, int32(least), err
}

// same says that a status needs no write.
func same(a, b *policyv1.PodDisruptionBudgetStatus) bool { return equality.Semantic.DeepEqual(a, b) }

// staleTarget says that a Pod is marked as one that is disrupted although nothing becomes of that, and when that will be so
// if it is not yet. What the node marks may take as long as it wants.
func staleTarget(pod *corev1.Pod, now time.Time) (stale bool, wait time.Duration) {
	if pod.DeletionTimestamp != nil || workload.Finished(pod) {
		return false, 0
	}
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type != corev1.DisruptionTarget || c.Status != corev1.ConditionTrue || c.Reason == corev1.PodReasonTerminationByKubelet {
			continue
		}
		left := c.LastTransitionTime.Add(gone).Sub(now)
		return left <= 0, max(left, 0)
	}
	return false, 0
}
