package service

import (
	"context"
	"testing"
)

// The registry asks Validate on updates too, so what is left to ValidateUpdate must not repeat it.
func TestKindTellsOnce(t *testing.T) {
	kind, c := New(), newCluster()
	c.created(t, `{clusterIP: 10.96.0.9, ports: [{port: 80}]}`)
	old := c.stored["s"].DeepCopy()
	svc := service(t, `{clusterIP: 10.96.0.8, loadBalancerClass: "a b", externalIPs: [x], ports: [{port: 80}]}`)
	if errs := Allocate(svc, old, c.choice()); len(errs) > 0 {
		t.Fatal(errs)
	}
	kind.PrepareUpdate(context.Background(), svc, old)
	errs := append(kind.ValidateUpdate(context.Background(), svc, old), kind.Validate(context.Background(), svc)...)
	wantCauses(t, causes(errs), "spec.clusterIPs[0] Invalid; spec.loadBalancerClass Forbidden; spec.externalIPs[0] Invalid")
}
