package flowcontrol

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// NewSchemas describes FlowSchemas.
func NewSchemas() registry.Resource {
	type object = v1.FlowSchema
	return registry.SpecAndStatus(&registry.Kind[object, *object]{
		Served: v1.SchemeGroupVersion, Plural: "flowschemas", Singular: "flowschema", KindName: "FlowSchema", ClusterScoped: true,
		NewList:  func() runtime.Object { return &v1.FlowSchemaList{} },
		Default:  DefaultSchema,
		Validate: func(_ context.Context, s *object) field.ErrorList { return validateSchema(s) },
		ValidateUpdate: func(_ context.Context, s, old *object) field.ErrorList {
			return append(rules.MetaUpdate(s, old), validateSchema(s)...)
		},
		Columns: []registry.Column[object]{
			{Name: "PriorityLevel", Description: "The level that requests get.", Cell: func(s *object) any { return s.Spec.PriorityLevelConfiguration.Name }},
			{Name: "MatchingPrecedence", Type: "integer", Description: "The schema with the lowest number that matches is used.", Cell: func(s *object) any { return int64(s.Spec.MatchingPrecedence) }},
			{Name: "DistinguisherMethod", Description: "What parts requests into flows.", Cell: func(s *object) any {
				if s.Spec.DistinguisherMethod == nil {
					return "<none>"
				}
				return string(s.Spec.DistinguisherMethod.Type)
			}},
			registry.Age[object](),
			{Name: "MissingPL", Description: "Whether the level is missing.", Cell: func(s *object) any {
				for _, c := range s.Status.Conditions {
					if c.Type == v1.FlowSchemaConditionDangling {
						return string(c.Status)
					}
				}
				return "?"
			}},
		},
		StrictUpdate: true,
	}, func(s *object) *v1.FlowSchemaSpec { return &s.Spec }, func(s *object) *v1.FlowSchemaStatus { return &s.Status },
		func(_ context.Context, s, _ *object) field.ErrorList {
			return validateConditions(s.Status.Conditions, func(c v1.FlowSchemaCondition) string { return string(c.Type) })
		})
}

func validateSchema(s *v1.FlowSchema) field.ErrorList {
	spec, path := &s.Spec, field.NewPath("spec")
	var errs field.ErrorList
	at := path.Child("matchingPrecedence")
	switch n := spec.MatchingPrecedence; {
	case n <= 0 || n > maxPrecedence:
		errs = append(errs, field.Invalid(at, n, fmt.Sprintf("must be from 1 to %d", maxPrecedence)))
	case n == 1 && s.Name != v1.FlowSchemaNameExempt:
		errs = append(errs, field.Invalid(at, n, "1 is reserved for the schema exempt"))
	}
	if m := spec.DistinguisherMethod; m != nil {
		errs = append(errs, rules.OneOf(path.Child("distinguisherMethod", "type"), m.Type, v1.FlowDistinguisherMethodByNamespaceType, v1.FlowDistinguisherMethodByUserType)...)
	}
	at = path.Child("priorityLevelConfiguration", "name")
	if name := spec.PriorityLevelConfiguration.Name; name == "" {
		errs = append(errs, field.Required(at, "the level that requests get"))
	} else {
		errs = append(errs, rules.DNSSubdomain(at, name)...)
	}
	for i := range spec.Rules {
		errs = append(errs, validateRule(path.Child("rules").Index(i), &spec.Rules[i])...)
	}
	for _, mandatory := range bootstrap.MandatoryFlowSchemas {
		if mandatory.Name == s.Name && !equality.Semantic.DeepEqual(s.Spec, mandatory.Spec) {
			errs = append(errs, field.Invalid(path, s.Name, "this schema is the server's own and must stay as it is"))
		}
	}
	return errs
}

func validateRule(path *field.Path, rule *v1.PolicyRulesWithSubjects) field.ErrorList {
	var errs field.ErrorList
	if len(rule.Subjects) == 0 {
		errs = append(errs, field.Required(path.Child("subjects"), "at least one subject"))
	}
	for i := range rule.Subjects {
		errs = append(errs, validateSubject(path.Child("subjects").Index(i), &rule.Subjects[i])...)
	}
	if len(rule.ResourceRules) == 0 && len(rule.NonResourceRules) == 0 {
		errs = append(errs, field.Required(path, "resourceRules or nonResourceRules"))
	}
	for i := range rule.ResourceRules {
		errs = append(errs, validateResourceRule(path.Child("resourceRules").Index(i), &rule.ResourceRules[i])...)
	}
	for i := range rule.NonResourceRules {
		at, r := path.Child("nonResourceRules").Index(i), &rule.NonResourceRules[i]
		errs = append(errs, validateVerbs(at.Child("verbs"), r.Verbs)...)
		errs = append(errs, listed(at.Child("nonResourceURLs"), r.NonResourceURLs)...)
		for j, url := range r.NonResourceURLs {
			errs = append(errs, validateURL(at.Child("nonResourceURLs").Index(j), url)...)
		}
	}
	return errs
}

