//go:build faults

package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// recreate has a change of the Deployment web replace its Pod at once, when the first one serves.
const recreate = `kubectl patch deployment web -n NS --type=merge -p '{"spec":{"strategy":{"type":"Recreate","rollingUpdate":null}}}' && kubectl rollout status -n NS deployment web --timeout=60s`

func onNode2(objects string) string {
	return strings.ReplaceAll(objects, "      containers:", "      nodeSelector: {kubernetes.io/hostname: node2}\n      containers:")
}

const pod = `apiVersion: v1
kind: Pod
metadata: {name: p, namespace: NS, labels: {app: %s}}
spec: {%s terminationGracePeriodSeconds: 1, containers: [{name: c, image: portal, args: [echo, --listen, ":9376"]}]}
---
`

// quota is one of the namespace, and quotaCounts waits until it counts: what is made in the same moment may pass.
func quota(hard string) string {
	return "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: few, namespace: NS}\nspec: {hard: {" + hard + "}}\n---\n"
}

const quotaCounts = "kubectl wait -n NS --for=jsonpath='{.status.hard}' resourcequota few --timeout=60s"

// applied is the command that applies objects.
func applied(objects string) string { return "echo '" + objects + "' | kubectl apply -f -" }

var further = slices.Concat(ofPods, ofPorts, ofNames, ofBalancers, ofAll, strangers, siblings)

