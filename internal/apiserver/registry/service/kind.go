// Package service is core/v1 Service: its defaults, what an update keeps and drops, which addresses and ports it asks
// for, its rules, and how it is shown. All that decides is pure, and knows no store; only the files that turn a wish
// into a claim (rest.go, keys.go) do.
package service

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
)

// New describes Services, but for the storage that makes good what Allocate asks for.
func New() *registry.Kind[corev1.Service, *corev1.Service] {
	return &registry.Kind[corev1.Service, *corev1.Service]{
		Served:     corev1.SchemeGroupVersion,
		Plural:     "services",
		Singular:   "service",
		KindName:   "Service",
		ShortNames: []string{"svc"},
		Categories: []string{"all"},
		NewList:    func() runtime.Object { return &corev1.ServiceList{} },

		Default:        Default,
		ValidName:      validation.NameIsDNSLabel,
		PrepareCreate:  PrepareCreate,
		PrepareUpdate:  PrepareUpdate,
		Validate:       Validate,
		ValidateUpdate: ValidateUpdate,
		Warnings:       Warnings,

		Fields:           selectable,
		SelectableFields: []string{"spec.clusterIP", "spec.type"},
		Columns:          columns(),

		Status: &registry.Status[corev1.Service, *corev1.Service]{
			Prepare:  PrepareStatus,
			Validate: ValidateStatus,
			Warnings: StatusWarnings,
			Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("spec")},
		},
		Reset: []fieldpath.Path{fieldpath.MakePathOrDie("status")},

		CreateOnUpdate: true,
		ReturnDeleted:  true,
	}
}
