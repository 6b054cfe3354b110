// Package disruption describes policy/v1 PodDisruptionBudgets, and evicts Pods as far as these allow it. How many Pods may be
// missing now is counted elsewhere: here it is only used up.
package disruption

import (
	"context"

	policyv1 "k8s.io/api/policy/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

type budget = policyv1.PodDisruptionBudget

// New describes PodDisruptionBudgets.
func New() registry.Resource {
	k := &registry.Kind[budget, *budget]{
		Served: policyv1.SchemeGroupVersion,
		Plural: "poddisruptionbudgets", Singular: "poddisruptionbudget", KindName: "PodDisruptionBudget",
		ShortNames:   []string{"pdb"},
		StrictUpdate: true,
		NewList:      func() runtime.Object { return &policyv1.PodDisruptionBudgetList{} },
		Validate: func(_ context.Context, b *budget) field.ErrorList {
			return append(rules.Finalizers(b), validateSpec(&b.Spec, nil)...)
		},
		ValidateUpdate: func(_ context.Context, b, old *budget) field.ErrorList {
			return append(rules.MetaUpdate(b, old), validateSpec(&b.Spec, &old.Spec)...)
		},
		Columns: []registry.Column[budget]{
			{Name: "Min Available", Description: "The minimum number of pods that must be available.",
				Cell: func(b *budget) any { return amount(b.Spec.MinAvailable) }},
			{Name: "Max Unavailable", Description: "The maximum number of pods that may be unavailable.",
				Cell: func(b *budget) any { return amount(b.Spec.MaxUnavailable) }},
			{Name: "Allowed Disruptions", Type: "integer", Description: "Calculated number of pods that may be disrupted at this time.",
				Cell: func(b *budget) any { return int64(b.Status.DisruptionsAllowed) }},
			registry.Age[budget](),
		},
	}
	registry.SpecAndStatus(k, func(b *budget) *policyv1.PodDisruptionBudgetSpec { return &b.Spec },
		func(b *budget) *policyv1.PodDisruptionBudgetStatus { return &b.Status }, validateStatus)
	// Labels and annotations can be changed with the status, as in Kubernetes.
	k.Status.Prepare = func(_ context.Context, b, old *budget) { b.Spec = old.Spec }
	k.Status.Reset = k.Status.Reset[:1]
	return k
}

func amount(value *intstr.IntOrString) string {
	if value == nil {
		return "N/A"
	}
	return value.String()
}

func validateSpec(spec, old *policyv1.PodDisruptionBudgetSpec) field.ErrorList {
	at := workload.At
	var errs field.ErrorList
	if spec.MinAvailable != nil && spec.MaxUnavailable != nil {
		errs = append(errs, field.Invalid(at, *spec, "must have minAvailable or maxUnavailable, not both"))
	}
	errs = append(errs, validateAmount(at.Child("minAvailable"), spec.MinAvailable)...)
	errs = append(errs, validateAmount(at.Child("maxUnavailable"), spec.MaxUnavailable)...)
	// A selector that is stored stays as it is, whatever was allowed when it was.
	if old == nil || workload.Changed(spec.Selector, old.Selector) {
		errs = append(errs, metavalidation.ValidateLabelSelector(spec.Selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
	}
	if policy := spec.UnhealthyPodEvictionPolicy; policy != nil {
		errs = append(errs, rules.OneOf(at.Child("unhealthyPodEvictionPolicy"), *policy, policyv1.AlwaysAllow, policyv1.IfHealthyBudget)...)
	}
	return errs
}

func validateAmount(at *field.Path, value *intstr.IntOrString) field.ErrorList {
	return append(workload.Share(at, value), workload.AtMostAll(at, value)...)
}

func validateStatus(_ context.Context, b, old *budget) field.ErrorList {
	at, status := workload.AtStatus, &b.Status
	errs := rules.MetaUpdate(b, old)
	errs = append(errs, metavalidation.ValidateConditions(status.Conditions, at.Child("conditions"))...)
	return append(errs, workload.NotNegative(at, workload.N("disruptionsAllowed", status.DisruptionsAllowed),
		workload.N("currentHealthy", status.CurrentHealthy), workload.N("desiredHealthy", status.DesiredHealthy),
		workload.N("expectedPods", status.ExpectedPods))...)
}
