// Package resourcequota describes ResourceQuotas: how much a namespace may use, and how much it uses. It counts nothing: see
// portal/internal/quota.
package resourcequota

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

type resourceQuota = corev1.ResourceQuota

var (
	atSpec   = field.NewPath("spec")
	atStatus = field.NewPath("status")

	// compute are what Pods use of a node; objects are what is counted in a namespace; storage is what claims ask for.
	compute = []corev1.ResourceName{
		corev1.ResourceCPU, corev1.ResourceRequestsCPU, corev1.ResourceLimitsCPU,
		corev1.ResourceMemory, corev1.ResourceRequestsMemory, corev1.ResourceLimitsMemory,
	}
	objects = []corev1.ResourceName{
		corev1.ResourcePods, corev1.ResourceQuotas, corev1.ResourceServices, corev1.ResourceReplicationControllers,
		corev1.ResourceSecrets, corev1.ResourceConfigMaps, corev1.ResourcePersistentVolumeClaims,
		corev1.ResourceServicesNodePorts, corev1.ResourceServicesLoadBalancers,
	}
	storage = []corev1.ResourceName{
		corev1.ResourceRequestsStorage, corev1.ResourceEphemeralStorage, corev1.ResourceRequestsEphemeralStorage, corev1.ResourceLimitsEphemeralStorage,
	}
	standard = slices.Concat(compute, objects, storage)
)

// New describes core/v1 ResourceQuotas.
func New() registry.Resource {
	return &registry.Kind[resourceQuota, *resourceQuota]{
		Served: corev1.SchemeGroupVersion,
		Plural: "resourcequotas", Singular: "resourcequota", KindName: "ResourceQuota",
		ShortNames:    []string{"quota"},
		NewList:       func() runtime.Object { return &corev1.ResourceQuotaList{} },
		PrepareCreate: func(_ context.Context, q *resourceQuota) { q.Status = corev1.ResourceQuotaStatus{} },
		PrepareUpdate: func(_ context.Context, q, old *resourceQuota) { q.Status = old.Status },
		Validate:      func(_ context.Context, q *resourceQuota) field.ErrorList { return validateSpec(&q.Spec) },
		ValidateUpdate: func(_ context.Context, q, old *resourceQuota) field.ErrorList {
			errs := append(rules.MetaUpdate(q, old), validateSpec(&q.Spec)...)
			if !sameScopes(q.Spec.Scopes, old.Spec.Scopes) {
				errs = append(errs, field.Invalid(atSpec.Child("scopes"), q.Spec.Scopes, "cannot be changed: make another quota"))
			}
			return errs
		},
		Warnings: warnings,
		Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[resourceQuota, *resourceQuota]{
			Prepare: func(_ context.Context, q, old *resourceQuota) { q.Spec = old.Spec },
			Validate: func(_ context.Context, q, old *resourceQuota) field.ErrorList {
				errs := rules.MetaUpdate(q, old)
				errs = append(errs, validateList(atStatus.Child("hard"), q.Status.Hard)...)
				return append(errs, validateList(atStatus.Child("used"), q.Status.Used)...)
			},
			Reset: []fieldpath.Path{fieldpath.MakePathOrDie("spec")},
		},
		Columns: []registry.Column[resourceQuota]{
			{Name: "Request", Description: "What is used of what may be requested, or made", Cell: usage(false)},
			{Name: "Limit", Description: "What is used of what limits may add up to", Cell: usage(true)},
			registry.Age[resourceQuota](),
		},
	}
}

func validateSpec(spec *corev1.ResourceQuotaSpec) field.ErrorList {
	errs := validateList(atSpec.Child("hard"), spec.Hard)
	errs = append(errs, validateScopes(spec)...)
	if spec.ScopeSelector != nil {
		errs = append(errs, validateSelector(spec)...)
	}
	return errs
}

// validateList wants amounts of what there can be a quota for.
func validateList(at *field.Path, list corev1.ResourceList) (errs field.ErrorList) {
	for _, name := range slices.Sorted(maps.Keys(list)) {
		path := at.Key(string(name))
		errs = append(errs, validateName(path, name)...)
		errs = append(errs, rules.Quantity(path, name, list[name])...)
	}
	return errs
}

func validateName(at *field.Path, name corev1.ResourceName) field.ErrorList {
	if errs := rules.QualifiedName(at, string(name)); len(errs) > 0 {
		return errs
	}
	if !strings.Contains(string(name), "/") && !known(name) {
		return field.ErrorList{field.Invalid(at, name, "must be a resource that a quota can limit, such as pods or requests.cpu, or have a domain, such as count/widgets.example.com")}
	}
	return nil
}

// known says whether a name without a slash is one that quotas have.
func known(name corev1.ResourceName) bool {
	return slices.Contains(standard, name) || strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) ||
		strings.HasPrefix(string(name), corev1.ResourceRequestsHugePagesPrefix)
}

// opposites of a scope leave nothing that a quota with both could count.
var opposites = [][2]corev1.ResourceQuotaScope{
	{corev1.ResourceQuotaScopeBestEffort, corev1.ResourceQuotaScopeNotBestEffort},
	{corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating},
}

