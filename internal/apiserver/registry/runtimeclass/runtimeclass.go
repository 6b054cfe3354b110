// Package runtimeclass describes node.k8s.io/v1 RuntimeClasses, and gives Pods what their class asks for: overhead, nodes,
// tolerations. Which runtime a node has for a class is the node's matter.
package runtimeclass

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

// New describes RuntimeClasses.
func New() registry.Resource {
	return &registry.Kind[nodev1.RuntimeClass, *nodev1.RuntimeClass]{
		Served: nodev1.SchemeGroupVersion,
		Plural: "runtimeclasses", Singular: "runtimeclass", KindName: "RuntimeClass",
		ClusterScoped:  true,
		NewList:        func() runtime.Object { return &nodev1.RuntimeClassList{} },
		Validate:       validateCreate,
		ValidateUpdate: validateUpdate,
		StrictUpdate:   true,
		Columns: []registry.Column[nodev1.RuntimeClass]{
			{Name: "Handler", Cell: func(class *nodev1.RuntimeClass) any { return class.Handler }},
			registry.Age[nodev1.RuntimeClass](),
		},
	}
}

func validateCreate(_ context.Context, class *nodev1.RuntimeClass) field.ErrorList {
	errs := rules.Finalizers(class)
	handler := field.NewPath("handler")
	if class.Handler == "" {
		errs = append(errs, field.Required(handler, ""))
	} else {
		errs = append(errs, rules.DNSLabel(handler, class.Handler)...)
	}
	if class.Overhead != nil {
		errs = append(errs, pod.ValidateOverhead(field.NewPath("overhead"), class.Overhead.PodFixed)...)
	}
	if class.Scheduling == nil {
		return errs
	}
	at := field.NewPath("scheduling")
	errs = append(errs, metavalidation.ValidateLabels(class.Scheduling.NodeSelector, at.Child("nodeSelector"))...)
	return append(errs, validateTolerations(at.Child("tolerations"), class.Scheduling.Tolerations)...)
}

func validateTolerations(at *field.Path, tolerations []corev1.Toleration) field.ErrorList {
	errs := pod.ValidateTolerations(at, tolerations)
	seen := map[corev1.Toleration]bool{}
	for i, t := range tolerations {
		t.TolerationSeconds = nil
		if seen[t] {
			errs = append(errs, field.Duplicate(at.Index(i), t))
		}
		seen[t] = true
	}
	return errs
}

func validateUpdate(_ context.Context, class, old *nodev1.RuntimeClass) field.ErrorList {
	return append(rules.MetaUpdate(class, old), workload.Immutable(field.NewPath("handler"), class.Handler, old.Handler)...)
}
