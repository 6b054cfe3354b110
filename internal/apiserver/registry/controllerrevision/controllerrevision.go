// Package controllerrevision describes apps/v1 ControllerRevisions: what a workload's template was at some time. Whose it
// is and what it holds is a matter of the controllers that write it.
package controllerrevision

import (
	"context"
	"encoding/json"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

// New describes ControllerRevisions.
func New() registry.Resource {
	return &registry.Kind[appsv1.ControllerRevision, *appsv1.ControllerRevision]{
		Served: appsv1.SchemeGroupVersion,
		Plural: "controllerrevisions", Singular: "controllerrevision", KindName: "ControllerRevision",
		NewList:        func() runtime.Object { return &appsv1.ControllerRevisionList{} },
		Validate:       validateCreate,
		ValidateUpdate: validateUpdate,
		Columns: []registry.Column[appsv1.ControllerRevision]{
			{Name: "Controller", Description: "Controller of the object", Cell: controller},
			{Name: "Revision", Description: appsv1.ControllerRevision{}.SwaggerDoc()["revision"],
				Cell: func(r *appsv1.ControllerRevision) any { return r.Revision }},
			registry.Age[appsv1.ControllerRevision](),
		},
	}
}

func validateCreate(_ context.Context, r *appsv1.ControllerRevision) field.ErrorList {
	errs := append(rules.Finalizers(r), rules.NotNegative(field.NewPath("revision"), r.Revision)...)
	at := field.NewPath("data")
	var data any
	if len(r.Data.Raw) == 0 {
		return append(errs, field.Required(at, ""))
	}
	if err := json.Unmarshal(r.Data.Raw, &data); err != nil {
		return append(errs, field.Invalid(at, "<value omitted>", "must be JSON: "+err.Error()))
	}
	if _, object := data.(map[string]any); !object {
		errs = append(errs, field.Required(at, "must be a JSON object"))
	}
	return errs
}

func validateUpdate(_ context.Context, r, old *appsv1.ControllerRevision) field.ErrorList {
	errs := rules.MetaUpdate(r, old)
	errs = append(errs, rules.NotNegative(field.NewPath("revision"), r.Revision)...)
	return append(errs, workload.Immutable(field.NewPath("data"), r.Data, old.Data)...)
}

// controller is the owner as kubectl would name it: statefulset.apps/web.
func controller(r *appsv1.ControllerRevision) any {
	owner := metav1.GetControllerOf(r)
	if owner == nil {
		return "<none>"
	}
	version, err := schema.ParseGroupVersion(owner.APIVersion)
	if err != nil {
		return owner.Name
	}
	return strings.ToLower(version.WithKind(owner.Kind).GroupKind().String()) + "/" + owner.Name
}
