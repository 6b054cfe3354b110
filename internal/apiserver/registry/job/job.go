// Package job describes batch/v1 Jobs: Pods that run until enough of them have succeeded. It makes none of them. The specification
// of a Job is judged here for CronJobs too.
package job

import (
	"context"
	"fmt"
	"maps"
	"math"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/workload"
	"portal/internal/jobs"
)

// Labels that Pods of a Job had before labels had domains.
const (
	legacyJobName       = "job-name"
	legacyControllerUID = "controller-uid"
)

// New describes Jobs.
func New() registry.Resource {
	return &registry.Kind[batchv1.Job, *batchv1.Job]{
		Served: batchv1.SchemeGroupVersion,
		Plural: "jobs", Singular: "job", KindName: "Job",
		Categories:       []string{"all"},
		NewList:          func() runtime.Object { return &batchv1.JobList{} },
		Default:          setDefaults,
		PrepareCreate:    prepareCreate,
		PrepareUpdate:    prepareUpdate,
		Validate:         validateCreate,
		ValidateUpdate:   validateUpdate,
		Warnings:         warnings,
		SelectableFields: []string{"status.successful"},
		Fields: func(job *batchv1.Job) fields.Set {
			return fields.Set{"status.successful": strconv.Itoa(int(job.Status.Succeeded))}
		},
		Columns: columns(),
		Reset:   []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[batchv1.Job, *batchv1.Job]{
			Prepare:  func(_ context.Context, job, old *batchv1.Job) { job.Spec = old.Spec },
			Validate: validateStatus,
			Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("spec")},
		},
		Customize: func(store *genericregistry.Store, _ map[string]rest.Storage) error {
			store.DeleteStrategy = orphaning{store.DeleteStrategy}
			return nil
		},
	}
}

// orphaning leaves the Pods when a delete doesn't say what becomes of them. This kind is older than garbage collection.
type orphaning struct{ rest.RESTDeleteStrategy }

var _ rest.GarbageCollectionDeleteStrategy = orphaning{}

// DefaultGarbageCollectionPolicy is to orphan.
func (orphaning) DefaultGarbageCollectionPolicy(context.Context) rest.GarbageCollectionPolicy {
	return rest.OrphanDependents
}

func setDefaults(job *batchv1.Job) {
	spec := &job.Spec
	if spec.Completions == nil && spec.Parallelism == nil {
		workload.OrPoint(&spec.Completions, 1)
	}
	workload.OrPoint(&spec.Parallelism, 1)
	if spec.BackoffLimitPerIndex != nil {
		workload.OrPoint(&spec.BackoffLimit, math.MaxInt32)
	}
	workload.OrPoint(&spec.BackoffLimit, 6)
	if len(job.Labels) == 0 && spec.Template.Labels != nil {
		job.Labels = maps.Clone(spec.Template.Labels)
	}
	workload.OrPoint(&spec.CompletionMode, batchv1.NonIndexedCompletion)
	workload.OrPoint(&spec.Suspend, false)
	if spec.PodFailurePolicy != nil {
		workload.OrPoint(&spec.PodReplacementPolicy, batchv1.Failed)
	}
	workload.OrPoint(&spec.PodReplacementPolicy, batchv1.TerminatingOrFailed)
	workload.OrPoint(&spec.ManualSelector, false)
	DefaultTemplate(spec)
}

// DefaultTemplate fills what is left out of that part of a specification which a CronJob's has as well.
func DefaultTemplate(spec *batchv1.JobSpec) {
	pod.DefaultTemplate(&spec.Template)
	if spec.PodFailurePolicy == nil {
		return
	}
	for i := range spec.PodFailurePolicy.Rules {
		patterns := spec.PodFailurePolicy.Rules[i].OnPodConditions
		for j := range patterns {
			if patterns[j].Status == "" {
				patterns[j].Status = corev1.ConditionTrue
			}
		}
	}
}

// DropUnserved drops what belongs to features that Kubernetes has off by default.
func DropUnserved(spec *batchv1.JobSpec) {
	spec.Scheduling = nil
	pod.PrepareTemplate(&spec.Template)
}

func prepareCreate(_ context.Context, job *batchv1.Job) {
	if job.Spec.ManualSelector == nil || !*job.Spec.ManualSelector {
		generateSelector(job)
	}
	job.Status = batchv1.JobStatus{}
	job.Generation = 1
	DropUnserved(&job.Spec)
}

func prepareUpdate(_ context.Context, job, old *batchv1.Job) {
	job.Status = old.Status
	DropUnserved(&job.Spec)
	if workload.Changed(job.Spec, old.Spec) {
		job.Generation = old.Generation + 1
	}
}

