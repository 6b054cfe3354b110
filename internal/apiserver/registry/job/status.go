package job

import (
	"context"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
	"portal/internal/jobs"
)

// validateStatus judges what a controller says of a Job: it may be another's than Kubernetes' own. Most rules are asked only
// where something of what they are about has changed, so that a status which breaks one can still be repaired.
func validateStatus(_ context.Context, job, old *batchv1.Job) field.ErrorList {
	at, now := workload.AtStatus, &job.Status
	errs := rules.MetaUpdate(job, old)
	errs = append(errs, workload.NotNegative(at, workload.N("active", now.Active), workload.N("succeeded", now.Succeeded), workload.N("failed", now.Failed),
		workload.P("ready", now.Ready), workload.P("terminating", now.Terminating))...)
	errs = append(errs, validateUncounted(at.Child("uncountedTerminatedPods"), now.UncountedTerminatedPods)...)
	s := statusChange{job: job, now: now, before: &old.Status}
	errs = append(errs, s.conditions(at.Child("conditions"))...)
	errs = append(errs, s.counters(at)...)
	errs = append(errs, s.times(at)...)
	return append(errs, s.indexes(at)...)
}

func validateUncounted(at *field.Path, uncounted *batchv1.UncountedTerminatedPods) field.ErrorList {
	if uncounted == nil {
		return nil
	}
	var errs field.ErrorList
	seen := map[types.UID]bool{}
	for _, list := range []struct {
		name string
		uids []types.UID
	}{{"succeeded", uncounted.Succeeded}, {"failed", uncounted.Failed}} {
		for i, uid := range list.uids {
			at := at.Child(list.name).Index(i)
			if uid == "" {
				errs = append(errs, field.Invalid(at, uid, "must not be empty"))
			} else if seen[uid] {
				errs = append(errs, field.Duplicate(at, uid))
			}
			seen[uid] = true
		}
	}
	return errs
}

type statusChange struct {
	job         *batchv1.Job
	now, before *batchv1.JobStatus
}

func (s statusChange) is(kind batchv1.JobConditionType) bool {
	return jobs.Condition(s.now, kind) != nil
}
func (s statusChange) was(kind batchv1.JobConditionType) bool {
	return jobs.Condition(s.before, kind) != nil
}

// turned says whether one of some conditions is another than before.
func (s statusChange) turned(kinds ...batchv1.JobConditionType) bool {
	for _, kind := range kinds {
		if s.is(kind) != s.was(kind) {
			return true
		}
	}
	return false
}

func (s statusChange) conditions(at *field.Path) field.ErrorList {
	const (
		complete, failed = batchv1.JobComplete, batchv1.JobFailed
		target, met      = batchv1.JobFailureTarget, batchv1.JobSuccessCriteriaMet
	)
	var errs field.ErrorList
	wrong := func(when bool, why string, args ...any) {
		if when {
			errs = append(errs, field.Invalid(at, field.OmitValueType{}, fmt.Sprintf(why, args...)))
		}
	}
	wrong(s.turned(complete, failed) && s.is(complete) && s.is(failed), "a Job cannot be Complete and Failed")
	wrong(s.turned(complete, target) && s.is(complete) && s.is(target), "a Job that is to fail (FailureTarget) cannot be Complete")
	wrong((s.turned(failed) || s.failedIndexesChanged()) && s.is(failed) && !s.is(target), "Failed needs FailureTarget beside it")
	wrong((s.turned(complete, met) || s.job.Spec.SuccessPolicy != nil) && s.is(complete) && !s.is(met), "Complete needs SuccessCriteriaMet beside it")
	wrong(s.is(met) && s.is(failed), "a Job that has met its criteria (SuccessCriteriaMet) cannot be Failed")
	wrong(s.is(met) && s.is(target), "a Job that has met its criteria (SuccessCriteriaMet) cannot be about to fail (FailureTarget)")
	for _, kind := range []batchv1.JobConditionType{failed, complete, target, met} {
		wrong(s.was(kind) && !s.is(kind), "%s cannot be taken back", kind)
	}
	wrong(s.was(complete) && !s.was(met) && s.is(met), "SuccessCriteriaMet comes before Complete, not after")
	return errs
}

