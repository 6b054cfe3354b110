package ingressclass

import (
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func class(change ...func(*networkingv1.IngressClass)) *networkingv1.IngressClass {
	c := &networkingv1.IngressClass{
		ObjectMeta: metav1.ObjectMeta{Name: "c", ResourceVersion: "1"},
		Spec: networkingv1.IngressClassSpec{
			Controller: "example.com/controller",
			Parameters: &networkingv1.IngressClassParametersReference{APIGroup: new("example.com"), Kind: "K", Name: "n"},
		},
	}
	for _, ch := range change {
		ch(c)
	}
	return c
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	for _, c := range []struct {
		name   string
		change func(*networkingv1.IngressClass)
		want   []string
	}{
		{"whole", func(*networkingv1.IngressClass) {}, nil},
		{"no parameters", func(c *networkingv1.IngressClass) { c.Spec.Parameters = nil }, nil},
		{"no controller", func(c *networkingv1.IngressClass) { c.Spec.Controller = "" }, []string{"spec.controller FieldValueRequired"}},
		{"controller without a path", func(c *networkingv1.IngressClass) { c.Spec.Controller = "example.com" }, []string{"spec.controller FieldValueInvalid"}},
		{"controller too long", func(c *networkingv1.IngressClass) {
			c.Spec.Controller = "example.com/" + strings.Repeat("x", 250)
		}, []string{"spec.controller FieldValueTooLong"}},
		{"empty reference", func(c *networkingv1.IngressClass) {
			c.Spec.Parameters = &networkingv1.IngressClassParametersReference{APIGroup: new("")}
		}, []string{
			"spec.parameters.apiGroup FieldValueInvalid", "spec.parameters.kind FieldValueRequired", "spec.parameters.name FieldValueRequired",
		}},
		{"names that no URL can carry", func(c *networkingv1.IngressClass) {
			c.Spec.Parameters.Kind, c.Spec.Parameters.Name = "a/b", ".."
		}, []string{"spec.parameters.kind FieldValueInvalid", "spec.parameters.name FieldValueInvalid"}},
		{"cluster-wide in a namespace", func(c *networkingv1.IngressClass) {
			c.Spec.Parameters.Namespace = new("ns")
		}, []string{"spec.parameters.namespace FieldValueForbidden"}},
		{"in no namespace", func(c *networkingv1.IngressClass) {
			c.Spec.Parameters.Scope = new("Namespace")
		}, []string{"spec.parameters.namespace FieldValueRequired"}},
		{"in a badly named namespace", func(c *networkingv1.IngressClass) {
			c.Spec.Parameters.Scope, c.Spec.Parameters.Namespace = new("Namespace"), new("a.b")
		}, []string{"spec.parameters.namespace FieldValueInvalid"}},
		{"in another scope", func(c *networkingv1.IngressClass) {
			c.Spec.Parameters.Scope, c.Spec.Parameters.Namespace = new("cluster"), new("a.b")
		}, []string{"spec.parameters.scope FieldValueNotSupported"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Create(t, class(c.change)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestScopeIsClusterIfNobodySays(t *testing.T) {
	c := class()
	setDefaults(c)
	if *c.Spec.Parameters.Scope != "Cluster" {
		t.Errorf("scope is %q", *c.Spec.Parameters.Scope)
	}
}

func TestUpdate(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	old := class(setDefaults, func(c *networkingv1.IngressClass) { c.Generation = 4 })
	same, changed := class(), class(func(c *networkingv1.IngressClass) { c.Spec.Parameters = nil })
	for obj, want := range map[*networkingv1.IngressClass]int64{same: 4, changed: 5} {
		if got := rules.Update(t, obj, old); got != nil || obj.Generation != want {
			t.Errorf("generation is %d, want %d (%q)", obj.Generation, want, got)
		}
	}
	other := class(func(c *networkingv1.IngressClass) { c.Spec.Controller = "example.com/other" })
	if got := rules.Update(t, other, old); !slices.Equal(got, []string{"spec.controller FieldValueInvalid"}) {
		t.Errorf("another controller was refused for %q", got)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	row := rules.Row(t, class(func(c *networkingv1.IngressClass) {
		c.Annotations = map[string]string{networkingv1.AnnotationIsDefaultIngressClass: "true"}
	}))
	if row["Name"] != "c (default)" || row["Controller"] != "example.com/controller" || row["Parameters"] != "K.example.com/n" {
		t.Errorf("row is %v", row)
	}
	row = rules.Row(t, class(func(c *networkingv1.IngressClass) { c.Spec.Parameters = nil }))
	if row["Name"] != "c" || row["Parameters"] != "<none>" {
		t.Errorf("row is %v", row)
	}
}
