package service

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// TestValidate: what is wrong with a new Service. An empty list of causes means that it is fine.
func TestValidate(t *testing.T) {
	long := strings.Repeat("x", 64)
	for _, group := range []struct {
		about string
		cases map[string]string // spec → causes
	}{
		{"types", map[string]string{
			`{type: ClusterIP, ports: [{port: 80}]}`:                     "",
			`{type: Bogus, ports: [{port: 80}]}`:                         "spec.type NotSupported",
			`{type: clusterip, ports: [{port: 80}]}`:                     "spec.type NotSupported",
			`{type: NodePort, clusterIP: None, ports: [{port: 80}]}`:     "spec.clusterIPs[0] Invalid",
			`{type: LoadBalancer, clusterIP: None, ports: [{port: 80}]}`: "spec.clusterIPs[0] Invalid",
		}},
		{"external names", map[string]string{
			`{type: ExternalName, externalName: a.example.com}`:                                        "",
			`{type: ExternalName, externalName: a.example.com.}`:                                       "",
			`{type: ExternalName, externalName: 1.2.3.4}`:                                              "",
			`{type: ExternalName}`:                                                                     "spec.externalName Required",
			`{type: ExternalName, externalName: .}`:                                                    "spec.externalName Required",
			`{type: ExternalName, externalName: A.b}`:                                                  "spec.externalName Invalid",
			`{type: ExternalName, externalName: a..b}`:                                                 "spec.externalName Invalid",
			`{type: ExternalName, externalName: a.b, clusterIP: None}`:                                 "spec.clusterIPs Forbidden",
			`{type: ExternalName, externalName: a.b, ipFamilies: [IPv4], ipFamilyPolicy: SingleStack}`: "spec.ipFamilies Forbidden; spec.ipFamilyPolicy Forbidden",
			`{externalName: not.looked/at, ports: [{port: 80}]}`:                                       "",
		}},
		{"ports", map[string]string{
			`{}`:                       "spec.ports Required",
			`{clusterIP: None}`:        "",
			`{ports: [{port: 0}]}`:     "spec.ports[0].port Invalid; spec.ports[0].targetPort Invalid",
			`{ports: [{port: 65535}]}`: "",
			`{ports: [{port: 65536, targetPort: 1}]}`:                            "spec.ports[0].port Invalid",
			`{ports: [{port: 80, protocol: SCTP}]}`:                              "",
			`{ports: [{port: 80, protocol: tcp}]}`:                               "spec.ports[0].protocol NotSupported",
			`{ports: [{port: 80, targetPort: -1}]}`:                              "spec.ports[0].targetPort Invalid",
			`{ports: [{port: 80, targetPort: web-1}]}`:                           "",
			`{ports: [{port: 80, targetPort: "80"}]}`:                            "spec.ports[0].targetPort Invalid",
			`{ports: [{port: 80, targetPort: HTTP}]}`:                            "spec.ports[0].targetPort Invalid; spec.ports[0].targetPort Invalid",
			`{ports: [{port: 80, name: a_b}]}`:                                   "spec.ports[0].name Invalid",
			`{ports: [{port: 80, name: ` + long + `}]}`:                          "spec.ports[0].name Invalid",
			`{ports: [{port: 80}, {port: 81}]}`:                                  "spec.ports[0].name Required; spec.ports[1].name Required",
			`{ports: [{port: 80, name: a}, {port: 81, name: a}]}`:                "spec.ports[1].name Duplicate",
			`{ports: [{port: 80, name: a}, {port: 80, name: b}]}`:                "spec.ports[1] Duplicate",
			`{ports: [{port: 80, name: a}, {port: 80, name: b, protocol: UDP}]}`: "",
			`{ports: [{port: 80, appProtocol: kubernetes.io/h2c}]}`:              "",
			`{ports: [{port: 80, appProtocol: a/b/c}]}`:                          "spec.ports[0].appProtocol Invalid",
			`{ports: [{port: 80, appProtocol: ""}]}`:                             "spec.ports[0].appProtocol Invalid; spec.ports[0].appProtocol Invalid",
			`{ports: [{port: 80, nodePort: 30080}]}`:                             "spec.ports[0].nodePort Forbidden",
			`{type: ExternalName, externalName: a.b, ports: [{port: 80, nodePort: 30080, name: a}, {port: 81, nodePort: 30080, name: b}]}`: "spec.ports[1].nodePort Duplicate",
		}},
		{"cluster IPs", map[string]string{
			`{clusterIP: 10.96.0.9, ports: [{port: 80}]}`:                                                                "",
			`{clusterIP: bogus, ports: [{port: 80}]}`:                                                                    "spec.clusterIPs[0] Invalid",
			`{clusterIP: none, ports: [{port: 80}]}`:                                                                     "spec.clusterIPs[0] Invalid",
			`{clusterIP: 010.96.0.9, ports: [{port: 80}]}`:                                                               "spec.clusterIPs[0] Invalid",
			`{clusterIP: "::ffff:10.96.0.9", ports: [{port: 80}]}`:                                                       "spec.clusterIPs[0] Invalid",
			`{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.8]}`:                                                            "spec.clusterIPs Invalid",
			`{clusterIP: None, clusterIPs: [None, 10.96.0.8]}`:                                                           "spec.clusterIPs Invalid",
			`{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, None]}`:                                                      "spec.clusterIPs[1] Invalid",
			`{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, 10.96.0.8], ipFamilyPolicy: RequireDualStack}`:               "spec.clusterIPs Invalid",
			`{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, "fd00:96::9", 10.96.0.8], ipFamilyPolicy: RequireDualStack}`: "spec.clusterIPs Invalid",
			`{clusterIP: 10.96.0.9, ipFamilies: [IPv6]}`:                                                                 "spec.clusterIPs[0] Invalid",
			`{clusterIP: 10.96.0.9, ipFamilies: [IPv4, IPv6], ipFamilyPolicy: PreferDualStack, ports: [{port: 80}]}`:     "",
		}},
		{"families", map[string]string{
			`{ipFamilies: [IPv5]}`:                                    "spec.ipFamilies[0] NotSupported",
			`{ipFamilies: [IPv4, IPv4]}`:                              "spec.ipFamilies[1] Duplicate",
			`{ipFamilies: [IPv5, IPv5]}`:                              "spec.ipFamilies[0] NotSupported; spec.ipFamilies[1] Duplicate; spec.ipFamilies[1] NotSupported",
			`{ipFamilyPolicy: ""}`:                                    "spec.ipFamilyPolicy NotSupported",
			`{ipFamilyPolicy: Bogus, ipFamilies: [IPv4, IPv6]}`:       "spec.ipFamilyPolicy NotSupported",
			`{ipFamilyPolicy: SingleStack, ipFamilies: [IPv6, IPv4]}`: "spec.ipFamilyPolicy Invalid",
		}},
		{"selectors", map[string]string{
			`{selector: {app: web, "example.com/tier": ""}, ports: [{port: 80}]}`: "",
			`{selector: {"a b": c}, ports: [{port: 80}]}`:                         "spec.selector Invalid",
			`{selector: {a: "b c"}, ports: [{port: 80}]}`:                         "spec.selector Invalid",
		}},
		{"affinity", map[string]string{
			`{sessionAffinity: Bogus, ports: [{port: 80}]}`:                                                                "spec.sessionAffinity NotSupported",
			`{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}, ports: [{port: 80}]}`:     "spec.sessionAffinityConfig.clientIP.timeoutSeconds Invalid",
			`{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}}, ports: [{port: 80}]}`: "",
			`{sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}, ports: [{port: 80}]}`: "spec.sessionAffinityConfig.clientIP.timeoutSeconds Invalid",
		}},
		{"external IPs", map[string]string{
			`{externalIPs: [1.2.3.4, "2001:DB8::1"], ports: [{port: 80}]}`:                   "",
			`{externalIPs: [127.0.0.1, 0.0.0.0, "fe80::1", 224.0.0.1], ports: [{port: 80}]}`: "spec.externalIPs[0] Invalid; spec.externalIPs[1] Invalid; spec.externalIPs[2] Invalid; spec.externalIPs[3] Invalid",
			`{externalIPs: [001.2.3.4, "::ffff:1.2.3.4", x], ports: [{port: 80}]}`:           "spec.externalIPs[0] Invalid; spec.externalIPs[1] Invalid; spec.externalIPs[2] Invalid",
		}},
		{"traffic", map[string]string{
			`{externalTrafficPolicy: Local, ports: [{port: 80}]}`:                                             "spec.externalTrafficPolicy Invalid",
			`{externalTrafficPolicy: Local, externalIPs: [1.2.3.4], ports: [{port: 80}]}`:                     "",
			`{type: NodePort, externalTrafficPolicy: Bogus, ports: [{port: 80}]}`:                             "spec.externalTrafficPolicy NotSupported",
			`{internalTrafficPolicy: Local, ports: [{port: 80}]}`:                                             "",
			`{internalTrafficPolicy: "", ports: [{port: 80}]}`:                                                "spec.internalTrafficPolicy NotSupported",
			`{type: ExternalName, externalName: a.b, internalTrafficPolicy: Local}`:                           "",
			`{type: ExternalName, externalName: a.b, internalTrafficPolicy: Bogus}`:                           "spec.internalTrafficPolicy NotSupported",
			`{trafficDistribution: PreferClose, ports: [{port: 80}]}`:                                         "",
			`{trafficDistribution: PreferSameZone, ports: [{port: 80}]}`:                                      "",
			`{trafficDistribution: PreferSameNode, ports: [{port: 80}]}`:                                      "",
			`{trafficDistribution: "", ports: [{port: 80}]}`:                                                  "spec.trafficDistribution NotSupported",
			`{healthCheckNodePort: 30099, ports: [{port: 80}]}`:                                               "spec.healthCheckNodePort Invalid",
			`{type: NodePort, externalTrafficPolicy: Local, healthCheckNodePort: 30099, ports: [{port: 80}]}`: "spec.healthCheckNodePort Invalid",
		}},
		{"load balancers", map[string]string{
			`{type: LoadBalancer, loadBalancerIP: anything, ports: [{port: 80}]}`:                   "",
			`{type: LoadBalancer, loadBalancerClass: example.com/lb, ports: [{port: 80}]}`:          "",
			`{type: LoadBalancer, loadBalancerClass: "a b", ports: [{port: 80}]}`:                   "spec.loadBalancerClass Invalid",
			`{type: NodePort, loadBalancerClass: "a b", ports: [{port: 80}]}`:                       "spec.loadBalancerClass Forbidden",
			`{type: NodePort, allocateLoadBalancerNodePorts: true, ports: [{port: 80}]}`:            "spec.allocateLoadBalancerNodePorts Forbidden",
			`{type: LoadBalancer, loadBalancerSourceRanges: [" 10.0.0.0/8 "], ports: [{port: 80}]}`: "",
			`{type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.1/8, x], ports: [{port: 80}]}`:  "spec.LoadBalancerSourceRanges[0] Invalid; spec.LoadBalancerSourceRanges[1] Invalid",
			`{loadBalancerSourceRanges: [x], ports: [{port: 80}]}`:                                  "spec.LoadBalancerSourceRanges Forbidden; spec.LoadBalancerSourceRanges[0] Invalid",
			ranged("LoadBalancer", "10.0.0.0/8, 11.0.0.0/8"):                                        "",
			ranged("LoadBalancer", " "):   "",
			ranged("LoadBalancer", "x,x"): rangesPath + " Invalid",
			ranged("LoadBalancer", "x,y"): rangesPath + " Invalid; " + rangesPath + " Invalid",
			ranged("NodePort", ""):        rangesPath + " Forbidden",
		}},
		{"annotations and finalizers", map[string]string{
			topology("Auto", "Auto"):     "",
			topology("Auto", "Disabled"): "metadata.annotations[service.kubernetes.io/topology-mode] Invalid",
			`{metadata: {finalizers: [example.com/x, foregroundDeletion]}, ports: [{port: 80}]}`: "",
			`{metadata: {finalizers: [x]}, ports: [{port: 80}]}`:                                 "metadata.finalizers[0] Invalid",
		}},
	} {
		t.Run(group.about, func(t *testing.T) {
			for given, want := range group.cases {
				t.Run(given, func(t *testing.T) {
					_, errs := newCluster().create(service(t, given))
					wantCauses(t, causes(errs), want)
				})
			}
		})
	}
}

