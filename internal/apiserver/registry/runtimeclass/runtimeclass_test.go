package runtimeclass

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

func class(change func(*nodev1.RuntimeClass)) *nodev1.RuntimeClass {
	c := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Handler: "h"}
	if change != nil {
		change(c)
	}
	return c
}

var overhead = corev1.ResourceList{"cpu": resource.MustParse("100m")}

func TestRules(t *testing.T) {
	type C = *nodev1.RuntimeClass
	rules := registrytest.For(t, New(), nodev1.AddToScheme)
	for name, c := range map[string]struct {
		change func(C)
		want   []string
	}{
		"sound":       {func(c C) { c.Overhead = &nodev1.Overhead{PodFixed: overhead} }, nil},
		"no handler":  {func(c C) { c.Handler = "" }, []string{"handler FieldValueRequired"}},
		"bad handler": {func(c C) { c.Handler = "A" }, []string{"handler FieldValueInvalid"}},
		"labels":      {func(c C) { c.Scheduling = &nodev1.Scheduling{NodeSelector: map[string]string{"!": ""}} }, []string{"scheduling.nodeSelector FieldValueInvalid"}},
		"twice": {func(c C) {
			c.Scheduling = &nodev1.Scheduling{Tolerations: []corev1.Toleration{{Key: "a", Operator: "Exists"}, {Key: "a", Operator: "Exists"}}}
		}, []string{"scheduling.tolerations[1] FieldValueDuplicate"}},
	} {
		if got := rules.Create(t, class(c.change)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := rules.Update(t, class(func(c C) { c.Handler = "other" }), class(nil)); !slices.Equal(got, []string{"handler FieldValueInvalid"}) {
		t.Errorf("changed: %v", got)
	}
}

type stored struct{ class *nodev1.RuntimeClass }

func (s stored) Get(_ context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	if s.class.Name == name {
		return s.class, nil
	}
	return nil, apierrors.NewNotFound(nodev1.Resource("runtimeclasses"), name)
}

func TestAdmission(t *testing.T) {
	full := func(c *nodev1.RuntimeClass) {
		c.Overhead = &nodev1.Overhead{PodFixed: overhead}
		c.Scheduling = &nodev1.Scheduling{NodeSelector: map[string]string{"disk": "ssd"}, Tolerations: []corev1.Toleration{{Operator: "Exists"}}}
	}
	for name, c := range map[string]struct {
		class   func(*nodev1.RuntimeClass)
		spec    corev1.PodSpec
		refused bool
	}{
		"none":              {nil, corev1.PodSpec{}, false},
		"unknown":           {nil, corev1.PodSpec{RuntimeClassName: ptr.To("x")}, true},
		"all":               {full, corev1.PodSpec{RuntimeClassName: ptr.To("c"), Tolerations: []corev1.Toleration{{Key: "a", Value: "b"}}}, false},
		"the same overhead": {full, corev1.PodSpec{RuntimeClassName: ptr.To("c"), Overhead: overhead}, false},
		"other overhead":    {full, corev1.PodSpec{RuntimeClassName: ptr.To("c"), Overhead: corev1.ResourceList{"cpu": resource.MustParse("1")}}, true},
		"overhead alone":    {nil, corev1.PodSpec{Overhead: overhead}, true},
		"other nodes":       {full, corev1.PodSpec{RuntimeClassName: ptr.To("c"), NodeSelector: map[string]string{"disk": "hdd"}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := NewAdmission()
			p.Classes = stored{class(c.class)}
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: c.spec}
			a := admission.NewAttributesRecord(pod, nil, corev1.SchemeGroupVersion.WithKind("Pod"), "", "p", corev1.SchemeGroupVersion.WithResource("pods"), "",
				admission.Create, &metav1.CreateOptions{}, false, nil)
			err := p.Admit(t.Context(), a, nil)
			if err == nil {
				err = p.Validate(t.Context(), a, nil)
			}
			if c.refused != apierrors.IsForbidden(err) || !c.refused && err != nil {
				t.Fatalf("%v", err)
			}
			if name == "all" && (pod.Spec.NodeSelector["disk"] != "ssd" || len(pod.Spec.Tolerations) != 1 || pod.Spec.Tolerations[0].Operator != "Exists" || len(pod.Spec.Overhead) != 1) {
				t.Errorf("%+v", pod.Spec)
			}
		})
	}
}
