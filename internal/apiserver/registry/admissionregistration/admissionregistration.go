// Package admissionregistration describes what extends admission: webhook configurations, and policies in CEL with their
// bindings. It calls no webhook and evaluates no policy; it only compiles expressions, to reject those with mistakes.
package admissionregistration

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// categories are the groups of resources by which `kubectl get` finds all of these.
var categories = []string{"api-extensions"}

// Virtual are resources that are questions and not kept: admission that users configure never sees them, because a cluster
// whose questions are rejected can't be repaired.
var Virtual = []schema.GroupResource{
	{Group: "authentication.k8s.io", Resource: "selfsubjectreviews"},
	{Group: "authentication.k8s.io", Resource: "tokenreviews"},
	{Group: "authorization.k8s.io", Resource: "localsubjectaccessreviews"},
	{Group: "authorization.k8s.io", Resource: "selfsubjectaccessreviews"},
	{Group: "authorization.k8s.io", Resource: "selfsubjectrulesreviews"},
	{Group: "authorization.k8s.io", Resource: "subjectaccessreviews"},
}

// reservedSuffix ends the names of what administrators put into files instead of the API.
const reservedSuffix = ".static.k8s.io"

func validateName(obj metav1.Object) field.ErrorList {
	if !strings.HasSuffix(obj.GetName(), reservedSuffix) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata", "name"), obj.GetName(), "names with the suffix "+reservedSuffix+" are reserved for configuration in files")}
}

func orDefault[T any](at **T, value T) {
	if *at == nil {
		*at = &value
	}
}

// matching are the settings that webhooks and policies share for what they apply to.
func defaultMatching(policy **v1.MatchPolicyType, namespaces, objects **metav1.LabelSelector) {
	orDefault(policy, v1.Equivalent)
	orDefault(namespaces, metav1.LabelSelector{})
	orDefault(objects, metav1.LabelSelector{})
}

func defaultRule(rule *v1.RuleWithOperations) { orDefault(&rule.Scope, v1.AllScopes) }

func defaultMatch(match *v1.MatchResources) {
	if match == nil {
		return
	}
	defaultMatching(&match.MatchPolicy, &match.NamespaceSelector, &match.ObjectSelector)
	for _, list := range [][]v1.NamedRuleWithOperations{match.ResourceRules, match.ExcludeResourceRules} {
		for i := range list {
			defaultRule(&list[i].RuleWithOperations)
		}
	}
}

// anyValue stands for all values in a list.
const anyValue = "*"

// aloneOr rejects "*" beside others.
func aloneOr[S ~string](path *field.Path, values []S, what string) field.ErrorList {
	if len(values) > 1 && slices.Contains(values, anyValue) {
		return field.ErrorList{field.Invalid(path, values, "* stands for all "+what+" and must be alone")}
	}
	return nil
}

func validateRule(path *field.Path, rule *v1.RuleWithOperations) field.ErrorList {
	var errs field.ErrorList
	at := path.Child("operations")
	if len(rule.Operations) == 0 {
		errs = append(errs, field.Required(at, "at least one operation, or *"))
	}
	errs = append(errs, aloneOr(at, rule.Operations, "operations")...)
	for i, operation := range rule.Operations {
		errs = append(errs, rules.OneOf(at.Index(i), operation, v1.OperationAll, v1.Connect, v1.Create, v1.Delete, v1.Update)...)
	}
	at = path.Child("apiGroups")
	if len(rule.APIGroups) == 0 {
		errs = append(errs, field.Required(at, "at least one group (\"\" for core), or *"))
	}
	errs = append(errs, aloneOr(at, rule.APIGroups, "groups")...)
	at = path.Child("apiVersions")
	if len(rule.APIVersions) == 0 {
		errs = append(errs, field.Required(at, "at least one version, or *"))
	}
	errs = append(errs, aloneOr(at, rule.APIVersions, "versions")...)
	for i, version := range rule.APIVersions {
		if version == "" {
			errs = append(errs, field.Required(at.Index(i), "a version, or *"))
		}
	}
	errs = append(errs, validateResources(path.Child("resources"), rule.Resources)...)
	if rule.Scope != nil {
		errs = append(errs, rules.OneOf(path.Child("scope"), *rule.Scope, v1.AllScopes, v1.ClusterScope, v1.NamespacedScope)...)
	}
	return errs
}

