package autoscaler

import (
	"encoding/json"
	"maps"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// What autoscaling/v1 has no field for is in these annotations, so that nothing is lost when a client of it writes back what
// it has read.
const (
	metricsAnnotation    = "autoscaling.alpha.kubernetes.io/metrics"
	currentAnnotation    = "autoscaling.alpha.kubernetes.io/current-metrics"
	conditionsAnnotation = "autoscaling.alpha.kubernetes.io/conditions"
	behaviorAnnotation   = "autoscaling.alpha.kubernetes.io/behavior"
	downAnnotation       = "autoscaling.alpha.kubernetes.io/scale-down-tolerance"
	upAnnotation         = "autoscaling.alpha.kubernetes.io/scale-up-tolerance"
)

var annotations = []string{metricsAnnotation, currentAnnotation, conditionsAnnotation, behaviorAnnotation, downAnnotation, upAnnotation}

// AddConversions teaches the scheme to convert between the versions. What comes out may share memory with what went in, as
// conversions may.
func AddConversions(scheme *runtime.Scheme) error {
	for _, add := range []func(*runtime.Scheme) error{
		conversionOf(toV1), conversionOf(toV2),
		conversionOf(func(in *autoscalingv2.HorizontalPodAutoscalerList, out *autoscalingv1.HorizontalPodAutoscalerList) error {
			out.ListMeta = in.ListMeta
			out.Items = make([]autoscalingv1.HorizontalPodAutoscaler, len(in.Items))
			return each(in.Items, out.Items, toV1)
		}),
		conversionOf(func(in *autoscalingv1.HorizontalPodAutoscalerList, out *autoscalingv2.HorizontalPodAutoscalerList) error {
			out.ListMeta = in.ListMeta
			out.Items = make([]scaler, len(in.Items))
			return each(in.Items, out.Items, toV2)
		}),
	} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	return nil
}

func conversionOf[In, Out any](convert func(*In, *Out) error) func(*runtime.Scheme) error {
	return func(scheme *runtime.Scheme) error {
		return scheme.AddConversionFunc((*In)(nil), (*Out)(nil), func(in, out any, _ conversion.Scope) error {
			return convert(in.(*In), out.(*Out))
		})
	}
}

func each[In, Out any](in []In, out []Out, convert func(*In, *Out) error) error {
	for i := range in {
		if err := convert(&in[i], &out[i]); err != nil {
			return err
		}
	}
	return nil
}

// without gives annotations without ours.
func without(in map[string]string) map[string]string {
	out := maps.Clone(in)
	for _, key := range annotations {
		delete(out, key)
	}
	return out
}

// isCPU says whether a metric is the one that v1 has a field for.
func isCPU(m *autoscalingv2.MetricSpec) bool {
	return m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil && m.Resource.Name == corev1.ResourceCPU && m.Resource.Target.AverageUtilization != nil
}

func toV1(in *scaler, out *autoscalingv1.HorizontalPodAutoscaler) error {
	out.ObjectMeta = in.ObjectMeta
	out.Annotations = without(in.Annotations)
	out.Spec = autoscalingv1.HorizontalPodAutoscalerSpec{
		ScaleTargetRef: autoscalingv1.CrossVersionObjectReference(in.Spec.ScaleTargetRef), MinReplicas: in.Spec.MinReplicas, MaxReplicas: in.Spec.MaxReplicas,
	}
	out.Status = autoscalingv1.HorizontalPodAutoscalerStatus{
		ObservedGeneration: in.Status.ObservedGeneration, LastScaleTime: in.Status.LastScaleTime,
		CurrentReplicas: in.Status.CurrentReplicas, DesiredReplicas: in.Status.DesiredReplicas,
	}
	var others []autoscalingv1.MetricSpec
	for i := range in.Spec.Metrics {
		m := &in.Spec.Metrics[i]
		switch {
		case !isCPU(m):
			others = append(others, metricToV1(m))
		case out.Spec.TargetCPUUtilizationPercentage == nil:
			out.Spec.TargetCPUUtilizationPercentage = m.Resource.Target.AverageUtilization
		}
	}
	var current []autoscalingv1.MetricStatus
	for i := range in.Status.CurrentMetrics {
		m := &in.Status.CurrentMetrics[i]
		if r := m.Resource; m.Type == autoscalingv2.ResourceMetricSourceType && r != nil && r.Name == corev1.ResourceCPU && r.Current.AverageUtilization != nil {
			out.Status.CurrentCPUUtilizationPercentage = r.Current.AverageUtilization
		}
		current = append(current, currentToV1(m))
	}
	var conditions []autoscalingv1.HorizontalPodAutoscalerCondition
	for _, c := range in.Status.Conditions {
		conditions = append(conditions, conditionToV1(c))
	}
	if err := annotate(out, metricsAnnotation, others, len(others)); err != nil {
		return err
	}
	if err := annotate(out, currentAnnotation, current, len(current)); err != nil {
		return err
	}
	if err := annotate(out, conditionsAnnotation, conditions, len(conditions)); err != nil {
		return err
	}
	if b := in.Spec.Behavior; b != nil {
		return annotate(out, behaviorAnnotation, behavior{rulesOf(b.ScaleUp), rulesOf(b.ScaleDown)}, 1)
	}
	return nil
}

// annotate keeps a value in an annotation, if it is something.
func annotate(out *autoscalingv1.HorizontalPodAutoscaler, key string, value any, n int) error {
	if n == 0 {
		return nil
	}
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if out.Annotations == nil {
		out.Annotations = map[string]string{}
	}
	out.Annotations[key] = string(data)
	return nil
}

func toV2(in *autoscalingv1.HorizontalPodAutoscaler, out *scaler) error {
	out.ObjectMeta = in.ObjectMeta
	out.Annotations = without(in.Annotations)
	out.Spec = autoscalingv2.HorizontalPodAutoscalerSpec{
		ScaleTargetRef: autoscalingv2.CrossVersionObjectReference(in.Spec.ScaleTargetRef), MinReplicas: in.Spec.MinReplicas, MaxReplicas: in.Spec.MaxReplicas,
	}
	out.Status = autoscalingv2.HorizontalPodAutoscalerStatus{
		ObservedGeneration: in.Status.ObservedGeneration, LastScaleTime: in.Status.LastScaleTime,
		CurrentReplicas: in.Status.CurrentReplicas, DesiredReplicas: in.Status.DesiredReplicas,
	}
	// An annotation that somebody wrote by hand may be anything; what can't be read is dropped.
	var others []autoscalingv1.MetricSpec
	if read(in, metricsAnnotation, &others) {
		for i := range others {
			out.Spec.Metrics = append(out.Spec.Metrics, metricToV2(&others[i]))
		}
	}
	if share := in.Spec.TargetCPUUtilizationPercentage; share != nil {
		out.Spec.Metrics = append(out.Spec.Metrics, cpu(*share))
	}
	if len(out.Spec.Metrics) == 0 {
		out.Spec.Metrics = []autoscalingv2.MetricSpec{cpu(defaultUtilization)}
	}
	var current []autoscalingv1.MetricStatus
	if read(in, currentAnnotation, &current) {
		for i := range current {
			out.Status.CurrentMetrics = append(out.Status.CurrentMetrics, currentToV2(&current[i]))
		}
	} else if share := in.Status.CurrentCPUUtilizationPercentage; share != nil {
		out.Status.CurrentMetrics = []autoscalingv2.MetricStatus{{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricStatus{
			Name: corev1.ResourceCPU, Current: autoscalingv2.MetricValueStatus{AverageUtilization: share},
		}}}
	}
	var conditions []autoscalingv1.HorizontalPodAutoscalerCondition
	if read(in, conditionsAnnotation, &conditions) {
		for _, c := range conditions {
			out.Status.Conditions = append(out.Status.Conditions, conditionToV2(c))
		}
	}
	var b autoscalingv2.HorizontalPodAutoscalerBehavior
	if read(in, behaviorAnnotation, &b) && (b.ScaleUp != nil || b.ScaleDown != nil) {
		out.Spec.Behavior = &b
	}
	return nil
}

func read(in *autoscalingv1.HorizontalPodAutoscaler, key string, into any) bool {
	text, ok := in.Annotations[key]
	return ok && json.Unmarshal([]byte(text), into) == nil
}

// behavior is how Kubernetes writes the annotation: with the names of Go. It is read in any case.
type behavior struct{ ScaleUp, ScaleDown *scalingRules }

type scalingRules struct {
	StabilizationWindowSeconds *int32
	SelectPolicy               *autoscalingv2.ScalingPolicySelect
	Policies                   []scalingPolicy
	Tolerance                  *resource.Quantity
}

type scalingPolicy struct {
	Type          autoscalingv2.HPAScalingPolicyType
	Value         int32
	PeriodSeconds int32
}

func rulesOf(r *autoscalingv2.HPAScalingRules) *scalingRules {
	if r == nil {
		return nil
	}
	out := &scalingRules{StabilizationWindowSeconds: r.StabilizationWindowSeconds, SelectPolicy: r.SelectPolicy, Tolerance: r.Tolerance}
	for _, p := range r.Policies {
		out.Policies = append(out.Policies, scalingPolicy(p))
	}
	return out
}

func conditionToV1(c autoscalingv2.HorizontalPodAutoscalerCondition) autoscalingv1.HorizontalPodAutoscalerCondition {
	return autoscalingv1.HorizontalPodAutoscalerCondition{
		Type: autoscalingv1.HorizontalPodAutoscalerConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime,
		Reason: c.Reason, Message: c.Message, ObservedGeneration: c.ObservedGeneration,
	}
}

func conditionToV2(c autoscalingv1.HorizontalPodAutoscalerCondition) autoscalingv2.HorizontalPodAutoscalerCondition {
	return autoscalingv2.HorizontalPodAutoscalerCondition{
		Type: autoscalingv2.HorizontalPodAutoscalerConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime,
		Reason: c.Reason, Message: c.Message, ObservedGeneration: c.ObservedGeneration,
	}
}
