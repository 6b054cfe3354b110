package cronjob

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/jobs"
)

// late is added to the time at which a CronJob is looked at: a clock that is a little behind should not make it look too early.
const late = 100 * time.Millisecond

// State is what there is.
type State struct {
	Cron *batchv1.CronJob
	// Jobs are those that it owns.
	Jobs []*batchv1.Job
	Now  time.Time
}

// Event is something to tell.
type Event struct{ Type, Reason, Message string }

// Plan is what to do.
type Plan struct {
	Status batchv1.CronJobStatus
	// Create is a Job to be made, or nil. Before, those in Replace are deleted.
	Create  *batchv1.Job
	Replace []*batchv1.Job
	// Remove are finished Jobs that are more than are kept.
	Remove []*batchv1.Job
	// Due is the time that Create is for.
	Due    time.Time
	Events []Event
	// Again is when to look again although nothing changes; 0: never.
	Again time.Duration
}

func (p *Plan) tell(kind, reason, format string, args ...any) {
	p.Events = append(p.Events, Event{kind, reason, fmt.Sprintf(format, args...)})
}

// Decide says what is to be done.
func Decide(s State) Plan {
	p := Plan{Status: *s.Cron.Status.DeepCopy(), Remove: s.old()}
	s.follow(&p)
	spec := &s.Cron.Spec
	if s.Cron.DeletionTimestamp != nil || spec.Suspend != nil && *spec.Suspend {
		return p
	}
	zone := ""
	if spec.TimeZone != nil {
		zone = *spec.TimeZone
		if _, err := jobs.LoadZone(zone); err != nil {
			p.tell(corev1.EventTypeWarning, "UnknownTimeZone", "spec.timeZone %q: %v", zone, err)
			return p
		}
	}
	if jobs.HasZone(spec.Schedule) {
		p.tell(corev1.EventTypeWarning, "UnsupportedSchedule", "spec.schedule %q: TZ and CRON_TZ are not supported; use spec.timeZone", spec.Schedule)
	}
	schedule, err := jobs.ParseSchedule(spec.Schedule, zone)
	if err != nil {
		p.tell(corev1.EventTypeWarning, "UnparseableSchedule", "spec.schedule %q: %v", spec.Schedule, err)
		return p
	}
	p.Again = s.wait(schedule)
	s.start(&p, schedule)
	return p
}

// follow keeps the list of Jobs that run.
func (s State) follow(p *Plan) {
	running := map[types.UID]bool{}
	for _, job := range s.Jobs {
		end := jobs.Finished(&job.Status)
		listed := slices.ContainsFunc(p.Status.Active, func(ref corev1.ObjectReference) bool { return ref.UID == job.UID })
		if end == nil {
			running[job.UID] = true
			if !listed {
				// It was made and the status could not be written, or somebody made it by hand.
				p.tell(corev1.EventTypeWarning, "UnexpectedJob", "Job %s runs that is not in status.active", job.Name)
			}
			continue
		}
		if listed {
			p.tell(corev1.EventTypeNormal, "SawCompletedJob", "Job %s has ended, condition: %s", job.Name, end.Type)
		}
		if done := job.Status.CompletionTime; end.Type == batchv1.JobComplete && done != nil &&
			(p.Status.LastSuccessfulTime == nil || done.After(p.Status.LastSuccessfulTime.Time)) {
			p.Status.LastSuccessfulTime = done
		}
	}
	finished := map[types.UID]bool{}
	for _, job := range s.Jobs {
		finished[job.UID] = !running[job.UID]
	}
	p.Status.Active = slices.DeleteFunc(p.Status.Active, func(ref corev1.ObjectReference) bool {
		ended, known := finished[ref.UID]
		if !known {
			p.tell(corev1.EventTypeNormal, "MissingJob", "Job %s is gone", ref.Name)
		}
		return ended || !known
	})
	if len(p.Status.Active) == 0 {
		p.Status.Active = nil
	}
}

// since is when the CronJob was last due, or made.
func (s State) since() time.Time {
	if last := s.Cron.Status.LastScheduleTime; last != nil {
		return last.Time
	}
	return s.Cron.CreationTimestamp.Time
}

// wait is how long it takes until the CronJob is due again.
func (s State) wait(schedule jobs.Schedule) time.Duration {
	next := schedule.Next(s.Now)
	// What begins anew each time, as @every does, does so from the last time it was due.
	if due, _, err := jobs.Due(schedule, s.since(), s.Now); err == nil {
		from := s.since()
		if !due.IsZero() {
			from = due
		}
		if n := schedule.Next(from); n.After(s.Now) {
			next = n
		}
	}
	if next.IsZero() {
		return 0
	}
	return next.Sub(s.Now) + late
}

