package autoscaler

import (
	"context"
	"errors"
	"fmt"
	"strings"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/api/validation/path"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/workload"
)

const (
	// In seconds.
	maxWindow = 3600
	maxPeriod = 1800
)

func validateCreate(_ context.Context, h *scaler) field.ErrorList {
	return append(rules.Finalizers(h), validateSpec(&h.Spec, nil)...)
}

func validateUpdate(_ context.Context, h, old *scaler) field.ErrorList {
	return append(rules.MetaUpdate(h, old), validateSpec(&h.Spec, &old.Spec)...)
}

func validateSpec(spec, old *autoscalingv2.HorizontalPodAutoscalerSpec) field.ErrorList {
	at := workload.At
	var errs field.ErrorList
	if least := spec.MinReplicas; least != nil {
		errs = append(errs, rules.NotNegative(at.Child("minReplicas"), int64(*least))...)
	}
	most := at.Child("maxReplicas")
	switch {
	case spec.MaxReplicas == 0:
		errs = append(errs, field.Required(most, "1 or more"))
	case spec.MaxReplicas < 0:
		errs = append(errs, field.Invalid(most, spec.MaxReplicas, "must be 1 or more"))
	}
	if spec.MinReplicas != nil && spec.MaxReplicas < *spec.MinReplicas {
		errs = append(errs, field.Invalid(most, spec.MaxReplicas, "must not be less than spec.minReplicas"))
	}
	// What is stored may stay; only one kind of the core group can be scaled.
	target := spec.ScaleTargetRef
	version := needsGroup
	switch {
	case old != nil && old.ScaleTargetRef.APIVersion == target.APIVersion && old.ScaleTargetRef.Kind == target.Kind:
		version = nil
	case target.Kind == "ReplicationController":
		version = anyVersion
	}
	errs = append(errs, validateReference(at.Child("scaleTargetRef"), target, version)...)
	errs = append(errs, validateMetrics(at.Child("metrics"), spec, old)...)
	if behavior := spec.Behavior; behavior != nil {
		errs = append(errs, validateRules(at.Child("behavior", "scaleUp"), behavior.ScaleUp)...)
		errs = append(errs, validateRules(at.Child("behavior", "scaleDown"), behavior.ScaleDown)...)
	}
	return errs
}

func anyVersion(text string) error {
	_, err := schema.ParseGroupVersion(text)
	return err
}

func needsGroup(text string) error {
	version, err := schema.ParseGroupVersion(text)
	if err == nil && version.Group == "" {
		err = errors.New("must have a group, such as apps/v1")
	}
	return err
}

// validateReference wants a kind, a name and a version that check takes; nil takes any.
func validateReference(at *field.Path, ref autoscalingv2.CrossVersionObjectReference, check func(string) error) field.ErrorList {
	errs := append(segment(at.Child("kind"), ref.Kind), segment(at.Child("name"), ref.Name)...)
	if check != nil {
		if err := check(ref.APIVersion); err != nil {
			errs = append(errs, field.Invalid(at.Child("apiVersion"), ref.APIVersion, err.Error()))
		}
	}
	return errs
}

// segment wants what can stand between two slashes of a path.
func segment(at *field.Path, value string) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return rules.Each(at, value, path.IsValidPathSegmentName(value))
}

var metricTypes = []autoscalingv2.MetricSourceType{
	autoscalingv2.ContainerResourceMetricSourceType, autoscalingv2.ExternalMetricSourceType, autoscalingv2.ObjectMetricSourceType,
	autoscalingv2.PodsMetricSourceType, autoscalingv2.ResourceMetricSourceType,
}

func validateMetrics(at *field.Path, spec, old *autoscalingv2.HorizontalPodAutoscalerSpec) field.ErrorList {
	version := anyVersion
	if old != nil {
		for _, m := range old.Metrics {
			if m.Type == autoscalingv2.ObjectMetricSourceType && m.Object != nil && anyVersion(m.Object.DescribedObject.APIVersion) != nil {
				version = nil
			}
		}
	}
	var errs field.ErrorList
	fromZero := false
	for i := range spec.Metrics {
		m := &spec.Metrics[i]
		fromZero = fromZero || m.Type == autoscalingv2.ObjectMetricSourceType || m.Type == autoscalingv2.ExternalMetricSourceType
		errs = append(errs, validateMetric(at.Index(i), m, version)...)
	}
	if spec.MinReplicas != nil && *spec.MinReplicas == 0 && !fromZero {
		errs = append(errs, field.Forbidden(at, "spec.minReplicas of 0 needs an Object or External metric: without Pods there are no others"))
	}
	return errs
}

