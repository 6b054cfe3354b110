package test

import (
	"encoding/json"
	"flag"
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// TestClaimsFollowServices does anything to a few Services, right and wrong, and looks after each request: the claims
// are what the stored Services say, and nothing that a user can send is the server's fault.
func TestClaimsFollowServices(t *testing.T) {
	// Each check has some thirty requests. What failed is in the output; a file of it would only lie about.
	for name, value := range map[string]string{"rapid.checks": "25", "rapid.nofailfile": "true"} {
		if f := flag.Lookup(name); f.Value.String() == f.DefValue {
			if err := f.Value.Set(value); err != nil {
				t.Fatal(err)
			}
		}
	}
	etcd := startEtcd(t, 1)[0]
	// Ten ports run out soon.
	api := startPortal(t, "--controllers", "none", "--service-node-port-range", "30000-30009", "--etcd-servers", etcd.ClientURL)
	who, client, keys := admin(t, api), connect(t, api.Kubeconfig), dialEtcd(t, etcd.ClientURL)
	answers := map[int]int{}
	rapid.Check(t, func(rt *rapid.T) {
		if code, answer := who.ask(t, "DELETE", services+"?labelSelector=component!=apiserver", ""); code != 200 {
			rt.Fatal(code, answer)
		}
		send := func(rt *rapid.T, method, path, kind, body string) {
			if rapid.IntRange(0, 5).Draw(rt, "dry run of six") == 0 {
				path += map[bool]string{true: "&", false: "?"}[kind == applyKind] + "dryRun=All"
			}
			code, answer, err := who.try(method, path, kind, body)
			rt.Logf("%s %s %s: %d", method, path, body, code)
			if err != nil || code >= 500 {
				rt.Fatalf("%s %s %s: %d %v %s", method, path, body, code, err, answer)
			}
			answers[code]++
		}
		name := func(rt *rapid.T) string { return rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "name") }
		rt.Repeat(map[string]func(*rapid.T){
			"create": func(rt *rapid.T) {
				send(rt, "POST", services, "application/json", object(name(rt), drawSpec(rt)))
			},
			"replace": func(rt *rapid.T) {
				n := name(rt)
				send(rt, "PUT", services+"/"+n, "application/json", object(n, drawSpec(rt)))
			},
			"apply": func(rt *rapid.T) {
				n := name(rt)
				manager := rapid.SampledFrom([]string{"x", "y"}).Draw(rt, "manager")
				send(rt, "PATCH", services+"/"+n+"?force=true&fieldManager="+manager, applyKind, object(n, drawSpec(rt)))
			},
			"patch": func(rt *rapid.T) {
				kind := rapid.SampledFrom([]string{"application/merge-patch+json", "application/strategic-merge-patch+json"}).Draw(rt, "kind")
				send(rt, "PATCH", services+"/"+name(rt), kind, encode(map[string]any{"spec": drawSpec(rt)}))
			},
			"JSON patch": func(rt *rapid.T) {
				field := rapid.SampledFrom([]string{"type", "clusterIP", "clusterIPs", "ports", "ipFamilyPolicy", "ipFamilies", "healthCheckNodePort"}).Draw(rt, "field")
				step := map[string]any{"op": "remove", "path": "/spec/" + field}
				if value, ok := drawSpec(rt)[field]; ok {
					step["op"], step["value"] = "add", value
				}
				send(rt, "PATCH", services+"/"+name(rt), "application/json-patch+json", encode([]any{step}))
			},
			"status": func(rt *rapid.T) {
				status := map[string]any{"loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": "192.0.2.7"}}}}
				send(rt, "PATCH", services+"/"+name(rt)+"/status", "application/merge-patch+json", encode(map[string]any{"spec": drawSpec(rt), "status": status}))
			},
			"finalizer": func(rt *rapid.T) {
				body := rapid.SampledFrom([]string{`{"metadata":{"finalizers":["test.portal/hold"]}}`, `{"metadata":{"finalizers":null}}`}).Draw(rt, "finalizers")
				send(rt, "PATCH", services+"/"+name(rt), "application/merge-patch+json", body)
			},
			"delete": func(rt *rapid.T) { send(rt, "DELETE", services+"/"+name(rt), "application/json", "") },
			"":       func(rt *rapid.T) { compareClaims(rt, "node port", checkAddresses(rt, client), portsInEtcd(rt, keys)) },
		})
		for _, n := range []string{"a", "b", "c"} {
			who.try("PATCH", services+"/"+n, "application/merge-patch+json", `{"metadata":{"finalizers":null}}`)
		}
	})
	t.Logf("answers: %v", answers)
	if answers[201] == 0 || answers[200] == 0 || answers[422] == 0 {
		t.Error("not every kind of answer was seen: the requests are not what they should be")
	}
}

