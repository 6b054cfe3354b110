package job

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/controllers/workload"
	"portal/internal/jobs"
)

const (
	// batch is how many Pods are created or deleted in one sync.
	batch = 500
	// noIndex is that of a Pod that has none.
	noIndex = -1

	firstBackOff = 10 * time.Second
	maxBackOff   = 10 * time.Minute
)

// State is what there is.
type State struct {
	Job *batchv1.Job
	// Pods are those that the Job owns.
	Pods []*corev1.Pod
	// Counted are Pods that look as if they were still to be counted, because their state is an old one.
	Counted map[types.UID]bool
	// Failures are those that were counted before.
	Failures Failures
	Now      time.Time
}

// NewPod is a Pod to be made.
type NewPod struct {
	Index int
	// Failures and Ignored are how often the index has failed, and how often the policy said that it does not count. They are
	// only written down where each index has its own limit.
	Failures, Ignored int32
}

// Plan is what to do with a Job's Pods.
type Plan struct {
	// End is the condition by which the Job is about to end; nil: it goes on.
	End *batchv1.JobCondition
	// Create and Delete are Pods; only one of them is more than none. Pods that are deleted because the Job ends are counted
	// as failed, others are not counted.
	Create  []NewPod
	Delete  []*corev1.Pod
	Counted bool
	// Managed says that it was decided how many Pods there should be.
	Managed bool
	// Failures are those to remember once the status is written.
	Failures Failures
	// Again is when to look again although nothing changes; 0: never.
	Again time.Duration

	count
}

// count is what is there, as far as decisions and status need it.
type count struct {
	active                          []*corev1.Pod
	ready, terminating              int32
	succeeded, failed               int32
	succeededIndexes, failedIndexes jobs.Indexes
	// last are the failed Pods of indexes that have no other now: their number of failures goes over to the next.
	last map[int]*corev1.Pod
}

// Decide says what is to be done.
func Decide(s State) Plan {
	p := Plan{}
	newSucceeded, newFailed := s.newlyFinished()
	p.take(s, newSucceeded, newFailed)
	p.Failures = s.Failures.after(newSucceeded, newFailed)
	p.End = s.ended(&p)
	switch {
	case p.End != nil:
		p.Delete, p.Counted = p.active, true
	case s.Job.DeletionTimestamp == nil:
		p.Managed = true
		s.manage(&p)
	}
	return p
}

func (p *Plan) take(s State, newSucceeded, newFailed []*corev1.Pod) {
	status, uncounted := &s.Job.Status, s.uncounted()
	for _, pod := range s.Pods {
		switch {
		case workload.Active(pod):
			p.active = append(p.active, pod)
			if workload.Ready(pod) {
				p.ready++
			}
		case workload.Terminating(pod):
			p.terminating++
		}
	}
	p.succeeded = status.Succeeded + int32(len(newSucceeded)+len(uncounted.Succeeded))
	p.failed = status.Failed + int32(len(uncounted.Failed))
	for _, pod := range newFailed {
		if action, _ := s.judge(pod); action != batchv1.PodFailurePolicyActionIgnore {
			p.failed++
		}
	}
	if !jobs.Indexed(&s.Job.Spec) {
		return
	}
	var done, lost []int
	for _, pod := range s.Pods {
		index := s.index(pod)
		switch {
		case index == noIndex || !s.tracked(pod):
		case pod.Status.Phase == corev1.PodSucceeded:
			done = append(done, index)
		case s.Job.Spec.BackoffLimitPerIndex != nil && s.indexFailed(pod):
			lost = append(lost, index)
		}
	}
	limit := s.completions()
	p.succeededIndexes = jobs.ReadIndexes(status.CompletedIndexes, limit).Union(jobs.IndexesOf(done...))
	p.succeeded = int32(p.succeededIndexes.Len())
	if s.Job.Spec.BackoffLimitPerIndex == nil {
		return
	}
	if status.FailedIndexes != nil {
		p.failedIndexes = jobs.ReadIndexes(*status.FailedIndexes, limit)
	}
	p.failedIndexes = p.failedIndexes.Union(jobs.IndexesOf(lost...))
	p.last = s.lastFailed(p)
}

func (s State) uncounted() batchv1.UncountedTerminatedPods {
	if u := s.Job.Status.UncountedTerminatedPods; u != nil {
		return *u
	}
	return batchv1.UncountedTerminatedPods{}
}