// validateMetric judges the source of the metric's type, and wants no other.
func validateMetric(at *field.Path, m *autoscalingv2.MetricSpec, version func(string) error) field.ErrorList {
	sources := []struct {
		name  string
		kind  autoscalingv2.MetricSourceType
		set   bool
		judge func(*field.Path) field.ErrorList
	}{
		{"object", autoscalingv2.ObjectMetricSourceType, m.Object != nil, func(at *field.Path) field.ErrorList { return validateObject(at, m.Object, version) }},
		{"external", autoscalingv2.ExternalMetricSourceType, m.External != nil, func(at *field.Path) field.ErrorList { return validateExternal(at, m.External) }},
		{"pods", autoscalingv2.PodsMetricSourceType, m.Pods != nil, func(at *field.Path) field.ErrorList { return validatePods(at, m.Pods) }},
		{"resource", autoscalingv2.ResourceMetricSourceType, m.Resource != nil, func(at *field.Path) field.ErrorList {
			return append(required(at.Child("name"), string(m.Resource.Name)), validateShare(at.Child("target"), &m.Resource.Target)...)
		}},
		{"containerResource", autoscalingv2.ContainerResourceMetricSourceType, m.ContainerResource != nil, func(at *field.Path) field.ErrorList {
			return validateContainer(at, m.ContainerResource)
		}},
	}
	errs := rules.RequiredOneOf(at.Child("type"), m.Type, metricTypes...)
	if m.Type == "" {
		errs = append(errs, rules.OneOf(at.Child("type"), m.Type, metricTypes...)...)
	}
	present := 0
	for _, s := range sources {
		if s.set {
			if present++; present == 1 {
				errs = append(errs, s.judge(at.Child(s.name))...)
			}
		} else if s.kind == m.Type {
			errs = append(errs, field.Required(at.Child(s.name), fmt.Sprintf("where type is %s", m.Type)))
		}
	}
	if present == 1 {
		return errs
	}
	for _, s := range sources {
		if s.set && s.kind != m.Type {
			errs = append(errs, field.Forbidden(at.Child(s.name), "only that of the type can be set"))
		}
	}
	return errs
}

func required(at *field.Path, value string) field.ErrorList {
	if value != "" {
		return nil
	}
	return field.ErrorList{field.Required(at, "")}
}

func validateObject(at *field.Path, source *autoscalingv2.ObjectMetricSource, version func(string) error) field.ErrorList {
	errs := validateReference(at.Child("describedObject"), source.DescribedObject, version)
	errs = append(errs, segment(at.Child("metric", "name"), source.Metric.Name)...)
	errs = append(errs, validateTarget(at.Child("target"), &source.Target)...)
	if source.Target.Value == nil && source.Target.AverageValue == nil {
		errs = append(errs, field.Required(at.Child("target", "averageValue"), "or value"))
	}
	return errs
}

func validateExternal(at *field.Path, source *autoscalingv2.ExternalMetricSource) field.ErrorList {
	errs := append(segment(at.Child("metric", "name"), source.Metric.Name), validateTarget(at.Child("target"), &source.Target)...)
	switch value, average := source.Target.Value, source.Target.AverageValue; {
	case value == nil && average == nil:
		errs = append(errs, field.Required(at.Child("target", "averageValue"), "or value"))
	case value != nil && average != nil:
		errs = append(errs, field.Forbidden(at.Child("target", "value"), "cannot be beside averageValue"))
	}
	return errs
}

func validatePods(at *field.Path, source *autoscalingv2.PodsMetricSource) field.ErrorList {
	errs := append(segment(at.Child("metric", "name"), source.Metric.Name), validateTarget(at.Child("target"), &source.Target)...)
	if source.Target.AverageValue == nil {
		errs = append(errs, field.Required(at.Child("target", "averageValue"), ""))
	}
	return errs
}

