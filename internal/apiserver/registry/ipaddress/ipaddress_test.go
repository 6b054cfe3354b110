package ipaddress

import (
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/registrytest"
)

func rulesOf(t testing.TB) *registrytest.Rules {
	return registrytest.For(t, New(nil), networkingv1.AddToScheme)
}

// claim is a Service's on an address, changed.
func claim(change func(*networkingv1.IPAddress)) *networkingv1.IPAddress {
	ip := &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: "10.96.0.9"},
		Spec:       networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: "default", Name: "web"}},
	}
	if change != nil {
		change(ip)
	}
	return ip
}

func TestCreate(t *testing.T) {
	type I = networkingv1.IPAddress
	for name, c := range map[string]struct {
		change func(*I)
		causes []string
	}{
		"sound":         {nil, nil},
		"IPv6":          {func(ip *I) { ip.Name = "2001:db8::1" }, nil},
		"a name":        {func(ip *I) { ip.Name = "web" }, []string{"metadata.name FieldValueInvalid"}},
		"not canonical": {func(ip *I) { ip.Name = "2001:db8:0::1" }, []string{"metadata.name FieldValueInvalid"}},
		"nobody":        {func(ip *I) { ip.Spec.ParentRef = nil }, []string{"spec.parentRef FieldValueRequired"}},
		"empty":         {func(ip *I) { ip.Spec.ParentRef = &networkingv1.ParentReference{} }, []string{"spec.parentRef.name FieldValueRequired", "spec.parentRef.resource FieldValueRequired"}},
		"odd": {func(ip *I) {
			ip.Spec.ParentRef = &networkingv1.ParentReference{Group: "A", Resource: "a/b", Namespace: "..", Name: "%"}
		}, []string{"spec.parentRef.group FieldValueInvalid", "spec.parentRef.name FieldValueInvalid", "spec.parentRef.namespace FieldValueInvalid", "spec.parentRef.resource FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			if causes := rulesOf(t).Create(t, claim(c.change)); !slices.Equal(causes, c.causes) {
				t.Errorf("refused because of %q, want %q", causes, c.causes)
			}
		})
	}
}

func TestGenerateNameIsTheName(t *testing.T) {
	strategy := rulesOf(t).Storage["ipaddresses"].(*registry.REST).CreateStrategy
	if got := strategy.GenerateName("10.96.0.9"); got != "10.96.0.9" {
		t.Errorf("generated %q", got)
	}
}

func TestUpdate(t *testing.T) {
	old := claim(func(ip *networkingv1.IPAddress) { ip.ResourceVersion = "1" })
	next := old.DeepCopy()
	next.Labels = map[string]string{"a": "b"}
	if causes := rulesOf(t).Update(t, next, old); causes != nil {
		t.Error(causes)
	}
	next.Spec.ParentRef.Name = "other"
	if causes := rulesOf(t).Update(t, next, old); !slices.Equal(causes, []string{"spec.parentRef FieldValueInvalid"}) {
		t.Error(causes)
	}
}

func TestColumns(t *testing.T) {
	for want, ref := range map[string]*networkingv1.ParentReference{
		"services/default/web":   {Resource: "services", Namespace: "default", Name: "web"},
		"gateways.example.com/g": {Group: "example.com", Resource: "Gateways", Name: "g"},
		"<none>":                 nil,
	} {
		if got := rulesOf(t).Row(t, claim(func(ip *networkingv1.IPAddress) { ip.Spec.ParentRef = ref }))["ParentRef"]; got != want {
			t.Errorf("shown as %q, want %q", got, want)
		}
	}
}
