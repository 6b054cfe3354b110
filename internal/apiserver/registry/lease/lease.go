// Package lease describes Leases: who holds something, and by when they must renew it. It elects nobody.
package lease

import (
	"context"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// New describes coordination.k8s.io/v1 Leases.
func New() registry.Resource {
	return &registry.Kind[coordinationv1.Lease, *coordinationv1.Lease]{
		Served:         coordinationv1.SchemeGroupVersion,
		Plural:         "leases",
		Singular:       "lease",
		KindName:       "Lease",
		NewList:        func() runtime.Object { return &coordinationv1.LeaseList{} },
		PrepareCreate:  func(_ context.Context, l *coordinationv1.Lease) { dropCoordination(l, &coordinationv1.Lease{}) },
		PrepareUpdate:  func(_ context.Context, l, old *coordinationv1.Lease) { dropCoordination(l, old) },
		Validate:       validate,
		StrictUpdate:   true,
		CreateOnUpdate: true,
		Columns: []registry.Column[coordinationv1.Lease]{
			{Name: "Holder", Description: coordinationv1.LeaseSpec{}.SwaggerDoc()["holderIdentity"], Cell: holder},
			registry.Age[coordinationv1.Lease](),
		},
		ValidateUpdate: func(ctx context.Context, l, _ *coordinationv1.Lease) field.ErrorList { return validate(ctx, l) },
	}
}

// dropCoordination drops what only coordinated leader election reads, which is off; what a store already has stays.
func dropCoordination(l, old *coordinationv1.Lease) {
	if old.Spec.Strategy == nil {
		l.Spec.Strategy = nil
	}
	if old.Spec.PreferredHolder == nil {
		l.Spec.PreferredHolder = nil
	}
}

func validate(_ context.Context, l *coordinationv1.Lease) field.ErrorList {
	var errs field.ErrorList
	path := field.NewPath("spec")
	if d := l.Spec.LeaseDurationSeconds; d != nil && *d <= 0 {
		errs = append(errs, field.Invalid(path.Child("leaseDurationSeconds"), *d, "must be 1 or more"))
	}
	if n := l.Spec.LeaseTransitions; n != nil {
		errs = append(errs, rules.NotNegative(path.Child("leaseTransitions"), int64(*n))...)
	}
	if s := l.Spec.Strategy; s != nil {
		errs = append(errs, validateStrategy(path.Child("strategy", "strategy"), *s)...)
	}
	if p := l.Spec.PreferredHolder; p != nil && *p != "" && (l.Spec.Strategy == nil || *l.Spec.Strategy == "") {
		errs = append(errs, field.Forbidden(path.Child("preferredHolder"), "needs a strategy beside it"))
	}
	return errs
}

// validateStrategy takes the one strategy there is, and others by a name with a prefix. The path that the reference
// reports says "strategy" twice.
func validateStrategy(path *field.Path, s coordinationv1.CoordinatedLeaseStrategy) field.ErrorList {
	if strings.Contains(string(s), "/") {
		return rules.QualifiedName(path, string(s))
	}
	return rules.OneOf(path, s, coordinationv1.OldestEmulationVersion)
}

func holder(l *coordinationv1.Lease) any {
	if l.Spec.HolderIdentity == nil {
		return ""
	}
	return *l.Spec.HolderIdentity
}
