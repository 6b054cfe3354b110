package service

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestColumns reads like the output of kubectl get services -o wide.
func TestColumns(t *testing.T) {
	for given, want := range map[string][]any{
		`{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, "fd00:96::9"], selector: {b: c, a: b}, ports: [{port: 80}, {port: 53, protocol: UDP}]}`: {
			"ClusterIP", "10.96.0.9", "<none>", "80/TCP,53/UDP", "<unknown>", "a=b,b=c",
		},
		`{clusterIP: None, clusterIPs: [None]}`: {"ClusterIP", "None", "<none>", "<none>", "<unknown>", "<none>"},
		`{type: NodePort, externalIPs: [1.2.3.4, 1.2.3.5], ports: [{port: 80, nodePort: 30080}]}`: {
			"NodePort", "<none>", "1.2.3.4,1.2.3.5", "80:30080/TCP", "<unknown>", "<none>",
		},
		`{type: LoadBalancer, clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9], ports: [{port: 80}]}`: {
			"LoadBalancer", "10.96.0.9", "<pending>", "80/TCP", "<unknown>", "<none>",
		},
		`{type: LoadBalancer, externalIPs: [9.9.9.9], status: {loadBalancer: {ingress: [{hostname: b.example.com}, {ip: 1.2.3.4}, {ip: 1.2.3.4}]}}}`: {
			"LoadBalancer", "<none>", "1.2.3.4,b.example.com,9.9.9.9", "<none>", "<unknown>", "<none>",
		},
		`{type: ExternalName, externalName: a.b, externalIPs: [9.9.9.9]}`: {"ExternalName", "<none>", "a.b", "<none>", "<unknown>", "<none>"},
	} {
		svc := service(t, given)
		var got []any
		for _, column := range columns() {
			got = append(got, column.Cell(svc))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s\n got %v\nwant %v", given, got, want)
		}
	}
}

func TestWarnings(t *testing.T) {
	for given, want := range map[string][]string{
		`{ports: [{port: 80}], loadBalancerIP: anything}`: nil,
		`{clusterIP: None, externalIPs: [1.2.3.4], loadBalancerIP: 1.2.3.4, sessionAffinity: ClientIP}`: {
			"spec.loadBalancerIP has no effect on a headless Service",
			"spec.externalIPs has no effect on a headless Service",
			"spec.sessionAffinity has no effect on a headless Service",
		},
		`{externalIPs: ["2001:DB8::1"], ports: [{port: 80}]}`: {
			"spec.externalIPs is deprecated, and some clusters don't serve it any more",
			`spec.externalIPs[0]: IPv6 address "2001:DB8::1" should be in RFC 5952 canonical format ("2001:db8::1")`,
		},
		`{type: ExternalName, externalName: a.b, externalIPs: [1.2.3.4]}`: {"spec.externalIPs has no effect on a Service of type ExternalName"},
		`{externalName: a.b, trafficDistribution: PreferClose}`: {
			"spec.externalName has an effect on a Service of type ExternalName only",
			"spec.trafficDistribution PreferClose is deprecated: use PreferSameZone",
		},
		`{metadata: {annotations: {service.kubernetes.io/topology-aware-hints: Auto}}}`: {
			"the annotation service.kubernetes.io/topology-aware-hints is deprecated: use service.kubernetes.io/topology-mode",
		},
		`{clusterIP: "FD00:96::9", clusterIPs: ["FD00:96::9"], loadBalancerIP: 001.2.3.4, loadBalancerSourceRanges: [" 2001:DB8::/32 "]}`: {
			`spec.clusterIPs[0]: IPv6 address "FD00:96::9" should be in RFC 5952 canonical format ("fd00:96::9")`,
			`spec.loadBalancerIP: non-standard IP address "001.2.3.4" is invalid: use "1.2.3.4"`,
			`spec.loadBalancerSourceRanges[0]: IPv6 CIDR value "2001:DB8::/32" should be in RFC 5952 canonical format ("2001:db8::/32")`,
		},
	} {
		if got := Warnings(context.Background(), service(t, given), nil); !slices.Equal(got, want) {
			t.Errorf("%s\n got %q\nwant %q", given, got, want)
		}
	}
}

func TestSelectable(t *testing.T) {
	svc := &corev1.Service{Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.9", Type: corev1.ServiceTypeNodePort}}
	if got := selectable(svc).String(); got != "spec.clusterIP=10.96.0.9,spec.type=NodePort" {
		t.Errorf("selectable fields are %s", got)
	}
}