const rangesPath = "metadata.annotations[service.beta.kubernetes.io/load-balancer-source-ranges]"

func ranged(typ, ranges string) string {
	return fmt.Sprintf(`{type: %s, metadata: {annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: %q}}, ports: [{port: 80}]}`, typ, ranges)
}

func topology(mode, hints string) string {
	return fmt.Sprintf(`{metadata: {annotations: {service.kubernetes.io/topology-mode: %s, service.kubernetes.io/topology-aware-hints: %s}}, ports: [{port: 80}]}`, mode, hints)
}

// TestUpdate: a stored Service, a change, and what becomes of it: causes or, where there are none, a new spec.
func TestUpdate(t *testing.T) {
	const (
		dual = `{ipFamilyPolicy: RequireDualStack, clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9, "fd00:96::9"], ports: [{port: 80}]}`
		lb   = `{type: LoadBalancer, loadBalancerClass: a/b, externalTrafficPolicy: Local, healthCheckNodePort: 30099, ports: [{port: 80, nodePort: 30080}]}`
		one  = `{clusterIP: 10.96.0.9, ports: [{port: 80}]}`
	)
	for _, c := range []struct{ name, given, change, causes, want string }{
		{
			"to an external name everything goes", lb, `{type: ExternalName, externalName: a.b}`, "",
			`{clusterIP: null, clusterIPs: null, ipFamilies: null, ipFamilyPolicy: null, loadBalancerClass: null, healthCheckNodePort: null,
			  allocateLoadBalancerNodePorts: null, externalTrafficPolicy: null, ports: [{port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{
			"to a node port some stays", lb, `{type: NodePort}`, "",
			`{loadBalancerClass: null, healthCheckNodePort: null, allocateLoadBalancerNodePorts: null, externalTrafficPolicy: Local,
			  ports: [{nodePort: 30080, port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{"what was changed on the way is refused", lb, `{type: NodePort, healthCheckNodePort: 30098}`, "spec.healthCheckNodePort Invalid", ""},
		{
			"a node port changed on the way to none", lb, `{type: ClusterIP, ports: [{port: 80, nodePort: 30081}]}`,
			"spec.ports[0].nodePort Forbidden", "",
		},
		{"cluster policy ends health checks", lb, `{externalTrafficPolicy: Cluster}`, "", `{healthCheckNodePort: null}`},
		{"the health-check port stays", lb, `{healthCheckNodePort: 30098}`, "spec.healthCheckNodePort Forbidden", ""},
		{"left out, it is kept", lb, `{healthCheckNodePort: null}`, "", `{healthCheckNodePort: 30099}`},
		{"the class stays", lb, `{loadBalancerClass: a/c}`, "spec.loadBalancerClass Invalid", ""},
		{"even if it was none", `{type: LoadBalancer, ports: [{port: 80}]}`, `{loadBalancerClass: a/c}`, "spec.loadBalancerClass Invalid", ""},
		{"a bad class is told once", one, `{loadBalancerClass: "a b"}`, "spec.loadBalancerClass Forbidden", ""},
		{"the address stays", one, `{clusterIP: 10.96.0.8}`, "spec.clusterIPs[0] Invalid", ""},
		{"left out, it is kept", one, `{clusterIP: null, clusterIPs: null}`, "", `{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9]}`},
		{"emptied, it is kept", one, `{clusterIP: ""}`, "", `{clusterIP: 10.96.0.9, clusterIPs: [10.96.0.9]}`},
		{"it can't become None", one, `{clusterIP: None}`, "spec.clusterIPs[0] Invalid", ""},
		{"None can't become an address", `{clusterIP: None}`, `{clusterIP: 10.96.0.9}`, "spec.ports Required; spec.clusterIPs[0] Invalid", ""},
		{"both fields must be changed", one, `{clusterIPs: [10.96.0.9, "fd00:96::9"]}`, "spec.ipFamilyPolicy Invalid", ""},
		{
			"families swapped", dual, `{clusterIP: "fd00:96::9", clusterIPs: ["fd00:96::9", 10.96.0.9], ipFamilies: [IPv6, IPv4]}`,
			"spec.clusterIPs[0] Invalid; spec.clusterIPs[1] Invalid; spec.ipFamilies[0] Invalid", "",
		},
		{"the second goes", dual, `{ipFamilyPolicy: SingleStack}`, "", `{clusterIPs: [10.96.0.9], ipFamilies: [IPv4]}`},
		{
			"the wrong one goes", dual, `{ipFamilyPolicy: SingleStack, clusterIP: "fd00:96::9", clusterIPs: ["fd00:96::9"], ipFamilies: [IPv6]}`,
			"spec.clusterIPs[0] Invalid; spec.ipFamilies[0] Invalid", "",
		},
		{"a headless one may change families", `{clusterIP: None, selector: {a: b}}`, `{ipFamilies: [IPv6]}`, "", `{ipFamilies: [IPv6]}`},
		{"no ports are left", one, `{ports: []}`, "spec.ports Required", ""},
		{"a port found again by its name", lb, `{ports: [{port: 81}]}`, "", `{ports: [{nodePort: 30080, port: 81, protocol: TCP, targetPort: 81}]}`},
		{
			"a node port given to another port", lb, `{ports: [{name: a, port: 81, nodePort: 30080}, {name: "", port: 80}]}`,
			"spec.ports[1].name Required", "",
		},
		{
			"two ports with one node port", lb, `{ports: [{name: a, port: 80, nodePort: 30080}, {name: b, port: 81, nodePort: 30080}]}`,
			"spec.ports[1].nodePort Duplicate", "",
		},
		{
			"no node ports any more", `{type: LoadBalancer, ports: [{port: 80}]}`, `{allocateLoadBalancerNodePorts: false, ports: [{port: 80}]}`, "",
			`{ports: [{port: 80, protocol: TCP, targetPort: 80}]}`,
		},
		{"status is not for users", lb, `{status: {loadBalancer: {ingress: [{ip: 1.2.3.4}]}}}`, "", `{type: LoadBalancer}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl := newCluster()
			cl.created(t, c.given)
			svc, errs := cl.update(cl.merged(t, "s", c.change))
			wantCauses(t, causes(errs), c.causes)
			if svc == nil {
				return
			}
			wantSpec(t, svc, c.want)
			if len(svc.Status.LoadBalancer.Ingress) > 0 {
				t.Error("the update changed status")
			}
		})
	}
}

// What older rules accepted may stay, but not be written anew.
func TestOldValuesStay(t *testing.T) {
	old := service(t, `{type: LoadBalancer, clusterIP: 010.096.000.009, clusterIPs: [010.096.000.009], ipFamilies: [IPv4],
		ipFamilyPolicy: SingleStack, externalIPs: [001.2.3.4], loadBalancerSourceRanges: [010.0.0.0/8], ports: [{port: 80, nodePort: 30080}],
		metadata: {annotations: {service.beta.kubernetes.io/load-balancer-source-ranges: x}}}`)
	if errs := ValidateUpdate(context.Background(), old.DeepCopy(), old); len(errs) > 0 {
		t.Errorf("unchanged: %v", errs)
	}
	wantCauses(t, causes(Validate(context.Background(), old)),
		"spec.clusterIPs[0] Invalid; spec.externalIPs[0] Invalid; spec.LoadBalancerSourceRanges[0] Invalid")
	bare := old.DeepCopy()
	bare.Spec.LoadBalancerSourceRanges = nil // now the annotation counts, and has been there before
	if errs := ValidateUpdate(context.Background(), bare, old); len(errs) > 0 {
		t.Errorf("the annotation: %v", errs)
	}
	more := old.DeepCopy()
	more.Spec.ExternalIPs = append(more.Spec.ExternalIPs, "001.2.3.5")
	wantCauses(t, causes(ValidateUpdate(context.Background(), more, old)), "spec.externalIPs[1] Invalid")
}

func TestStatus(t *testing.T) {
	const path = "status.loadBalancer.ingress"
	for _, c := range []struct{ typ, ingress, want string }{
		{"LoadBalancer", `[{ip: 1.2.3.4}, {ip: "2001:db8::1", ipMode: Proxy}, {hostname: a.example.com}, {}]`, ""},
		{"LoadBalancer", `[{ip: 1.2.3.4, ports: [{port: 80, protocol: TCP, error: whatever}]}]`, ""},
		{"NodePort", `[{ip: 1.2.3.4}]`, path + " Forbidden"},
		{"NodePort", `[]`, ""},
		{"LoadBalancer", `[{ip: 001.2.3.4}, {ip: x}]`, path + "[0].ip Invalid; " + path + "[1].ip Invalid"},
		{"LoadBalancer", `[{ipMode: VIP}]`, path + "[0].ipMode Forbidden"},
		{"LoadBalancer", `[{ip: 1.2.3.4, ipMode: Bogus}]`, path + "[0].ipMode NotSupported"},
		{"LoadBalancer", `[{hostname: A}, {hostname: 1.2.3.4}]`, path + "[0].hostname Invalid; " + path + "[1].hostname Invalid"},
	} {
		t.Run(c.typ+c.ingress, func(t *testing.T) {
			cl := newCluster()
			cl.created(t, fmt.Sprintf(`{type: %s, ports: [{port: 80}]}`, c.typ))
			svc, errs := cl.updateStatus(cl.merged(t, "s", fmt.Sprintf(`{selector: {a: b}, status: {loadBalancer: {ingress: %s}}}`, c.ingress)))
			wantCauses(t, causes(errs), c.want)
			if svc != nil {
				wantSpec(t, svc, `{selector: null}`)
			}
		})
	}
}

// A Service that is a load balancer no more has no addresses of one.
func TestStatusGoesWithType(t *testing.T) {
	c := newCluster()
	c.created(t, `{type: LoadBalancer, ports: [{port: 80}]}`)
	for _, step := range []struct {
		change string
		want   int
	}{
		{`{status: {loadBalancer: {ingress: [{ip: 1.2.3.4}]}}}`, 1},
		{`{selector: {a: b}}`, 1},
		{`{type: NodePort}`, 0},
	} {
		write := c.update
		if strings.Contains(step.change, "status") {
			write = c.updateStatus
		}
		svc, errs := write(c.merged(t, "s", step.change))
		if len(errs) > 0 {
			t.Fatal(errs)
		}
		if got := len(svc.Status.LoadBalancer.Ingress); got != step.want {
			t.Errorf("after %s: %d addresses, want %d", step.change, got, step.want)
		}
	}
}
