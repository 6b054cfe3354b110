package service

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestDefault(t *testing.T) {
	for _, c := range []struct{ name, given, want string }{
		{
			"the least of all", `{ports: [{port: 80}]}`,
			`{type: ClusterIP, sessionAffinity: None, internalTrafficPolicy: Cluster, externalTrafficPolicy: null,
			  ports: [{port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{"a name as target stays", `{ports: [{port: 80, targetPort: web}]}`, `{ports: [{port: 80, protocol: TCP, targetPort: web}]}`},
		{"an empty target is none", `{ports: [{port: 80, targetPort: ""}]}`, `{ports: [{port: 80, protocol: TCP, targetPort: 80}]}`},
		{"affinity lasts three hours", `{sessionAffinity: ClientIP}`, `{sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}}`},
		{
			"affinity with half a configuration", `{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {}}}`,
			`{sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}}`,
		},
		{
			"affinity as the user wants it", `{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}}`,
			`{sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}}`,
		},
		{"no affinity, no configuration", `{sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}}`, `{sessionAffinityConfig: null}`},
		{"a node port faces outside", `{type: NodePort}`, `{externalTrafficPolicy: Cluster, allocateLoadBalancerNodePorts: null}`},
		{"so do external IPs", `{externalIPs: [1.2.3.4]}`, `{externalTrafficPolicy: Cluster}`},
		{"a load balancer uses node ports", `{type: LoadBalancer}`, `{externalTrafficPolicy: Cluster, allocateLoadBalancerNodePorts: true}`},
		{"unless told not to", `{type: LoadBalancer, allocateLoadBalancerNodePorts: false}`, `{allocateLoadBalancerNodePorts: false}`},
		{
			"an external name has no traffic", `{type: ExternalName, externalName: a.b, externalIPs: [1.2.3.4]}`,
			`{internalTrafficPolicy: null, externalTrafficPolicy: null}`,
		},
	} {
		t.Run(c.name, func(t *testing.T) { wantSpec(t, service(t, c.given), c.want) })
	}
}

// An address that a load balancer reports is taken for one that it delivers to unchanged.
func TestDefaultIPMode(t *testing.T) {
	given := `{type: %s, status: {loadBalancer: {ingress: [{ip: 1.2.3.4}, {hostname: a.b}, {ip: 1.2.3.5, ipMode: Proxy}]}}}`
	for typ, want := range map[string]corev1.LoadBalancerIPMode{"LoadBalancer": corev1.LoadBalancerIPModeVIP, "ClusterIP": ""} {
		ingress := service(t, fmt.Sprintf(given, typ)).Status.LoadBalancer.Ingress
		if got := ptr.Deref(ingress[0].IPMode, ""); got != want {
			t.Errorf("%s: mode of an address is %q, want %q", typ, got, want)
		}
		if got := ptr.Deref(ingress[1].IPMode, ""); got != "" {
			t.Errorf("%s: a name has the mode %q", typ, got)
		}
		if got := ptr.Deref(ingress[2].IPMode, ""); got != corev1.LoadBalancerIPModeProxy {
			t.Errorf("%s: the given mode became %q", typ, got)
		}
	}
}