func validateContainer(at *field.Path, source *autoscalingv2.ContainerResourceMetricSource) field.ErrorList {
	var errs field.ErrorList
	name := string(source.Name)
	switch {
	case name == "":
		errs = append(errs, field.Required(at.Child("name"), ""))
	case !strings.Contains(name, "/"):
		if name != "cpu" && name != "memory" && name != "ephemeral-storage" && !strings.HasPrefix(name, "hugepages-") {
			errs = append(errs, field.Invalid(at.Child("name"), name, "must be a resource that containers have"))
		}
	default:
		errs = append(errs, rules.QualifiedName(at.Child("name"), name)...)
	}
	if source.Container == "" {
		errs = append(errs, field.Required(at.Child("container"), ""))
	} else {
		errs = append(errs, rules.DNSLabel(at.Child("container"), source.Container)...)
	}
	return append(errs, validateShare(at.Child("target"), &source.Target)...)
}

// validateShare wants a value or a utilization.
func validateShare(at *field.Path, target *autoscalingv2.MetricTarget) field.ErrorList {
	errs := validateTarget(at, target)
	switch {
	case target.AverageUtilization == nil && target.AverageValue == nil:
		errs = append(errs, field.Required(at.Child("averageUtilization"), "or averageValue"))
	case target.AverageUtilization != nil && target.AverageValue != nil:
		errs = append(errs, field.Forbidden(at.Child("averageValue"), "cannot be beside averageUtilization"))
	}
	return errs
}

func validateTarget(at *field.Path, target *autoscalingv2.MetricTarget) field.ErrorList {
	errs := required(at.Child("type"), string(target.Type))
	switch target.Type {
	case autoscalingv2.UtilizationMetricType, autoscalingv2.ValueMetricType, autoscalingv2.AverageValueMetricType:
	default:
		errs = append(errs, field.Invalid(at.Child("type"), target.Type, "must be Utilization, Value or AverageValue"))
	}
	positive := func(name string, q *resource.Quantity) {
		if q != nil && q.Sign() != 1 {
			errs = append(errs, field.Invalid(at.Child(name), q, "must be more than 0"))
		}
	}
	positive("value", target.Value)
	positive("averageValue", target.AverageValue)
	if share := target.AverageUtilization; share != nil && *share < 1 {
		errs = append(errs, field.Invalid(at.Child("averageUtilization"), *share, "must be more than 0"))
	}
	return errs
}

func validateRules(at *field.Path, r *autoscalingv2.HPAScalingRules) field.ErrorList {
	if r == nil {
		return nil
	}
	var errs field.ErrorList
	if window := r.StabilizationWindowSeconds; window != nil && (*window < 0 || *window > maxWindow) {
		errs = append(errs, field.Invalid(at.Child("stabilizationWindowSeconds"), *window, fmt.Sprintf("must be from 0 to %d", maxWindow)))
	}
	if choice := r.SelectPolicy; choice != nil {
		errs = append(errs, rules.OneOf(at.Child("selectPolicy"), *choice,
			autoscalingv2.DisabledPolicySelect, autoscalingv2.MaxChangePolicySelect, autoscalingv2.MinChangePolicySelect)...)
	}
	if len(r.Policies) == 0 {
		errs = append(errs, field.Required(at.Child("policies"), "at least one"))
	}
	for i, policy := range r.Policies {
		at := at.Child("policies").Index(i)
		errs = append(errs, rules.OneOf(at.Child("type"), policy.Type, autoscalingv2.PercentScalingPolicy, autoscalingv2.PodsScalingPolicy)...)
		if policy.Value <= 0 {
			errs = append(errs, field.Invalid(at.Child("value"), policy.Value, "must be more than 0"))
		}
		if policy.PeriodSeconds <= 0 || policy.PeriodSeconds > maxPeriod {
			errs = append(errs, field.Invalid(at.Child("periodSeconds"), policy.PeriodSeconds, fmt.Sprintf("must be from 1 to %d", maxPeriod)))
		}
	}
	if r.Tolerance != nil && r.Tolerance.Sign() < 0 {
		errs = append(errs, field.Invalid(at.Child("tolerance"), r.Tolerance.String(), "must not be negative"))
	}
	return errs
}

func validateStatus(_ context.Context, h, old *scaler) field.ErrorList {
	at := workload.AtStatus
	errs := rules.MetaUpdate(h, old)
	for i, c := range h.Status.Conditions {
		errs = append(errs, workload.NotNegative(at.Child("conditions").Index(i), workload.P("observedGeneration", c.ObservedGeneration))...)
	}
	return append(errs, workload.NotNegative(at, workload.N("currentReplicas", h.Status.CurrentReplicas), workload.N("desiredReplicas", h.Status.DesiredReplicas))...)
}
