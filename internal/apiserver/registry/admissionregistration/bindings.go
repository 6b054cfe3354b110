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

// NewValidatingBindings describes ValidatingAdmissionPolicyBindings, whose authors must have access to the parameters.
func NewValidatingBindings(access Access, kindOf KindOf) registry.Resource {
	type object = v1.ValidatingAdmissionPolicyBinding
	judge := func(ctx context.Context, b, old *object) field.ErrorList {
		path := field.NewPath("spec")
		errs := validateBinding(path, b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources)
		errs = append(errs, validateActions(path.Child("validationActions"), b.Spec.ValidationActions)...)
		if len(errs) > 0 || old != nil && old.Spec.PolicyName == b.Spec.PolicyName && equality.Semantic.DeepEqual(old.Spec.ParamRef, b.Spec.ParamRef) {
			return errs
		}
		return mayReadParams(ctx, access, kindOf, b.Spec.PolicyName, b.Spec.ParamRef)
	}
	return &registry.Kind[object, *object]{
		Served: v1.SchemeGroupVersion, Plural: "validatingadmissionpolicybindings", Singular: "validatingadmissionpolicybinding",
		KindName: "ValidatingAdmissionPolicyBinding", Categories: categories, ClusterScoped: true,
		NewList:       func() runtime.Object { return &v1.ValidatingAdmissionPolicyBindingList{} },
		Default:       func(b *object) { defaultMatch(b.Spec.MatchResources) },
		PrepareCreate: func(_ context.Context, b *object) { setGeneration(b, nil, nil, nil) },
		PrepareUpdate: func(_ context.Context, b, old *object) { setGeneration(b, old, b.Spec, old.Spec) },
		Validate: func(ctx context.Context, b *object) field.ErrorList {
			return append(validateName(b), judge(ctx, b, nil)...)
		},
		ValidateUpdate: func(ctx context.Context, b, old *object) field.ErrorList {
			return append(rules.MetaUpdate(b, old), judge(ctx, b, old)...)
		},
		Columns: []registry.Column[object]{
			{Name: "PolicyName", Description: "The policy that is bound.", Cell: func(b *object) any { return b.Spec.PolicyName }},
			{Name: "ParamRef", Description: "The parameters that the policy is given.", Cell: func(b *object) any { return showParams(b.Spec.ParamRef) }},
			registry.Age[object](),
		},
		StrictUpdate: true,
	}
}

// NewMutatingBindings describes MutatingAdmissionPolicyBindings, whose authors must have access to the parameters.
func NewMutatingBindings(access Access, kindOf KindOf) registry.Resource {
	type object = v1.MutatingAdmissionPolicyBinding
	judge := func(ctx context.Context, b, old *object) field.ErrorList {
		path := field.NewPath("spec")
		errs := validateBinding(path, b.Spec.PolicyName, b.Spec.ParamRef, b.Spec.MatchResources)
		errs = append(errs, onlyChanging(path.Child("matchResources", "resourceRules", "operations"), b.Spec.MatchResources)...)
		if len(errs) > 0 || old != nil && old.Spec.PolicyName == b.Spec.PolicyName && equality.Semantic.DeepEqual(old.Spec.ParamRef, b.Spec.ParamRef) {
			return errs
		}
		return mayReadParams(ctx, access, kindOf, b.Spec.PolicyName, b.Spec.ParamRef)
	}
	return &registry.Kind[object, *object]{
		Served: v1.SchemeGroupVersion, Plural: "mutatingadmissionpolicybindings", Singular: "mutatingadmissionpolicybinding",
		KindName: "MutatingAdmissionPolicyBinding", Categories: categories, ClusterScoped: true,
		NewList:       func() runtime.Object { return &v1.MutatingAdmissionPolicyBindingList{} },
		Default:       func(b *object) { defaultMatch(b.Spec.MatchResources) },
		PrepareCreate: func(_ context.Context, b *object) { setGeneration(b, nil, nil, nil) },
		PrepareUpdate: func(_ context.Context, b, old *object) { setGeneration(b, old, b.Spec, old.Spec) },
		Validate: func(ctx context.Context, b *object) field.ErrorList {
			return append(validateName(b), judge(ctx, b, nil)...)
		},
		ValidateUpdate: func(ctx context.Context, b, old *object) field.ErrorList {
			return append(rules.MetaUpdate(b, old), judge(ctx, b, old)...)
		},
		Columns: []registry.Column[object]{
			{Name: "PolicyName", Description: "The policy that is bound.", Cell: func(b *object) any { return b.Spec.PolicyName }},
			{Name: "ParamRef", Description: "The parameters that the policy is given.", Cell: func(b *object) any { return showParams(b.Spec.ParamRef) }},
			registry.Age[object](),
		},
		StrictUpdate: true,
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

// mayReadParams refuses a binding to parameters that its author may not read.
func mayReadParams(ctx context.Context, access Access, kindOf KindOf, policy string, ref *v1.ParamRef) field.ErrorList {
	if ref == nil {
		return nil
	}
	verb := "get"
	if ref.Name == "" {
		verb = "list"
	}
	if err := access(ctx, kindOf(ctx, policy), verb, ref.Namespace, ref.Name); err != nil {
		return field.ErrorList{field.Forbidden(field.NewPath("spec", "paramRef"), err.Error())}
	}
	return nil
}

func validateBinding(path *field.Path, policy string, ref *v1.ParamRef, match *v1.MatchResources) field.ErrorList {
	var errs field.ErrorList
	if policy == "" {
		errs = append(errs, field.Required(path.Child("policyName"), "the policy to bind"))
	} else {
		errs = append(errs, rules.DNSSubdomain(path.Child("policyName"), policy)...)
	}
	errs = append(errs, validateParams(path.Child("paramRef"), ref)...)
	return append(errs, validateMatch(path.Child("matchResources"), match)...)
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
