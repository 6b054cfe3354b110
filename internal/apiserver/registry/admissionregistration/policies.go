package admissionregistration

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/util/jsonpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

var (
	reasons = []metav1.StatusReason{metav1.StatusReasonForbidden, metav1.StatusReasonInvalid, metav1.StatusReasonRequestEntityTooLarge}
	// changing are the operations that a mutation can apply to: a deletion carries no object.
	changing = []v1.OperationType{v1.OperationAll, v1.Connect, v1.Create, v1.Update}
)

// maxAnnotations is how many audit annotations a policy may have.
const maxAnnotations = 20

// policyParts is what both kinds of policies have.
type policyParts struct {
	failure **v1.FailurePolicyType
	match   *v1.MatchResources
	params  *v1.ParamKind
}

// NewValidatingPolicies describes ValidatingAdmissionPolicies, whose authors must have access to their parameters.
func NewValidatingPolicies(access Access) registry.Resource {
	type object = v1.ValidatingAdmissionPolicy
	k := newPolicies(access, func(p *object) policyParts {
		return policyParts{&p.Spec.FailurePolicy, p.Spec.MatchConstraints, p.Spec.ParamKind}
	}, validateValidating, registry.Column[object]{
		Name: "Validations", Type: "integer", Description: "The number of rules in the policy.", Cell: func(p *object) any { return int64(len(p.Spec.Validations)) },
	})
	k.Plural, k.Singular, k.KindName = "validatingadmissionpolicies", "validatingadmissionpolicy", "ValidatingAdmissionPolicy"
	k.NewList = func() runtime.Object { return &v1.ValidatingAdmissionPolicyList{} }
	return registry.SpecAndStatus(k, func(p *object) *v1.ValidatingAdmissionPolicySpec { return &p.Spec },
		func(p *object) *v1.ValidatingAdmissionPolicyStatus { return &p.Status },
		func(_ context.Context, p, _ *object) field.ErrorList { return validateStatus(&p.Status) })
}

// NewMutatingPolicies describes MutatingAdmissionPolicies, whose authors must have access to their parameters.
func NewMutatingPolicies(access Access) registry.Resource {
	type object = v1.MutatingAdmissionPolicy
	k := newPolicies(access, func(p *object) policyParts {
		return policyParts{&p.Spec.FailurePolicy, p.Spec.MatchConstraints, p.Spec.ParamKind}
	}, validateMutating, registry.Column[object]{
		Name: "Mutations", Type: "integer", Description: "The number of changes in the policy.", Cell: func(p *object) any { return int64(len(p.Spec.Mutations)) },
	})
	k.Plural, k.Singular, k.KindName = "mutatingadmissionpolicies", "mutatingadmissionpolicy", "MutatingAdmissionPolicy"
	k.NewList = func() runtime.Object { return &v1.MutatingAdmissionPolicyList{} }
	return registry.CountChanges(k, func(p *object) *v1.MutatingAdmissionPolicySpec { return &p.Spec })
}

// newPolicies describes what both kinds have in common; size is the column that says how large a policy is.
func newPolicies[T any, P registry.Object[T]](access Access, parts func(P) policyParts, validate func(obj, old P) field.ErrorList, size registry.Column[T]) *registry.Kind[T, P] {
	judge := func(ctx context.Context, obj, old P) field.ErrorList {
		params := parts(obj).params
		if errs := validate(obj, old); len(errs) > 0 || old != nil && equality.Semantic.DeepEqual(params, parts(old).params) {
			return errs
		}
		return mayReadAll(ctx, access, params)
	}
	return &registry.Kind[T, P]{
		Served: v1.SchemeGroupVersion, Categories: categories, ClusterScoped: true, StrictUpdate: true,
		Default: func(obj P) {
			p := parts(obj)
			orDefault(p.failure, v1.Fail)
			defaultMatch(p.match)
		},
		Validate: func(ctx context.Context, obj P) field.ErrorList {
			return append(validateName(obj), judge(ctx, obj, nil)...)
		},
		ValidateUpdate: func(ctx context.Context, obj, old P) field.ErrorList {
			return append(rules.MetaUpdate(obj, old), judge(ctx, obj, old)...)
		},
		Columns: []registry.Column[T]{
			size,
			{Name: "ParamKind", Description: "The kind of the policy's parameters.", Cell: func(obj *T) any { return showKind(parts(P(obj)).params) }},
			registry.Age[T, P](),
		},
	}
}

