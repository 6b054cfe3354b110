// Package autoscaler describes HorizontalPodAutoscalers, which the API serves as autoscaling/v2 and as autoscaling/v1, with one
// storage behind both. It scales nothing.
package autoscaler

import (
	"context"
	"fmt"
	"strings"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/workload"
)

type scaler = autoscalingv2.HorizontalPodAutoscaler

const (
	// defaultUtilization is the share of the CPU that is aimed at where nothing is.
	defaultUtilization = 80
	// shown is how many metrics a table shows.
	shown = 2
)

// New describes HorizontalPodAutoscalers in both versions. The first makes the storage that the second serves too.
func New() (v2, v1 registry.Resource) {
	k := &registry.Kind[scaler, *scaler]{
		Served: autoscalingv2.SchemeGroupVersion, AlsoServed: []schema.GroupVersion{autoscalingv1.SchemeGroupVersion},
		Plural: "horizontalpodautoscalers", Singular: "horizontalpodautoscaler", KindName: "HorizontalPodAutoscaler",
		ShortNames:     []string{"hpa"},
		Categories:     []string{"all"},
		NewList:        func() runtime.Object { return &autoscalingv2.HorizontalPodAutoscalerList{} },
		Default:        setDefaults,
		Validate:       validateCreate,
		ValidateUpdate: validateUpdate,
		Columns:        columns(),
	}
	registry.SpecAndStatus(k, func(h *scaler) *autoscalingv2.HorizontalPodAutoscalerSpec { return &h.Spec },
		func(h *scaler) *autoscalingv2.HorizontalPodAutoscalerStatus { return &h.Status }, validateStatus)
	// Labels and annotations can be changed with the status, as in Kubernetes.
	k.Status.Prepare = func(_ context.Context, h, old *scaler) { h.Spec = old.Spec }
	k.Status.Reset = k.Status.Reset[:1]
	made := &storage{Kind: k}
	return made, older{made}
}

// storage remembers what was made.
type storage struct {
	*registry.Kind[scaler, *scaler]
	made map[string]rest.Storage
}

func (s *storage) Storage(scheme *runtime.Scheme, getter generic.RESTOptionsGetter) (_ map[string]rest.Storage, err error) {
	s.made, err = s.Kind.Storage(scheme, getter)
	return s.made, err
}

// older is the version that knows no metric but the CPU's utilization. The others are in annotations.
type older struct{ *storage }

// GroupVersion is where the resource is served.
func (o older) GroupVersion() schema.GroupVersion { return autoscalingv1.SchemeGroupVersion }

// AddToScheme teaches the scheme this version's defaults and the fields that can be selected by.
func (o older) AddToScheme(scheme *runtime.Scheme) error {
	fill := func(h *autoscalingv1.HorizontalPodAutoscaler) { workload.OrPoint(&h.Spec.MinReplicas, 1) }
	scheme.AddTypeDefaultingFunc(&autoscalingv1.HorizontalPodAutoscaler{}, func(obj any) { fill(obj.(*autoscalingv1.HorizontalPodAutoscaler)) })
	scheme.AddTypeDefaultingFunc(&autoscalingv1.HorizontalPodAutoscalerList{}, func(obj any) {
		list := obj.(*autoscalingv1.HorizontalPodAutoscalerList)
		for i := range list.Items {
			fill(&list.Items[i])
		}
	})
	kind := autoscalingv1.SchemeGroupVersion.WithKind(o.KindName)
	return scheme.AddFieldLabelConversionFunc(kind, runtime.DefaultMetaV1FieldSelectorConversion)
}

// Storage is that of the other version.
func (o older) Storage(*runtime.Scheme, generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	if o.made == nil {
		return nil, fmt.Errorf("%s has to be served before %s", autoscalingv2.SchemeGroupVersion, autoscalingv1.SchemeGroupVersion)
	}
	return o.made, nil
}

func cpu(utilization int32) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricSource{
		Name: corev1.ResourceCPU, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: &utilization},
	}}
}

func setDefaults(h *scaler) {
	workload.OrPoint(&h.Spec.MinReplicas, 1)
	if len(h.Spec.Metrics) == 0 {
		h.Spec.Metrics = []autoscalingv2.MetricSpec{cpu(defaultUtilization)}
	}
	behavior := h.Spec.Behavior
	if behavior == nil {
		return
	}
	// Up: at once, by 4 Pods or to twice as many, whichever is more. Down: as far as wanted; after how long the controller knows.
	workload.OrPoint(&behavior.ScaleUp, autoscalingv2.HPAScalingRules{})
	workload.OrPoint(&behavior.ScaleUp.StabilizationWindowSeconds, 0)
	defaultRules(behavior.ScaleUp, autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PodsScalingPolicy, Value: 4, PeriodSeconds: 15},
		autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PercentScalingPolicy, Value: 100, PeriodSeconds: 15})
	workload.OrPoint(&behavior.ScaleDown, autoscalingv2.HPAScalingRules{})
	defaultRules(behavior.ScaleDown, autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PercentScalingPolicy, Value: 100, PeriodSeconds: 15})
}

