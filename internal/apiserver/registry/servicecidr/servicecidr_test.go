package servicecidr

import (
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func rulesOf(t testing.TB) *registrytest.Rules {
	return registrytest.For(t, New(), networkingv1.AddToScheme)
}

func ranges(cidrs ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "c", ResourceVersion: "1"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs},
	}
}

func TestCreate(t *testing.T) {
	for _, c := range []struct{ cidrs, causes []string }{
		{[]string{"10.96.0.0/16"}, nil},
		{[]string{"10.96.0.0/16", "fd00:96::/112"}, nil},
		{nil, []string{"spec.cidrs FieldValueRequired"}},
		{[]string{"10.0.0.0/16", "10.1.0.0/16", "fd00::/112"}, []string{"spec.cidrs FieldValueInvalid"}},
		{[]string{"10.0.0.0/16", "10.1.0.0/16"}, []string{"spec.cidrs FieldValueInvalid"}},
		{[]string{"10.0.0.1/16"}, []string{"spec.cidrs[0] FieldValueInvalid"}},
		{[]string{"FD00::/112"}, []string{"spec.cidrs[0] FieldValueInvalid"}},
		{[]string{"x", "y"}, []string{"spec.cidrs[0] FieldValueInvalid", "spec.cidrs[1] FieldValueInvalid"}},
	} {
		cidr := ranges(c.cidrs...)
		cidr.ResourceVersion = ""
		cidr.Status.Conditions = []metav1.Condition{{Type: "Ready"}}
		if causes := rulesOf(t).Create(t, cidr); !slices.Equal(causes, c.causes) {
			t.Errorf("%q is refused because of %q, want %q", c.cidrs, causes, c.causes)
		}
		if cidr.Status.Conditions != nil {
			t.Error("a user set the status")
		}
	}
}

func TestUpdate(t *testing.T) {
	for _, c := range []struct{ was, is, causes []string }{
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/16"}, nil},
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/16", "fd00::/112"}, nil},
		{[]string{"10.0.0.0/16"}, []string{"fd00::/112", "10.0.0.0/16"}, []string{"spec.cidrs[0] FieldValueInvalid"}},
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/16", "10.1.0.0/16"}, []string{"spec.cidrs FieldValueInvalid"}},
		{[]string{"10.0.0.0/16"}, []string{"10.0.0.0/15"}, []string{"spec.cidrs[0] FieldValueInvalid"}},
		{[]string{"10.0.0.0/16", "fd00::/112"}, []string{"10.0.0.0/16"}, []string{"spec.cidrs FieldValueInvalid"}},
		{[]string{"10.0.0.0/16"}, nil, []string{"spec.cidrs FieldValueInvalid"}},
	} {
		if causes := rulesOf(t).Update(t, ranges(c.is...), ranges(c.was...)); !slices.Equal(causes, c.causes) {
			t.Errorf("%q → %q is refused because of %q, want %q", c.was, c.is, causes, c.causes)
		}
	}
}

func TestStatus(t *testing.T) {
	status := New().Status
	old, next := ranges("10.0.0.0/16"), ranges("10.1.0.0/16")
	next.Labels = map[string]string{"a": "b"}
	next.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: metav1.ConditionTrue}}
	status.Prepare(t.Context(), next, old)
	if next.Labels != nil || next.Spec.CIDRs[0] != "10.0.0.0/16" || len(next.Status.Conditions) != 1 {
		t.Errorf("became %+v", next)
	}
	if errs := status.Validate(t.Context(), next, old); len(errs) > 0 {
		t.Error(errs)
	}
}

func TestColumns(t *testing.T) {
	if got := rulesOf(t).Row(t, ranges("10.0.0.0/16", "fd00::/112"))["CIDRs"]; got != "10.0.0.0/16,fd00::/112" {
		t.Errorf("shown as %q", got)
	}
}
