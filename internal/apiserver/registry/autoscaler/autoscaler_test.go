package autoscaler

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

func of(change func(*scaler)) *scaler {
	h := &scaler{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "h"}, Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
		ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web"}, MaxReplicas: 5,
	}}
	if change != nil {
		change(h)
	}
	return h
}

func quantity(text string) *resource.Quantity { return ptr.To(resource.MustParse(text)) }

// all has something of everything that v1 has no field for.
func all(h *scaler) {
	name := autoscalingv2.MetricIdentifier{Name: "m", Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}
	h.Annotations = map[string]string{"mine": "kept"}
	h.Spec.Metrics = []autoscalingv2.MetricSpec{
		{Type: autoscalingv2.ExternalMetricSourceType, External: &autoscalingv2.ExternalMetricSource{Metric: name, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.ValueMetricType, Value: quantity("3")}}},
		{Type: autoscalingv2.ObjectMetricSourceType, Object: &autoscalingv2.ObjectMetricSource{Metric: name, DescribedObject: h.Spec.ScaleTargetRef, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: quantity("3")}}},
		{Type: autoscalingv2.PodsMetricSourceType, Pods: &autoscalingv2.PodsMetricSource{Metric: name, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: quantity("3")}}},
		{Type: autoscalingv2.ContainerResourceMetricSourceType, ContainerResource: &autoscalingv2.ContainerResourceMetricSource{Name: "memory", Container: "c", Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: quantity("1Gi")}}},
		cpu(70),
	}
	h.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleDown: &autoscalingv2.HPAScalingRules{
		StabilizationWindowSeconds: ptr.To[int32](9), SelectPolicy: ptr.To(autoscalingv2.MinChangePolicySelect), Tolerance: quantity("100m"),
		Policies: []autoscalingv2.HPAScalingPolicy{{Type: autoscalingv2.PodsScalingPolicy, Value: 1, PeriodSeconds: 2}},
	}}
	h.Status = autoscalingv2.HorizontalPodAutoscalerStatus{
		ObservedGeneration: ptr.To[int64](2), CurrentReplicas: 3, DesiredReplicas: 4,
		Conditions: []autoscalingv2.HorizontalPodAutoscalerCondition{{Type: autoscalingv2.AbleToScale, Status: corev1.ConditionTrue, Reason: "R"}},
		CurrentMetrics: []autoscalingv2.MetricStatus{{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricStatus{
			Name: "cpu", Current: autoscalingv2.MetricValueStatus{AverageUtilization: ptr.To[int32](60), AverageValue: quantity("1")},
		}}},
	}
}

// What a client of v1 reads and writes back is what was there.
func TestRoundTrip(t *testing.T) {
	in := of(all)
	before := in.DeepCopy()
	var v1 autoscalingv1.HorizontalPodAutoscaler
	if err := toV1(in, &v1); err != nil {
		t.Fatal(err)
	}
	if *v1.Spec.TargetCPUUtilizationPercentage != 70 || *v1.Status.CurrentCPUUtilizationPercentage != 60 || v1.Annotations["mine"] != "kept" {
		t.Errorf("%+v", v1)
	}
	if text := v1.Annotations[behaviorAnnotation]; !strings.Contains(text, `"ScaleDown":{"StabilizationWindowSeconds":9`) {
		t.Errorf("behavior: %s", text)
	}
	// As a client does it.
	data, err := json.Marshal(v1)
	if err != nil {
		t.Fatal(err)
	}
	var written autoscalingv1.HorizontalPodAutoscaler
	if err := json.Unmarshal(data, &written); err != nil {
		t.Fatal(err)
	}
	var out scaler
	if err := toV2(&written, &out); err != nil {
		t.Fatal(err)
	}
	if !equality.Semantic.DeepEqual(before, &out) {
		a, _ := json.Marshal(before)
		b, _ := json.Marshal(out)
		t.Errorf("in:  %s\nout: %s", a, b)
	}
	if !equality.Semantic.DeepEqual(before, in) {
		t.Error("what was converted has changed")
	}
}

