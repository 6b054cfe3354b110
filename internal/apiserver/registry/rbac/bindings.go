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
	type object = rbacv1.RoleBinding
	k := newBinding(g, "rolebindings", true, func(b *object) (*rbacv1.RoleRef, []rbacv1.Subject) { return &b.RoleRef, b.Subjects })
	k.Singular, k.KindName, k.NewList = "rolebinding", "RoleBinding", func() runtime.Object { return &rbacv1.RoleBindingList{} }
	return k
}

// NewClusterRoleBinding describes ClusterRoleBindings, which give subjects what a ClusterRole allows, everywhere.
func NewClusterRoleBinding(g *Guard) registry.Resource {
	type object = rbacv1.ClusterRoleBinding
	k := newBinding(g, "clusterrolebindings", false, func(b *object) (*rbacv1.RoleRef, []rbacv1.Subject) { return &b.RoleRef, b.Subjects })
	k.Singular, k.KindName, k.NewList = "clusterrolebinding", "ClusterRoleBinding", func() runtime.Object { return &rbacv1.ClusterRoleBindingList{} }
	return k
}

// newBinding describes what both kinds have in common.
func newBinding[T any, P registry.Object[T]](g *Guard, plural string, namespaced bool, parts func(P) (*rbacv1.RoleRef, []rbacv1.Subject)) *registry.Kind[T, P] {
	judge := func(b P) field.ErrorList {
		ref, subjects := parts(b)
		return validateBinding(*ref, subjects, namespaced)
	}
	return &registry.Kind[T, P]{
		Served: rbacv1.SchemeGroupVersion, Plural: plural, ClusterScoped: !namespaced, CreateOnUpdate: true,
		Default:   func(b P) { setDefaults(parts(b)) },
		ValidName: validName,
		Validate:  func(_ context.Context, b P) field.ErrorList { return judge(b) },
		ValidateUpdate: func(_ context.Context, b, old P) field.ErrorList {
			now, _ := parts(b)
			before, _ := parts(old)
			return append(judge(b), keepRole(*now, *before)...)
		},
		Columns: columns[T, P](parts),
		Customize: func(_ *genericregistry.Store, storage map[string]rest.Storage) error {
			return g.protect(storage, plural, func(ctx context.Context, obj, _ runtime.Object) error {
				b := obj.(P)
				ref, _ := parts(b)
				return g.mayBind(ctx, plural, b.GetNamespace(), b.GetName(), *ref)
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

func columns[T any, P registry.Object[T]](parts func(P) (*rbacv1.RoleRef, []rbacv1.Subject)) []registry.Column[T] {
	subjects := func(kind string) func(*T) any {
		return func(t *T) any {
			var names []string
			_, list := parts(P(t))
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
			ref, _ := parts(P(t))
			return ref.Kind + "/" + ref.Name
		}},
		registry.Age[T, P](),
		{Name: "Users", Wide: true, Description: "Users in the subjects of the binding", Cell: subjects(rbacv1.UserKind)},
		{Name: "Groups", Wide: true, Description: "Groups in the subjects of the binding", Cell: subjects(rbacv1.GroupKind)},
		{Name: "ServiceAccounts", Wide: true, Description: "Service accounts in the subjects of the binding", Cell: subjects(rbacv1.ServiceAccountKind)},
	}
}
