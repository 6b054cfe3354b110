package accessreview

import (
	"context"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validateSelf(_ context.Context, r *authorizationv1.SelfSubjectAccessReview) field.ErrorList {
	errs := validateAsked(r.Spec.ResourceAttributes, r.Spec.NonResourceAttributes)
	return append(errs, noMetadata(r.ObjectMeta)...)
}

func validateSubject(_ context.Context, r *authorizationv1.SubjectAccessReview) field.ErrorList {
	return append(validateSpec(&r.Spec), noMetadata(r.ObjectMeta)...)
}

func validateLocal(_ context.Context, r *authorizationv1.LocalSubjectAccessReview) field.ErrorList {
	errs := validateSpec(&r.Spec)
	meta := r.ObjectMeta
	meta.Namespace = ""
	errs = append(errs, noMetadata(meta)...)
	if a := r.Spec.ResourceAttributes; a != nil && a.Namespace != r.Namespace {
		errs = append(errs, field.Invalid(field.NewPath("spec", "resourceAttributes", "namespace"), a.Namespace, "must be metadata.namespace"))
	}
	if a := r.Spec.NonResourceAttributes; a != nil {
		errs = append(errs, field.Invalid(field.NewPath("spec", "nonResourceAttributes"), a, "cannot be asked about in a namespace"))
	}
	return errs
}

func validateSpec(spec *authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	errs := validateAsked(spec.ResourceAttributes, spec.NonResourceAttributes)
	if spec.User == "" && len(spec.Groups) == 0 {
		errs = append(errs, field.Invalid(field.NewPath("spec", "user"), "", "must be given, or groups must, or both"))
	}
	return errs
}

func validateAsked(resource *authorizationv1.ResourceAttributes, other *authorizationv1.NonResourceAttributes) field.ErrorList {
	var errs field.ErrorList
	if (resource == nil) == (other == nil) {
		errs = append(errs, field.Invalid(field.NewPath("spec"), "", "must have either resourceAttributes or nonResourceAttributes"))
	}
	if resource == nil {
		return errs
	}
	path := field.NewPath("spec", "resourceAttributes")
	if s := resource.FieldSelector; s != nil {
		p := path.Child("fieldSelector")
		errs = append(errs, eitherForm(p, s.RawSelector, len(s.Requirements))...)
		// Operators that a newer client knows are let through: what they ask for is left out of the question.
		lenient := metavalidation.FieldSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}
		for i, r := range s.Requirements {
			errs = append(errs, metavalidation.ValidateFieldSelectorRequirement(r, lenient, p.Child("requirements").Index(i))...)
		}
	}
	if s := resource.LabelSelector; s != nil {
		p := path.Child("labelSelector")
		errs = append(errs, eitherForm(p, s.RawSelector, len(s.Requirements))...)
		lenient := metavalidation.LabelSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}
		for i, r := range s.Requirements {
			errs = append(errs, metavalidation.ValidateLabelSelectorRequirement(r, lenient, p.Child("requirements").Index(i))...)
		}
	}
	return errs
}

func eitherForm(path *field.Path, raw string, requirements int) field.ErrorList {
	switch {
	case raw != "" && requirements > 0:
		return field.ErrorList{field.Invalid(path.Child("rawSelector"), raw, "must be left out where there are requirements")}
	case raw == "" && requirements == 0:
		return field.ErrorList{field.Required(path.Child("requirements"), "a selector has requirements or a rawSelector")}
	}
	return nil
}

// noMetadata wants none: a question is not kept, so it has no name. Managed fields are the server's own.
func noMetadata(meta metav1.ObjectMeta) field.ErrorList {
	meta.ManagedFields = nil
	if equality.Semantic.DeepEqual(meta, metav1.ObjectMeta{}) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), meta, "must be empty: a question is not kept")}
}
