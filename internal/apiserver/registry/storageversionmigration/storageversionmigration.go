// Package storageversionmigration describes StorageVersionMigrations: requests to write all objects of a resource anew. It writes none.
package storageversionmigration

import (
	"context"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

type migration = storagemigrationv1.StorageVersionMigration

var (
	atResource   = field.NewPath("spec", "resource")
	atVersion    = field.NewPath("status", "resourceVersion")
	atConditions = field.NewPath("status", "conditions")
)

// New describes storagemigration.k8s.io/v1 StorageVersionMigrations.
func New() registry.Resource {
	return &registry.Kind[migration, *migration]{
		Served: storagemigrationv1.SchemeGroupVersion,
		Plural: "storageversionmigrations", Singular: "storageversionmigration", KindName: "StorageVersionMigration",
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &storagemigrationv1.StorageVersionMigrationList{} },
		PrepareCreate: func(_ context.Context, m *migration) { m.Status = storagemigrationv1.StorageVersionMigrationStatus{} },
		PrepareUpdate: func(_ context.Context, m, old *migration) { m.Status = old.Status },
		Validate:      func(_ context.Context, m *migration) field.ErrorList { return validate(m) },
		ValidateUpdate: func(_ context.Context, m, old *migration) field.ErrorList {
			errs := append(rules.MetaUpdate(m, old), validate(m)...)
			if !equality.Semantic.DeepEqual(m.Spec, old.Spec) {
				errs = append(errs, field.Invalid(field.NewPath("spec"), m.Spec, "cannot be changed: make another migration"))
			}
			return errs
		},
		StrictUpdate: true,
		Reset:        []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[migration, *migration]{
			Prepare: func(_ context.Context, m, old *migration) {
				m.Spec = old.Spec
				metav1.ResetObjectMetaForStatus(&m.ObjectMeta, &old.ObjectMeta)
			},
			Validate: func(_ context.Context, m, old *migration) field.ErrorList { return validateStatus(m, old) },
			Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("metadata"), fieldpath.MakePathOrDie("spec")},
		},
		Columns: []registry.Column[migration]{
			{Name: "Resource", Description: "The resource whose objects are written anew", Cell: func(m *migration) any { return m.Spec.Resource.String() }},
			{Name: "Status", Description: "How far the migration has come", Cell: func(m *migration) any { return state(m) }},
		},
	}
}

func validate(m *migration) (errs field.ErrorList) {
	if name := m.Spec.Resource.Resource; name == "" {
		errs = append(errs, field.Required(atResource.Child("resource"), "the plural name of a resource, such as secrets"))
	} else {
		errs = append(errs, rules.Each(atResource.Child("resource"), name, validation.IsDNS1035Label(name))...)
	}
	if group := m.Spec.Resource.Group; group != "" {
		errs = append(errs, rules.DNSSubdomain(atResource.Child("group"), group)...)
	}
	return errs
}

// validateStatus keeps what was decided: the version up to which objects are written, and how it ended.
func validateStatus(m, old *migration) field.ErrorList {
	errs := rules.MetaUpdate(m, old)
	version, was := m.Status.ResourceVersion, old.Status.ResourceVersion
	if version != "" {
		if _, err := resourceversion.CompareResourceVersion(version, version); err != nil {
			errs = append(errs, field.Invalid(atVersion, version, err.Error()))
		}
	}
	if was != "" && was != version {
		errs = append(errs, field.Invalid(atVersion, version, "cannot be changed"))
	}
	errs = append(errs, metavalidation.ValidateConditions(m.Status.Conditions, atConditions)...)
	if is(m, storagemigrationv1.MigrationSucceeded) && is(m, storagemigrationv1.MigrationFailed) {
		errs = append(errs, field.Invalid(atConditions, m.Status.Conditions, "a migration either succeeded or failed"))
	}
	for _, end := range []storagemigrationv1.MigrationConditionType{storagemigrationv1.MigrationSucceeded, storagemigrationv1.MigrationFailed} {
		if is(old, end) && !is(m, end) {
			errs = append(errs, field.Invalid(atConditions, m.Status.Conditions, string(end)+" cannot be taken back"))
		}
	}
	return errs
}

func is(m *migration, condition storagemigrationv1.MigrationConditionType) bool {
	return meta.IsStatusConditionTrue(m.Status.Conditions, string(condition))
}

func state(m *migration) string {
	out := "Unknown"
	for _, c := range m.Status.Conditions {
		switch storagemigrationv1.MigrationConditionType(c.Type) {
		case storagemigrationv1.MigrationRunning, storagemigrationv1.MigrationSucceeded, storagemigrationv1.MigrationFailed:
			if c.Status == metav1.ConditionTrue {
				out = c.Type
			}
		}
	}
	return out
}
