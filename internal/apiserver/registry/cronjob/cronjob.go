// Package cronjob describes batch/v1 CronJobs: Jobs that are made by a schedule. It makes none of them.
package cronjob

import (
	"context"
	"regexp"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/job"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
	"portal/internal/jobs"
)

// maxName leaves room for the time that a Job's name ends with.
const maxName = validation.DNS1035LabelMaxLength - 11

// New describes CronJobs.
func New() registry.Resource {
	return &registry.Kind[batchv1.CronJob, *batchv1.CronJob]{
		Served: batchv1.SchemeGroupVersion,
		Plural: "cronjobs", Singular: "cronjob", KindName: "CronJob",
		ShortNames: []string{"cj"},
		Categories: []string{"all"},
		NewList:    func() runtime.Object { return &batchv1.CronJobList{} },
		Default:    setDefaults,
		PrepareCreate: func(_ context.Context, c *batchv1.CronJob) {
			c.Status = batchv1.CronJobStatus{}
			c.Generation = 1
			job.DropUnserved(&c.Spec.JobTemplate.Spec)
		},
		PrepareUpdate: func(_ context.Context, c, old *batchv1.CronJob) {
			c.Status = old.Status
			job.DropUnserved(&c.Spec.JobTemplate.Spec)
			if workload.Changed(c.Spec, old.Spec) {
				c.Generation = old.Generation + 1
			}
		},
		Validate:       validateCreate,
		ValidateUpdate: validateUpdate,
		Warnings:       warnings,
		Columns:        columns(),
		Reset:          []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[batchv1.CronJob, *batchv1.CronJob]{
			Prepare:  func(_ context.Context, c, old *batchv1.CronJob) { c.Spec = old.Spec },
			Validate: func(_ context.Context, c, old *batchv1.CronJob) field.ErrorList { return rules.MetaUpdate(c, old) },
			Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("spec")},
		},
	}
}

func setDefaults(c *batchv1.CronJob) {
	spec := &c.Spec
	if spec.ConcurrencyPolicy == "" {
		spec.ConcurrencyPolicy = batchv1.AllowConcurrent
	}
	workload.OrPoint(&spec.Suspend, false)
	workload.OrPoint(&spec.SuccessfulJobsHistoryLimit, 3)
	workload.OrPoint(&spec.FailedJobsHistoryLimit, 1)
	job.DefaultTemplate(&spec.JobTemplate.Spec)
}

func validateCreate(_ context.Context, c *batchv1.CronJob) field.ErrorList {
	errs := append(rules.Finalizers(c), validateSpec(&c.Spec, nil)...)
	if len(c.Name) > maxName {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), c.Name, "must not be longer than 52 characters: names of Jobs begin with it"))
	}
	return errs
}

func validateUpdate(_ context.Context, c, old *batchv1.CronJob) field.ErrorList {
	return append(rules.MetaUpdate(c, old), validateSpec(&c.Spec, &old.Spec)...)
}

func validateSpec(spec, old *batchv1.CronJobSpec) field.ErrorList {
	at := workload.At
	errs := validateSchedule(at.Child("schedule"), spec, old != nil && jobs.HasZone(old.Schedule))
	if old == nil || workload.Changed(spec.TimeZone, old.TimeZone) {
		errs = append(errs, validateTimeZone(at.Child("timeZone"), spec.TimeZone)...)
	}
	errs = append(errs, rules.RequiredOneOf(at.Child("concurrencyPolicy"), spec.ConcurrencyPolicy,
		batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent)...)
	errs = append(errs, workload.NotNegative(at, workload.P("startingDeadlineSeconds", spec.StartingDeadlineSeconds),
		workload.P("successfulJobsHistoryLimit", spec.SuccessfulJobsHistoryLimit), workload.P("failedJobsHistoryLimit", spec.FailedJobsHistoryLimit))...)

	template := at.Child("jobTemplate", "spec")
	errs = append(errs, job.ValidateSpec(template, &spec.JobTemplate.Spec)...)
	if selector := spec.JobTemplate.Spec.Selector; selector != nil {
		errs = append(errs, field.Invalid(template.Child("selector"), selector, "must be left out: each Job gets its own"))
	}
	if manual := spec.JobTemplate.Spec.ManualSelector; manual != nil && *manual {
		errs = append(errs, field.NotSupported(template.Child("manualSelector"), *manual, []string{"nil", "false"}))
	}
	return errs
}

