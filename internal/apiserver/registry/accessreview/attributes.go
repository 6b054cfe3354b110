package accessreview

import (
	"errors"
	"fmt"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// attributes are what an authorizer would see of the request that is asked about. One of resource and other is set.
func attributes(who user.Info, resource *authorizationv1.ResourceAttributes, other *authorizationv1.NonResourceAttributes) authorizer.AttributesRecord {
	if resource == nil {
		return authorizer.AttributesRecord{User: who, Verb: other.Verb, Path: other.Path}
	}
	out := authorizer.AttributesRecord{
		User: who, Verb: resource.Verb, Namespace: resource.Namespace, Name: resource.Name,
		APIGroup: resource.Group, APIVersion: resource.Version, Resource: resource.Resource, Subresource: resource.Subresource,
		ResourceRequest: true,
	}
	if out.APIVersion == "" {
		out.APIVersion = "*"
	}
	if s := resource.LabelSelector; s != nil {
		out.LabelSelectorRequirements, out.LabelSelectorParsingErr = labelRequirements(s)
	}
	if s := resource.FieldSelector; s != nil {
		out.FieldSelectorRequirements, out.FieldSelectorParsingErr = fieldRequirements(s)
	}
	return out
}

var labelOperators = map[metav1.LabelSelectorOperator]selection.Operator{
	metav1.LabelSelectorOpIn:           selection.In,
	metav1.LabelSelectorOpNotIn:        selection.NotIn,
	metav1.LabelSelectorOpExists:       selection.Exists,
	metav1.LabelSelectorOpDoesNotExist: selection.DoesNotExist,
}

// labelRequirements gives those it understands beside an error about the others: all of them must hold, so leaving one
// out only asks for more.
func labelRequirements(s *authorizationv1.LabelSelectorAttributes) (labels.Requirements, error) {
	if len(s.Requirements) == 0 {
		parsed, err := labels.Parse(s.RawSelector)
		if err != nil {
			return nil, err
		}
		out, _ := parsed.Requirements()
		return out, nil
	}
	var out labels.Requirements
	var errs []error
	for _, r := range s.Requirements {
		op, ok := labelOperators[r.Operator]
		if !ok {
			errs = append(errs, fmt.Errorf("%q is no operator of a label selector", r.Operator))
			continue
		}
		parsed, err := labels.NewRequirement(r.Key, op, r.Values)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, *parsed)
	}
	return out, errors.Join(errs...)
}

// fieldRequirements understands a field that has, or has not, one value: all that a field selector in a URL can say.
func fieldRequirements(s *authorizationv1.FieldSelectorAttributes) (fields.Requirements, error) {
	if len(s.Requirements) == 0 {
		parsed, err := fields.ParseSelector(s.RawSelector)
		if err != nil {
			return nil, err
		}
		return parsed.Requirements(), nil
	}
	operators := map[metav1.FieldSelectorOperator]selection.Operator{
		metav1.FieldSelectorOpIn: selection.Equals, metav1.FieldSelectorOpNotIn: selection.NotEquals,
	}
	var out fields.Requirements
	var errs []error
	for _, r := range s.Requirements {
		op, ok := operators[r.Operator]
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("a field selector cannot say %q", r.Operator))
		case len(r.Values) != 1:
			errs = append(errs, fmt.Errorf("a field selector compares %s with one value, not with %d", r.Key, len(r.Values)))
		default:
			out = append(out, fields.Requirement{Field: r.Key, Operator: op, Value: r.Values[0]})
		}
	}
	return out, errors.Join(errs...)
}

// troubles says what kept the authorizer from the whole question.
func troubles(err error, what authorizer.AttributesRecord) string {
	var out []string
	if err != nil {
		out = append(out, err.Error())
	}
	tell := func(name string, understood int, err error) {
		switch {
		case err == nil:
		case understood > 0:
			out = append(out, "spec.resourceAttributes."+name+" was not wholly understood; the rest was left out")
		default:
			out = append(out, "spec.resourceAttributes."+name+" was not understood and was left out")
		}
	}
	tell("fieldSelector", len(what.FieldSelectorRequirements), what.FieldSelectorParsingErr)
	tell("labelSelector", len(what.LabelSelectorRequirements), what.LabelSelectorParsingErr)
	return strings.Join(out, "; ")
}