func showKind(kind *v1.ParamKind) string {
	if kind == nil {
		return "<unset>"
	}
	return kind.APIVersion + "/" + kind.Kind
}

// mayReadAll rejects a policy with parameters that its author may not read: its messages could tell what is in them.
func mayReadAll(ctx context.Context, access Access, kind *v1.ParamKind) field.ErrorList {
	if kind == nil {
		return nil
	}
	if err := access(ctx, kind, "get", anyValue, anyValue); err != nil {
		return field.ErrorList{field.Forbidden(field.NewPath("spec", "paramKind"), err.Error())}
	}
	return nil
}

func validateFailurePolicy(path *field.Path, policy *v1.FailurePolicyType) field.ErrorList {
	if policy == nil {
		return field.ErrorList{field.Required(path, "Fail, or Ignore")}
	}
	return rules.OneOf(path, *policy, v1.Fail, v1.Ignore)
}

// validateConstraints validates what a policy applies to; without a rule its expressions would have no types.
func validateConstraints(path *field.Path, match *v1.MatchResources) field.ErrorList {
	if match == nil {
		return field.ErrorList{field.Required(path, "what the policy applies to")}
	}
	errs := validateMatch(path, match)
	if len(match.ResourceRules) == 0 {
		errs = append(errs, field.Required(path.Child("resourceRules"), "at least one rule"))
	}
	return errs
}

func validateValidating(p, old *v1.ValidatingAdmissionPolicy) field.ErrorList {
	spec, path := &p.Spec, field.NewPath("spec")
	errs := validateFailurePolicy(path.Child("failurePolicy"), spec.FailurePolicy)
	errs = append(errs, validateKind(path.Child("paramKind"), spec.ParamKind)...)
	errs = append(errs, validateConstraints(path.Child("matchConstraints"), spec.MatchConstraints)...)
	conditions, stored := map[string]bool{}, map[string]bool{}
	same := false
	if old != nil {
		same = equality.Semantic.DeepEqual(spec.ParamKind, old.Spec.ParamKind) && equality.Semantic.DeepEqual(spec.MatchConditions, old.Spec.MatchConditions)
		for _, c := range old.Spec.MatchConditions {
			conditions[c.Expression] = true
		}
		for _, v := range old.Spec.Validations {
			stored[v.Expression], stored[v.MessageExpression] = true, true
		}
		for _, a := range old.Spec.AuditAnnotations {
			stored[a.ValueExpression] = true
		}
	}
	if !same {
		errs = append(errs, validateConditions(path.Child("matchConditions"), spec.MatchConditions, spec.ParamKind != nil, conditions)...)
	}
	if len(spec.Validations) == 0 && len(spec.AuditAnnotations) == 0 {
		const either = "there must be validations or auditAnnotations"
		return append(errs, field.Required(path.Child("validations"), either), field.Required(path.Child("auditAnnotations"), either))
	}
	e, err := withVariables(spec.ParamKind != nil, stored)
	if err != nil {
		return append(errs, field.InternalError(path, err))
	}
	for i, variable := range spec.Variables {
		errs = append(errs, e.declare(path.Child("variables").Index(i), variable)...)
	}
	for i := range spec.Validations {
		errs = append(errs, e.validation(path.Child("validations").Index(i), &spec.Validations[i])...)
	}
	at := path.Child("auditAnnotations")
	if len(spec.AuditAnnotations) > maxAnnotations {
		errs = append(errs, field.Invalid(at, len(spec.AuditAnnotations), fmt.Sprintf("at most %d are allowed", maxAnnotations)))
	}
	seen := map[string]bool{}
	for i := range spec.AuditAnnotations {
		annotation := &spec.AuditAnnotations[i]
		errs = append(errs, e.annotation(at.Index(i), p.Name, annotation)...)
		if seen[annotation.Key] {
			errs = append(errs, field.Duplicate(at.Index(i).Child("key"), annotation.Key))
		}
		seen[annotation.Key] = true
	}
	return errs
}

