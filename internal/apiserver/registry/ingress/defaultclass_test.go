package ingress

import (
	"context"
	"testing"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

func marked(name string, age time.Duration, isDefault string) *networkingv1.IngressClass {
	return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{
		Name:              name,
		CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age)),
		Annotations:       map[string]string{networkingv1.AnnotationIsDefaultIngressClass: isDefault},
	}}
}

func TestDefaultClass(t *testing.T) {
	named := func(i *networkingv1.Ingress) { i.Spec.IngressClassName = new("mine") }
	annotated := func(i *networkingv1.Ingress) { i.Annotations = map[string]string{classAnnotation: "mine"} }
	for _, c := range []struct {
		name    string
		classes []runtime.Object
		ingress *networkingv1.Ingress
		want    string
	}{
		{"no class at all", nil, ingress(), ""},
		{"no default", []runtime.Object{marked("a", 0, "false")}, ingress(), ""},
		{"one default", []runtime.Object{marked("a", 0, "false"), marked("b", time.Hour, "true")}, ingress(), "b"},
		{"the youngest", []runtime.Object{marked("a", time.Hour, "true"), marked("b", 0, "true")}, ingress(), "b"},
		{"alike in age", []runtime.Object{marked("b", 0, "true"), marked("a", 0, "true")}, ingress(), "a"},
		{"named already", []runtime.Object{marked("a", 0, "true")}, ingress(named), "mine"},
		{"named by annotation", []runtime.Object{marked("a", 0, "true")}, ingress(annotated), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			factory := informers.NewSharedInformerFactory(fake.NewClientset(c.classes...), 0)
			plugin := NewDefaultClass()
			if plugin.ValidateInitialization() == nil {
				t.Error("the plugin was content without informers")
			}
			plugin.SetExternalKubeInformerFactory(factory)
			if err := plugin.ValidateInitialization(); err != nil {
				t.Fatal(err)
			}
			factory.Start(ctx.Done())
			defer factory.Shutdown()
			defer cancel()
			attr := admission.NewAttributesRecord(c.ingress, nil, networkingv1.SchemeGroupVersion.WithKind("Ingress"), "ns", "i",
				networkingv1.SchemeGroupVersion.WithResource("ingresses"), "", admission.Create, nil, false, nil)
			if err := plugin.Admit(ctx, attr, nil); err != nil {
				t.Fatal(err)
			}
			if got := class(c.ingress); got != c.want && (c.want != "" || got != "<none>") {
				t.Errorf("class is %q, want %q", got, c.want)
			}
		})
	}
}
