package priorityclass

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/registrytest"
)

func class(name string, value int32, change func(*schedulingv1.PriorityClass)) *schedulingv1.PriorityClass {
	c := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, PreemptionPolicy: ptr.To(corev1.PreemptLowerPriority)}
	if change != nil {
		change(c)
	}
	return c
}

func TestRules(t *testing.T) {
	rules := registrytest.For(t, New(), schedulingv1.AddToScheme)
	for name, c := range map[string]struct {
		class *schedulingv1.PriorityClass
		want  []string
	}{
		"a user's":       {class("mine", highestOfUsers, nil), nil},
		"too high":       {class("mine", highestOfUsers+1, nil), []string{"value FieldValueForbidden"}},
		"the system's":   {System()[0], nil},
		"not quite":      {class("system-node-critical", 5, nil), []string{"metadata.name FieldValueForbidden"}},
		"reserved":       {class("system-mine", 5, nil), []string{"metadata.name FieldValueForbidden"}},
		"bad preemption": {class("mine", 5, func(c *schedulingv1.PriorityClass) { c.PreemptionPolicy = ptr.To[corev1.PreemptionPolicy]("X") }), []string{"preemptionPolicy FieldValueNotSupported"}},
	} {
		if got := rules.Create(t, c.class); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", name, got)
		}
	}
	never := class("mine", 6, func(c *schedulingv1.PriorityClass) { c.PreemptionPolicy = ptr.To(corev1.PreemptNever) })
	if got := rules.Update(t, never, class("mine", 5, nil)); !slices.Equal(got, []string{"preemptionPolicy FieldValueInvalid", "value FieldValueForbidden"}) {
		t.Errorf("changed: %v", got)
	}
}

// stored are the classes that the API keeps.
type stored map[string]*schedulingv1.PriorityClass

func (s stored) Get(_ context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	if c := s[name]; c != nil {
		return c, nil
	}
	return nil, apierrors.NewNotFound(schedulingv1.Resource("priorityclasses"), name)
}

func TestAdmission(t *testing.T) {
	low := class("low", -5, func(c *schedulingv1.PriorityClass) { c.PreemptionPolicy = ptr.To(corev1.PreemptNever) })
	usual := class("usual", 100, func(c *schedulingv1.PriorityClass) { c.GlobalDefault = true })
	for name, c := range map[string]struct {
		classes []*schedulingv1.PriorityClass
		change  func(*corev1.PodSpec)
		refused bool
		want    int32
		named   string
	}{
		"none":         {nil, func(*corev1.PodSpec) {}, false, 0, ""},
		"the default":  {[]*schedulingv1.PriorityClass{usual}, func(*corev1.PodSpec) {}, false, 100, "usual"},
		"a class":      {[]*schedulingv1.PriorityClass{low, usual}, func(s *corev1.PodSpec) { s.PriorityClassName = "low" }, false, -5, "low"},
		"the system's": {nil, func(s *corev1.PodSpec) { s.PriorityClassName = "system-node-critical" }, false, 2000001000, "system-node-critical"},
		"unknown":      {nil, func(s *corev1.PodSpec) { s.PriorityClassName = "mine" }, true, 0, ""},
		"own number":   {nil, func(s *corev1.PodSpec) { s.Priority = ptr.To[int32](7) }, true, 0, ""},
		"own preemption": {[]*schedulingv1.PriorityClass{low}, func(s *corev1.PodSpec) {
			s.PriorityClassName, s.PreemptionPolicy = "low", ptr.To(corev1.PreemptLowerPriority)
		}, true, 0, ""},
		"the same number": {nil, func(s *corev1.PodSpec) { s.Priority = ptr.To[int32](0) }, false, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := plugin(t, c.classes...)
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
			c.change(&pod.Spec)
			err := p.Admit(t.Context(), create(pod, "pods", "Pod"), nil)
			if c.refused {
				if !apierrors.IsForbidden(err) {
					t.Errorf("admitted: %v", err)
				}
				return
			}
			if err != nil || *pod.Spec.Priority != c.want || pod.Spec.PriorityClassName != c.named || pod.Spec.PreemptionPolicy == nil {
				t.Errorf("%v: %+v", err, pod.Spec)
			}
		})
	}
	p := plugin(t, usual)
	second := class("second", 1, func(c *schedulingv1.PriorityClass) { c.GlobalDefault = true })
	if err := p.Validate(t.Context(), create(second, "priorityclasses", "PriorityClass"), nil); !apierrors.IsForbidden(err) {
		t.Errorf("a second default: %v", err)
	}
}

func plugin(t *testing.T, classes ...*schedulingv1.PriorityClass) *Admission {
	t.Helper()
	keep := stored{}
	var objects []runtime.Object
	for _, c := range classes {
		keep[c.Name] = c
		objects = append(objects, c)
	}
	factory := informers.NewSharedInformerFactory(fake.NewClientset(objects...), 0)
	p := NewAdmission(factory)
	p.Classes = keep
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	return p
}

func create(obj metav1.Object, resource, kind string) admission.Attributes {
	version := schedulingv1.SchemeGroupVersion
	if kind == "Pod" {
		version = corev1.SchemeGroupVersion
	}
	return admission.NewAttributesRecord(obj.(runtime.Object), nil, version.WithKind(kind), "", obj.GetName(), version.WithResource(resource), "",
		admission.Create, &metav1.CreateOptions{}, false, nil)
}