func (s State) completions() int {
	if s.Job.Spec.Completions == nil {
		return 0
	}
	return int(*s.Job.Spec.Completions)
}

func (s State) suspended() bool { return s.Job.Spec.Suspend != nil && *s.Job.Spec.Suspend }

// onlyFailed says that a Pod is replaced when it has ended, not already when it is about to.
func (s State) onlyFailed() bool {
	policy := s.Job.Spec.PodReplacementPolicy
	return policy != nil && *policy == batchv1.Failed
}

// tracked says that a Pod is still to be counted and released.
func (s State) tracked(pod *corev1.Pod) bool {
	return slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer) && !s.Counted[pod.UID]
}

// index of a Pod; noIndex if it has none that the Job has.
func (s State) index(pod *corev1.Pod) int {
	if index := anyIndex(pod); index < s.completions() {
		return index
	}
	return noIndex
}

// anyIndex of a Pod, also if the Job has fewer.
func anyIndex(pod *corev1.Pod) int {
	index, err := strconv.Atoi(pod.Annotations[batchv1.JobCompletionIndexAnnotation])
	if err != nil || index < 0 {
		return noIndex
	}
	return index
}

func (s State) condition(kind batchv1.JobConditionType, reason, message string) *batchv1.JobCondition {
	return &batchv1.JobCondition{
		Type: kind, Status: corev1.ConditionTrue, LastProbeTime: metav1.NewTime(s.Now), LastTransitionTime: metav1.NewTime(s.Now),
		Reason: reason, Message: message,
	}
}

// ended is the condition by which a Job ends. What was decided before stays; failures come before success.
func (s State) ended(p *Plan) *batchv1.JobCondition {
	job := s.Job
	if met := jobs.Condition(&job.Status, batchv1.JobSuccessCriteriaMet); met != nil {
		return met
	}
	if target := jobs.Condition(&job.Status, batchv1.JobFailureTarget); target != nil {
		return target
	}
	fail := func(reason, message string) *batchv1.JobCondition {
		return s.condition(batchv1.JobFailureTarget, reason, message)
	}
	for _, pod := range s.Pods {
		if !s.hasFailed(pod) {
			continue
		}
		if action, why := s.judge(pod); action == batchv1.PodFailurePolicyActionFailJob {
			return fail(batchv1.JobReasonPodFailurePolicy, why)
		}
	}
	if job.Spec.BackoffLimit != nil && (p.failed > *job.Spec.BackoffLimit || s.restarted() > int64(max(*job.Spec.BackoffLimit-1, 0))) {
		return fail(batchv1.JobReasonBackoffLimitExceeded, "More Pods have failed than spec.backoffLimit allows")
	}
	if limit := job.Spec.ActiveDeadlineSeconds; limit != nil && !s.suspended() {
		left := s.start().Add(jobs.Seconds(*limit)).Sub(s.Now)
		if left <= 0 {
			return fail(batchv1.JobReasonDeadlineExceeded, "The Job was active for longer than spec.activeDeadlineSeconds")
		}
		p.Again = left
	}
	if !jobs.Indexed(&job.Spec) {
		return nil
	}
	if failed := p.failedIndexes.Len(); failed > 0 {
		if most := job.Spec.MaxFailedIndexes; most != nil && failed > int(*most) {
			return fail(batchv1.JobReasonMaxFailedIndexesExceeded, "More indexes have failed than spec.maxFailedIndexes allows")
		}
		if failed+p.succeededIndexes.Len() >= s.completions() {
			return fail(batchv1.JobReasonFailedIndexes, "Some indexes have failed, and all others have succeeded")
		}
	}
	if rule := s.enough(p.succeededIndexes); rule >= 0 {
		return s.condition(batchv1.JobSuccessCriteriaMet, batchv1.JobReasonSuccessPolicy, fmt.Sprintf("Rule %d of spec.successPolicy is met", rule))
	}
	return nil
}

// start is when the Job began, or begins now.
func (s State) start() time.Time {
	if s.Job.Status.StartTime == nil {
		return s.Now
	}
	return s.Job.Status.StartTime.Time
}

