// Package quota says how much of a ResourceQuota an object uses, and which quotas it counts against. It is pure: who lists objects,
// refuses them or writes usage down is not its business.
package quota

import (
	"errors"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/utils/clock"
)

// Lister lists the objects of a resource in a namespace.
type Lister func(resource schema.GroupVersionResource) generic.ListFuncByNamespace

// NoLister is for those who judge single objects and sum nothing up.
func NoLister(schema.GroupVersionResource) generic.ListFuncByNamespace {
	return func(string) ([]runtime.Object, error) { return nil, errors.New("usage is not summed up here") }
}

// counted are the resources that quotas can also name without "count/".
var counted = map[string]corev1.ResourceName{
	"configmaps":             corev1.ResourceConfigMaps,
	"resourcequotas":         corev1.ResourceQuotas,
	"replicationcontrollers": corev1.ResourceReplicationControllers,
	"secrets":                corev1.ResourceSecrets,
}

// Evaluators are those of the resources that quotas know by more than their number, or by another name than "count/".
func Evaluators(list Lister, clock clock.PassiveClock) []quota.Evaluator {
	pods, services := corev1.SchemeGroupVersion.WithResource("pods"), corev1.SchemeGroupVersion.WithResource("services")
	out := []quota.Evaluator{
		&podEvaluator{list: list(pods), clock: clock},
		&serviceEvaluator{list: list(services)},
	}
	for name, alias := range counted {
		r := corev1.SchemeGroupVersion.WithResource(name)
		out = append(out, generic.NewObjectCountEvaluator(r.GroupResource(), list(r), alias))
	}
	return out
}

// Ignored are what no quota counts: questions, which are not stored, and Events.
var Ignored = map[schema.GroupResource]struct{}{
	corev1.Resource("bindings"):                                               {},
	corev1.Resource("events"):                                                 {},
	{Group: eventsv1.GroupName, Resource: "events"}:                           {},
	{Group: authenticationv1.GroupName, Resource: "tokenreviews"}:             {},
	{Group: authenticationv1.GroupName, Resource: "selfsubjectreviews"}:       {},
	{Group: authorizationv1.GroupName, Resource: "subjectaccessreviews"}:      {},
	{Group: authorizationv1.GroupName, Resource: "selfsubjectaccessreviews"}:  {},
	{Group: authorizationv1.GroupName, Resource: "localsubjectaccessreviews"}: {},
	{Group: authorizationv1.GroupName, Resource: "selfsubjectrulesreviews"}:   {},
}

func number(n int) resource.Quantity { return *resource.NewQuantity(int64(n), resource.DecimalSI) }

// unscoped is the part of an evaluator whose objects have no scopes.
type unscoped struct{}

func (unscoped) Constraints([]corev1.ResourceName, runtime.Object) error { return nil }

func (unscoped) MatchingScopes(runtime.Object, []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return nil, nil
}

func (unscoped) UncoveredQuotaScopes(_, _ []corev1.ScopedResourceSelectorRequirement) ([]corev1.ScopedResourceSelectorRequirement, error) {
	return nil, nil
}
