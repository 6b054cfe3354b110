// Package deployment describes apps/v1 Deployments: a number of Pods from a template, and how one template is replaced by
// the next. It rolls nothing out.
package deployment

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/workload"
)

// New describes Deployments.
func New() registry.Resource {
	parts := workload.Parts[appsv1.Deployment, *appsv1.Deployment, appsv1.DeploymentSpec, appsv1.DeploymentStatus]{
		Spec:         func(d *appsv1.Deployment) *appsv1.DeploymentSpec { return &d.Spec },
		Status:       func(d *appsv1.Deployment) *appsv1.DeploymentStatus { return &d.Status },
		Template:     func(spec *appsv1.DeploymentSpec) *corev1.PodTemplateSpec { return &spec.Template },
		ValidateSpec: validateSpec,
		ValidateChange: func(now, before *appsv1.DeploymentSpec) field.ErrorList {
			return workload.Immutable(workload.At.Child("selector"), now.Selector, before.Selector)
		},
		ValidateStatus: validateStatus,
		Scaling: &workload.Scaling[*appsv1.Deployment]{
			Replicas: func(d *appsv1.Deployment) **int32 { return &d.Spec.Replicas },
			Status:   func(d *appsv1.Deployment) int32 { return d.Status.Replicas },
			Selector: func(d *appsv1.Deployment) *metav1.LabelSelector { return d.Spec.Selector },
		},
	}
	return workload.Describe(&registry.Kind[appsv1.Deployment, *appsv1.Deployment]{
		Served: appsv1.SchemeGroupVersion,
		Plural: "deployments", Singular: "deployment", KindName: "Deployment",
		ShortNames:    []string{"deploy"},
		NewList:       func() runtime.Object { return &appsv1.DeploymentList{} },
		Default:       setDefaults,
		PrepareUpdate: prepareUpdate,
		Columns:       columns(),
		Status: &registry.Status[appsv1.Deployment, *appsv1.Deployment]{
			Prepare: func(_ context.Context, d, old *appsv1.Deployment) {
				d.Spec = old.Spec
				d.Labels = old.Labels
			},
			Reset: []fieldpath.Path{fieldpath.MakePathOrDie("metadata", "labels")},
		},
	}, parts)
}

func setDefaults(d *appsv1.Deployment) {
	workload.OrPoint(&d.Spec.Replicas, 1)
	workload.OrPoint(&d.Spec.RevisionHistoryLimit, 10)
	workload.OrPoint(&d.Spec.ProgressDeadlineSeconds, 600)
	strategy := &d.Spec.Strategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateDeploymentStrategyType
	}
	if strategy.Type == appsv1.RollingUpdateDeploymentStrategyType {
		workload.OrPoint(&strategy.RollingUpdate, appsv1.RollingUpdateDeployment{})
		workload.OrPoint(&strategy.RollingUpdate.MaxUnavailable, intstr.FromString("25%"))
		workload.OrPoint(&strategy.RollingUpdate.MaxSurge, intstr.FromString("25%"))
	}
	pod.DefaultTemplate(&d.Spec.Template)
}

func prepareUpdate(_ context.Context, d, old *appsv1.Deployment) {
	d.Status = old.Status
	pod.PrepareTemplate(&d.Spec.Template)
	// Annotations count too: they are copied to the ReplicaSets.
	if workload.Changed(d.Spec, old.Spec) || workload.Changed(d.Annotations, old.Annotations) {
		d.Generation = old.Generation + 1
	}
}

func validateSpec(spec *appsv1.DeploymentSpec) field.ErrorList {
	at := workload.At
	errs := workload.NotNegative(at, workload.P("replicas", spec.Replicas))
	errs = append(errs, workload.ValidateSelector(at.Child("selector"), spec.Selector)...)
	errs = append(errs, workload.ValidateSelected(at.Child("template"), &spec.Template, spec.Selector)...)
	errs = append(errs, workload.ValidateEndless(at.Child("template"), &spec.Template)...)
	errs = append(errs, validateStrategy(at.Child("strategy"), &spec.Strategy)...)
	errs = append(errs, workload.NotNegative(at, workload.N("minReadySeconds", spec.MinReadySeconds),
		workload.P("revisionHistoryLimit", spec.RevisionHistoryLimit), workload.P("progressDeadlineSeconds", spec.ProgressDeadlineSeconds))...)
	if deadline := spec.ProgressDeadlineSeconds; deadline != nil && *deadline <= spec.MinReadySeconds {
		errs = append(errs, field.Invalid(at.Child("progressDeadlineSeconds"), *deadline, "must be more than minReadySeconds"))
	}
	return errs
}

