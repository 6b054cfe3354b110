package namespace

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

var (
	atFinalizers = field.NewPath("spec", "finalizers")
	// The API has always spelt this path with a capital letter.
	atPhase = field.NewPath("status", "Phase")
)

func validate(_ context.Context, ns *corev1.Namespace) field.ErrorList {
	return append(rules.Finalizers(ns), validateSpec(ns)...)
}

func validateSpec(ns *corev1.Namespace) field.ErrorList {
	var errs field.ErrorList
	for _, finalizer := range ns.Spec.Finalizers {
		errs = append(errs, validateFinalizer(atFinalizers, string(finalizer))...)
	}
	return errs
}

func validateUpdate(_ context.Context, ns, old *corev1.Namespace) field.ErrorList {
	errs := rules.Meta(ns, false, apivalidation.ValidateNamespaceName)
	errs = append(errs, validateSpec(ns)...)
	return append(errs, rules.MetaUpdate(ns, old)...)
}

func validateFinalizer(at *field.Path, name string) field.ErrorList {
	return append(apivalidation.ValidateFinalizerName(name, at), rules.Finalizer(at, name)...)
}

func validateStatus(_ context.Context, ns, old *corev1.Namespace) field.ErrorList {
	errs := rules.MetaUpdate(ns, old)
	want, when := corev1.NamespaceActive, "until the namespace is deleted"
	if !ns.DeletionTimestamp.IsZero() {
		want, when = corev1.NamespaceTerminating, "once the namespace is deleted"
	}
	if ns.Status.Phase != want {
		errs = append(errs, field.Invalid(atPhase, ns.Status.Phase, "must be "+string(want)+" "+when))
	}
	return errs
}

func validateFinalize(_ context.Context, ns, old *corev1.Namespace) field.ErrorList {
	errs := rules.MetaUpdate(ns, old)
	for i, finalizer := range ns.Spec.Finalizers {
		errs = append(errs, validateFinalizer(atFinalizers.Index(i), string(finalizer))...)
	}
	return errs
}