// generateSelector gives the Pods of a Job labels that no other Job's have. What the user set stays, and is judged later.
func generateSelector(job *batchv1.Job) {
	template := &job.Spec.Template
	template.Labels = maps.Clone(template.Labels) // the Job's own may be the same map
	if template.Labels == nil {
		template.Labels = map[string]string{}
	}
	for key, value := range ownLabels(job) {
		if _, set := template.Labels[key]; !set {
			template.Labels[key] = value
		}
	}
	if job.Spec.Selector == nil {
		job.Spec.Selector = &metav1.LabelSelector{}
	}
	if job.Spec.Selector.MatchLabels == nil {
		job.Spec.Selector.MatchLabels = map[string]string{}
	}
	if _, set := job.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel]; !set {
		job.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel] = string(job.UID)
	}
}

func ownLabels(job *batchv1.Job) map[string]string {
	return map[string]string{
		legacyJobName: job.Name, batchv1.JobNameLabel: job.Name,
		legacyControllerUID: string(job.UID), batchv1.ControllerUidLabel: string(job.UID),
	}
}

func warnings(ctx context.Context, job, old *batchv1.Job) []string {
	if old == nil {
		return append(workload.NameWarning(job), SpecWarnings(ctx, workload.At, &job.Spec, nil)...)
	}
	return SpecWarnings(ctx, workload.At, &job.Spec, &old.Spec)
}

// SpecWarnings are about a specification that is new or was changed; old is nil on create.
func SpecWarnings(ctx context.Context, at *field.Path, spec, old *batchv1.JobSpec) []string {
	if old != nil && !workload.Changed(spec, old) {
		return nil
	}
	var out []string
	if jobs.Indexed(spec) && or(spec.Completions, 0) > manyCompletions && or(spec.Parallelism, 0) > fewerAtOnce {
		out = append(out, fmt.Sprintf("%s: with more than %d completions and a parallelism of more than %d status.completedIndexes may become too long if many indexes fail",
			at, manyCompletions, fewerAtOnce))
	}
	if old == nil || workload.Changed(spec.Template, old.Template) {
		out = append(out, pod.TemplateWarnings(ctx, at.Child("template"), &spec.Template)...)
	}
	return out
}

// or is what a pointer points to, or something else.
func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

func columns() []registry.Column[batchv1.Job] {
	out := []registry.Column[batchv1.Job]{
		{Name: "Status", Description: "Status of the job.", Cell: func(job *batchv1.Job) any { return state(job) }},
		{Name: "Completions", Description: batchv1.JobStatus{}.SwaggerDoc()["succeeded"], Cell: completions},
		{Name: "Duration", Description: "Time required to complete the job.", Cell: func(job *batchv1.Job) any {
			start, end := job.Status.StartTime, job.Status.CompletionTime
			switch {
			case start == nil:
				return ""
			case end == nil:
				return duration.HumanDuration(time.Since(start.Time))
			}
			return duration.HumanDuration(end.Sub(start.Time))
		}},
		registry.Age[batchv1.Job](),
	}
	out = append(out, workload.ContainerColumns(func(job *batchv1.Job) *corev1.PodTemplateSpec { return &job.Spec.Template }, true)...)
	return append(out, registry.Column[batchv1.Job]{Name: "Selector", Wide: true, Description: batchv1.JobSpec{}.SwaggerDoc()["selector"],
		Cell: func(job *batchv1.Job) any { return metav1.FormatLabelSelector(job.Spec.Selector) }})
}

func state(job *batchv1.Job) string {
	is := func(kind batchv1.JobConditionType) bool { return jobs.Condition(&job.Status, kind) != nil }
	switch {
	case is(batchv1.JobComplete):
		return "Complete"
	case is(batchv1.JobFailed):
		return "Failed"
	case job.DeletionTimestamp != nil:
		return "Terminating"
	case is(batchv1.JobSuspended):
		return "Suspended"
	case is(batchv1.JobFailureTarget):
		return "FailureTarget"
	case is(batchv1.JobSuccessCriteriaMet):
		return "SuccessCriteriaMet"
	}
	return "Running"
}

func completions(job *batchv1.Job) any {
	if job.Spec.Completions != nil {
		return fmt.Sprintf("%d/%d", job.Status.Succeeded, *job.Spec.Completions)
	}
	if parallel := or(job.Spec.Parallelism, 0); parallel > 1 {
		return fmt.Sprintf("%d/1 of %d", job.Status.Succeeded, parallel)
	}
	return fmt.Sprintf("%d/1", job.Status.Succeeded)
}
