// Package workload holds what the resources have in common that make Pods from a template: how template and selector are
// judged, how they are scaled, what a table shows of them. It knows none of these resources.
package workload

import (
	"cmp"
	"context"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
)

// At is where the spec of a workload is, AtStatus its status.
var (
	At       = field.NewPath("spec")
	AtStatus = field.NewPath("status")
)

// OrPoint sets a pointer that is still nil.
func OrPoint[T any](where **T, value T) {
	if *where == nil {
		*where = &value
	}
}

// NotNegative wants zero or more of each field, in a fixed order.
func NotNegative(at *field.Path, fields ...Number) field.ErrorList {
	var errs field.ErrorList
	for _, f := range fields {
		errs = append(errs, rules.NotNegative(at.Child(f.Field), f.Value)...)
	}
	return errs
}

// Number is the value of a field.
type Number struct {
	Field string
	Value int64
}

// N is a number of a field.
func N[I ~int32 | ~int64](field string, value I) Number { return Number{field, int64(value)} }

// P is a number that may not be there; then it is none.
func P[I ~int32 | ~int64](field string, value *I) Number {
	if value == nil {
		return Number{Field: field}
	}
	return N(field, *value)
}

// ValidateSelector wants a selector that selects something less than everything.
func ValidateSelector(at *field.Path, selector *metav1.LabelSelector) field.ErrorList {
	if selector == nil {
		return field.ErrorList{field.Required(at, "")}
	}
	errs := metavalidation.ValidateLabelSelector(selector, metavalidation.LabelSelectorValidationOptions{}, at)
	if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
		errs = append(errs, field.Invalid(at, selector, "must not be empty: that would select every Pod"))
	}
	return errs
}

// ValidateSelected wants a template whose Pods the selector selects.
func ValidateSelected(at *field.Path, t *corev1.PodTemplateSpec, selector *metav1.LabelSelector) field.ErrorList {
	selects, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil || selects.Empty() || selects.Matches(labels.Set(t.Labels)) {
		return nil
	}
	return field.ErrorList{field.Invalid(at.Child("metadata", "labels"), t.Labels, "must be selected by spec.selector")}
}

// ValidateEndless judges a template of Pods that are replaced when they end.
func ValidateEndless(at *field.Path, t *corev1.PodTemplateSpec) field.ErrorList {
	errs := pod.ValidateTemplate(at, t)
	spec := at.Child("spec")
	if t.Spec.RestartPolicy != corev1.RestartPolicyAlways {
		errs = append(errs, field.NotSupported(spec.Child("restartPolicy"), t.Spec.RestartPolicy, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(spec.Child("activeDeadlineSeconds"), "cannot be where Pods are replaced when they end"))
	}
	return errs
}

// Immutable wants a field to stay as it is.
func Immutable(at *field.Path, now, before any) field.ErrorList {
	return apivalidation.ValidateImmutableField(now, before, at)
}

// Share wants a number of Pods, or a share of them in percent.
func Share(at *field.Path, value *intstr.IntOrString) field.ErrorList {
	if value == nil {
		return nil
	}
	if value.Type == intstr.String {
		return rules.Each(at, *value, validation.IsValidPercent(value.StrVal))
	}
	return rules.NotNegative(at, int64(value.IntVal))
}

// AtMostAll wants a share of no more than 100%.
func AtMostAll(at *field.Path, value *intstr.IntOrString) field.ErrorList {
	if percent, ok := percentOf(value); ok && percent > 100 {
		return field.ErrorList{field.Invalid(at, *value, "must not be more than 100%")}
	}
	return nil
}

func percentOf(value *intstr.IntOrString) (int, bool) {
	if value == nil || value.Type != intstr.String || len(validation.IsValidPercent(value.StrVal)) > 0 {
		return 0, false
	}
	percent, err := strconv.Atoi(strings.TrimSuffix(value.StrVal, "%"))
	return percent, err == nil
}

// IsNone says whether a share is none at all.
func IsNone(value *intstr.IntOrString) bool {
	if value == nil {
		return true
	}
	if percent, ok := percentOf(value); ok {
		return percent == 0
	}
	return value.IntValue() == 0
}

// NotFewer refuses to count collisions backwards: names that were taken would be tried again.
func NotFewer(at *field.Path, now, before *int32) field.ErrorList {
	if before == nil || now != nil && *now >= *before {
		return nil
	}
	var value int32
	if now != nil {
		value = *now
	}
	return field.ErrorList{field.Invalid(at, value, "must not become less")}
}

// AtMost refuses counts that are more than another one, of which they are a part.
func AtMost(at *field.Path, whole Number, parts ...Number) field.ErrorList {
	var errs field.ErrorList
	for _, part := range parts {
		if part.Value > whole.Value {
			errs = append(errs, field.Invalid(at.Child(part.Field), part.Value, "must not be more than "+at.Child(whole.Field).String()))
		}
	}
	return errs
}

// Changed says whether two values mean something different.
func Changed(now, before any) bool { return !equality.Semantic.DeepEqual(now, before) }

// Warnings are about a template that is new or was changed; before is nil on create.
func Warnings(ctx context.Context, now, before *corev1.PodTemplateSpec) []string {
	if now == nil || before != nil && !Changed(now, before) {
		return nil
	}
	return pod.TemplateWarnings(ctx, At.Child("template"), now)
}

// NameWarning is for a name that host names can't be made of.
func NameWarning(obj metav1.Object) []string {
	if len(validation.IsDNS1123Label(obj.GetName())) == 0 {
		return nil
	}
	return []string{"metadata.name: begins the names and host names of Pods, and should be a DNS label (at most 63 of a-z, 0-9 and -, no dots)"}
}

// ContainerColumns show the containers of a template.
func ContainerColumns[T any](template func(*T) *corev1.PodTemplateSpec, wide bool) []registry.Column[T] {
	cell := func(of func(*corev1.Container) string) func(*T) any {
		return func(obj *T) any {
			t := template(obj)
			if t == nil {
				return ""
			}
			var texts []string
			for i := range t.Spec.Containers {
				texts = append(texts, of(&t.Spec.Containers[i]))
			}
			return strings.Join(texts, ",")
		}
	}
	return []registry.Column[T]{
		{Name: "Containers", Wide: wide, Description: "Names of each container in the template.",
			Cell: cell(func(c *corev1.Container) string { return c.Name })},
		{Name: "Images", Wide: wide, Description: "Images referenced by each container in the template.",
			Cell: cell(func(c *corev1.Container) string { return c.Image })},
	}
}

// FormatLabels is how a table shows labels.
func FormatLabels(set map[string]string) string { return cmp.Or(labels.Set(set).String(), "<none>") }
