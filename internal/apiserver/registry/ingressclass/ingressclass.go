// Package ingressclass describes IngressClasses: which program serves an Ingress, and with what parameters. It knows
// no such program.
package ingressclass

import (
	"context"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

const maxController = 250

// New describes networking.k8s.io/v1 IngressClasses.
func New() registry.Resource {
	return registry.CountChanges(&registry.Kind[networkingv1.IngressClass, *networkingv1.IngressClass]{
		Served:         networkingv1.SchemeGroupVersion,
		Plural:         "ingressclasses",
		Singular:       "ingressclass",
		KindName:       "IngressClass",
		ClusterScoped:  true,
		NewList:        func() runtime.Object { return &networkingv1.IngressClassList{} },
		Default:        setDefaults,
		Validate:       validate,
		ValidateUpdate: validateUpdate,
		Columns: []registry.Column[networkingv1.IngressClass]{
			{
				Name: "Controller", Description: "Controller that is responsible for handling this class",
				Cell: func(c *networkingv1.IngressClass) any { return c.Spec.Controller },
			},
			{Name: "Parameters", Description: "A reference to a resource with additional parameters", Cell: parameters},
			registry.Age[networkingv1.IngressClass](),
		},
		Customize: func(store *genericregistry.Store, _ map[string]rest.Storage) error {
			store.TableConvertor = markDefault{store.TableConvertor}
			return nil
		},
	}, func(c *networkingv1.IngressClass) *networkingv1.IngressClassSpec { return &c.Spec })
}

func setDefaults(c *networkingv1.IngressClass) {
	if p := c.Spec.Parameters; p != nil && p.Scope == nil {
		p.Scope = new(networkingv1.IngressClassParametersReferenceScopeCluster)
	}
}

func validate(_ context.Context, c *networkingv1.IngressClass) field.ErrorList {
	errs := rules.Finalizers(c)
	path := field.NewPath("spec", "controller")
	if len(c.Spec.Controller) > maxController {
		errs = append(errs, field.TooLong(path, "", maxController))
	}
	errs = append(errs, utilvalidation.IsDomainPrefixedPath(path, c.Spec.Controller)...)
	if p := c.Spec.Parameters; p != nil {
		errs = append(errs, validateParameters(field.NewPath("spec", "parameters"), p)...)
	}
	return errs
}

func validateParameters(path *field.Path, p *networkingv1.IngressClassParametersReference) field.ErrorList {
	errs := ValidateReference(path, p.APIGroup, p.Kind, p.Name)
	scopePath, nsPath := path.Child("scope"), path.Child("namespace")
	switch {
	case p.Scope == nil:
		errs = append(errs, field.Required(scopePath, "Cluster or Namespace"))
	case *p.Scope == networkingv1.IngressClassParametersReferenceScopeCluster:
		if p.Namespace != nil {
			errs = append(errs, field.Forbidden(nsPath, "parameters of scope Cluster are in no namespace"))
		}
	case *p.Scope == networkingv1.IngressClassParametersReferenceScopeNamespace:
		if p.Namespace == nil {
			errs = append(errs, field.Required(nsPath, "parameters of scope Namespace are in one"))
		} else {
			errs = append(errs, rules.Each(nsPath, *p.Namespace, validation.ValidateNamespaceName(*p.Namespace, false))...)
		}
	default:
		errs = append(errs, field.NotSupported(scopePath, *p.Scope, []string{
			networkingv1.IngressClassParametersReferenceScopeCluster, networkingv1.IngressClassParametersReferenceScopeNamespace,
		}))
	}
	return errs
}

// ValidateReference validates a reference to an object of any kind.
func ValidateReference(path *field.Path, group *string, kind, name string) field.ErrorList {
	var errs field.ErrorList
	if group != nil {
		errs = append(errs, rules.DNSSubdomain(path.Child("apiGroup"), *group)...)
	}
	for _, part := range []struct{ field, value string }{{"kind", kind}, {"name", name}} {
		if part.value == "" {
			errs = append(errs, field.Required(path.Child(part.field), "a reference says kind and name"))
		}
		errs = append(errs, rules.Each(path.Child(part.field), part.value, content.IsPathSegmentName(part.value))...)
	}
	return errs
}

// validateUpdate keeps the controller: Ingresses would change hands unseen.
func validateUpdate(ctx context.Context, c, old *networkingv1.IngressClass) field.ErrorList {
	return append(validate(ctx, c),
		validation.ValidateImmutableField(c.Spec.Controller, old.Spec.Controller, field.NewPath("spec", "controller"))...)
}

func parameters(c *networkingv1.IngressClass) any {
	p := c.Spec.Parameters
	if p == nil {
		return "<none>"
	}
	kind := p.Kind
	if p.APIGroup != nil {
		kind += "." + *p.APIGroup
	}
	return kind + "/" + p.Name
}

// IsDefault says whether an Ingress that names no class gets this one.
func IsDefault(c metav1.Object) bool {
	return c.GetAnnotations()[networkingv1.AnnotationIsDefaultIngressClass] == "true"
}

// markDefault shows in a table which class is the default.
type markDefault struct{ rest.TableConvertor }

func (m markDefault) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	table, err := m.TableConvertor.ConvertToTable(ctx, obj, options)
	if err != nil {
		return nil, err
	}
	for i := range table.Rows {
		if c, ok := table.Rows[i].Object.Object.(*networkingv1.IngressClass); ok && IsDefault(c) {
			table.Rows[i].Cells[0] = c.Name + " (default)"
		}
	}
	return table, nil
}