func conflicting(at *field.Path, scopes []corev1.ResourceQuotaScope) (errs field.ErrorList) {
	for _, pair := range opposites {
		if slices.Contains(scopes, pair[0]) && slices.Contains(scopes, pair[1]) {
			errs = append(errs, field.Invalid(at, scopes, fmt.Sprintf("%s and %s exclude each other", pair[0], pair[1])))
		}
	}
	return errs
}

func validateScopes(spec *corev1.ResourceQuotaSpec) (errs field.ErrorList) {
	at := atSpec.Child("scopes")
	for _, scope := range spec.Scopes {
		if !isScope(scope) {
			errs = append(errs, field.Invalid(at, spec.Scopes, fmt.Sprintf("there is no scope %q", scope)))
		}
		for _, name := range outside(scope, spec.Hard) {
			errs = append(errs, field.Invalid(at, spec.Scopes, fmt.Sprintf("%s does not apply to %s", scope, name)))
		}
	}
	return append(errs, conflicting(at, spec.Scopes)...)
}

func validateSelector(spec *corev1.ResourceQuotaSpec) (errs field.ErrorList) {
	at := atSpec.Child("scopeSelector", "matchExpressions")
	var scopes []corev1.ResourceQuotaScope
	for _, r := range spec.ScopeSelector.MatchExpressions {
		scopes = append(scopes, r.ScopeName)
		if !isScope(r.ScopeName) {
			errs = append(errs, field.Invalid(at.Child("scopeName"), r.ScopeName, "there is no such scope"))
		}
		for _, name := range outside(r.ScopeName, spec.Hard) {
			errs = append(errs, field.Invalid(at, spec.ScopeSelector, fmt.Sprintf("%s does not apply to %s", r.ScopeName, name)))
		}
		switch r.ScopeName {
		case corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeVolumeAttributesClass:
		default:
			if r.Operator != corev1.ScopeSelectorOpExists {
				errs = append(errs, field.Invalid(at.Child("operator"), r.Operator, "must be Exists for this scope"))
			}
		}
		switch r.Operator {
		case corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn:
			if len(r.Values) == 0 {
				errs = append(errs, field.Required(at.Child("values"), fmt.Sprintf("one value or more for %s", r.Operator)))
			}
		case corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpDoesNotExist:
			if len(r.Values) > 0 {
				errs = append(errs, field.Invalid(at.Child("values"), r.Values, fmt.Sprintf("must be empty for %s", r.Operator)))
			}
		default:
			errs = append(errs, field.Invalid(at.Child("operator"), r.Operator, "must be In, NotIn, Exists or DoesNotExist"))
		}
	}
	return append(errs, conflicting(at, scopes)...)
}

func isScope(scope corev1.ResourceQuotaScope) bool {
	switch scope {
	case corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopeBestEffort,
		corev1.ResourceQuotaScopeNotBestEffort, corev1.ResourceQuotaScopePriorityClass,
		corev1.ResourceQuotaScopeCrossNamespacePodAffinity, corev1.ResourceQuotaScopeVolumeAttributesClass:
		return true
	}
	return false
}

// outside are the resources of a quota that have nothing to do with a scope.
func outside(scope corev1.ResourceQuotaScope, hard corev1.ResourceList) (out []corev1.ResourceName) {
	if !isScope(scope) {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(hard)) {
		if known(name) && !applies(scope, name) {
			out = append(out, name)
		}
	}
	return out
}

func applies(scope corev1.ResourceQuotaScope, name corev1.ResourceName) bool {
	switch scope {
	case corev1.ResourceQuotaScopeBestEffort:
		return name == corev1.ResourcePods
	case corev1.ResourceQuotaScopeVolumeAttributesClass:
		return name == corev1.ResourcePersistentVolumeClaims || name == corev1.ResourceRequestsStorage
	}
	return name == corev1.ResourcePods || slices.Contains(compute, name)
}

func sameScopes(a, b []corev1.ResourceQuotaScope) bool {
	within := func(a, b []corev1.ResourceQuotaScope) bool {
		return !slices.ContainsFunc(a, func(s corev1.ResourceQuotaScope) bool { return !slices.Contains(b, s) })
	}
	return within(a, b) && within(b, a)
}

// warnings tell that requests may add up to more than limits, which no Pod can make use of.
func warnings(_ context.Context, q, old *resourceQuota) (out []string) {
	if old != nil {
		return nil
	}
	hard := q.Spec.Hard
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceStorage, corev1.ResourceEphemeralStorage} {
		requests := corev1.DefaultResourceRequestsPrefix + name
		request, ok := hard[requests]
		if !ok && (name == corev1.ResourceCPU || name == corev1.ResourceMemory) {
			requests = name
			request, ok = hard[name]
		}
		limit, limited := hard["limits."+name]
		if ok && limited && request.Cmp(limit) > 0 {
			out = append(out, fmt.Sprintf("spec.hard: %s (%s) is more than limits.%s (%s)", requests, request.String(), name, limit.String()))
		}
	}
	return out
}

// usage is a column of what is used, of limits or of all else.
func usage(limits bool) func(*resourceQuota) any {
	return func(q *resourceQuota) any {
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(q.Status.Hard)) {
			if strings.HasPrefix(string(name), "limits.") != limits {
				continue
			}
			used, hard := q.Status.Used[name], q.Status.Hard[name]
			parts = append(parts, fmt.Sprintf("%s: %s/%s", name, used.String(), hard.String()))
		}
		return strings.Join(parts, ", ")
	}
}
