package job

import (
	"cmp"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/jobs"
)

// maxUncounted bounds the Pods that are counted in one sync: their UIDs are in the status for a while.
const maxUncounted = 500

// Done is what became of a plan.
type Done struct{ Created, Deleted, DeletedReady int32 }

// Record is how Pods that have ended are counted exactly once. First Status is written, which names them; then they are
// released, so that they may go; then they are counted, by Settle.
type Record struct {
	Status  batchv1.JobStatus
	Release []*corev1.Pod
	// Suspended and Resumed say that the Job has become so.
	Suspended, Resumed bool

	end     *batchv1.JobCondition // Complete or Failed, if the Job ends
	tracked map[types.UID]bool
	more    bool // there are Pods left for another sync
}

// Report makes the status after a plan was carried out.
func Report(s State, p Plan, d Done) Record {
	r := Record{Status: *s.Job.Status.DeepCopy(), tracked: map[types.UID]bool{}}
	status := &r.Status
	if status.UncountedTerminatedPods == nil {
		status.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{}
	}
	if status.StartTime == nil && !s.suspended() {
		status.StartTime = &metav1.Time{Time: s.Now}
	}
	status.Active = int32(len(p.active)) + d.Created - d.Deleted
	status.Ready, status.Terminating = new(int32), new(int32)
	*status.Ready, *status.Terminating = p.ready-d.DeletedReady, p.terminating+d.Deleted
	end := p.End
	switch {
	case end != nil && int(d.Deleted) != len(p.Delete):
		end = nil // not before all Pods are stopped
	case end == nil && s.complete(p, status.Active):
		end = s.condition(batchv1.JobSuccessCriteriaMet, batchv1.JobReasonCompletionsReached, "As many Pods have succeeded as spec.completions asks for")
	case end == nil && p.Managed:
		r.suspend(s)
	}
	r.gather(s, p, end)
	if jobs.Indexed(&s.Job.Spec) {
		status.CompletedIndexes, status.Succeeded = p.succeededIndexes.String(), int32(p.succeededIndexes.Len())
		if s.Job.Spec.BackoffLimitPerIndex != nil {
			failed := p.failedIndexes.String()
			status.FailedIndexes = &failed
		}
	}
	if end != nil {
		if jobs.Condition(status, end.Type) == nil {
			status.Conditions = append(status.Conditions, *end)
		}
		last := batchv1.JobFailed
		if end.Type == batchv1.JobSuccessCriteriaMet {
			last = batchv1.JobComplete
		}
		r.end = s.condition(last, end.Reason, end.Message)
	}
	return r
}

// complete says that enough Pods have succeeded, and none runs any more.
func (s State) complete(p Plan, active int32) bool {
	if active > 0 {
		return false
	}
	if s.Job.Spec.Completions == nil {
		return p.succeeded > 0
	}
	return p.succeeded >= *s.Job.Spec.Completions
}

// suspend keeps the condition that says whether the Job is suspended. While it is, no time passes for its deadline.
func (r *Record) suspend(s State) {
	status := &r.Status
	was := jobs.Condition(status, batchv1.JobSuspended) != nil
	switch now := s.suspended(); {
	case now && !was:
		r.Suspended = true
		setCondition(status, *s.condition(batchv1.JobSuspended, "JobSuspended", "The Job is suspended"))
		status.StartTime = nil
	case was && !now:
		r.Resumed = true
		resumed := s.condition(batchv1.JobSuspended, "JobResumed", "The Job goes on")
		resumed.Status = corev1.ConditionFalse
		setCondition(status, *resumed)
		status.StartTime = &metav1.Time{Time: s.Now}
	}
}

func setCondition(status *batchv1.JobStatus, c batchv1.JobCondition) {
	for i := range status.Conditions {
		if status.Conditions[i].Type == c.Type {
			status.Conditions[i] = c
			return
		}
	}
	status.Conditions = append(status.Conditions, c)
}

// gather notes the Pods that have ended, and those that can be released.
func (r *Record) gather(s State, p Plan, end *batchv1.JobCondition) {
	for _, pod := range s.Pods {
		if s.tracked(pod) {
			r.tracked[pod.UID] = true
		}
	}
	r.count()
	uncounted := r.Status.UncountedTerminatedPods
	indexed := jobs.Indexed(&s.Job.Spec)
	pods := slices.Clone(s.Pods)
	if indexed {
		slices.SortStableFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(anyIndex(a), anyIndex(b)) })
	}
	fails := end != nil && end.Type != batchv1.JobSuccessCriteriaMet
	indexes := 0
	for _, pod := range pods {
		if !s.tracked(pod) || !s.releasable(p, end, pod) {
			continue
		}
		r.Release = append(r.Release, pod)
		switch {
		case pod.Status.Phase == corev1.PodSucceeded && !slices.Contains(uncounted.Failed, pod.UID):
			if indexed {
				indexes++ // the index says that it was counted
			} else if !slices.Contains(uncounted.Succeeded, pod.UID) {
				uncounted.Succeeded = append(uncounted.Succeeded, pod.UID)
			}
		case s.hasFailed(pod) || fails:
			action, _ := s.judge(pod)
			counts := action != batchv1.PodFailurePolicyActionIgnore && (!indexed || s.index(pod) != noIndex)
			if counts && !slices.Contains(uncounted.Failed, pod.UID) {
				uncounted.Failed = append(uncounted.Failed, pod.UID)
			}
		}
		if indexes+len(uncounted.Succeeded)+len(uncounted.Failed) >= maxUncounted {
			r.more = true
			return
		}
	}
}

// releasable says whether a Pod is needed no more. A failed one is needed until the next Pod of its index carries its number of failures.
func (s State) releasable(p Plan, end *batchv1.JobCondition, pod *corev1.Pod) bool {
	if s.Job.DeletionTimestamp != nil || end != nil || pod.Status.Phase == corev1.PodSucceeded {
		return true
	}
	if !s.hasFailed(pod) {
		return false
	}
	last := p.last[s.index(pod)]
	return last == nil || last.UID != pod.UID
}

// count moves the Pods that are tracked no more from the list into the numbers.
func (r *Record) count() {
	u := r.Status.UncountedTerminatedPods
	for _, c := range []struct {
		uids *[]types.UID
		sum  *int32
	}{{&u.Succeeded, &r.Status.Succeeded}, {&u.Failed, &r.Status.Failed}} {
		left := slices.DeleteFunc(slices.Clone(*c.uids), func(uid types.UID) bool { return !r.tracked[uid] })
		*c.sum += int32(len(*c.uids) - len(left))
		if *c.uids = left; len(left) == 0 {
			*c.uids = nil
		}
	}
}

// Settle counts the Pods that were released, and ends the Job if nothing of it is left. It gives the condition with which the
// Job has ended, if it has.
func (r *Record) Settle(released map[types.UID]bool) *batchv1.JobCondition {
	for uid := range released {
		delete(r.tracked, uid)
	}
	r.count()
	u := r.Status.UncountedTerminatedPods
	if r.end == nil || r.more || len(u.Succeeded)+len(u.Failed) > 0 || *r.Status.Terminating > 0 {
		return nil
	}
	setCondition(&r.Status, *r.end)
	if r.end.Type == batchv1.JobComplete {
		r.Status.CompletionTime = &r.end.LastTransitionTime
	}
	return r.end
}