// enough is the rule of the success policy that is met; -1 if none is.
func (s State) enough(succeeded jobs.Indexes) int {
	policy := s.Job.Spec.SuccessPolicy
	if policy == nil || succeeded.Len() == 0 {
		return -1
	}
	for i, rule := range policy.Rules {
		have, all := succeeded.Len(), math.MaxInt
		if rule.SucceededIndexes != nil {
			wanted := jobs.ReadIndexes(*rule.SucceededIndexes, s.completions())
			if have, all = wanted.Common(succeeded), wanted.Len(); all == 0 {
				continue
			}
		}
		if have >= all || rule.SucceededCount != nil && have >= int(*rule.SucceededCount) {
			return i
		}
	}
	return -1
}

// manage decides which Pods to create or to delete. Where both were to be done, deleting comes first.
func (s State) manage(p *Plan) {
	active := len(p.active)
	if s.suspended() {
		p.Delete = s.surplus(p.active, active)
		return
	}
	want := int(*s.Job.Spec.Parallelism)
	switch {
	case s.Job.Spec.Completions != nil:
		want = max(min(want, s.completions()-int(p.succeeded)), 0)
	case p.succeeded > 0:
		want = active // they end by themselves
	}
	if p.Delete = s.surplus(p.active, max(active-want, 0)); len(p.Delete) > 0 {
		p.Delete = p.Delete[:min(len(p.Delete), batch)]
		return
	}
	missing := want - active
	if s.onlyFailed() {
		missing -= int(p.terminating)
	}
	if missing = min(missing, batch); missing <= 0 {
		return
	}
	if s.Job.Spec.BackoffLimitPerIndex == nil {
		if wait := p.Failures.wait(s.Now); wait > 0 {
			p.Again = workload.Sooner(p.Again, wait)
			return
		}
	}
	if !jobs.Indexed(&s.Job.Spec) {
		p.Create = slices.Repeat([]NewPod{{Index: noIndex}}, missing)
		return
	}
	p.Create = s.newIndexes(p, missing)
}

// newIndexes are the next indexes to be tried. Those that have failed wait, each for itself, where each has its own limit.
func (s State) newIndexes(p *Plan, missing int) (out []NewPod) {
	var busy []int
	for _, pod := range s.Pods {
		index := anyIndex(pod)
		if index != noIndex && (workload.Active(pod) || s.onlyFailed() && workload.Terminating(pod)) {
			busy = append(busy, index)
		}
	}
	var wait time.Duration
	taken := p.succeededIndexes.Union(p.failedIndexes).Union(jobs.IndexesOf(busy...))
	for _, index := range taken.Missing(missing, s.completions()) {
		next := NewPod{Index: index}
		if last := p.last[index]; last != nil {
			if left := (Failures{Count: allFailures(last) + 1, Last: endOf(last)}).wait(s.Now); left > 0 {
				wait = workload.Sooner(wait, left)
				continue
			}
			next.Failures = annotation(last, batchv1.JobIndexFailureCountAnnotation)
			next.Ignored = annotation(last, batchv1.JobIndexIgnoredFailureCountAnnotation)
			if action, _ := s.judge(last); action == batchv1.PodFailurePolicyActionIgnore {
				next.Ignored++
			} else {
				next.Failures++
			}
		}
		out = append(out, next)
	}
	p.Again = workload.Sooner(p.Again, wait)
	return out
}

// surplus are the Pods to delete, at least so many: first those whose index is nobody's or another Pod's too.
func (s State) surplus(active []*corev1.Pod, least int) (out []*corev1.Pod) {
	rest := active
	if jobs.Indexed(&s.Job.Spec) {
		rest = nil
		byIndex := map[int][]*corev1.Pod{}
		for _, pod := range active {
			if index := s.index(pod); index == noIndex {
				out = append(out, pod)
			} else {
				byIndex[index] = append(byIndex[index], pod)
			}
		}
		for _, same := range byIndex {
			ordered := workload.FirstToGo(same, same, s.Now)
			out = append(out, ordered[:len(ordered)-1]...)
			rest = append(rest, ordered[len(ordered)-1])
		}
		slices.SortFunc(rest, func(a, b *corev1.Pod) int { return cmp.Compare(anyIndex(a), anyIndex(b)) })
	}
	if more := least - len(out); more > 0 {
		out = append(out, workload.FirstToGo(rest, rest, s.Now)[:min(more, len(rest))]...)
	}
	return out
}
