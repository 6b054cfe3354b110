package service

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// seeds are specs of every kind, right and wrong.
var seeds = []string{
	`{ports: [{port: 80}]}`,
	`{type: NodePort, ports: [{name: a, port: 53, nodePort: 30053}, {name: b, port: 53, protocol: UDP}]}`,
	`{type: NodePort, ports: [{port: 80, nodePort: 30053}, {port: 81, nodePort: 30053}]}`,
	`{type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30099, loadBalancerClass: a/b, ports: [{port: 80}]}`,
	`{type: LoadBalancer, allocateLoadBalancerNodePorts: false, loadBalancerSourceRanges: [10.0.0.0/8], ports: [{port: 80, targetPort: web}]}`,
	`{type: ExternalName, externalName: a.b., ports: [{port: 80, nodePort: 30080}], internalTrafficPolicy: Local}`,
	`{clusterIP: None}`,
	`{clusterIP: None, selector: {a: b}, ipFamilyPolicy: PreferDualStack}`,
	`{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, "fd00:96::9"], ipFamilyPolicy: RequireDualStack, ports: [{port: 80}]}`,
	`{clusterIP: "fd00:96::9", ipFamilies: [IPv6, IPv4], ipFamilyPolicy: PreferDualStack, ports: [{port: 80}]}`,
	`{clusterIPs: [None, ""], ipFamilies: [IPv5, ""], ipFamilyPolicy: ""}`,
	`{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}, externalIPs: [127.0.0.1, x], ports: [{port: 0}]}`,
	`{type: Bogus, trafficDistribution: "", externalTrafficPolicy: Local, healthCheckNodePort: -1, ports: [{port: 65536, nodePort: -1, appProtocol: ""}]}`,
}

func seedJSON(spec string) []byte {
	return must(json.Marshal(map[string]any{
		"metadata": map[string]any{"name": "s"}, "spec": json.RawMessage(must(yaml.YAMLToJSON([]byte(spec)))),
	}))
}

// FuzzValidate creates whatever a stranger sends. It must be rejected with causes, or stored and sound.
func FuzzValidate(f *testing.F) {
	for _, spec := range seeds {
		f.Add(seedJSON(spec), true)
	}
	f.Fuzz(func(t *testing.T, body []byte, dual bool) {
		c := newCluster(v4)
		if dual {
			c = newCluster(v4, v6)
		}
		svc, err := decode(body)
		if err != nil {
			return
		}
		again := svc.DeepCopy()
		Default(again)
		if diff := cmp.Diff(svc, again); diff != "" {
			t.Errorf("defaults add to themselves:\n%s", diff)
		}
		svc.Namespace = "ns"
		if stored, errs := c.create(svc); len(errs) == 0 {
			sound(t, c, stored)
		}
	})
}

// FuzzUpdate stores one Service and lets another take its place, as a whole and as a merge patch.
func FuzzUpdate(f *testing.F) {
	for _, from := range seeds {
		for _, to := range seeds {
			f.Add(seedJSON(from), seedJSON(to))
		}
	}
	f.Fuzz(func(t *testing.T, before, after []byte) {
		c := newCluster()
		old, err := decode(before)
		if err != nil {
			return
		}
		old.Namespace = "ns"
		if stored, errs := c.create(old); stored == nil || len(errs) > 0 {
			return
		}
		name := old.Name
		for _, read := range []func() (*corev1.Service, error){
			func() (*corev1.Service, error) { return decode(after) },
			func() (*corev1.Service, error) { return c.patch(name, "MP", after) },
		} {
			svc, err := read()
			if err != nil {
				continue
			}
			svc.Name, svc.Namespace = name, "ns"
			kept := c.stored[name].DeepCopy()
			if stored, errs := c.update(svc); len(errs) == 0 {
				sound(t, c, stored)
			} else if diff := cmp.Diff(kept, c.stored[name]); diff != "" {
				t.Errorf("a refused update left its mark:\n%s", diff)
			}
			Warnings(t.Context(), svc, kept)
			for _, column := range columns() {
				column.Cell(c.stored[name])
			}
		}
	})
}

// sound is what holds of any Service that was let in.
func sound(t *testing.T, c *cluster, svc *corev1.Service) {
	t.Helper()
	spec, held := &svc.Spec, Claims(svc)
	switch {
	case !addressed(spec):
		if len(held.Addresses)+len(held.Ports()) > 0 || spec.ClusterIP != "" || len(spec.ClusterIPs) > 0 {
			t.Errorf("an external name holds %+v: %+v", held, spec)
		}
	case headless(spec):
		if len(held.Addresses) > 0 || len(spec.IPFamilies) == 0 {
			t.Errorf("a headless Service holds %+v: %+v", held, spec)
		}
	default:
		if len(held.Addresses) != len(spec.IPFamilies) || len(spec.ClusterIPs) != len(spec.IPFamilies) || spec.ClusterIP != spec.ClusterIPs[0] {
			t.Errorf("addresses and families don't agree: %+v", spec)
		}
		for i, addr := range held.Addresses {
			if familyOf(addr.String()) != spec.IPFamilies[i] || !c.ranges[spec.IPFamilies[i]].Contains(addr) {
				t.Errorf("%s is no address for family %d: %+v", addr, i, spec)
			}
		}
	}
	for _, port := range held.Ports() {
		if port < c.first || port > c.last {
			t.Errorf("port %d is out of range: %+v", port, spec)
		}
	}
	if slices.Contains(held.NodePorts, held.HealthPort) || healthChecked(spec) != (held.HealthPort != 0) {
		t.Errorf("a health-check port of %d: %+v", held.HealthPort, spec)
	}
	for i := range spec.Ports {
		if spec.Ports[i].NodePort == 0 && wantsNodePorts(spec) {
			t.Errorf("port %d has no node port: %+v", i, spec)
		}
	}
	rests(t, c, svc)
}

// rests says that a Service sent back as it was read changes nothing, and asks for nothing.
func rests(t *testing.T, c *cluster, svc *corev1.Service) {
	t.Helper()
	after, before, choice := svc.DeepCopy(), svc.DeepCopy(), c.choice()
	Default(after)
	errs := Allocate(after, before, choice)
	PrepareUpdate(t.Context(), after, before)
	errs = append(errs, ValidateUpdate(t.Context(), after, before)...)
	if len(errs) > 0 || len(choice.asked) > 0 {
		t.Errorf("an update without a change asks for %q and meets %v", choice.asked, errs)
	}
	if diff := cmp.Diff(svc, after); diff != "" {
		t.Errorf("an update without a change made one:\n%s", diff)
	}
}
