// Package daemonset describes apps/v1 DaemonSets: a Pod from a template on each node that fits. It makes none of them.
package daemonset

import (
	"context"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

// New describes DaemonSets.
func New() registry.Resource {
	return workload.Describe(&registry.Kind[appsv1.DaemonSet, *appsv1.DaemonSet]{
		Served: appsv1.SchemeGroupVersion,
		Plural: "daemonsets", Singular: "daemonset", KindName: "DaemonSet",
		ShortNames:     []string{"ds"},
		NewList:        func() runtime.Object { return &appsv1.DaemonSetList{} },
		Default:        setDefaults,
		PrepareCreate:  prepareCreate,
		PrepareUpdate:  prepareUpdate,
		ValidateUpdate: validateUpdate,
		Warnings:       warnings,
		Columns:        columns(),
	}, workload.Parts[appsv1.DaemonSet, *appsv1.DaemonSet, appsv1.DaemonSetSpec, appsv1.DaemonSetStatus]{
		Spec:           func(set *appsv1.DaemonSet) *appsv1.DaemonSetSpec { return &set.Spec },
		Status:         func(set *appsv1.DaemonSet) *appsv1.DaemonSetStatus { return &set.Status },
		Template:       func(spec *appsv1.DaemonSetSpec) *corev1.PodTemplateSpec { return &spec.Template },
		ValidateSpec:   validateSpec,
		ValidateStatus: validateStatus,
	})
}

func setDefaults(set *appsv1.DaemonSet) {
	strategy := &set.Spec.UpdateStrategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateDaemonSetStrategyType
	}
	if strategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		workload.OrPoint(&strategy.RollingUpdate, appsv1.RollingUpdateDaemonSet{})
		workload.OrPoint(&strategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		workload.OrPoint(&strategy.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	workload.OrPoint(&set.Spec.RevisionHistoryLimit, 10)
	pod.DefaultTemplate(&set.Spec.Template)
}

// generationOf counts the templates that a DaemonSet has had. It was a field once, and lives on as an annotation.
func generationOf(set *appsv1.DaemonSet) int64 {
	n, err := strconv.ParseInt(set.Annotations[appsv1.DeprecatedTemplateGeneration], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func setGeneration(set *appsv1.DaemonSet, n int64) {
	if set.Annotations == nil {
		set.Annotations = map[string]string{}
	}
	set.Annotations[appsv1.DeprecatedTemplateGeneration] = strconv.FormatInt(n, 10)
}

func prepareCreate(_ context.Context, set *appsv1.DaemonSet) {
	set.Status = appsv1.DaemonSetStatus{}
	set.Generation = 1
	setGeneration(set, max(generationOf(set), 1))
	pod.PrepareTemplate(&set.Spec.Template)
}

func prepareUpdate(_ context.Context, set, old *appsv1.DaemonSet) {
	set.Status = old.Status
	pod.PrepareTemplate(&set.Spec.Template)
	templates := generationOf(old)
	if workload.Changed(set.Spec.Template, old.Spec.Template) {
		templates++
	}
	setGeneration(set, templates)
	if workload.Changed(set.Spec, old.Spec) {
		set.Generation = old.Generation + 1
	}
}

func validateUpdate(_ context.Context, set, old *appsv1.DaemonSet) field.ErrorList {
	errs := rules.MetaUpdate(set, old)
	errs = append(errs, workload.Immutable(workload.At.Child("selector"), set.Spec.Selector, old.Spec.Selector)...)
	return append(errs, validateSpec(&set.Spec)...)
}

func validateSpec(spec *appsv1.DaemonSetSpec) field.ErrorList {
	at := workload.At
	var errs field.ErrorList
	if spec.Selector != nil { // without one no template is selected, which is an error below
		errs = workload.ValidateSelector(at.Child("selector"), spec.Selector)
	}
	errs = append(errs, workload.ValidateSelected(at.Child("template"), &spec.Template, spec.Selector)...)
	errs = append(errs, workload.ValidateEndless(at.Child("template"), &spec.Template)...)
	errs = append(errs, workload.NotNegative(at, workload.N("minReadySeconds", spec.MinReadySeconds),
		workload.P("revisionHistoryLimit", spec.RevisionHistoryLimit))...)
	return append(errs, validateStrategy(at.Child("updateStrategy"), &spec.UpdateStrategy)...)
}

func validateStrategy(at *field.Path, strategy *appsv1.DaemonSetUpdateStrategy) field.ErrorList {
	rolling := at.Child("rollingUpdate")
	switch strategy.Type {
	case appsv1.OnDeleteDaemonSetStrategyType:
		return nil
	case appsv1.RollingUpdateDaemonSetStrategyType:
	default:
		return field.ErrorList{field.NotSupported(at, strategy.Type,
			[]appsv1.DaemonSetUpdateStrategyType{appsv1.RollingUpdateDaemonSetStrategyType, appsv1.OnDeleteDaemonSetStrategyType})}
	}
	update := strategy.RollingUpdate
	if update == nil {
		return field.ErrorList{field.Required(rolling, "")}
	}
	unavailable, surge := rolling.Child("maxUnavailable"), rolling.Child("maxSurge")
	errs := workload.Share(unavailable, update.MaxUnavailable)
	errs = append(errs, workload.Share(surge, update.MaxSurge)...)
	errs = append(errs, workload.AtMostAll(unavailable, update.MaxUnavailable)...)
	errs = append(errs, workload.AtMostAll(surge, update.MaxSurge)...)
	none, noSurge := workload.IsNone(update.MaxUnavailable), workload.IsNone(update.MaxSurge)
	switch {
	case !none && !noSurge:
		errs = append(errs, field.Invalid(surge, update.MaxSurge, "must be 0 where maxUnavailable is not"))
	case none && noSurge:
		errs = append(errs, field.Required(unavailable, "must not be 0 where maxSurge is 0: no Pod could be replaced"))
	}
	return errs
}

func validateStatus(status, old *appsv1.DaemonSetStatus) field.ErrorList {
	at := workload.AtStatus
	errs := workload.NotNegative(at,
		workload.N("currentNumberScheduled", status.CurrentNumberScheduled), workload.N("numberMisscheduled", status.NumberMisscheduled),
		workload.N("desiredNumberScheduled", status.DesiredNumberScheduled), workload.N("numberReady", status.NumberReady),
		workload.N("observedGeneration", status.ObservedGeneration), workload.N("updatedNumberScheduled", status.UpdatedNumberScheduled),
		workload.N("numberAvailable", status.NumberAvailable), workload.N("numberUnavailable", status.NumberUnavailable),
		workload.P("collisionCount", status.CollisionCount))
	return append(errs, workload.NotFewer(at.Child("collisionCount"), status.CollisionCount, old.CollisionCount)...)
}

func warnings(ctx context.Context, set, old *appsv1.DaemonSet) []string {
	if old != nil {
		return workload.Warnings(ctx, &set.Spec.Template, &old.Spec.Template)
	}
	return workload.Warnings(ctx, &set.Spec.Template, nil)
}

func columns() []registry.Column[appsv1.DaemonSet] {
	status := appsv1.DaemonSetStatus{}.SwaggerDoc()
	number := func(name, field string, of func(*appsv1.DaemonSetStatus) int32) registry.Column[appsv1.DaemonSet] {
		return registry.Column[appsv1.DaemonSet]{Name: name, Type: "integer", Description: status[field],
			Cell: func(set *appsv1.DaemonSet) any { return int64(of(&set.Status)) }}
	}
	out := []registry.Column[appsv1.DaemonSet]{
		number("Desired", "desiredNumberScheduled", func(s *appsv1.DaemonSetStatus) int32 { return s.DesiredNumberScheduled }),
		number("Current", "currentNumberScheduled", func(s *appsv1.DaemonSetStatus) int32 { return s.CurrentNumberScheduled }),
		number("Ready", "numberReady", func(s *appsv1.DaemonSetStatus) int32 { return s.NumberReady }),
		number("Up-to-date", "updatedNumberScheduled", func(s *appsv1.DaemonSetStatus) int32 { return s.UpdatedNumberScheduled }),
		number("Available", "numberAvailable", func(s *appsv1.DaemonSetStatus) int32 { return s.NumberAvailable }),
		{Name: "Node Selector", Description: corev1.PodSpec{}.SwaggerDoc()["nodeSelector"],
			Cell: func(set *appsv1.DaemonSet) any { return workload.FormatLabels(set.Spec.Template.Spec.NodeSelector) }},
		registry.Age[appsv1.DaemonSet](),
	}
	out = append(out, workload.ContainerColumns(func(set *appsv1.DaemonSet) *corev1.PodTemplateSpec { return &set.Spec.Template }, true)...)
	return append(out, registry.Column[appsv1.DaemonSet]{
		Name: "Selector", Wide: true, Description: appsv1.DaemonSetSpec{}.SwaggerDoc()["selector"],
		Cell: func(set *appsv1.DaemonSet) any { return metav1.FormatLabelSelector(set.Spec.Selector) },
	})
}