// validateResources rejects lists in which one entry includes another: "a/*" and "a/b", "*/b" and "a/b", "*/*" and anything, "*"
// and a resource.
func validateResources(path *field.Path, resources []string) field.ErrorList {
	var errs field.ErrorList
	if len(resources) == 0 {
		errs = append(errs, field.Required(path, "at least one resource, or *"))
	}
	allOf, everywhere := map[string]bool{}, map[string]bool{}
	plain := false // what counts is the last entry without a subresource
	for i, entry := range resources {
		if entry == "" {
			errs = append(errs, field.Required(path.Index(i), "a resource, resource/subresource, or *"))
			continue
		}
		resource, sub, has := strings.Cut(entry, "/")
		if !has {
			plain = entry != anyValue
			continue
		}
		if allOf[resource] {
			errs = append(errs, field.Invalid(path.Index(i), entry, fmt.Sprintf("is included in %s/*", resource)))
		}
		if everywhere[sub] {
			errs = append(errs, field.Invalid(path.Index(i), entry, fmt.Sprintf("is included in */%s", sub)))
		}
		allOf[resource] = allOf[resource] || sub == anyValue
		everywhere[sub] = everywhere[sub] || resource == anyValue
	}
	if len(resources) > 1 && slices.Contains(resources, "*/*") {
		errs = append(errs, field.Invalid(path, resources, "*/* stands for everything and must be alone"))
	}
	if plain && slices.Contains(resources, anyValue) {
		errs = append(errs, field.Invalid(path, resources, "* stands for all resources; beside it there may be subresources only"))
	}
	return errs
}

func validateSelector(path *field.Path, selector *metav1.LabelSelector, lenient bool) field.ErrorList {
	if selector == nil {
		return nil
	}
	return metavalidation.ValidateLabelSelector(selector, metavalidation.LabelSelectorValidationOptions{AllowInvalidLabelValueInSelector: lenient}, path)
}

// validateMatch validates what a policy or its binding applies to. Defaults have been set.
func validateMatch(path *field.Path, match *v1.MatchResources) field.ErrorList {
	if match == nil {
		return nil
	}
	var errs field.ErrorList
	if match.MatchPolicy == nil {
		errs = append(errs, field.Required(path.Child("matchPolicy"), ""))
	} else {
		errs = append(errs, rules.OneOf(path.Child("matchPolicy"), *match.MatchPolicy, v1.Equivalent, v1.Exact)...)
	}
	for name, selector := range map[string]*metav1.LabelSelector{"namespaceSelector": match.NamespaceSelector, "objectSelector": match.ObjectSelector} {
		if selector == nil {
			errs = append(errs, field.Required(path.Child(name), ""))
		}
		errs = append(errs, validateSelector(path.Child(name), selector, false)...)
	}
	errs = append(errs, validateNamedRules(path.Child("resourceRules"), match.ResourceRules)...)
	return append(errs, validateNamedRules(path.Child("excludeResourceRules"), match.ExcludeResourceRules)...)
}

func validateNamedRules(path *field.Path, list []v1.NamedRuleWithOperations) field.ErrorList {
	var errs field.ErrorList
	for i := range list {
		seen := map[string]bool{}
		for j, name := range list[i].ResourceNames {
			at := path.Index(i).Child("resourceNames").Index(j)
			errs = append(errs, validatePathSegment(at, name)...)
			if seen[name] {
				errs = append(errs, field.Duplicate(at, name))
			}
			seen[name] = true
		}
		errs = append(errs, validateRule(path.Index(i), &list[i].RuleWithOperations)...)
	}
	return errs
}

// warnings tells of rules that name what admission never sees.
func warnings(rules map[*field.Path][]v1.RuleWithOperations) []string {
	var out []string
	for path, list := range rules {
		for i := range list {
			for _, virtual := range Virtual {
				if slices.Contains(list[i].APIGroups, virtual.Group) && slices.Contains(list[i].Resources, virtual.Resource) {
					out = append(out, fmt.Sprintf("%s: %s are never sent to webhooks", path.Index(i), virtual))
				}
			}
		}
	}
	slices.Sort(out)
	return out
}

// Access answers what the author of a policy may read.
type Access func(ctx context.Context, kind *v1.ParamKind, verb, namespace, name string) error