func TestAnnotationsByHand(t *testing.T) {
	var out scaler
	in := &autoscalingv1.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		metricsAnnotation: "no JSON", currentAnnotation: "{", conditionsAnnotation: "7", behaviorAnnotation: "[]",
	}}}
	if err := toV2(in, &out); err != nil || len(out.Annotations) != 0 || len(out.Spec.Metrics) != 1 || *out.Spec.Metrics[0].Resource.Target.AverageUtilization != 80 {
		t.Errorf("%+v (%v)", out, err)
	}
}

func TestRules(t *testing.T) {
	v2, _ := New()
	rules := registrytest.For(t, v2, autoscalingv2.AddToScheme)
	type H = *scaler
	metric := func(m autoscalingv2.MetricSpec) func(H) {
		return func(h H) { h.Spec.Metrics = []autoscalingv2.MetricSpec{m} }
	}
	const m = "spec.metrics[0]"
	for name, c := range map[string]struct {
		change func(H)
		want   []string
	}{
		"sound":      {nil, nil},
		"everything": {all, nil},
		"no most":    {func(h H) { h.Spec.MaxReplicas, h.Spec.MinReplicas = 0, ptr.To[int32](0) }, []string{"spec.maxReplicas FieldValueRequired", "spec.metrics FieldValueForbidden"}},
		"less":       {func(h H) { h.Spec.MinReplicas = ptr.To[int32](6) }, []string{"spec.maxReplicas FieldValueInvalid"}},
		"negative":   {func(h H) { h.Spec.MinReplicas = ptr.To[int32](-1) }, []string{"spec.minReplicas FieldValueInvalid"}},
		"no group":   {func(h H) { h.Spec.ScaleTargetRef.APIVersion = "v1" }, []string{"spec.scaleTargetRef.apiVersion FieldValueInvalid"}},
		"controller": {func(h H) { h.Spec.ScaleTargetRef.APIVersion, h.Spec.ScaleTargetRef.Kind = "", "ReplicationController" }, nil},
		"no name":    {func(h H) { h.Spec.ScaleTargetRef.Name = "" }, []string{"spec.scaleTargetRef.name FieldValueRequired"}},
		"path":       {func(h H) { h.Spec.ScaleTargetRef.Name = "a/b" }, []string{"spec.scaleTargetRef.name FieldValueInvalid"}},
		"no source":  {metric(autoscalingv2.MetricSpec{Type: autoscalingv2.PodsMetricSourceType}), []string{m + ".pods FieldValueRequired"}},
		"type":       {metric(autoscalingv2.MetricSpec{Type: "x"}), []string{m + ".type FieldValueNotSupported"}},
		"both": {func(h H) {
			h.Spec.Metrics = []autoscalingv2.MetricSpec{cpu(50)}
			h.Spec.Metrics[0].Resource.Target.AverageValue = quantity("1")
		}, []string{m + ".resource.target.averageValue FieldValueForbidden"}},
		"zero":   {metric(cpu(0)), []string{m + ".resource.target.averageUtilization FieldValueInvalid"}},
		"window": {func(h H) { all(h); *h.Spec.Behavior.ScaleDown.StabilizationWindowSeconds = 3601 }, []string{"spec.behavior.scaleDown.stabilizationWindowSeconds FieldValueInvalid"}},
		"period": {func(h H) { all(h); h.Spec.Behavior.ScaleDown.Policies[0].PeriodSeconds = 0 }, []string{"spec.behavior.scaleDown.policies[0].periodSeconds FieldValueInvalid"}},
	} {
		if got := rules.Create(t, of(c.change)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
	if row := rules.Row(t, of(all)); row["Targets"] != "<unknown>/3, <unknown>/3 (avg) + 3 more..." || row["Reference"] != "Deployment/web" {
		t.Errorf("%v", row)
	}
}