// validateSchedule takes a time zone in the schedule only where one is stored already.
func validateSchedule(at *field.Path, spec *batchv1.CronJobSpec, zoned bool) field.ErrorList {
	if spec.Schedule == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	var errs field.ErrorList
	if _, err := jobs.ParseSchedule(spec.Schedule, ""); err != nil {
		errs = append(errs, field.Invalid(at, spec.Schedule, err.Error()))
	}
	if jobs.HasZone(spec.Schedule) && (!zoned || spec.TimeZone != nil) {
		errs = append(errs, field.Invalid(at, spec.Schedule, "must not have TZ or CRON_TZ: spec.timeZone is for that"))
	}
	return errs
}

// zonePart is what stands between the slashes of a time zone's name: no path into the file system.
var zonePart = regexp.MustCompile(`^[A-Za-z._0-9+][A-Za-z._0-9+-]{0,13}$`)

func validateTimeZone(at *field.Path, name *string) field.ErrorList {
	if name == nil {
		return nil
	}
	if *name == "" {
		return field.ErrorList{field.Invalid(at, *name, "must be left out or not be empty")}
	}
	for part := range strings.SplitSeq(*name, "/") {
		if part == "." || part == ".." || !zonePart.MatchString(part) {
			return field.ErrorList{field.Invalid(at, *name, "is no time zone; Europe/Paris is one")}
		}
	}
	if _, err := jobs.LoadZone(*name); err != nil {
		return field.ErrorList{field.Invalid(at, *name, err.Error())}
	}
	return nil
}

func warnings(ctx context.Context, c, old *batchv1.CronJob) []string {
	at, spec := workload.At.Child("jobTemplate", "spec"), &c.Spec.JobTemplate.Spec
	if old == nil {
		return append(workload.NameWarning(c), job.SpecWarnings(ctx, at, spec, nil)...)
	}
	out := job.SpecWarnings(ctx, at, spec, &old.Spec.JobTemplate.Spec)
	if jobs.HasZone(c.Spec.Schedule) {
		out = append(out, "spec.schedule: TZ and CRON_TZ are not supported; use spec.timeZone")
	}
	return out
}

func columns() []registry.Column[batchv1.CronJob] {
	spec, status := batchv1.CronJobSpec{}.SwaggerDoc(), batchv1.CronJobStatus{}.SwaggerDoc()
	out := []registry.Column[batchv1.CronJob]{
		{Name: "Schedule", Description: spec["schedule"], Cell: func(c *batchv1.CronJob) any { return c.Spec.Schedule }},
		{Name: "Timezone", Description: spec["timeZone"], Cell: func(c *batchv1.CronJob) any {
			if c.Spec.TimeZone == nil {
				return "<none>"
			}
			return *c.Spec.TimeZone
		}},
		{Name: "Suspend", Type: "boolean", Description: spec["suspend"], Cell: func(c *batchv1.CronJob) any {
			switch {
			case c.Spec.Suspend == nil:
				return "<unset>"
			case *c.Spec.Suspend:
				return "True"
			}
			return "False"
		}},
		{Name: "Active", Type: "integer", Description: status["active"], Cell: func(c *batchv1.CronJob) any { return int64(len(c.Status.Active)) }},
		{Name: "Last Schedule", Description: status["lastScheduleTime"], Cell: func(c *batchv1.CronJob) any {
			if c.Status.LastScheduleTime == nil {
				return "<none>"
			}
			return registry.Since(*c.Status.LastScheduleTime)
		}},
		registry.Age[batchv1.CronJob](),
	}
	out = append(out, workload.ContainerColumns(func(c *batchv1.CronJob) *corev1.PodTemplateSpec { return &c.Spec.JobTemplate.Spec.Template }, true)...)
	return append(out, registry.Column[batchv1.CronJob]{Name: "Selector", Wide: true, Description: batchv1.JobSpec{}.SwaggerDoc()["selector"],
		Cell: func(c *batchv1.CronJob) any { return metav1.FormatLabelSelector(c.Spec.JobTemplate.Spec.Selector) }})
}