const applyKind = "application/apply-patch+yaml"

func object(name string, spec map[string]any) string {
	return encode(map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": name}, "spec": spec})
}

func encode(value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// drawSpec draws a spec, mostly of values that fit together and are fought for, sometimes of ones that don't.
func drawSpec(rt *rapid.T) map[string]any {
	spec := map[string]any{}
	sometimes := func(key string, of int, values ...any) {
		if rapid.IntRange(1, of).Draw(rt, key+"?") == 1 {
			spec[key] = rapid.SampledFrom(values).Draw(rt, key)
		}
	}
	sometimes("type", 1, "ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "LoadBalancer", "NodePort", nil)
	switch kind := spec["type"]; kind {
	case "ExternalName":
		spec["externalName"] = "example.com"
		sometimes("externalName", 10, "", nil, "wrong_name")
	case "LoadBalancer", "NodePort":
		sometimes("externalTrafficPolicy", 2, "Local", "Cluster")
		sometimes("allocateLoadBalancerNodePorts", 8, true, false)
		if kind == "LoadBalancer" && spec["externalTrafficPolicy"] == "Local" {
			sometimes("healthCheckNodePort", 3, 30000, 30001, 30002, 29999)
		}
	}
	sometimes("clusterIP", 4, "None", "", "10.96.0.20", "10.96.0.21", "fd00:96::20", nil)
	sometimes("clusterIP", 20, "10.1.1.1", "wrong")
	sometimes("clusterIPs", 10, []string{"10.96.0.20"}, []string{"10.96.0.21", "fd00:96::20"}, []string{"fd00:96::21", "10.96.0.22"}, []string{"None"}, nil)
	sometimes("ipFamilyPolicy", 3, "SingleStack", "PreferDualStack", "RequireDualStack", "PreferDualStack", nil)
	sometimes("ipFamilies", 5, []string{"IPv4"}, []string{"IPv6"}, []string{"IPv4", "IPv6"}, []string{"IPv6", "IPv4"}, nil)
	sometimes("internalTrafficPolicy", 10, "Local", "Cluster", nil)
	sometimes("sessionAffinity", 8, "None", "ClientIP")
	sometimes("loadBalancerClass", 15, "example.com/lb", nil)
	sometimes("externalIPs", 10, []string{"80.11.12.10"}, nil)
	sometimes("healthCheckNodePort", 20, 0, 30000)
	if rapid.IntRange(0, 3).Draw(rt, "selector?") > 0 {
		spec["selector"] = map[string]any{"app": "a"}
	}
	ports := []any{}
	for i := range rapid.SampledFrom([]int{1, 1, 2, 3, 0}).Draw(rt, "ports") {
		port := map[string]any{
			"name": fmt.Sprintf("p%d", i), "port": rapid.SampledFrom([]int{80 + i, 80 + i, 80 + i, 53}).Draw(rt, "port"),
			"protocol": rapid.SampledFrom([]string{"TCP", "TCP", "UDP", "SCTP"}).Draw(rt, "protocol"),
		}
		if rapid.IntRange(0, 3).Draw(rt, "nodePort?") == 0 && spec["type"] != "ClusterIP" && spec["type"] != nil {
			port["nodePort"] = rapid.SampledFrom([]int{0, 30000, 30001, 30002, 30003, 30004, 30005, 29999}).Draw(rt, "nodePort")
		}
		ports = append(ports, port)
	}
	if len(ports) > 0 {
		spec["ports"] = ports
	}
	return spec
}
