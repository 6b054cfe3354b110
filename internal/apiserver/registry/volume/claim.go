package volume

import (
	"cmp"
	"context"

	corev1 "k8s.io/api/core/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

// NewClaim describes PersistentVolumeClaims.
func NewClaim() registry.Resource {
	type claim = corev1.PersistentVolumeClaim
	spec, status := corev1.PersistentVolumeClaimSpec{}.SwaggerDoc(), corev1.PersistentVolumeClaimStatus{}.SwaggerDoc()
	k := &registry.Kind[claim, *claim]{
		Served: corev1.SchemeGroupVersion,
		Plural: "persistentvolumeclaims", Singular: "persistentvolumeclaim", KindName: "PersistentVolumeClaim",
		ShortNames:    []string{"pvc"},
		ReturnDeleted: true,
		NewList:       func() runtime.Object { return &corev1.PersistentVolumeClaimList{} },
		Default: func(c *claim) {
			c.Status.Phase = cmp.Or(c.Status.Phase, corev1.ClaimPending)
			workload.OrPoint(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		},
		Validate: func(_ context.Context, c *claim) field.ErrorList {
			return append(rules.Finalizers(c), validateClaim(&c.Spec)...)
		},
		ValidateUpdate: validateClaimUpdate,
		Columns: []registry.Column[claim]{
			{Name: "Status", Description: status["phase"], Cell: func(c *claim) any { return ending(c.DeletionTimestamp != nil, string(c.Status.Phase)) }},
			{Name: "Volume", Description: spec["volumeName"], Cell: func(c *claim) any { return c.Spec.VolumeName }},
			{Name: "Capacity", Description: status["capacity"], Cell: func(c *claim) any {
				if c.Spec.VolumeName == "" {
					return ""
				}
				return storageOf(c.Status.Capacity)
			}},
			{Name: "Access Modes", Description: status["accessModes"], Cell: func(c *claim) any {
				if c.Spec.VolumeName == "" {
					return ""
				}
				return modes(c.Status.AccessModes)
			}},
			{Name: "StorageClass", Description: "StorageClass of the pvc",
				Cell: func(c *claim) any {
					return cmp.Or(c.Annotations[corev1.BetaStorageClassAnnotation], or(c.Spec.StorageClassName, ""))
				}},
			{Name: "VolumeAttributesClass", Description: "VolumeAttributesClass of the pvc",
				Cell: func(c *claim) any { return or(c.Spec.VolumeAttributesClassName, "<unset>") }},
			registry.Age[claim](),
			{Name: "VolumeMode", Wide: true, Description: spec["volumeMode"], Cell: func(c *claim) any { return string(or(c.Spec.VolumeMode, "<unset>")) }},
		},
	}
	registry.SpecAndStatus(k, func(c *claim) *corev1.PersistentVolumeClaimSpec { return &c.Spec },
		func(c *claim) *corev1.PersistentVolumeClaimStatus { return &c.Status }, validateClaimStatus)
	// Its changes are not counted.
	k.PrepareCreate = func(_ context.Context, c *claim) {
		c.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
		sameSource(&c.Spec)
	}
	k.PrepareUpdate = func(_ context.Context, c, old *claim) {
		c.Status = old.Status
		sameSource(&c.Spec)
	}
	return k
}

// sameSource fills dataSource and dataSourceRef, the older and the newer name of one thing, from each other. What is in another
// namespace has only the newer.
func sameSource(spec *corev1.PersistentVolumeClaimSpec) {
	switch source, ref := spec.DataSource, spec.DataSourceRef; {
	case source != nil && ref == nil:
		spec.DataSourceRef = &corev1.TypedObjectReference{APIGroup: source.APIGroup, Kind: source.Kind, Name: source.Name}
	case source == nil && ref != nil && or(ref.Namespace, "") == "":
		spec.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
}

func validateClaim(spec *corev1.PersistentVolumeClaimSpec) field.ErrorList {
	errs := validateModes(at.Child("accessModes"), spec.AccessModes)
	if spec.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(spec.Selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
	}
	size := at.Child("resources").Key(string(corev1.ResourceStorage))
	if wanted, found := spec.Resources.Requests[corev1.ResourceStorage]; !found {
		errs = append(errs, field.Required(size, ""))
	} else if wanted.Sign() <= 0 {
		errs = append(errs, field.Invalid(size, wanted.String(), "must be more than 0"))
	}
	if spec.StorageClassName != nil {
		errs = append(errs, validateClass(at.Child("storageClassName"), *spec.StorageClassName)...)
	}
	if spec.VolumeAttributesClassName != nil {
		errs = append(errs, validateClass(at.Child("volumeAttributesClassName"), *spec.VolumeAttributesClassName)...)
	}
	errs = append(errs, validateVolumeMode(spec.VolumeMode)...)
	if source := spec.DataSource; source != nil {
		errs = append(errs, validateReference(at.Child("dataSource"), source.APIGroup, source.Kind, source.Name)...)
	}
	if ref := spec.DataSourceRef; ref != nil {
		errs = append(errs, validateReference(at.Child("dataSourceRef"), ref.APIGroup, ref.Kind, ref.Name)...)
		other := or(ref.Namespace, "") != ""
		if source := spec.DataSource; source != nil && (other || or(source.APIGroup, "") != or(ref.APIGroup, "") || source.Kind != ref.Kind || source.Name != ref.Name) {
			errs = append(errs, field.Invalid(at, "", "dataSource and dataSourceRef must be the same"))
		}
	}
	return errs
}

// validateReference wants a name and a kind. Of the core group, only claims can be copied.
func validateReference(at *field.Path, group *string, kind, name string) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(at.Child("name"), ""))
	}
	if kind == "" {
		errs = append(errs, field.Required(at.Child("kind"), ""))
	}
	if or(group, "") == "" && kind != "PersistentVolumeClaim" {
		errs = append(errs, field.Invalid(at, kind, "must be PersistentVolumeClaim without an apiGroup"))
	}
	return errs
}

