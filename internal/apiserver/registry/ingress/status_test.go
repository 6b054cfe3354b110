package ingress

import (
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
)

func at(points ...networkingv1.IngressLoadBalancerIngress) *networkingv1.Ingress {
	return ingress(func(i *networkingv1.Ingress) { i.Status.LoadBalancer.Ingress = points })
}

func TestStatus(t *testing.T) {
	type point = networkingv1.IngressLoadBalancerIngress
	for _, c := range []struct {
		name     string
		old, now *networkingv1.Ingress
		want     []string
	}{
		{"addresses and names", at(), at(point{IP: "1.2.3.4"}, point{IP: "2001:db8::1"}, point{Hostname: "a.b"}, point{}), nil},
		{"no address", at(), at(point{IP: "x"}), []string{"status.loadBalancer.ingress[0].ip"}},
		{"leading zeros", at(), at(point{IP: "01.2.3.4"}), []string{"status.loadBalancer.ingress[0].ip"}},
		{"leading zeros that were there", at(point{IP: "01.2.3.4"}), at(point{}, point{IP: "01.2.3.4"}), nil},
		{"an address as a name", at(), at(point{Hostname: "1.2.3.4"}), []string{"status.loadBalancer.ingress[0].hostname"}},
		{"no name", at(), at(point{Hostname: "A"}), []string{"status.loadBalancer.ingress[0].hostname"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, err := range validateStatus(t.Context(), c.now, c.old) {
				got = append(got, err.Field)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestStatusKeepsTheSpec(t *testing.T) {
	s := newStatus(nil)
	old, now := ingress(), at(networkingv1.IngressLoadBalancerIngress{IP: "2001:DB8::1"})
	now.Spec = networkingv1.IngressSpec{}
	s.PrepareForUpdate(t.Context(), now, old)
	if now.Spec.DefaultBackend == nil {
		t.Error("the spec was changed through the status")
	}
	if got := s.WarningsOnUpdate(t.Context(), now, old); len(got) != 1 {
		t.Errorf("an address in capitals gave %q", got)
	}
}