func defaultRules(rules *autoscalingv2.HPAScalingRules, policies ...autoscalingv2.HPAScalingPolicy) {
	workload.OrPoint(&rules.SelectPolicy, autoscalingv2.MaxChangePolicySelect)
	if rules.Policies == nil {
		rules.Policies = policies
	}
}

func columns() []registry.Column[scaler] {
	spec, status := autoscalingv2.HorizontalPodAutoscalerSpec{}.SwaggerDoc(), autoscalingv2.HorizontalPodAutoscalerStatus{}.SwaggerDoc()
	return []registry.Column[scaler]{
		{Name: "Reference", Description: spec["scaleTargetRef"],
			Cell: func(h *scaler) any { return h.Spec.ScaleTargetRef.Kind + "/" + h.Spec.ScaleTargetRef.Name }},
		{Name: "Targets", Description: spec["metrics"], Cell: targets},
		{Name: "MinPods", Description: spec["minReplicas"], Cell: func(h *scaler) any {
			if h.Spec.MinReplicas == nil {
				return "<unset>"
			}
			return fmt.Sprint(*h.Spec.MinReplicas)
		}},
		{Name: "MaxPods", Description: spec["maxReplicas"], Cell: func(h *scaler) any { return int64(h.Spec.MaxReplicas) }},
		{Name: "Replicas", Description: status["currentReplicas"], Cell: func(h *scaler) any { return int64(h.Status.CurrentReplicas) }},
		registry.Age[scaler](),
	}
}

// targets shows what each metric is and should be.
func targets(h *scaler) any {
	if len(h.Spec.Metrics) == 0 {
		return "<none>"
	}
	var texts []string
	for i := range h.Spec.Metrics {
		var now autoscalingv2.MetricStatus
		if i < len(h.Status.CurrentMetrics) {
			now = h.Status.CurrentMetrics[i]
		}
		texts = append(texts, metric(&h.Spec.Metrics[i], &now))
	}
	text := strings.Join(texts[:min(len(texts), shown)], ", ")
	if more := len(texts) - shown; more > 0 {
		text += fmt.Sprintf(" + %d more...", more)
	}
	return text
}

func metric(spec *autoscalingv2.MetricSpec, now *autoscalingv2.MetricStatus) string {
	is := func(status *autoscalingv2.MetricValueStatus) autoscalingv2.MetricValueStatus {
		if status == nil {
			return autoscalingv2.MetricValueStatus{}
		}
		return *status
	}
	switch {
	case spec.Type == autoscalingv2.ExternalMetricSourceType && spec.External != nil:
		var current *autoscalingv2.MetricValueStatus
		if now.External != nil {
			current = &now.External.Current
		}
		return value(spec.External.Target, is(current))
	case spec.Type == autoscalingv2.ObjectMetricSourceType && spec.Object != nil:
		var current *autoscalingv2.MetricValueStatus
		if now.Object != nil {
			current = &now.Object.Current
		}
		return value(spec.Object.Target, is(current))
	case spec.Type == autoscalingv2.PodsMetricSourceType && spec.Pods != nil:
		current := autoscalingv2.MetricValueStatus{}
		if now.Pods != nil {
			current = now.Pods.Current
		}
		return amount(current.AverageValue) + "/" + amount(spec.Pods.Target.AverageValue)
	case spec.Type == autoscalingv2.ResourceMetricSourceType && spec.Resource != nil:
		var current *autoscalingv2.MetricValueStatus
		if now.Resource != nil {
			current = &now.Resource.Current
		}
		return share(spec.Resource.Name, spec.Resource.Target, is(current))
	case spec.Type == autoscalingv2.ContainerResourceMetricSourceType && spec.ContainerResource != nil:
		var current *autoscalingv2.MetricValueStatus
		if now.ContainerResource != nil {
			current = &now.ContainerResource.Current
		}
		return share(spec.ContainerResource.Name, spec.ContainerResource.Target, is(current))
	}
	return "<unknown type>"
}

func amount(q *resource.Quantity) string {
	if q == nil {
		return "<unknown>"
	}
	return q.String()
}

func value(target autoscalingv2.MetricTarget, now autoscalingv2.MetricValueStatus) string {
	if target.AverageValue != nil {
		return fmt.Sprintf("%s/%s (avg)", amount(now.AverageValue), target.AverageValue)
	}
	return amount(now.Value) + "/" + amount(target.Value)
}

func share(name corev1.ResourceName, target autoscalingv2.MetricTarget, now autoscalingv2.MetricValueStatus) string {
	if target.AverageValue != nil {
		return fmt.Sprintf("%s: %s/%s", name, amount(now.AverageValue), target.AverageValue)
	}
	percent := func(p *int32, otherwise string) string {
		if p == nil {
			return otherwise
		}
		return fmt.Sprintf("%d%%", *p)
	}
	return fmt.Sprintf("%s: %s/%s", name, percent(now.AverageUtilization, "<unknown>"), percent(target.AverageUtilization, "<auto>"))
}
