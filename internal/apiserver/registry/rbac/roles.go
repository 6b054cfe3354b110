package rbac

import (
	"context"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

// NewRole describes Roles, which grant in one namespace.
func NewRole(g *Guard) registry.Resource {
	return &registry.Kind[rbacv1.Role, *rbacv1.Role]{
		Served:         rbacv1.SchemeGroupVersion,
		Plural:         "roles",
		Singular:       "role",
		KindName:       "Role",
		NewList:        func() runtime.Object { return &rbacv1.RoleList{} },
		ValidName:      validName,
		Validate:       func(_ context.Context, r *rbacv1.Role) field.ErrorList { return validateRules(r.Rules, true) },
		CreateOnUpdate: true,
		Columns:        []registry.Column[rbacv1.Role]{createdAt[rbacv1.Role]()},
		Customize: func(_ *genericregistry.Store, storage map[string]rest.Storage) error {
			return g.protect(storage, "roles", func(ctx context.Context, obj, _ runtime.Object) error {
				r := obj.(*rbacv1.Role)
				return g.mayGrant(ctx, "roles", r.Namespace, r.Name, r.Rules)
			})
		},
	}
}

// NewClusterRole describes ClusterRoles, which grant everywhere or, through a RoleBinding, in its namespace.
func NewClusterRole(g *Guard) registry.Resource {
	return &registry.Kind[rbacv1.ClusterRole, *rbacv1.ClusterRole]{
		Served:         rbacv1.SchemeGroupVersion,
		Plural:         "clusterroles",
		Singular:       "clusterrole",
		KindName:       "ClusterRole",
		ClusterScoped:  true,
		NewList:        func() runtime.Object { return &rbacv1.ClusterRoleList{} },
		ValidName:      validName,
		Validate:       validateClusterRole,
		CreateOnUpdate: true,
		Columns:        []registry.Column[rbacv1.ClusterRole]{createdAt[rbacv1.ClusterRole]()},
		Customize: func(_ *genericregistry.Store, storage map[string]rest.Storage) error {
			return g.protect(storage, "clusterroles", func(ctx context.Context, obj, old runtime.Object) error {
				r := obj.(*rbacv1.ClusterRole)
				grants := r.Rules
				// An aggregated role will get whatever rules others write: only those who may do everything may make one, or
				// change one into another.
				if before, ok := old.(*rbacv1.ClusterRole); aggregates(r) || ok && aggregates(before) {
					grants = append(everything(), grants...)
				}
				return g.mayGrant(ctx, "clusterroles", "", r.Name, grants)
			})
		},
	}
}

func aggregates(r *rbacv1.ClusterRole) bool {
	return r.AggregationRule != nil && len(r.AggregationRule.ClusterRoleSelectors) > 0
}

func everything() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}},
		{Verbs: []string{"*"}, NonResourceURLs: []string{"*"}},
	}
}

// validName takes whatever can be a part of a path: role names have colons and capitals.
func validName(name string, prefix bool) []string {
	if prefix {
		return content.IsPathSegmentPrefix(name)
	}
	return content.IsPathSegmentName(name)
}

func validateRules(rules []rbacv1.PolicyRule, namespaced bool) (errs field.ErrorList) {
	for i, r := range rules {
		errs = append(errs, validateRule(field.NewPath("rules").Index(i), r, namespaced)...)
	}
	return errs
}

func validateRule(path *field.Path, r rbacv1.PolicyRule, namespaced bool) (errs field.ErrorList) {
	if len(r.Verbs) == 0 {
		errs = append(errs, field.Required(path.Child("verbs"), "a rule allows at least one verb"))
	}
	if len(r.NonResourceURLs) > 0 {
		urls := path.Child("nonResourceURLs")
		if namespaced {
			errs = append(errs, field.Invalid(urls, r.NonResourceURLs, "paths are in no namespace: only a ClusterRole can have them"))
		}
		if len(r.APIGroups)+len(r.Resources)+len(r.ResourceNames) > 0 {
			errs = append(errs, field.Invalid(urls, r.NonResourceURLs, "a rule has either paths or resources: write two rules"))
		}
		return errs
	}
	if len(r.APIGroups) == 0 {
		errs = append(errs, field.Required(path.Child("apiGroups"), `resources are in a group; "" is the core group`))
	}
	if len(r.Resources) == 0 {
		errs = append(errs, field.Required(path.Child("resources"), "a rule is about at least one resource, or about nonResourceURLs"))
	}
	return errs
}

func validateClusterRole(_ context.Context, r *rbacv1.ClusterRole) field.ErrorList {
	errs := validateRules(r.Rules, false)
	if r.AggregationRule == nil {
		return errs
	}
	path := field.NewPath("aggregationRule", "clusterRoleSelectors")
	if len(r.AggregationRule.ClusterRoleSelectors) == 0 {
		return append(errs, field.Required(path, "which ClusterRoles to aggregate"))
	}
	for i := range r.AggregationRule.ClusterRoleSelectors {
		s := &r.AggregationRule.ClusterRoleSelectors[i]
		errs = append(errs, metavalidation.ValidateLabelSelector(s, metavalidation.LabelSelectorValidationOptions{}, path.Index(i))...)
		if _, err := metav1.LabelSelectorAsSelector(s); err != nil {
			errs = append(errs, field.Invalid(path.Index(i), s, err.Error()))
		}
	}
	return errs
}

func createdAt[T any, P registry.Object[T]]() registry.Column[T] {
	return registry.Column[T]{
		Name: "Created At", Type: "date", Description: metav1.ObjectMeta{}.SwaggerDoc()["creationTimestamp"],
		Cell: func(t *T) any { return P(t).GetCreationTimestamp().UTC().Format(time.RFC3339) },
	}
}
