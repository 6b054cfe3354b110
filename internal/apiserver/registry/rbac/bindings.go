package rbac

import (
	"context"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// NewRoleBinding describes RoleBindings, which give subjects what a Role or ClusterRole allows, in one namespace.
func NewRoleBinding(g *Guard) registry.Resource {
	return &registry.Kind[rbacv1.RoleBinding, *rbacv1.RoleBinding]{
		Served:    rbacv1.SchemeGroupVersion,
		Plural:    "rolebindings",
		Singular:  "rolebinding",
		KindName:  "RoleBinding",
		NewList:   func() runtime.Object { return &rbacv1.RoleBindingList{} },
		Default:   func(b *rbacv1.RoleBinding) { setDefaults(&b.RoleRef, b.Subjects) },
		ValidName: validName,
		Validate: func(_ context.Context, b *rbacv1.RoleBinding) field.ErrorList {
			return validateBinding(b.RoleRef, b.Subjects, true)
		},
		CreateOnUpdate: true,
		Columns:        columns(func(b *rbacv1.RoleBinding) (rbacv1.RoleRef, []rbacv1.Subject) { return b.RoleRef, b.Subjects }),
		ValidateUpdate: func(_ context.Context, b, old *rbacv1.RoleBinding) field.ErrorList {
			return append(validateBinding(b.RoleRef, b.Subjects, true), keepRole(b.RoleRef, old.RoleRef)...)
		},
		Customize: func(_ *genericregistry.Store, storage map[string]rest.Storage) error {
			return g.protect(storage, "rolebindings", func(ctx context.Context, obj, _ runtime.Object) error {
				b := obj.(*rbacv1.RoleBinding)
				return g.mayBind(ctx, "rolebindings", b.Namespace, b.Name, b.RoleRef)
			})
		},
	}
}

// NewClusterRoleBinding describes ClusterRoleBindings, which give subjects what a ClusterRole allows, everywhere.
func NewClusterRoleBinding(g *Guard) registry.Resource {
	return &registry.Kind[rbacv1.ClusterRoleBinding, *rbacv1.ClusterRoleBinding]{
		Served:        rbacv1.SchemeGroupVersion,
		Plural:        "clusterrolebindings",
		Singular:      "clusterrolebinding",
		KindName:      "ClusterRoleBinding",
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &rbacv1.ClusterRoleBindingList{} },
		Default:       func(b *rbacv1.ClusterRoleBinding) { setDefaults(&b.RoleRef, b.Subjects) },
		ValidName:     validName,
		Validate: func(_ context.Context, b *rbacv1.ClusterRoleBinding) field.ErrorList {
			return validateBinding(b.RoleRef, b.Subjects, false)
		},
		CreateOnUpdate: true,
		Columns:        columns(func(b *rbacv1.ClusterRoleBinding) (rbacv1.RoleRef, []rbacv1.Subject) { return b.RoleRef, b.Subjects }),
		ValidateUpdate: func(_ context.Context, b, old *rbacv1.ClusterRoleBinding) field.ErrorList {
			return append(validateBinding(b.RoleRef, b.Subjects, false), keepRole(b.RoleRef, old.RoleRef)...)
		},
		Customize: func(_ *genericregistry.Store, storage map[string]rest.Storage) error {
			return g.protect(storage, "clusterrolebindings", func(ctx context.Context, obj, _ runtime.Object) error {
				b := obj.(*rbacv1.ClusterRoleBinding)
				return g.mayBind(ctx, "clusterrolebindings", "", b.Name, b.RoleRef)
			})
		},
	}
}

func setDefaults(ref *rbacv1.RoleRef, subjects []rbacv1.Subject) {
	if ref.APIGroup == "" {
		ref.APIGroup = rbacv1.GroupName
	}
	for i := range subjects {
		if s := &subjects[i]; s.APIGroup == "" && (s.Kind == rbacv1.UserKind || s.Kind == rbacv1.GroupKind) {
			s.APIGroup = rbacv1.GroupName
		}
	}
}

func validateBinding(ref rbacv1.RoleRef, subjects []rbacv1.Subject, namespaced bool) field.ErrorList {
	path := field.NewPath("roleRef")
	errs := rules.OneOf(path.Child("apiGroup"), ref.APIGroup, rbacv1.GroupName)
	kinds := []string{"ClusterRole"}
	if namespaced {
		kinds = append(kinds, "Role")
	}
	errs = append(errs, rules.OneOf(path.Child("kind"), ref.Kind, kinds...)...)
	if ref.Name == "" {
		errs = append(errs, field.Required(path.Child("name"), "the role to bind"))
	} else {
		errs = append(errs, rules.Each(path.Child("name"), ref.Name, content.IsPathSegmentName(ref.Name))...)
	}
	for i, s := range subjects {
		errs = append(errs, validateSubject(field.NewPath("subjects").Index(i), s, namespaced)...)
	}
	return errs
}

func validateSubject(path *field.Path, s rbacv1.Subject, namespaced bool) (errs field.ErrorList) {
	if s.Name == "" {
		errs = append(errs, field.Required(path.Child("name"), "who it is"))
	}
	group := path.Child("apiGroup")
	switch s.Kind {
	case rbacv1.ServiceAccountKind:
		if s.Name != "" {
			errs = append(errs, rules.Each(path.Child("name"), s.Name, validation.ValidateServiceAccountName(s.Name, false))...)
		}
		errs = append(errs, rules.OneOf(group, s.APIGroup, "")...)
		if !namespaced && s.Namespace == "" {
			errs = append(errs, field.Required(path.Child("namespace"), "the service account's namespace"))
		}
	case rbacv1.UserKind, rbacv1.GroupKind:
		errs = append(errs, rules.OneOf(group, s.APIGroup, rbacv1.GroupName)...)
	default:
		errs = append(errs, rules.OneOf(path.Child("kind"), s.Kind, rbacv1.ServiceAccountKind, rbacv1.UserKind, rbacv1.GroupKind)...)
	}
	return errs
}

// keepRole keeps a binding at its role, so that whoever may change a binding's subjects can't thereby grant another role.
func keepRole(ref, old rbacv1.RoleRef) field.ErrorList {
	if ref == old {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("roleRef"), ref, "can't be changed: delete the binding and create another")}
}

func columns[T any, P registry.Object[T]](parts func(*T) (rbacv1.RoleRef, []rbacv1.Subject)) []registry.Column[T] {
	subjects := func(kind string) func(*T) any {
		return func(t *T) any {
			var names []string
			_, list := parts(t)
			for _, s := range list {
				switch {
				case s.Kind != kind:
				case kind == rbacv1.ServiceAccountKind:
					names = append(names, s.Namespace+"/"+s.Name)
				default:
					names = append(names, s.Name)
				}
			}
			return strings.Join(names, ", ")
		}
	}
	return []registry.Column[T]{
		{Name: "Role", Description: rbacv1.RoleBinding{}.SwaggerDoc()["roleRef"], Cell: func(t *T) any {
			ref, _ := parts(t)
			return ref.Kind + "/" + ref.Name
		}},
		registry.Age[T, P](),
		{Name: "Users", Wide: true, Description: "Users in the subjects of the binding", Cell: subjects(rbacv1.UserKind)},
		{Name: "Groups", Wide: true, Description: "Groups in the subjects of the binding", Cell: subjects(rbacv1.GroupKind)},
		{Name: "ServiceAccounts", Wide: true, Description: "Service accounts in the subjects of the binding", Cell: subjects(rbacv1.ServiceAccountKind)},
	}
}