func validateStrategy(at *field.Path, strategy *appsv1.DeploymentStrategy) field.ErrorList {
	rolling := at.Child("rollingUpdate")
	switch strategy.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if strategy.RollingUpdate != nil {
			return field.ErrorList{field.Forbidden(rolling, "cannot be where type is Recreate")}
		}
		return nil
	case appsv1.RollingUpdateDeploymentStrategyType:
	default:
		return field.ErrorList{field.NotSupported(at, strategy.Type,
			[]appsv1.DeploymentStrategyType{appsv1.RecreateDeploymentStrategyType, appsv1.RollingUpdateDeploymentStrategyType})}
	}
	update := strategy.RollingUpdate
	if update == nil {
		return field.ErrorList{field.Required(rolling, "")}
	}
	unavailable := rolling.Child("maxUnavailable")
	errs := workload.Share(unavailable, update.MaxUnavailable)
	errs = append(errs, workload.Share(rolling.Child("maxSurge"), update.MaxSurge)...)
	if workload.IsNone(update.MaxUnavailable) && workload.IsNone(update.MaxSurge) {
		errs = append(errs, field.Invalid(unavailable, update.MaxUnavailable, "must not be 0 where maxSurge is 0: no Pod could be replaced"))
	}
	return append(errs, workload.AtMostAll(unavailable, update.MaxUnavailable)...)
}

func validateStatus(status, old *appsv1.DeploymentStatus) field.ErrorList {
	at := workload.AtStatus
	replicas, updated := workload.N("replicas", status.Replicas), workload.N("updatedReplicas", status.UpdatedReplicas)
	ready, available := workload.N("readyReplicas", status.ReadyReplicas), workload.N("availableReplicas", status.AvailableReplicas)
	errs := workload.NotNegative(at, workload.N("observedGeneration", status.ObservedGeneration), replicas, updated, ready,
		available, workload.N("unavailableReplicas", status.UnavailableReplicas), workload.P("terminatingReplicas", status.TerminatingReplicas),
		workload.P("collisionCount", status.CollisionCount))
	errs = append(errs, workload.AtMost(at, replicas, updated, ready, available)...)
	errs = append(errs, workload.AtMost(at, ready, available)...)
	return append(errs, workload.NotFewer(at.Child("collisionCount"), status.CollisionCount, old.CollisionCount)...)
}

func columns() []registry.Column[appsv1.Deployment] {
	out := []registry.Column[appsv1.Deployment]{
		{Name: "Ready", Description: "Number of the pod with ready state", Cell: func(d *appsv1.Deployment) any {
			return fmt.Sprintf("%d/%d", d.Status.ReadyReplicas, ptr.Deref(d.Spec.Replicas, 0))
		}},
		{Name: "Up-to-date", Description: appsv1.DeploymentStatus{}.SwaggerDoc()["updatedReplicas"],
			Cell: func(d *appsv1.Deployment) any { return int64(d.Status.UpdatedReplicas) }},
		{Name: "Available", Description: appsv1.DeploymentStatus{}.SwaggerDoc()["availableReplicas"],
			Cell: func(d *appsv1.Deployment) any { return int64(d.Status.AvailableReplicas) }},
		registry.Age[appsv1.Deployment](),
	}
	out = append(out, workload.ContainerColumns(func(d *appsv1.Deployment) *corev1.PodTemplateSpec { return &d.Spec.Template }, true)...)
	return append(out, registry.Column[appsv1.Deployment]{
		Name: "Selector", Wide: true, Description: appsv1.DeploymentSpec{}.SwaggerDoc()["selector"],
		Cell: func(d *appsv1.Deployment) any {
			text, err := workload.SelectorText(d.Spec.Selector)
			if err != nil {
				return "<invalid>"
			}
			return text
		},
	})
}
