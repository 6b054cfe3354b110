// Package podtemplate describes v1 PodTemplates: templates that are kept for others to read.
package podtemplate

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

var at = field.NewPath("template")

// New describes PodTemplates.
func New() registry.Resource {
	return &registry.Kind[corev1.PodTemplate, *corev1.PodTemplate]{
		Served: corev1.SchemeGroupVersion,
		Plural: "podtemplates", Singular: "podtemplate", KindName: "PodTemplate",
		NewList: func() runtime.Object { return &corev1.PodTemplateList{} },
		Default: func(t *corev1.PodTemplate) { pod.DefaultTemplate(&t.Template) },
		PrepareCreate: func(_ context.Context, t *corev1.PodTemplate) {
			t.Generation = 1
			pod.PrepareTemplate(&t.Template)
		},
		PrepareUpdate: func(_ context.Context, t, old *corev1.PodTemplate) {
			pod.PrepareTemplate(&t.Template)
			if workload.Changed(t.Template, old.Template) {
				t.Generation = old.Generation + 1
			}
		},
		Validate: func(_ context.Context, t *corev1.PodTemplate) field.ErrorList {
			return append(rules.Finalizers(t), pod.ValidateTemplate(at, &t.Template)...)
		},
		ValidateUpdate: func(_ context.Context, t, old *corev1.PodTemplate) field.ErrorList {
			return append(rules.MetaUpdate(t, old), pod.ValidateTemplate(at, &t.Template)...)
		},
		Warnings: func(ctx context.Context, t, old *corev1.PodTemplate) []string {
			if old != nil && !workload.Changed(t.Template, old.Template) {
				return nil
			}
			return pod.TemplateWarnings(ctx, at, &t.Template)
		},
		ReturnDeleted: true,
		Columns: append(workload.ContainerColumns(func(t *corev1.PodTemplate) *corev1.PodTemplateSpec { return &t.Template }, false),
			registry.Column[corev1.PodTemplate]{Name: "Pod Labels", Description: "The labels for the pod template.",
				Cell: func(t *corev1.PodTemplate) any { return workload.FormatLabels(t.Template.Labels) }}),
	}
}
