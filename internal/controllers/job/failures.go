package job

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"portal/internal/jobs"
)

// Failures are the Pods that have failed since one last succeeded. With each it takes longer until they are replaced.
type Failures struct {
	Count int64
	Last  time.Time
}

// hasFailed says that a Pod counts as failed. One that is deleted may never get to say so itself.
func (s State) hasFailed(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodFailed ||
		!s.onlyFailed() && pod.DeletionTimestamp != nil && pod.Status.Phase != corev1.PodSucceeded
}

// newlyFinished are the Pods that have ended and are not in the status yet.
func (s State) newlyFinished() (succeeded, failed []*corev1.Pod) {
	uncounted := s.uncounted()
	for _, pod := range s.Pods {
		if !s.tracked(pod) || jobs.Indexed(&s.Job.Spec) && s.index(pod) == noIndex {
			continue
		}
		if pod.Status.Phase == corev1.PodSucceeded && !slices.Contains(uncounted.Succeeded, pod.UID) {
			succeeded = append(succeeded, pod)
		}
		if s.hasFailed(pod) && !slices.Contains(uncounted.Failed, pod.UID) {
			failed = append(failed, pod)
		}
	}
	return succeeded, failed
}

// judge is what the policy makes of a failed Pod, and why.
func (s State) judge(pod *corev1.Pod) (batchv1.PodFailurePolicyAction, string) {
	policy := s.Job.Spec.PodFailurePolicy
	if policy == nil {
		return batchv1.PodFailurePolicyActionCount, ""
	}
	for i, rule := range policy.Rules {
		if codes := rule.OnExitCodes; codes != nil {
			if c := exited(pod, codes); c != nil {
				return rule.Action, fmt.Sprintf("Container %s of Pod %s/%s ended with exit code %d, as rule %d of spec.podFailurePolicy says",
					c.Name, pod.Namespace, pod.Name, c.State.Terminated.ExitCode, i)
			}
			continue
		}
		for _, c := range pod.Status.Conditions {
			if slices.ContainsFunc(rule.OnPodConditions, func(p batchv1.PodFailurePolicyOnPodConditionsPattern) bool {
				return p.Type == c.Type && p.Status == c.Status
			}) {
				return rule.Action, fmt.Sprintf("Pod %s/%s has the condition %s, as rule %d of spec.podFailurePolicy says", pod.Namespace, pod.Name, c.Type, i)
			}
		}
	}
	return batchv1.PodFailurePolicyActionCount, ""
}

// exited is a container that ended with one of some exit codes. 0 is none of them, whatever the policy says.
func exited(pod *corev1.Pod, codes *batchv1.PodFailurePolicyOnExitCodesRequirement) *corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses} {
		for i := range list {
			c := &list[i]
			if c.State.Terminated == nil || c.State.Terminated.ExitCode == 0 || codes.ContainerName != nil && *codes.ContainerName != c.Name {
				continue
			}
			if in := slices.Contains(codes.Values, c.State.Terminated.ExitCode); in == (codes.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn) {
				return c
			}
		}
	}
	return nil
}

// indexFailed says that with a Pod its index has failed for good.
func (s State) indexFailed(pod *corev1.Pod) bool {
	if !s.hasFailed(pod) {
		return false
	}
	switch action, _ := s.judge(pod); action {
	case batchv1.PodFailurePolicyActionFailIndex:
		return true
	case batchv1.PodFailurePolicyActionIgnore:
		return false
	}
	return annotation(pod, batchv1.JobIndexFailureCountAnnotation) >= *s.Job.Spec.BackoffLimitPerIndex
}

// annotation is a number that a Pod was made with. One more still fits.
func annotation(pod *corev1.Pod, key string) int32 {
	n, err := strconv.ParseInt(pod.Annotations[key], 10, 32)
	if err != nil || n < 0 {
		return 0
	}
	return int32(min(n, math.MaxInt32-1))
}

