// Package servicecidr describes networking.k8s.io/v1 ServiceCIDRs: the ranges that cluster IPs come from.
package servicecidr

import (
	"context"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

var atCIDRs = field.NewPath("spec", "cidrs")

// New describes ServiceCIDRs.
func New() *registry.Kind[networkingv1.ServiceCIDR, *networkingv1.ServiceCIDR] {
	return &registry.Kind[networkingv1.ServiceCIDR, *networkingv1.ServiceCIDR]{
		Served: networkingv1.SchemeGroupVersion,
		Plural: "servicecidrs", Singular: "servicecidr", KindName: "ServiceCIDR",
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &networkingv1.ServiceCIDRList{} },
		PrepareCreate: func(_ context.Context, cidr *networkingv1.ServiceCIDR) {
			cidr.Status = networkingv1.ServiceCIDRStatus{}
		},
		PrepareUpdate: func(_ context.Context, cidr, old *networkingv1.ServiceCIDR) { cidr.Status = old.Status },
		Validate:      validateCreate,
		Columns: []registry.Column[networkingv1.ServiceCIDR]{
			{Name: "CIDRs", Description: networkingv1.ServiceCIDRSpec{}.SwaggerDoc()["cidrs"],
				Cell: func(c *networkingv1.ServiceCIDR) any { return strings.Join(c.Spec.CIDRs, ",") }},
			registry.Age[networkingv1.ServiceCIDR](),
		},
		Status: &registry.Status[networkingv1.ServiceCIDR, *networkingv1.ServiceCIDR]{
			Prepare: func(_ context.Context, cidr, old *networkingv1.ServiceCIDR) {
				cidr.Spec = old.Spec
				metav1.ResetObjectMetaForStatus(cidr, old)
			},
			Validate: func(_ context.Context, cidr, old *networkingv1.ServiceCIDR) field.ErrorList {
				return rules.MetaUpdate(cidr, old)
			},
			Reset: []fieldpath.Path{fieldpath.MakePathOrDie("metadata"), fieldpath.MakePathOrDie("spec")},
		},
		Reset:          []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		ValidateUpdate: validateUpdate,
	}
}

func validateCreate(_ context.Context, cidr *networkingv1.ServiceCIDR) field.ErrorList {
	return append(rules.Finalizers(cidr), validateCIDRs(cidr.Spec.CIDRs)...)
}

// validateCIDRs wants one range, or one of each IP family, in the one way that it is written.
func validateCIDRs(cidrs []string) field.ErrorList {
	switch {
	case len(cidrs) == 0:
		return field.ErrorList{field.Required(atCIDRs, "a range, such as 10.96.0.0/16")}
	case len(cidrs) > 2:
		return field.ErrorList{field.Invalid(atCIDRs, cidrs, "must be at most two, one of each IP family")}
	}
	var errs field.ErrorList
	for i, cidr := range cidrs {
		errs = append(errs, validation.IsValidCIDR(atCIDRs.Index(i), cidr)...)
	}
	if len(cidrs) == 2 {
		first, second := utilnet.IPFamilyOfCIDRString(cidrs[0]), utilnet.IPFamilyOfCIDRString(cidrs[1])
		if first == second && first != utilnet.IPFamilyUnknown {
			errs = append(errs, field.Invalid(atCIDRs, cidrs, "must be one of each IP family"))
		}
	}
	return errs
}

// validateUpdate lets a second family be added, and nothing else change: Services hold addresses of the ranges.
func validateUpdate(_ context.Context, cidr, old *networkingv1.ServiceCIDR) field.ErrorList {
	errs := rules.MetaUpdate(cidr, old)
	now, was := cidr.Spec.CIDRs, old.Spec.CIDRs
	const why = "cannot be changed: make another ServiceCIDR"
	switch {
	case len(now) == len(was):
		for i := range was {
			if now[i] != was[i] {
				errs = append(errs, field.Invalid(atCIDRs.Index(i), now[i], why))
			}
		}
	case len(was) == 1 && len(now) == 2:
		if now[0] != was[0] {
			errs = append(errs, field.Invalid(atCIDRs.Index(0), now[0], why))
		}
		errs = append(errs, validateCIDRs(now)...)
	default:
		errs = append(errs, field.Invalid(atCIDRs, now, why))
	}
	return errs
}
