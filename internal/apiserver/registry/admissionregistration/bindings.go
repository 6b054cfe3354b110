package admissionregistration

import (
	"context"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// KindOf is the kind of the parameters of the policy with a name; nil if it has none or can't be read.
type KindOf func(ctx context.Context, policy string) *v1.ParamKind

// bindingParts is what both kinds of bindings have.
type bindingParts struct {
	policy string
	params *v1.ParamRef
	match  *v1.MatchResources
}

// NewValidatingBindings describes ValidatingAdmissionPolicyBindings, whose authors must have access to the parameters.
func NewValidatingBindings(access Access, kindOf KindOf) registry.Resource {
	type object = v1.ValidatingAdmissionPolicyBinding
	k := newBindings(access, kindOf, func(b *object) bindingParts {
		return bindingParts{b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources}
	}, func(path *field.Path, b *object) field.ErrorList {
		return validateActions(path.Child("validationActions"), b.Spec.ValidationActions)
	})
	k.Plural, k.Singular, k.KindName = "validatingadmissionpolicybindings", "validatingadmissionpolicybinding", "ValidatingAdmissionPolicyBinding"
	k.NewList = func() runtime.Object { return &v1.ValidatingAdmissionPolicyBindingList{} }
	return registry.CountChanges(k, func(b *object) *v1.ValidatingAdmissionPolicyBindingSpec { return &b.Spec })
}

// NewMutatingBindings describes MutatingAdmissionPolicyBindings, whose authors must have access to the parameters.
func NewMutatingBindings(access Access, kindOf KindOf) registry.Resource {
	type object = v1.MutatingAdmissionPolicyBinding
	k := newBindings(access, kindOf, func(b *object) bindingParts {
		return bindingParts{b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources}
	}, func(path *field.Path, b *object) field.ErrorList {
		return onlyChanging(path.Child("matchResources", "resourceRules", "operations"), b.Spec.MatchResources)
	})
	k.Plural, k.Singular, k.KindName = "mutatingadmissionpolicybindings", "mutatingadmissionpolicybinding", "MutatingAdmissionPolicyBinding"
	k.NewList = func() runtime.Object { return &v1.MutatingAdmissionPolicyBindingList{} }
	return registry.CountChanges(k, func(b *object) *v1.MutatingAdmissionPolicyBindingSpec { return &b.Spec })
}

// newBindings describes what both kinds have in common; own validates what only one has.
func newBindings[T any, P registry.Object[T]](access Access, kindOf KindOf, parts func(P) bindingParts, own func(*field.Path, P) field.ErrorList) *registry.Kind[T, P] {
	judge := func(ctx context.Context, obj, old P) field.ErrorList {
		path, b := field.NewPath("spec"), parts(obj)
		if errs := append(validateBinding(path, b), own(path, obj)...); len(errs) > 0 {
			return errs
		}
		if old != nil {
			if before := parts(old); before.policy == b.policy && equality.Semantic.DeepEqual(before.params, b.params) {
				return nil
			}
		}
		return mayReadParams(ctx, access, kindOf, b)
	}
	return &registry.Kind[T, P]{
		Served: v1.SchemeGroupVersion, Categories: categories, ClusterScoped: true, StrictUpdate: true,
		Default: func(obj P) { defaultMatch(parts(obj).match) },
		Validate: func(ctx context.Context, obj P) field.ErrorList {
			return append(validateName(obj), judge(ctx, obj, nil)...)
		},
		ValidateUpdate: func(ctx context.Context, obj, old P) field.ErrorList {
			return append(rules.MetaUpdate(obj, old), judge(ctx, obj, old)...)
		},
		Columns: []registry.Column[T]{
			{Name: "PolicyName", Description: "The policy that is bound.", Cell: func(obj *T) any { return parts(P(obj)).policy }},
			{Name: "ParamRef", Description: "The parameters that the policy is given.", Cell: func(obj *T) any { return showParams(parts(P(obj)).params) }},
			registry.Age[T, P](),
		},
	}
}

// showParams is how people read a reference. Whether the parameters are in namespaces can't be told from it.
func showParams(ref *v1.ParamRef) string {
	switch {
	case ref == nil || ref.Name == "" && ref.Selector == nil:
		return "<unset>"
	case ref.Name == "":
		return metav1.FormatLabelSelector(ref.Selector)
	case ref.Namespace == "":
		return "*/" + ref.Name
	}
	return ref.Namespace + "/" + ref.Name
}

// mayReadParams rejects a binding to parameters that its author may not read.
func mayReadParams(ctx context.Context, access Access, kindOf KindOf, b bindingParts) field.ErrorList {
	ref := b.params
	if ref == nil {
		return nil
	}
	verb := "get"
	if ref.Name == "" {
		verb = "list"
	}
	if err := access(ctx, kindOf(ctx, b.policy), verb, ref.Namespace, ref.Name); err != nil {
		return field.ErrorList{field.Forbidden(field.NewPath("spec", "paramRef"), err.Error())}
	}
	return nil
}

func validateBinding(path *field.Path, b bindingParts) field.ErrorList {
	var errs field.ErrorList
	if b.policy == "" {
		errs = append(errs, field.Required(path.Child("policyName"), "the policy to bind"))
	} else {
		errs = append(errs, rules.DNSSubdomain(path.Child("policyName"), b.policy)...)
	}
	errs = append(errs, validateParams(path.Child("paramRef"), b.params)...)
	return append(errs, validateMatch(path.Child("matchResources"), b.match)...)
}

func validateParams(path *field.Path, ref *v1.ParamRef) field.ErrorList {
	if ref == nil {
		return nil
	}
	var errs field.ErrorList
	if ref.Name != "" {
		errs = append(errs, validatePathSegment(path.Child("name"), ref.Name)...)
	}
	errs = append(errs, validateSelector(path.Child("selector"), ref.Selector, false)...)
	switch {
	case ref.Name != "" && ref.Selector != nil:
		const either = "there may be a name or a selector, not both"
		errs = append(errs, field.Forbidden(path.Child("name"), either), field.Forbidden(path.Child("selector"), either))
	case ref.Name == "" && ref.Selector == nil:
		errs = append(errs, field.Required(path, "a name or a selector"))
	}
	at := path.Child("parameterNotFoundAction")
	if ref.ParameterNotFoundAction == nil {
		return append(errs, field.Required(at, "Allow, or Deny"))
	}
	return append(errs, rules.RequiredOneOf(at, *ref.ParameterNotFoundAction, v1.AllowAction, v1.DenyAction)...)
}

func validateActions(path *field.Path, actions []v1.ValidationAction) field.ErrorList {
	if len(actions) == 0 {
		return field.ErrorList{field.Required(path, "at least one of Audit, Deny, Warn")}
	}
	var errs field.ErrorList
	seen := map[v1.ValidationAction]bool{}
	for i, action := range actions {
		errs = append(errs, rules.OneOf(path.Index(i), action, v1.Audit, v1.Deny, v1.Warn)...)
		if seen[action] {
			errs = append(errs, field.Duplicate(path.Index(i), action))
		}
		seen[action] = true
	}
	if seen[v1.Deny] && seen[v1.Warn] {
		errs = append(errs, field.Invalid(path, actions, "Deny and Warn would say the same twice: choose one"))
	}
	return errs
}