// allFailures is how often the index of a Pod had failed before it, whether that counts or not.
func allFailures(pod *corev1.Pod) int64 {
	return int64(annotation(pod, batchv1.JobIndexFailureCountAnnotation)) + int64(annotation(pod, batchv1.JobIndexIgnoredFailureCountAnnotation))
}

// lastFailed are the last failed Pods of the indexes that are to be tried again and have no Pod now.
func (s State) lastFailed(p *Plan) map[int]*corev1.Pod {
	busy := map[int]bool{}
	for _, pod := range p.active {
		busy[s.index(pod)] = true
	}
	out := map[int]*corev1.Pod{}
	for _, pod := range s.Pods {
		index := s.index(pod)
		if index == noIndex || busy[index] || !s.tracked(pod) || !s.hasFailed(pod) || p.succeededIndexes.Has(index) || p.failedIndexes.Has(index) {
			continue
		}
		had := out[index]
		if had == nil || allFailures(had) <= allFailures(pod) && !endOf(pod).Before(endOf(had)) {
			out[index] = pod
		}
	}
	return out
}

// restarted is how often containers were restarted, where that counts as a failure.
func (s State) restarted() (sum int64) {
	if s.Job.Spec.Template.Spec.RestartPolicy != corev1.RestartPolicyOnFailure {
		return 0
	}
	for _, pod := range s.Pods {
		if pod.Status.Phase != corev1.PodRunning && pod.Status.Phase != corev1.PodPending {
			continue
		}
		for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
			for i := range list {
				sum += int64(list[i].RestartCount)
			}
		}
	}
	return sum
}

// after are the failures after some more Pods have ended.
func (f Failures) after(succeeded, failed []*corev1.Pod) Failures {
	var lastSuccess time.Time
	if len(succeeded) > 0 {
		f = Failures{}
		for _, pod := range succeeded {
			if end := endOf(pod); end.After(lastSuccess) {
				lastSuccess = end
			}
		}
	}
	for _, pod := range failed {
		end := endOf(pod)
		if len(succeeded) > 0 && !end.After(lastSuccess) {
			continue
		}
		f.Count++
		if end.After(f.Last) {
			f.Last = end
		}
	}
	return f
}

// wait is how long to wait before the next try.
func (f Failures) wait(now time.Time) time.Duration {
	if f.Count == 0 {
		return 0
	}
	pause := firstBackOff
	for range f.Count - 1 {
		if pause *= 2; pause >= maxBackOff {
			pause = maxBackOff
			break
		}
	}
	return max(pause-now.Sub(f.Last), 0)
}

// endOf is when a Pod ended: as its containers say, or its conditions, or when its deletion was asked for.
func endOf(pod *corev1.Pod) time.Time {
	if end := containersEnd(pod); !end.IsZero() {
		return end
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionFalse && !c.LastTransitionTime.IsZero() {
			return c.LastTransitionTime.Time
		}
	}
	if deleted := pod.DeletionTimestamp; deleted != nil {
		var grace time.Duration
		if pod.DeletionGracePeriodSeconds != nil {
			grace = jobs.Seconds(*pod.DeletionGracePeriodSeconds)
		}
		return deleted.Add(-grace)
	}
	return pod.CreationTimestamp.Time
}

// containersEnd is when the last container ended, if all have. Init containers that stay end after the others.
func containersEnd(pod *corev1.Pod) (last time.Time) {
	for i := range pod.Status.ContainerStatuses {
		ended := pod.Status.ContainerStatuses[i].State.Terminated
		if ended == nil || ended.FinishedAt.IsZero() {
			return time.Time{}
		}
		if ended.FinishedAt.After(last) {
			last = ended.FinishedAt.Time
		}
	}
	if last.IsZero() {
		return last
	}
	for i := range pod.Status.InitContainerStatuses {
		if ended := pod.Status.InitContainerStatuses[i].State.Terminated; ended != nil && ended.FinishedAt.After(last) {
			last = ended.FinishedAt.Time
		}
	}
	return last
}