var ofAll = []fault{
	{name: "capitals", objects: backend("web", "app: web", serving) + service("selector: {app: Web},", ports), code: "selector-typo", says: "app=Web"},
	{name: "another key for the same value", objects: backend("web", "app.kubernetes.io/name: web", serving) + service(ofWeb, ports), code: "selector-typo", says: "app.kubernetes.io/name=web"},
	{name: "labels that nobody has", objects: backend("x", "app: x", serving) + service("selector: {component: front},", ports), at: "none", code: "selector-no-pods", says: "component=front"},
	{name: "Pods in another namespace", objects: service("selector: {app: NS-there},", ports) + strings.ReplaceAll(backend("web", "app: NS-there", serving), "namespace: NS}", "namespace: default}"), then: []string{"true"}, at: "none", code: "selector-namespace", says: "namespace default"},
	{name: "a quota", objects: quota("pods: 0") + service(ofWeb, ports), then: []string{quotaCounts, applied(backend("web", "app: web", serving))}, code: "workload-empty", says: "has none"},
	{name: "an image that is not there", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{recreate, `kubectl patch deployment web -n NS -p '{"spec":{"template":{"spec":{"containers":[{"name":"c","image":"web.invalid/web:2","imagePullPolicy":"Never"}]}}}}'`}, code: "pods-image", says: "web.invalid/web:2"},
	{name: "a container that crashes", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{recreate, `kubectl patch deployment web -n NS -p '{"spec":{"template":{"spec":{"containers":[{"name":"c","args":["echo","--wrong"]}]}}}}'`}, code: "pods-crashing", says: "again and again"},
	{name: "no node fits", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{recreate, `kubectl patch deployment web -n NS -p '{"spec":{"template":{"spec":{"nodeSelector":{"disk":"ssd"}}}}}'`}, code: "pods-pending", says: "no node"},
	{name: "a ConfigMap that is missing", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{recreate, `kubectl patch deployment web -n NS -p '{"spec":{"template":{"spec":{"containers":[{"name":"c","envFrom":[{"configMapRef":{"name":"none"}}]}]}}}}'`}, code: "pods-config", says: "CreateContainerConfigError"},
	{name: "a readiness gate", objects: onNode2(strings.ReplaceAll(backend("web", "app: web", serving), "      containers:", "      readinessGates: [{conditionType: example.com/ready}]\n      containers:")) + service(ofWeb, ports), at: "none", code: "readiness-gate", says: "example.com/ready"},
	{name: "readiness asks a port by a name that is not there", objects: backend("web", "app: web", serving+"\n        readinessProbe: {tcpSocket: {port: 9999}, periodSeconds: 1}") + service(ofWeb, ports), code: "readiness-port", says: "9999"},
	{name: "publishNotReadyAddresses", objects: backend("web", "app: web", serving+"\n        readinessProbe: {httpGet: {port: 9376, path: /none}, periodSeconds: 1}") + service(ofWeb, "publishNotReadyAddresses: true, "+ports), at: "none", code: "publish-not-ready", says: "publishNotReadyAddresses"},
	{name: "a name on some Pods only", objects: backend("web", "app: web", serving) + backend("other", "app: web", listening9376) + service(ofWeb, "ports: [{port: 80, targetPort: http}]"), answers: true, code: "target-port-name", says: "1 of 2"},
	{name: "two ports, one wrong", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{name: a, port: 80, targetPort: 9377}, {name: b, port: 81, targetPort: 9376}]"), code: "port-not-listening", says: "9377"},
	{name: "a slice by hand", objects: backend("web", "app: web", serving) + service(ofWeb, ports) + strings.ReplaceAll(handMade, "web-1", "extra") + "ports: [{port: 9376}]\nendpoints: [{addresses: [192.0.2.77]}]\n", answers: true, code: "slice-by-hand", says: "192.0.2.77"},
	{name: "an endpoint that is a cluster IP", objects: backend("web", "app: web", serving) + service("", ports) + strings.ReplaceAll(service(ofWeb, ports), "name: web,", "name: real,"), then: []string{`ip=$(kubectl get service real -n NS -o jsonpath='{.spec.clusterIP}'); echo '` + handMade + `ports: [{port: 80}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, answers: true, code: "endpoint-is-cluster-ip", says: "cluster IP of Service NS/real"},
	{name: "an endpoint that refuses", objects: service("", ports) + handMade + "ports: [{port: 9999}]\nendpoints: [{addresses: [192.168.100.11]}]\n", at: "none", code: "endpoint-unreachable", says: "192.168.100.11:9999 refuses"},
	{name: "an endpoint that was a Pod", objects: service("", ports) + handMade + "ports: [{port: 9376}]\nendpoints: [{addresses: [10.244.1.250]}]\n", at: "none", code: "endpoint-no-pod", says: "10.244.1.250"},
	{name: "a slice without ports", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + handMade + `endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "slice-port", says: "no ports"},
	{name: "Endpoints that are not mirrored", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo 'apiVersion: v1
kind: Endpoints
metadata: {name: web, namespace: NS, labels: {endpointslice.kubernetes.io/skip-mirror: "true"}}
subsets: [{addresses: [{ip: '$ip'}], ports: [{port: 9376}]}]' | kubectl apply -f -`}, code: "endpoints-unmirrored", says: "skip-mirror"},
	{name: "internalTrafficPolicy Local", objects: onNode2(backend("web", "app: web", serving)) + service(ofWeb, "internalTrafficPolicy: Local, "+ports), code: "policy-local", says: "node node1"},
	{name: "externalTrafficPolicy Local", objects: onNode2(backend("web", "app: web", serving)) + service(ofWeb, "type: NodePort, externalTrafficPolicy: Local, ports: [{port: 80, targetPort: 9376, nodePort: 31234}]"), ask: []string{"address", "192.168.100.11:31234"}, from: "client", at: "http://192.168.100.11:31234/", code: "policy-local", says: "node node1"},
	{name: "an external IP that is another's", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{`kubectl create service clusterip thief -n NS --tcp=80:9376 && kubectl patch service thief -n NS -p '{"spec":{"externalIPs":["'$(kubectl get service web -n NS -o jsonpath='{.spec.clusterIP}')'"]}}'`}, answers: true, code: "external-ip-theft", says: "takes traffic of Service NS/web"},
	{name: "headless, and used by its port", objects: backend("web", "app: web", serving) + service(ofWeb, "clusterIP: None, "+ports), answers: true, code: "headless-port", says: "headless"},
	{name: "ExternalName without a domain", objects: service("type: ExternalName,", "externalName: db"), at: "none", code: "externalname-unknown", says: `"db"`},
	{name: "ExternalName to a Service that is not there", objects: service("type: ExternalName,", "externalName: db.NS.svc.cluster.local"), at: "none", code: "externalname-unknown", says: "no Service db"},
	{name: "a Pod with the node's resolver", objects: fmt.Sprintf(pod, "p", "dnsPolicy: Default,"), ask: []string{"pod", "p"}, at: "none", code: "pod-dns-policy", says: "Default"},
	{name: "a Pod with another DNS server", objects: fmt.Sprintf(pod, "p", "dnsPolicy: None, dnsConfig: {nameservers: [192.0.2.53]},"), ask: []string{"pod", "p"}, at: "none", code: "pod-dns-server", says: "192.0.2.53"},
	{name: "a Pod of the node's network", objects: fmt.Sprintf(strings.ReplaceAll(pod, "9376", "19376"), "p", "hostNetwork: true,"), ask: []string{"pod", "p"}, at: "none", code: "pod-dns-hostnetwork", says: "ClusterFirst"},
	{name: "a Pod with a wrong label", objects: backend("web", "app: web", serving) + service(ofWeb, ports) + fmt.Sprintf(pod, "wbe", ""), ask: []string{"pod", "p"}, answers: true, code: "pod-unselected", says: "app=wbe"},
	{name: "a wrong zone", objects: service(ofWeb, ports), ask: []string{"name", "web.NS.svc.cluster.locl"}, at: "none", code: "name-unknown", says: "cluster.locl"},
	{name: "an address that nobody has", objects: service(ofWeb, ports), ask: []string{"address", "10.96.200.201:80"}, at: "none", code: "address-free", says: "10.96.200.201"},
	{name: "a node port that nobody has", objects: service(ofWeb, ports), ask: []string{"address", "192.168.100.11:32001"}, at: "none", code: "no-node-port", says: "32001"},
	{name: "a Service that is in another namespace", objects: service(ofWeb, ports), ask: []string{"service", "kube-dns"}, at: "none", code: "not-found", says: "there is Service kube-system/kube-dns"},
}

// more are faults of a whole node, one after the other; and a cluster in which nothing is wrong.
func (c *cluster) more(t *testing.T) {
	for _, line := range []string{"kubectl create namespace many", "kubectl apply -f " + c.many(t), "kubectl wait -n many --for=condition=Available --timeout=90s deployment --all", "kubectl rollout pause -n many deployment b2"} {
		if out, err := c.shell(t.Context(), line); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	healthy := func(ctx context.Context) string {
		a, first, err := c.explain(ctx)
		if err != nil || !a.Healthy {
			return fmt.Sprint(first, err)
		}
		return ""
	}
	if complaint := until(t, patience, healthy); complaint != "" {
		t.Errorf("200 healthy Services: %s", complaint)
	}
	for _, f := range c.ofNodes() {
		t.Run(f.name, func(t *testing.T) { c.tryNode(t, f) })
	}
}

// block drops packets on node2, or lets them pass again.
func (c *cluster) block(hook, what string, on bool) func() error {
	line := "nft delete table inet blocked"
	if on {
		line = fmt.Sprintf("nft 'add table inet blocked; add chain inet blocked drops { type filter hook %[1]s priority 0; }; add rule inet blocked drops %[2]s drop'", hook, what)
	}
	return func() error { return c.on("node2", line) }
}

func (c *cluster) on(node, line string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err := c.Node(node).Exec(ctx, "bash", "-c", line)
	return err
}

// odd is what looks as if something were wrong, and is not: a StatefulSet with its headless Service, a Job that has ended, a Deployment that was
// paused when its Pods were there, a Pod with the node's resolver, a Service for UDP and TCP, an Ingress, a name with a dot.
var odd = strings.ReplaceAll(stateful("peers", serving), "name: web,", "name: peers,") +
	strings.Replace(service("selector: {app: web},", "clusterIP: None, ports: [{port: 9376}]"), "name: web,", "name: peers,", 1) +
	"apiVersion: batch/v1\nkind: Job\nmetadata: {name: once, namespace: NS}\nspec: {template: {metadata: {labels: {app: b0}}, spec: {restartPolicy: Never, containers: [{name: c, image: portal, args: [version]}]}}}\n---\n" +
	fmt.Sprintf(pod, "alone", "dnsPolicy: Default,") +
	strings.Replace(service("selector: {app: b1},", "ports: [{name: t, port: 53, targetPort: 9376}]"), "name: web,", "name: both,", 1) +
	strings.Replace(alias("www.example.com.", ""), "name: web,", "name: dotted,", 1) +
	strings.Replace(ingress(class, toWeb, ""), "name: web, port: {number: 80}", "name: s0, port: {number: 80}", 1)

// many is a file with 200 Services of all sorts, and what is behind them.
func (c *cluster) many(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for i := range 6 {
		text := backend(fmt.Sprintf("b%d", i), fmt.Sprintf("app: b%d", i), serving+"\n        readinessProbe: {httpGet: {port: 9376}, periodSeconds: 2}")
		out.WriteString(strings.ReplaceAll(text, "replicas: 1", "replicas: 2"))
	}
	for i := range 200 {
		selector := fmt.Sprintf("selector: {app: b%d},", i%6)
		spec := []string{
			ports, "ports: [{port: 80, targetPort: http}]", "clusterIP: None, ports: [{port: 9376}]", "type: NodePort, " + ports, "ipFamilyPolicy: PreferDualStack, " + ports,
			"sessionAffinity: ClientIP, " + ports, "ports: [{name: a, port: 80, targetPort: 9376}, {name: b, port: 443, targetPort: http}]",
			"internalTrafficPolicy: Local, " + ports, "type: NodePort, externalTrafficPolicy: Local, " + ports, fmt.Sprintf("externalIPs: [198.51.100.%d], %s", i%200+1, ports),
			"publishNotReadyAddresses: true, " + ports, "trafficDistribution: PreferClose, " + ports, "EXTERNAL", "SLICE",
			"type: LoadBalancer, " + ports, "type: LoadBalancer, externalTrafficPolicy: Local, " + ports, "clusterIP: None", "ENDPOINTS",
		}[i%18]
		switch spec {
		case "EXTERNAL":
			selector, spec = "", "type: ExternalName, externalName: www.example.com"
		case "ENDPOINTS":
			selector, spec = "", ports
			fmt.Fprintf(&out, "apiVersion: v1\nkind: Endpoints\nmetadata: {name: s%d, namespace: NS}\nsubsets: [{addresses: [{ip: 192.0.2.11}], ports: [{port: 9376}]}]\n---\n", i)
		case "SLICE":
			selector, spec = "", ports
			out.WriteString(strings.NewReplacer("web-1", fmt.Sprintf("s%d-1", i), "service-name: web", fmt.Sprintf("service-name: s%d", i)).Replace(handMade) + "ports: [{port: 9376}]\nendpoints: [{addresses: [192.0.2.10]}]\n---\n")
		}
		out.WriteString(strings.ReplaceAll(service(selector, spec), "name: web,", fmt.Sprintf("name: s%d,", i)))
	}
	out.WriteString(odd)
	path := filepath.Join(t.TempDir(), "many.yaml")
	if err := os.WriteFile(path, []byte(in("many", out.String())), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
