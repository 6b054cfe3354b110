package service

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/apiserver/registry/registrytest"
)

// As the server asks: an update is validated once, with the old Service in view, and nothing is reported twice.
func TestKind(t *testing.T) {
	rules := registrytest.For(t, New(), corev1.AddToScheme)
	old := service(t, `{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9], externalIPs: [001.2.3.4], ports: [{port: 80}]}`)
	svc := service(t, `{clusterIP: 10.96.0.8, clusterIPs: [10.96.0.8], externalIPs: [001.2.3.4], loadBalancerClass: "a b", ports: [{port: 80}]}`)
	for what, c := range map[string]struct {
		got  []string
		want []string
	}{
		"create": {rules.Create(t, svc.DeepCopy()), []string{"spec.externalIPs[0] FieldValueInvalid", "spec.loadBalancerClass FieldValueForbidden"}},
		"update": {rules.Update(t, svc.DeepCopy(), old), []string{"spec.clusterIPs[0] FieldValueInvalid", "spec.loadBalancerClass FieldValueForbidden"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: causes %q, want %q", what, c.got, c.want)
		}
	}
}
