// Package replicationcontroller describes v1 ReplicationControllers, which ReplicaSets came after: a number of Pods from a
// template. It makes none of them.
package replicationcontroller

import (
	"context"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/workload"
)

// New describes ReplicationControllers.
func New() registry.Resource {
	return workload.Describe(&registry.Kind[corev1.ReplicationController, *corev1.ReplicationController]{
		Served: corev1.SchemeGroupVersion,
		Plural: "replicationcontrollers", Singular: "replicationcontroller", KindName: "ReplicationController",
		ShortNames:       []string{"rc"},
		NewList:          func() runtime.Object { return &corev1.ReplicationControllerList{} },
		Default:          setDefaults,
		SelectableFields: []string{"status.replicas"},
		Fields: func(rc *corev1.ReplicationController) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(rc.Status.Replicas))}
		},
		Columns: columns(),
		Customize: func(store *genericregistry.Store, _ map[string]rest.Storage) error {
			store.DeleteStrategy = orphaning{store.DeleteStrategy}
			return nil
		},
	}, workload.Parts[corev1.ReplicationController, *corev1.ReplicationController, corev1.ReplicationControllerSpec, corev1.ReplicationControllerStatus]{
		Spec:           func(rc *corev1.ReplicationController) *corev1.ReplicationControllerSpec { return &rc.Spec },
		Status:         func(rc *corev1.ReplicationController) *corev1.ReplicationControllerStatus { return &rc.Status },
		Template:       func(spec *corev1.ReplicationControllerSpec) *corev1.PodTemplateSpec { return spec.Template },
		ValidateSpec:   validateSpec,
		ValidateStatus: validateStatus,
		Scaling: &workload.Scaling[*corev1.ReplicationController]{
			Replicas: func(rc *corev1.ReplicationController) **int32 { return &rc.Spec.Replicas },
			Status:   func(rc *corev1.ReplicationController) int32 { return rc.Status.Replicas },
			Selector: func(rc *corev1.ReplicationController) *metav1.LabelSelector {
				return &metav1.LabelSelector{MatchLabels: rc.Spec.Selector}
			},
		},
	})
}

// orphaning leaves the Pods when a delete doesn't say what becomes of them. This kind is older than garbage collection.
type orphaning struct{ rest.RESTDeleteStrategy }

var _ rest.GarbageCollectionDeleteStrategy = orphaning{}

// DefaultGarbageCollectionPolicy is to orphan.
func (orphaning) DefaultGarbageCollectionPolicy(context.Context) rest.GarbageCollectionPolicy {
	return rest.OrphanDependents
}

func setDefaults(rc *corev1.ReplicationController) {
	if t := rc.Spec.Template; t != nil {
		if len(rc.Spec.Selector) == 0 {
			rc.Spec.Selector = t.Labels
		}
		if len(rc.Labels) == 0 {
			rc.Labels = t.Labels
		}
		pod.DefaultTemplate(t)
	}
	workload.OrPoint(&rc.Spec.Replicas, 1)
}

func validateSpec(spec *corev1.ReplicationControllerSpec) field.ErrorList {
	at := workload.At
	errs := workload.NotNegative(at, workload.N("minReadySeconds", spec.MinReadySeconds))
	if len(spec.Selector) == 0 {
		errs = append(errs, field.Required(at.Child("selector"), ""))
	}
	if spec.Replicas == nil {
		errs = append(errs, field.Required(at.Child("replicas"), ""))
	}
	errs = append(errs, workload.NotNegative(at, workload.P("replicas", spec.Replicas))...)
	template := at.Child("template")
	if spec.Template == nil {
		return append(errs, field.Required(template, ""))
	}
	if selects := labels.Set(spec.Selector).AsSelector(); !selects.Empty() && !selects.Matches(labels.Set(spec.Template.Labels)) {
		errs = append(errs, field.Invalid(template.Child("metadata", "labels"), spec.Template.Labels, "must be selected by spec.selector"))
	}
	return append(errs, workload.ValidateEndless(template, spec.Template)...)
}

func validateStatus(status, _ *corev1.ReplicationControllerStatus) field.ErrorList {
	at := workload.AtStatus
	replicas, labelled := workload.N("replicas", status.Replicas), workload.N("fullyLabeledReplicas", status.FullyLabeledReplicas)
	ready, available := workload.N("readyReplicas", status.ReadyReplicas), workload.N("availableReplicas", status.AvailableReplicas)
	errs := workload.NotNegative(at, replicas, labelled, ready, available, workload.N("observedGeneration", status.ObservedGeneration))
	errs = append(errs, workload.AtMost(at, replicas, labelled, ready, available)...)
	return append(errs, workload.AtMost(at, ready, available)...)
}

func columns() []registry.Column[corev1.ReplicationController] {
	out := []registry.Column[corev1.ReplicationController]{
		{Name: "Desired", Type: "integer", Description: corev1.ReplicationControllerSpec{}.SwaggerDoc()["replicas"],
			Cell: func(rc *corev1.ReplicationController) any { return int64(ptr.Deref(rc.Spec.Replicas, 0)) }},
		{Name: "Current", Type: "integer", Description: corev1.ReplicationControllerStatus{}.SwaggerDoc()["replicas"],
			Cell: func(rc *corev1.ReplicationController) any { return int64(rc.Status.Replicas) }},
		{Name: "Ready", Type: "integer", Description: corev1.ReplicationControllerStatus{}.SwaggerDoc()["readyReplicas"],
			Cell: func(rc *corev1.ReplicationController) any { return int64(rc.Status.ReadyReplicas) }},
		registry.Age[corev1.ReplicationController](),
	}
	out = append(out, workload.ContainerColumns(func(rc *corev1.ReplicationController) *corev1.PodTemplateSpec { return rc.Spec.Template }, true)...)
	return append(out, registry.Column[corev1.ReplicationController]{
		Name: "Selector", Wide: true, Description: corev1.ReplicationControllerSpec{}.SwaggerDoc()["selector"],
		Cell: func(rc *corev1.ReplicationController) any { return workload.FormatLabels(rc.Spec.Selector) },
	})
}