func (s statusChange) counters(at *field.Path) field.ErrorList {
	var errs field.ErrorList
	now, before := s.now, s.before
	finished, turned := jobs.Finished(now) != nil, (jobs.Finished(now) != nil) != (jobs.Finished(before) != nil)
	if (turned || now.Active != before.Active) && finished && now.Active > 0 {
		errs = append(errs, field.Invalid(at.Child("active"), now.Active, "must be 0 of a Job that is finished"))
	}
	if (turned || workload.Changed(now.Terminating, before.Terminating)) && finished && or(now.Terminating, 0) > 0 {
		errs = append(errs, field.Invalid(at.Child("terminating"), *now.Terminating, "must be 0 of a Job that is finished"))
	}
	if (workload.Changed(now.Ready, before.Ready) || now.Active != before.Active) && or(now.Ready, 0) > now.Active {
		errs = append(errs, field.Invalid(at.Child("ready"), *now.Ready, "must not be more than status.active"))
	}
	if u := now.UncountedTerminatedPods; (turned || workload.Changed(u, before.UncountedTerminatedPods)) && finished && u != nil && len(u.Succeeded)+len(u.Failed) > 0 {
		errs = append(errs, field.Invalid(at.Child("uncountedTerminatedPods"), u, "must be empty of a Job that is finished"))
	}
	if now.Failed < before.Failed {
		errs = append(errs, field.Invalid(at.Child("failed"), now.Failed, "must not become less"))
	}
	// Jobs whose indexes can become fewer may lose some that have succeeded.
	elastic := jobs.Indexed(&s.job.Spec) && !workload.Changed(s.job.Spec.Completions, s.job.Spec.Parallelism)
	if !elastic && now.Succeeded < before.Succeeded {
		errs = append(errs, field.Invalid(at.Child("succeeded"), now.Succeeded, "must not become less"))
	}
	return errs
}

func (s statusChange) times(at *field.Path) field.ErrorList {
	var errs field.ErrorList
	now, before := s.now, s.before
	started, ended := !now.StartTime.Equal(before.StartTime), !now.CompletionTime.Equal(before.CompletionTime)
	start, end := at.Child("startTime"), at.Child("completionTime")
	turned := s.turned(batchv1.JobComplete)
	suspended := or(s.job.Spec.Suspend, false)
	nothing := suspended && s.job.Spec.Completions != nil && *s.job.Spec.Completions == 0
	if finished := jobs.Finished(now) != nil; finished && now.StartTime == nil && !nothing && (started || finished != (jobs.Finished(before) != nil)) {
		errs = append(errs, field.Required(start, "of a Job that is finished"))
	}
	if before.StartTime != nil && started && !suspended && !s.resumed() {
		errs = append(errs, field.Invalid(start, now.StartTime, "cannot be changed while the Job is not suspended"))
	}
	if (started || ended) && now.StartTime != nil && now.CompletionTime != nil && now.CompletionTime.Before(now.StartTime) {
		errs = append(errs, field.Invalid(end, now.CompletionTime, "must not be before status.startTime"))
	}
	if (turned || ended) && now.CompletionTime != nil && !s.is(batchv1.JobComplete) {
		errs = append(errs, field.Invalid(end, now.CompletionTime, "must not be set of a Job that is not Complete"))
	}
	if (turned || ended) && now.CompletionTime == nil && s.is(batchv1.JobComplete) {
		errs = append(errs, field.Required(end, "of a Job that is Complete"))
	}
	if ended && now.CompletionTime != nil && before.CompletionTime != nil {
		errs = append(errs, field.Invalid(end, now.CompletionTime, "cannot be changed"))
	}
	return errs
}

// resumed says that a Job was suspended and no longer is.
func (s statusChange) resumed() bool {
	for _, c := range s.now.Conditions {
		if c.Type == batchv1.JobSuspended && c.Status == corev1.ConditionFalse {
			return s.was(batchv1.JobSuspended)
		}
	}
	return false
}

func (s statusChange) failedIndexesChanged() bool {
	return workload.Changed(s.now.FailedIndexes, s.before.FailedIndexes)
}

func (s statusChange) indexes(at *field.Path) field.ErrorList {
	var errs field.ErrorList
	spec, now := &s.job.Spec, s.now
	doneChanged, failedChanged := now.CompletedIndexes != s.before.CompletedIndexes, s.failedIndexesChanged()
	completed, failed := at.Child("completedIndexes"), at.Child("failedIndexes")
	if doneChanged && now.CompletedIndexes != "" && !jobs.Indexed(spec) {
		errs = append(errs, field.Invalid(completed, now.CompletedIndexes, "needs the completionMode Indexed"))
	}
	if failedChanged && now.FailedIndexes != nil && spec.BackoffLimitPerIndex == nil {
		errs = append(errs, field.Invalid(failed, *now.FailedIndexes, "needs spec.backoffLimitPerIndex"))
	}
	if spec.Completions == nil {
		return errs
	}
	limit := int(*spec.Completions)
	read := func(at *field.Path, text string, report bool) jobs.Indexes {
		set, err := jobs.ParseIndexes(text, limit)
		if err != nil && report {
			errs = append(errs, field.Invalid(at, text, err.Error()))
		}
		return set
	}
	done := read(completed, now.CompletedIndexes, doneChanged)
	if now.FailedIndexes == nil {
		return errs
	}
	lost := read(failed, *now.FailedIndexes, failedChanged && spec.BackoffLimitPerIndex != nil)
	if (doneChanged || failedChanged) && done.Common(lost) > 0 {
		errs = append(errs, field.Invalid(failed, *now.FailedIndexes, "must not have an index that status.completedIndexes has"))
	}
	return errs
}