func validateMutating(p, old *v1.MutatingAdmissionPolicy) field.ErrorList {
	spec, path := &p.Spec, field.NewPath("spec")
	errs := validateFailurePolicy(path.Child("failurePolicy"), spec.FailurePolicy)
	errs = append(errs, validateKind(path.Child("paramKind"), spec.ParamKind)...)
	errs = append(errs, validateConstraints(path.Child("matchConstraints"), spec.MatchConstraints)...)
	errs = append(errs, onlyChanging(path.Child("matchConstraints", "resourceRules", "operations"), spec.MatchConstraints)...)
	conditions, stored := map[string]bool{}, map[string]bool{}
	same := false
	if old != nil {
		same = equality.Semantic.DeepEqual(spec.ParamKind, old.Spec.ParamKind) && equality.Semantic.DeepEqual(spec.MatchConditions, old.Spec.MatchConditions)
		for _, c := range old.Spec.MatchConditions {
			conditions[c.Expression] = true
		}
		for _, m := range old.Spec.Mutations {
			if m.ApplyConfiguration != nil {
				stored[strings.TrimSpace(m.ApplyConfiguration.Expression)] = true
			}
			if m.JSONPatch != nil {
				stored[strings.TrimSpace(m.JSONPatch.Expression)] = true
			}
		}
	}
	if !same {
		errs = append(errs, validateConditions(path.Child("matchConditions"), spec.MatchConditions, spec.ParamKind != nil, conditions)...)
	}
	e, err := withVariables(spec.ParamKind != nil, stored)
	if err != nil {
		return append(errs, field.InternalError(path, err))
	}
	for i, variable := range spec.Variables {
		errs = append(errs, e.declare(path.Child("variables").Index(i), variable)...)
	}
	if len(spec.Mutations) == 0 {
		errs = append(errs, field.Required(path.Child("mutations"), "at least one"))
	}
	for i := range spec.Mutations {
		errs = append(errs, e.mutation(path.Child("mutations").Index(i), &spec.Mutations[i])...)
	}
	return append(errs, rules.RequiredOneOf(path.Child("reinvocationPolicy"), spec.ReinvocationPolicy, reinvocationSet...)...)
}

// onlyChanging rejects rules for operations that carry no object to change.
func onlyChanging(path *field.Path, match *v1.MatchResources) field.ErrorList {
	if match == nil {
		return nil
	}
	var errs field.ErrorList
	for i := range match.ResourceRules {
		for _, operation := range match.ResourceRules[i].Operations {
			if !slices.Contains(changing, operation) {
				errs = append(errs, field.NotSupported(path, operation, changing))
			}
		}
	}
	return errs
}

// validateKind validates the kind of a policy's parameters.
func validateKind(path *field.Path, kind *v1.ParamKind) field.ErrorList {
	if kind == nil {
		return nil
	}
	var errs field.ErrorList
	at := path.Child("apiVersion")
	group, version, grouped := strings.Cut(kind.APIVersion, "/")
	if !grouped {
		group, version = "", kind.APIVersion
	}
	switch {
	case kind.APIVersion == "":
		errs = append(errs, field.Required(at, "group/version, or the version of core"))
	case strings.Contains(version, "/"):
		errs = append(errs, field.Invalid(at, kind.APIVersion, "must be group/version"))
	default:
		if group != "" {
			errs = append(errs, rules.DNSSubdomain(at, group)...)
		}
		if version == "" {
			errs = append(errs, field.Invalid(at, kind.APIVersion, "must have a version"))
		} else {
			errs = append(errs, rules.Each(at, version, validation.IsDNS1035Label(version))...)
		}
	}
	if kind.Kind == "" {
		return append(errs, field.Required(path.Child("kind"), "the kind of the parameters"))
	}
	return append(errs, rules.Each(path.Child("kind"), kind.Kind, validation.IsDNS1035Label(strings.ToLower(kind.Kind)))...)
}

func validateStatus(status *v1.ValidatingAdmissionPolicyStatus) field.ErrorList {
	path := field.NewPath("status")
	errs := metavalidation.ValidateConditions(status.Conditions, path.Child("conditions"))
	if status.TypeChecking == nil {
		return errs
	}
	for i, warning := range status.TypeChecking.ExpressionWarnings {
		at := path.Child("typeChecking", "expressionWarnings").Index(i)
		if warning.Warning == "" {
			errs = append(errs, field.Required(at.Child("warning"), "what is wrong"))
		}
		if blank(warning.FieldRef) {
			errs = append(errs, field.Required(at.Child("fieldRef"), "where it is"))
		} else if err := jsonpath.New("").Parse("{" + strings.TrimSpace(warning.FieldRef) + "}"); err != nil {
			errs = append(errs, field.Invalid(at.Child("fieldRef"), warning.FieldRef, err.Error()))
		}
	}
	return errs
}
