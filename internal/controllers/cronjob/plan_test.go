package cronjob

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// cron is due at each full hour, and was so last at eleven.
func cron(change func(*batchv1.CronJob)) *batchv1.CronJob {
	c := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c", UID: "u", CreationTimestamp: metav1.NewTime(noon.Add(-24 * time.Hour))}}
	c.Spec = batchv1.CronJobSpec{Schedule: "0 * * * *", TimeZone: ptr.To("UTC"), ConcurrencyPolicy: batchv1.AllowConcurrent,
		SuccessfulJobsHistoryLimit: ptr.To[int32](3), FailedJobsHistoryLimit: ptr.To[int32](1)}
	c.Status.LastScheduleTime = &metav1.Time{Time: noon.Add(-time.Hour)}
	if change != nil {
		change(c)
	}
	return c
}

func job(name string, end batchv1.JobConditionType, start time.Time) *batchv1.Job {
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(name)}}
	j.Status.StartTime = &metav1.Time{Time: start}
	if end != "" {
		j.Status.Conditions = []batchv1.JobCondition{{Type: end, Status: corev1.ConditionTrue}}
		if end == batchv1.JobComplete {
			j.Status.CompletionTime = &metav1.Time{Time: start.Add(time.Minute)}
		}
	}
	return j
}

func active(names ...string) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) {
		for _, name := range names {
			c.Status.Active = append(c.Status.Active, corev1.ObjectReference{Namespace: "n", Name: name, UID: types.UID(name)})
		}
	}
}

func both(a, b func(*batchv1.CronJob)) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { a(c); b(c) }
}

func policy(p batchv1.ConcurrencyPolicy) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { c.Spec.ConcurrencyPolicy = p }
}

func TestDecide(t *testing.T) {
	name := fmt.Sprintf("c-%d", noon.Unix()/60)
	running := job("r", "", noon.Add(-time.Hour))
	for what, c := range map[string]struct {
		cron *batchv1.CronJob
		jobs []*batchv1.Job
		now  time.Time
		// create, number of replaced ones, reasons of events, how long to wait
		create   string
		replaced int
		events   string
		wait     time.Duration
	}{
		"not due":       {cron(nil), nil, noon.Add(-time.Minute), "", 0, "", time.Minute + late},
		"due":           {cron(nil), nil, noon, name, 0, "", time.Hour + late},
		"late":          {cron(nil), nil, noon.Add(30 * time.Minute), name, 0, "", 30*time.Minute + late},
		"too late":      {cron(func(c *batchv1.CronJob) { c.Spec.StartingDeadlineSeconds = ptr.To[int64](60) }), nil, noon.Add(2 * time.Minute), "", 0, "", 58*time.Minute + late},
		"just in time":  {cron(func(c *batchv1.CronJob) { c.Spec.StartingDeadlineSeconds = ptr.To[int64](60) }), nil, noon.Add(time.Minute - time.Second), name, 0, "", 59*time.Minute + time.Second + late},
		"no deadline":   {cron(func(c *batchv1.CronJob) { c.Spec.StartingDeadlineSeconds = ptr.To[int64](math.MaxInt64) }), nil, noon.Add(2 * time.Minute), name, 0, "", 58*time.Minute + late},
		"suspended":     {cron(func(c *batchv1.CronJob) { c.Spec.Suspend = ptr.To(true) }), nil, noon, "", 0, "", 0},
		"being deleted": {cron(func(c *batchv1.CronJob) { c.DeletionTimestamp = &metav1.Time{Time: noon} }), nil, noon, "", 0, "", 0},
		"made before":   {cron(active(name)), []*batchv1.Job{job(name, "", noon)}, noon, "", 0, "", time.Hour + late},
		"several":       {cron(active("r")), []*batchv1.Job{running}, noon, name, 0, "", time.Hour + late},
		"forbidden":     {cron(both(active("r"), policy(batchv1.ForbidConcurrent))), []*batchv1.Job{running}, noon, "", 0, "JobAlreadyActive", time.Hour + late},
		"replaced":      {cron(both(active("r"), policy(batchv1.ReplaceConcurrent))), []*batchv1.Job{running}, noon, name, 1, "", time.Hour + late},
		"unknown zone":  {cron(func(c *batchv1.CronJob) { c.Spec.TimeZone = ptr.To("No/Where") }), nil, noon, "", 0, "UnknownTimeZone", 0},
		"no schedule":   {cron(func(c *batchv1.CronJob) { c.Spec.Schedule = "x" }), nil, noon, "", 0, "UnparseableSchedule", 0},
		"many missed":   {cron(func(c *batchv1.CronJob) { c.Status.LastScheduleTime.Time = noon.AddDate(-1, 0, 0) }), nil, noon, name, 0, "TooManyMissedTimes", time.Hour + late},
	} {
		p := Decide(State{Cron: c.cron, Jobs: c.jobs, Now: c.now})
		var events []string
		for _, e := range p.Events {
			events = append(events, e.Reason)
		}
		created := ""
		if p.Create != nil {
			created = p.Create.Name
		}
		if created != c.create || len(p.Replace) != c.replaced || strings.Join(events, " ") != c.events || p.Again != c.wait {
			t.Errorf("%s: %q, %d replaced, %q, again in %v", what, created, len(p.Replace), events, p.Again)
		}
	}
}

// The Job says for which time it is, and is in the status; the one that it replaces no longer.
func TestStarted(t *testing.T) {
	c := cron(both(active("r"), policy(batchv1.ReplaceConcurrent)))
	*c.Spec.TimeZone = "Europe/Paris"
	p := Decide(State{Cron: c, Jobs: []*batchv1.Job{job("r", "", noon.Add(-time.Hour))}, Now: noon.Add(time.Second)})
	if got := p.Create.Annotations[batchv1.CronJobScheduledTimestampAnnotation]; got != "2026-01-01T13:00:00+01:00" || !metav1.IsControlledBy(p.Create, c) {
		t.Errorf("%q, %+v", got, p.Create.OwnerReferences)
	}
	p.Started(p.Create)
	if len(p.Status.Active) != 1 || p.Status.Active[0].Name != p.Create.Name || !p.Status.LastScheduleTime.Time.Equal(noon) {
		t.Errorf("%+v", p.Status)
	}
}

func TestHistory(t *testing.T) {
	jobs := []*batchv1.Job{job("f1", batchv1.JobFailed, noon), job("f0", batchv1.JobFailed, noon.Add(-time.Hour))}
	for i := range 5 {
		jobs = append(jobs, job(fmt.Sprint("s", i), batchv1.JobComplete, noon.Add(time.Duration(i)*time.Minute)))
	}
	p := Decide(State{Cron: cron(active("s4", "gone")), Jobs: jobs, Now: noon.Add(-time.Minute)})
	var removed []string
	for _, j := range p.Remove {
		removed = append(removed, j.Name)
	}
	if got := strings.Join(removed, " "); got != "s0 s1 f0" {
		t.Errorf("removed: %s", got)
	}
	if len(p.Status.Active) != 0 || !p.Status.LastSuccessfulTime.Time.Equal(noon.Add(5*time.Minute)) || len(p.Events) != 2 {
		t.Errorf("%+v, %v", p.Status, p.Events)
	}
}