// listed wants at least one value, and "*" alone.
func listed(path *field.Path, values []string) field.ErrorList {
	switch {
	case len(values) == 0:
		return field.ErrorList{field.Required(path, "at least one, or *")}
	case len(values) > 1 && slices.Contains(values, "*"):
		return field.ErrorList{field.Invalid(path, values, "* stands for all and must be alone")}
	}
	return nil
}

var verbs = []string{"create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"}

func validateVerbs(path *field.Path, values []string) field.ErrorList {
	if errs := listed(path, values); errs != nil || slices.Contains(values, "*") {
		return errs
	}
	if slices.ContainsFunc(values, func(verb string) bool { return !slices.Contains(verbs, verb) }) {
		return field.ErrorList{field.NotSupported(path, values, verbs)}
	}
	return nil
}

// validateURL wants a path, with * as its last segment at most.
func validateURL(path *field.Path, url string) field.ErrorList {
	switch before, star := strings.CutSuffix(url, "*"); {
	case url == "*":
		return nil
	case url == "":
		return field.ErrorList{field.Invalid(path, url, "must not be empty")}
	case url == "/":
		return nil
	case !strings.HasPrefix(url, "/"):
		return field.ErrorList{field.Invalid(path, url, "must begin with /")}
	case strings.Contains(url, " "):
		return field.ErrorList{field.Invalid(path, url, "must have no spaces")}
	case strings.Contains(url, "//"):
		return field.ErrorList{field.Invalid(path, url, "must have no empty segments")}
	case strings.Contains(before, "*") || star && !strings.HasSuffix(before, "/"):
		return field.ErrorList{field.Invalid(path, url, "* may be the last segment only")}
	}
	return nil
}

func validateResourceRule(path *field.Path, r *v1.ResourcePolicyRule) field.ErrorList {
	errs := validateVerbs(path.Child("verbs"), r.Verbs)
	errs = append(errs, listed(path.Child("apiGroups"), r.APIGroups)...)
	errs = append(errs, listed(path.Child("resources"), r.Resources)...)
	at := path.Child("namespaces")
	if len(r.Namespaces) == 0 {
		if !r.ClusterScope {
			errs = append(errs, field.Required(at, "namespaces, or clusterScope"))
		}
		return errs
	}
	errs = append(errs, listed(at, r.Namespaces)...)
	for i, namespace := range r.Namespaces {
		if namespace != "*" {
			errs = append(errs, rules.DNSLabel(at.Index(i), namespace)...)
		}
	}
	return errs
}

func validateSubject(path *field.Path, s *v1.Subject) field.ErrorList {
	var errs field.ErrorList
	parts := []struct {
		kind  v1.SubjectKind
		child string
		given bool
	}{
		{v1.SubjectKindUser, "user", s.User != nil},
		{v1.SubjectKindGroup, "group", s.Group != nil},
		{v1.SubjectKindServiceAccount, "serviceAccount", s.ServiceAccount != nil},
	}
	known := false
	for _, part := range parts {
		known = known || part.kind == s.Kind
	}
	if !known {
		return rules.OneOf(path.Child("kind"), s.Kind, v1.SubjectKindGroup, v1.SubjectKindServiceAccount, v1.SubjectKindUser)
	}
	for _, part := range parts {
		switch {
		case part.kind == s.Kind && !part.given:
			errs = append(errs, field.Required(path.Child(part.child), "with kind "+string(s.Kind)))
		case part.kind != s.Kind && part.given:
			errs = append(errs, field.Forbidden(path.Child(part.child), "does not belong to kind "+string(s.Kind)))
		}
	}
	const missing = "a name, or *"
	switch {
	case s.Kind == v1.SubjectKindUser && s.User != nil && s.User.Name == "":
		errs = append(errs, field.Required(path.Child("user", "name"), missing))
	case s.Kind == v1.SubjectKindGroup && s.Group != nil && s.Group.Name == "":
		errs = append(errs, field.Required(path.Child("group", "name"), missing))
	case s.Kind == v1.SubjectKindServiceAccount && s.ServiceAccount != nil:
		at, account := path.Child("serviceAccount"), s.ServiceAccount
		if account.Name == "" {
			errs = append(errs, field.Required(at.Child("name"), missing))
		} else if account.Name != "*" {
			errs = append(errs, rules.Each(at.Child("name"), account.Name, validation.ValidateServiceAccountName(account.Name, false))...)
		}
		if account.Namespace == "" {
			errs = append(errs, field.Required(at.Child("namespace"), "the namespace of the account"))
		} else {
			errs = append(errs, rules.DNSLabel(at.Child("namespace"), account.Namespace)...)
		}
	}
	return errs
}