// start decides whether a Job is due.
func (s State) start(p *Plan, schedule jobs.Schedule) {
	spec := &s.Cron.Spec
	since := s.since()
	var deadline time.Duration
	if spec.StartingDeadlineSeconds != nil {
		deadline = jobs.Seconds(*spec.StartingDeadlineSeconds)
		if earliest := s.Now.Add(-deadline); earliest.After(since) {
			since = earliest
		}
	}
	due, missed, err := jobs.Due(schedule, since, s.Now)
	switch {
	case err != nil:
		p.tell(corev1.EventTypeWarning, "InvalidSchedule", "spec.schedule %q: %v", spec.Schedule, err)
		return
	case due.IsZero():
		return
	}
	if missed {
		p.tell(corev1.EventTypeWarning, "TooManyMissedTimes", "more than 100 times were missed; spec.startingDeadlineSeconds limits how far to look back, and clocks may differ")
	}
	job := s.newJob(due)
	last := s.Cron.Status.LastScheduleTime
	switch {
	case spec.StartingDeadlineSeconds != nil && due.Add(deadline).Before(s.Now):
		p.tell(corev1.EventTypeWarning, "MissSchedule", "it is too late for the Job of %s", due.UTC().Format(time.RFC1123Z))
		return
	case last != nil && last.Time.Equal(due), slices.ContainsFunc(p.Status.Active, func(ref corev1.ObjectReference) bool { return ref.Name == job.Name }):
		return // it was made
	case spec.ConcurrencyPolicy == batchv1.ForbidConcurrent && len(p.Status.Active) > 0:
		p.tell(corev1.EventTypeNormal, "JobAlreadyActive", "no Job is started while the last one runs: spec.concurrencyPolicy is Forbid")
		return
	case spec.ConcurrencyPolicy == batchv1.ReplaceConcurrent:
		for _, ref := range p.Status.Active {
			if i := slices.IndexFunc(s.Jobs, func(j *batchv1.Job) bool { return j.UID == ref.UID }); i >= 0 {
				p.Replace = append(p.Replace, s.Jobs[i])
			}
		}
	}
	p.Create, p.Due = job, due
}

// Started is the status after the Job was made, or found to exist.
func (p *Plan) Started(job *batchv1.Job) {
	replaced := func(ref corev1.ObjectReference) bool {
		return slices.ContainsFunc(p.Replace, func(j *batchv1.Job) bool { return j.UID == ref.UID })
	}
	p.Status.Active = append(slices.DeleteFunc(p.Status.Active, replaced), corev1.ObjectReference{
		APIVersion: batchv1.SchemeGroupVersion.String(), Kind: "Job", Namespace: job.Namespace, Name: job.Name, UID: job.UID,
		ResourceVersion: job.ResourceVersion,
	})
	p.Status.LastScheduleTime = &metav1.Time{Time: p.Due}
}

// newJob is the Job of a time. Its name says for which, so that there can be only one.
func (s State) newJob(due time.Time) *batchv1.Job {
	template := &s.Cron.Spec.JobTemplate
	annotations := maps.Clone(template.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	told := due.UTC()
	if s.Cron.Spec.TimeZone != nil {
		if zone, err := jobs.LoadZone(*s.Cron.Spec.TimeZone); err == nil {
			told = due.In(zone)
		}
	}
	annotations[batchv1.CronJobScheduledTimestampAnnotation] = told.Format(time.RFC3339)
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Cron.Namespace, Name: fmt.Sprintf("%s-%d", s.Cron.Name, due.Unix()/60),
			Labels: maps.Clone(template.Labels), Annotations: annotations, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(s.Cron, Kind)},
		},
		Spec: *template.Spec.DeepCopy(),
	}
}

// old are the finished Jobs that are more than the limits keep, of each kind the oldest.
func (s State) old() (out []*batchv1.Job) {
	ended := map[batchv1.JobConditionType][]*batchv1.Job{}
	for _, job := range s.Jobs {
		if end := jobs.Finished(&job.Status); end != nil && job.DeletionTimestamp == nil {
			ended[end.Type] = append(ended[end.Type], job)
		}
	}
	for _, kind := range []struct {
		of   []*batchv1.Job
		keep *int32
	}{{ended[batchv1.JobComplete], s.Cron.Spec.SuccessfulJobsHistoryLimit}, {ended[batchv1.JobFailed], s.Cron.Spec.FailedJobsHistoryLimit}} {
		if kind.keep == nil || len(kind.of) <= int(*kind.keep) {
			continue
		}
		slices.SortFunc(kind.of, func(a, b *batchv1.Job) int {
			return cmp.Or(startOf(a).Compare(startOf(b)), cmp.Compare(a.Name, b.Name))
		})
		out = append(out, kind.of[:len(kind.of)-int(*kind.keep)]...)
	}
	return out
}

// startOf is when a Job was started. Those that never were come last.
func startOf(job *batchv1.Job) time.Time {
	if job.Status.StartTime == nil {
		return time.Unix(1<<40, 0)
	}
	return job.Status.StartTime.Time
}
