package rules

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"
)

var here = field.NewPath("here")

func TestEndpointIP(t *testing.T) {
	for value, wrong := range map[string]int{
		"10.0.0.1": 0, "2001:db8::1": 0, "224.1.0.1": 0, "ff0e::1": 0, "010.0.0.1": 0, "255.255.255.255": 0, "::ffff:10.0.0.1": 0,
		"": 1, "x": 1, "0.0.0.0": 1, "::": 1, "127.0.0.1": 1, "::1": 1, "::ffff:127.0.0.1": 1,
		"169.254.0.1": 1, "fe80::1": 1, "224.0.0.1": 1, "ff02::1": 1,
	} {
		if errs := EndpointIP(here, value); len(errs) != wrong {
			t.Errorf("%q: %v, want %d", value, errs, wrong)
		}
	}
}

func TestIPAndCIDR(t *testing.T) {
	for value, wrong := range map[string]int{"10.0.0.1": 0, "2001:DB8::1": 0, "010.0.0.1": 1, "::ffff:10.0.0.1": 1, "x": 1} {
		if errs := IP(here, value); len(errs) != wrong {
			t.Errorf("%q: %v, want %d", value, errs, wrong)
		}
		if errs := IP(here, value, "y", value); len(errs) != 0 {
			t.Errorf("%q was there before: %v", value, errs)
		}
	}
	for value, wrong := range map[string]int{"10.0.0.0/8": 0, "10.0.0.1/8": 1, "10.0.0.0/08": 1, "10.0.0.0": 1} {
		if errs := CIDR(here, value); len(errs) != wrong {
			t.Errorf("%q: %v, want %d", value, errs, wrong)
		}
	}
}

func TestOnePerFamily(t *testing.T) {
	for _, c := range []struct {
		values []string
		wrong  []field.ErrorType
	}{
		{nil, nil},
		{[]string{"x"}, nil},
		{[]string{"10.0.0.1", "fd00::1"}, nil},
		{[]string{"fd00::1", "10.0.0.1"}, nil},
		{[]string{"10.0.0.1", "10.0.0.2"}, []field.ErrorType{field.ErrorTypeInvalid}},
		{[]string{"10.0.0.1", "fd00::1", "fd00::2"}, []field.ErrorType{field.ErrorTypeInvalid}},
		{[]string{"10.0.0.1", "x"}, []field.ErrorType{field.ErrorTypeInternal, field.ErrorTypeInvalid}},
	} {
		var got []field.ErrorType
		for _, err := range OnePerFamily(here, c.values, utilnet.IPFamilyOfString) {
			got = append(got, err.Type)
		}
		if !slices.Equal(got, c.wrong) {
			t.Errorf("%q: %v, want %v", c.values, got, c.wrong)
		}
	}
}

func TestQuantity(t *testing.T) {
	for _, c := range []struct {
		name   corev1.ResourceName
		amount string
		wrong  int
	}{
		{"cpu", "1500m", 0}, {"cpu", "-1", 1}, {"pods", "1500m", 1}, {"example.com/x", "1500m", 1}, {"example.com/x", "2", 0},
		{"kubernetes.io/x", "1500m", 0}, {"requests.example.com/x", "1500m", 0}, {"example.com/x", "-1500m", 2},
	} {
		if errs := Quantity(here, c.name, resource.MustParse(c.amount)); len(errs) != c.wrong {
			t.Errorf("%s of %s: %v, want %d", c.amount, c.name, errs, c.wrong)
		}
	}
}

func TestFinalizers(t *testing.T) {
	obj := &metav1.ObjectMeta{Finalizers: []string{"kubernetes", "orphan", "foregroundDeletion", "a/b", "mine"}}
	if errs := Finalizers(obj); len(errs) != 1 || errs[0].Field != "metadata.finalizers[4]" {
		t.Errorf("refused because of %v", errs)
	}
}