// validateClaimUpdate lets a claim be bound once, and a bound one ask for more storage or other attributes.
func validateClaimUpdate(_ context.Context, c, old *corev1.PersistentVolumeClaim) field.ErrorList {
	errs := append(rules.MetaUpdate(c, old), validateClaim(&c.Spec)...)
	now, before := c.Spec.DeepCopy(), old.Spec.DeepCopy()
	if before.VolumeName == "" {
		before.VolumeName = now.VolumeName
	}
	if old.Status.Phase == corev1.ClaimBound {
		before.Resources.Requests, before.VolumeAttributesClassName = now.Resources.Requests, now.VolumeAttributesClassName
	}
	// The class may still be filled in by those who choose the default one.
	if before.StorageClassName == nil {
		before.StorageClassName = now.StorageClassName
	}
	if workload.Changed(now, before) {
		errs = append(errs, field.Forbidden(at, "cannot be changed after creation, except for resources.requests and volumeAttributesClassName of bound claims"))
	}
	if wanted, had := c.Spec.Resources.Requests[corev1.ResourceStorage], old.Spec.Resources.Requests[corev1.ResourceStorage]; wanted.Cmp(had) < 0 {
		if has := old.Status.Capacity[corev1.ResourceStorage]; wanted.Cmp(has) <= 0 {
			errs = append(errs, field.Forbidden(at.Child("resources", "requests", "storage"), "cannot be less than status.capacity"))
		}
	}
	return errs
}

func validateClaimStatus(_ context.Context, c, old *corev1.PersistentVolumeClaim) field.ErrorList {
	errs := rules.MetaUpdate(c, old)
	if len(c.Spec.AccessModes) == 0 {
		errs = append(errs, field.Required(field.NewPath("spec", "accessModes"), ""))
	}
	for name, quantity := range c.Status.Capacity {
		errs = append(errs, rules.Quantity(workload.AtStatus.Child("capacity").Key(string(name)), name, quantity)...)
	}
	return errs
}
