package registry

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// TestValidateUpdateAloneJudgesUpdates: and each mistake is reported once.
func TestValidateUpdateAloneJudgesUpdates(t *testing.T) {
	here := field.NewPath("here")
	s := strategy[corev1.Secret, *corev1.Secret]{kind: &Kind[corev1.Secret, *corev1.Secret]{
		Validate: func(context.Context, *corev1.Secret) field.ErrorList {
			return field.ErrorList{field.Required(here, "of a new object")}
		},
		ValidateUpdate: func(context.Context, *corev1.Secret, *corev1.Secret) field.ErrorList {
			return field.ErrorList{field.Invalid(here, "x", "wrong"), field.Invalid(here, "x", "wrong"), field.Invalid(here, "y", "wrong")}
		},
	}}
	errs := s.ValidateUpdate(t.Context(), &corev1.Secret{}, &corev1.Secret{})
	config := s.DeclarativeValidationConfig(t.Context(), nil, nil)
	if errs = s.ValidateDeclaratively(t.Context(), nil, nil, errs, 0, config); len(errs) != 2 {
		t.Errorf("reported %v", errs)
	}
	s.kind.ValidateUpdate = nil
	named := &corev1.Secret{}
	named.Name, named.Namespace = "a", "b"
	if errs := s.ValidateUpdate(t.Context(), named, named); len(errs) != 1 {
		t.Errorf("without it: %v", errs)
	}
}
