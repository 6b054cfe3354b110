package disruption

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

var now = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func pods(ready, unready int) (out []*corev1.Pod) {
	for i := range ready + unready {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("p", i)}}
		status := corev1.ConditionFalse
		if i < ready {
			status = corev1.ConditionTrue
		}
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}}
		out = append(out, pod)
	}
	return out
}

func budget(least, most string) *policyv1.PodDisruptionBudget {
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "b", Generation: 3}}
	if least != "" {
		b.Spec.MinAvailable = ptr.To(intstr.Parse(least))
	}
	if most != "" {
		b.Spec.MaxUnavailable = ptr.To(intstr.Parse(most))
	}
	return b
}

func TestCount(t *testing.T) {
	for name, c := range map[string]struct {
		budget         *policyv1.PodDisruptionBudget
		ready, unready int
		scale          int32
		// healthy, desired, expected, allowed
		want [4]int32
	}{
		"a number that must be there":       {budget("2", ""), 3, 1, 0, [4]int32{3, 2, 4, 1}},
		"all that must be there":            {budget("4", ""), 3, 1, 0, [4]int32{3, 4, 4, 0}},
		"a share, of what is wanted":        {budget("50%", ""), 3, 0, 5, [4]int32{3, 3, 5, 0}},
		"a share is rounded up":             {budget("30%", ""), 3, 0, 5, [4]int32{3, 2, 5, 1}},
		"a number that may be missing":      {budget("", "1"), 5, 0, 5, [4]int32{5, 4, 5, 1}},
		"it is missing already":             {budget("", "1"), 4, 1, 5, [4]int32{4, 4, 5, 0}},
		"more than all may be missing":      {budget("", "9"), 2, 0, 5, [4]int32{2, 0, 5, 2}},
		"a share that may be missing":       {budget("", "34%"), 3, 0, 3, [4]int32{3, 1, 3, 2}},
		"nothing is said":                   {budget("", ""), 3, 0, 3, [4]int32{3, 0, 0, 0}},
		"nothing is there":                  {budget("0", ""), 0, 0, 0, [4]int32{0, 0, 0, 0}},
		"nobody wants the Pods there still": {budget("", "1"), 2, 0, 0, [4]int32{2, 0, 0, 0}},
	} {
		plan, err := Count(State{Budget: c.budget, Pods: pods(c.ready, c.unready), Scale: c.scale, Now: now})
		s := plan.Status
		if got := [4]int32{s.CurrentHealthy, s.DesiredHealthy, s.ExpectedPods, s.DisruptionsAllowed}; err != nil || got != c.want {
			t.Errorf("%s: %v (%v), want %v", name, got, err, c.want)
		}
		condition, reason := metav1.ConditionFalse, policyv1.InsufficientPodsReason
		if c.want[3] > 0 {
			condition, reason = metav1.ConditionTrue, policyv1.SufficientPodsReason
		}
		if len(s.Conditions) != 1 || s.Conditions[0].Status != condition || s.Conditions[0].Reason != reason || s.ObservedGeneration != 3 {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// A Pod whose eviction was allowed is as good as gone, for two minutes.
func TestPodsThatAreBeingEvicted(t *testing.T) {
	b := budget("1", "")
	b.Status.DisruptedPods = map[string]metav1.Time{
		"p0": metav1.NewTime(now.Add(-time.Minute)), "p1": metav1.NewTime(now.Add(-3 * time.Minute)), "p2": metav1.NewTime(now), "other": metav1.NewTime(now),
	}
	all := pods(4, 0)
	all[2].DeletionTimestamp = &metav1.Time{Time: now}
	plan, err := Count(State{Budget: b, Pods: all, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	if s := plan.Status; s.CurrentHealthy != 2 || s.DisruptionsAllowed != 1 || len(s.DisruptedPods) != 1 || !s.DisruptedPods["p0"].Time.Equal(now.Add(-time.Minute)) {
		t.Errorf("%+v", s)
	}
	if plan.Again != time.Minute || len(plan.Kept) != 1 || plan.Kept[0].Name != "p1" {
		t.Errorf("again in %v, kept %v", plan.Again, plan.Kept)
	}
}

// Counting twice changes nothing: no write is made of it.
func TestCountIsStable(t *testing.T) {
	b := budget("", "50%")
	first, err := Count(State{Budget: b, Pods: pods(3, 1), Scale: 4, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	b.Status = first.Status
	second, err := Count(State{Budget: b, Pods: pods(3, 1), Scale: 4, Now: now.Add(time.Hour)})
	if err != nil || !same(&first.Status, &second.Status) {
		t.Errorf("%+v\n%+v (%v)", first.Status, second.Status, err)
	}
}

func TestStaleMarks(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		stale  bool
		wait   time.Duration
	}{
		"old":       {func(*corev1.Pod) {}, true, 0},
		"young":     {func(p *corev1.Pod) { p.Status.Conditions[0].LastTransitionTime.Time = now.Add(-time.Minute) }, false, time.Minute},
		"deleted":   {func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: now} }, false, 0},
		"ended":     {func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, false, 0},
		"by a node": {func(p *corev1.Pod) { p.Status.Conditions[0].Reason = corev1.PodReasonTerminationByKubelet }, false, 0},
		"no more":   {func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }, false, 0},
		"never":     {func(p *corev1.Pod) { p.Status.Conditions = nil }, false, 0},
	} {
		pod := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now.Add(-5 * time.Minute)),
		}}}}
		c.change(pod)
		if stale, wait := staleTarget(pod, now); stale != c.stale || wait != c.wait {
			t.Errorf("%s: %v, %v", name, stale, wait)
		}
	}
}
