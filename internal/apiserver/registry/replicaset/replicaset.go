// Package replicaset describes apps/v1 ReplicaSets: a number of Pods from a template. It makes none of them.
package replicaset

import (
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/workload"
)

// New describes ReplicaSets.
func New() registry.Resource {
	return workload.Describe(&registry.Kind[appsv1.ReplicaSet, *appsv1.ReplicaSet]{
		Served: appsv1.SchemeGroupVersion,
		Plural: "replicasets", Singular: "replicaset", KindName: "ReplicaSet",
		ShortNames:       []string{"rs"},
		NewList:          func() runtime.Object { return &appsv1.ReplicaSetList{} },
		Default:          setDefaults,
		SelectableFields: []string{"status.replicas"},
		Fields: func(rs *appsv1.ReplicaSet) fields.Set {
			return fields.Set{"status.replicas": strconv.Itoa(int(rs.Status.Replicas))}
		},
		Columns: columns(),
	}, workload.Parts[appsv1.ReplicaSet, *appsv1.ReplicaSet, appsv1.ReplicaSetSpec, appsv1.ReplicaSetStatus]{
		Spec:         func(rs *appsv1.ReplicaSet) *appsv1.ReplicaSetSpec { return &rs.Spec },
		Status:       func(rs *appsv1.ReplicaSet) *appsv1.ReplicaSetStatus { return &rs.Status },
		Template:     func(spec *appsv1.ReplicaSetSpec) *corev1.PodTemplateSpec { return &spec.Template },
		ValidateSpec: validateSpec,
		ValidateChange: func(now, before *appsv1.ReplicaSetSpec) field.ErrorList {
			return workload.Immutable(workload.At.Child("selector"), now.Selector, before.Selector)
		},
		ValidateStatus: validateStatus,
		Scaling: &workload.Scaling[*appsv1.ReplicaSet]{
			Replicas: func(rs *appsv1.ReplicaSet) **int32 { return &rs.Spec.Replicas },
			Status:   func(rs *appsv1.ReplicaSet) int32 { return rs.Status.Replicas },
			Selector: func(rs *appsv1.ReplicaSet) *metav1.LabelSelector { return rs.Spec.Selector },
		},
	})
}

func setDefaults(rs *appsv1.ReplicaSet) {
	workload.OrPoint(&rs.Spec.Replicas, 1)
	pod.DefaultTemplate(&rs.Spec.Template)
}

func validateSpec(spec *appsv1.ReplicaSetSpec) field.ErrorList {
	at := workload.At
	errs := workload.NotNegative(at, workload.P("replicas", spec.Replicas), workload.N("minReadySeconds", spec.MinReadySeconds))
	errs = append(errs, workload.ValidateSelector(at.Child("selector"), spec.Selector)...)
	errs = append(errs, workload.ValidateSelected(at.Child("template"), &spec.Template, spec.Selector)...)
	return append(errs, workload.ValidateEndless(at.Child("template"), &spec.Template)...)
}

func validateStatus(status, _ *appsv1.ReplicaSetStatus) field.ErrorList {
	at := workload.AtStatus
	replicas, labelled := workload.N("replicas", status.Replicas), workload.N("fullyLabeledReplicas", status.FullyLabeledReplicas)
	ready, available := workload.N("readyReplicas", status.ReadyReplicas), workload.N("availableReplicas", status.AvailableReplicas)
	errs := workload.NotNegative(at, replicas, labelled, ready, available,
		workload.N("observedGeneration", status.ObservedGeneration), workload.P("terminatingReplicas", status.TerminatingReplicas))
	errs = append(errs, workload.AtMost(at, replicas, labelled, ready, available)...)
	return append(errs, workload.AtMost(at, ready, available)...)
}

func columns() []registry.Column[appsv1.ReplicaSet] {
	out := []registry.Column[appsv1.ReplicaSet]{
		{Name: "Desired", Type: "integer", Description: appsv1.ReplicaSetSpec{}.SwaggerDoc()["replicas"],
			Cell: func(rs *appsv1.ReplicaSet) any { return int64(ptr.Deref(rs.Spec.Replicas, 0)) }},
		{Name: "Current", Type: "integer", Description: appsv1.ReplicaSetStatus{}.SwaggerDoc()["replicas"],
			Cell: func(rs *appsv1.ReplicaSet) any { return int64(rs.Status.Replicas) }},
		{Name: "Ready", Type: "integer", Description: appsv1.ReplicaSetStatus{}.SwaggerDoc()["readyReplicas"],
			Cell: func(rs *appsv1.ReplicaSet) any { return int64(rs.Status.ReadyReplicas) }},
		registry.Age[appsv1.ReplicaSet](),
	}
	out = append(out, workload.ContainerColumns(func(rs *appsv1.ReplicaSet) *corev1.PodTemplateSpec { return &rs.Spec.Template }, true)...)
	return append(out, registry.Column[appsv1.ReplicaSet]{
		Name: "Selector", Wide: true, Description: appsv1.ReplicaSetSpec{}.SwaggerDoc()["selector"],
		Cell: func(rs *appsv1.ReplicaSet) any { return metav1.FormatLabelSelector(rs.Spec.Selector) },
	})
}
