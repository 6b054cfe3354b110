package console

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func service(spec corev1.ServiceSpec) *corev1.Service {
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP
	}
	if spec.Ports == nil && spec.Type != corev1.ServiceTypeExternalName {
		spec.Ports = []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolTCP}}
	}
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", ResourceVersion: "1"}, Spec: spec}
}

// endpointSlice has one endpoint for each word: ready, not, going (terminating, serves), gone (terminating, does not); @NODE says where.
func endpointSlice(name string, port string, words ...string) *discoveryv1.EndpointSlice {
	number := int32(8080)
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		Ports:      []discoveryv1.EndpointPort{{Name: &port, Port: &number}},
	}
	for i, word := range words {
		word, node, _ := strings.Cut(word, "@")
		ready, serving, terminating := word == "ready", word == "ready" || word == "going", word == "going" || word == "gone"
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{"10.0.0." + string(rune('1'+i))}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		})
	}
	return s
}

// TestJudge: what is said of a Service, and at which stage.
func TestJudge(t *testing.T) {
	nodes := map[string]*Node{"up": {Name: "up", Ready: true}, "down": {Name: "down"}}
	selector := map[string]string{"app": "web"}
	two := []corev1.ServicePort{{Name: "a", Port: 1}, {Name: "b", Port: 2, TargetPort: intstr.FromString("bee")}}
	for name, c := range map[string]struct {
		spec                   corev1.ServiceSpec
		port                   string
		endpoints              []string
		health, stage, problem string
	}{
		"all ready":               {endpoints: []string{"ready@up", "ready@up"}, health: healthy},
		"an unknown node":         {endpoints: []string{"ready@elsewhere"}, health: healthy},
		"one not ready":           {endpoints: []string{"ready", "not"}, health: warning, stage: atEndpoints, problem: "1 of 2 endpoints are not ready"},
		"the only one not ready":  {endpoints: []string{"not"}, health: broken, stage: atEndpoints, problem: "its only endpoint is not ready"},
		"none ready":              {endpoints: []string{"not", "not"}, health: broken, stage: atEndpoints, problem: "none of its 2 endpoints is ready"},
		"no Pod matches":          {spec: corev1.ServiceSpec{Selector: selector}, health: broken, stage: atEndpoints, problem: "no Pod with an address matches app=web"},
		"no selector":             {health: broken, stage: atEndpoints, problem: "it has no selector"},
		"a rollout":               {endpoints: []string{"ready", "going", "gone"}, health: healthy},
		"terminating, serves":     {endpoints: []string{"going", "gone"}, health: warning, stage: atEndpoints, problem: "terminating; those that still serve"},
		"terminating":             {endpoints: []string{"gone"}, health: broken, stage: atEndpoints, problem: "all its endpoints are terminating"},
		"lost nodes":              {endpoints: []string{"ready@down", "ready@down"}, health: broken, stage: atNodes, problem: "not ready: down"},
		"a lost node":             {endpoints: []string{"ready@up", "ready@down"}, health: warning, stage: atNodes, problem: "1 of 2 ready endpoints are on nodes that are not ready: down"},
		"a port without targets":  {spec: corev1.ServiceSpec{Ports: two}, port: "a", endpoints: []string{"ready"}, health: warning, stage: atEndpoints, problem: "port b (2) has no endpoints: none has its target bee"},
		"its only port":           {spec: corev1.ServiceSpec{Ports: two[1:]}, port: "a", endpoints: []string{"ready"}, health: broken, stage: atEndpoints, problem: "port b (2)"},
		"no address from outside": {spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}, endpoints: []string{"ready"}, health: warning, stage: atAddress, problem: "waits for a load balancer"},
		"broken before waiting":   {spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer}, endpoints: []string{"not"}, health: broken, stage: atEndpoints, problem: "not ready"},
		"ExternalName":            {spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "example.com"}, health: healthy},
		"ExternalName, an IP":     {spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "192.0.2.1"}, health: broken, stage: atName, problem: "is an IP address"},
	} {
		t.Run(name, func(t *testing.T) {
			svc := service(c.spec)
			parts := map[string]*slice{}
			if c.endpoints != nil {
				parts["one"] = newSlice(endpointSlice("one", c.port, c.endpoints...))
			}
			row := newRow(svc)
			judge(&row, svc, parts, merge(parts), true, nodes)
			if row.Health != c.health || row.Stage != c.stage || !strings.Contains(row.Problem, c.problem) || (c.problem == "") != (row.Problem == "") {
				t.Errorf("got %s at %q: %s", row.Health, row.Stage, row.Problem)
			}
		})
	}
}

// TestJudgeIngressEntry: the Service that has the address of Ingresses has no endpoints, and needs none.
func TestJudgeIngressEntry(t *testing.T) {
	svc := service(corev1.ServiceSpec{})
	svc.Namespace, svc.Name = "kube-system", "portal-ingress"
	row := newRow(svc)
	if judge(&row, svc, nil, nil, true, nil); row.Health != healthy {
		t.Errorf("%s: %s", row.Health, row.Problem)
	}
}

// TestMerge: an address in two slices, one for each port, is one endpoint with both ports.
func TestMerge(t *testing.T) {
	other := endpointSlice("two", "b", "ready")
	port := int32(9090)
	other.Ports[0].Port = &port
	got := merge(map[string]*slice{"one": newSlice(endpointSlice("one", "a", "ready", "not")), "two": newSlice(other)})
	if len(got) != 2 || len(got[0].Ports) != 2 || len(got[1].Ports) != 1 {
		t.Errorf("got %+v", got)
	}
}
