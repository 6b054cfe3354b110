//go:build faults

package faults

import (
	"fmt"
	"strings"
)

// alias is the Service web as another name, and target is what it is a name of.
func alias(name, more string) string {
	return service("type: ExternalName,", "externalName: "+name+more)
}

func target(spec string) string {
	return strings.Replace(service("selector: {app: real},", spec), "name: web,", "name: real,", 1)
}

const headless = "clusterIP: None, ports: [{name: http, port: 9376}]"

// stateful is a StatefulSet with one Pod.
func stateful(serviceName, container string) string {
	return strings.NewReplacer("kind: Deployment", "kind: StatefulSet", "  replicas: 1\n", "  replicas: 1\n  serviceName: "+serviceName+"\n").Replace(backend("web", "app: web", container))
}

var ofNames = []fault{
	{name: "a dot at the end", objects: backend("web", "app: web", serving) + service(ofWeb, ports), ask: []string{"name", "web.NS."}, at: "none", code: "name-unknown", says: "dot"},
	{name: "svc with a typo", objects: backend("web", "app: web", serving) + service(ofWeb, ports), ask: []string{"name", "web.NS.scv.cluster.local"}, at: "none", code: "name-unknown", says: ".svc.cluster.local"},
	{name: "a namespace with a typo", objects: backend("web", "app: web", serving) + service(ofWeb, ports), ask: []string{"name", "web.NSx.svc.cluster.local"}, at: "none", code: "name-unknown", says: "there is Service NS/web"},
	{name: "namespace and Service in the wrong order", objects: backend("web", "app: web", serving) + service(ofWeb, ports), ask: []string{"name", "NS.web.svc.cluster.local"}, at: "none", code: "name-unknown", says: "there is Service NS/web"},
	{name: "a URL", objects: backend("web", "app: web", serving) + service("selector: {app: wbe},", ports), ask: []string{"name", "http://web.NS:80/path"}, at: "", code: "selector-typo", says: "app=wbe"},
	{name: "a port's name in an SRV record", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{name: http, port: 80, targetPort: 9376}]"), ask: []string{"name", "_https._tcp.web.NS.svc.cluster.local"}, at: "none", code: "name-unknown", says: "_http._tcp"},
	{name: "a Pod's name below a Service with an address", objects: fmt.Sprintf(pod, "web", "") + service(ofWeb, ports), then: []string{"kubectl wait -n NS --for=condition=Ready pod p --timeout=60s"}, ask: []string{"name", "p.web"}, at: "none", code: "name-unknown", says: "no spec.hostname"},
	{name: "a StatefulSet with another Service's name", objects: stateful("wbe", serving) + service(ofWeb, headless), ask: []string{"name", "web-0.web"}, at: "none", code: "name-unknown", says: "wbe"},
	{name: "a StatefulSet's Pod that is not ready", objects: stateful("web", serving+"\n        readinessProbe: {httpGet: {port: 9376, path: /none}, periodSeconds: 1}") + service(ofWeb, headless), ask: []string{"name", "web-0.web"}, at: "none", code: "name-not-ready", says: "web-0"},
	{name: "a Pod by its own name", objects: fmt.Sprintf(pod, "web", "") + service(ofWeb, ports), ask: []string{"name", "p.NS.pod.cluster.local"}, at: "none", code: "name-unknown", says: "address"},
	{name: "a headless Service without ready Pods", objects: backend("web", "app: web", serving+"\n        readinessProbe: {httpGet: {port: 9376, path: /none}, periodSeconds: 1}") + service(ofWeb, headless), ask: []string{"name", "web"}, at: "none", code: "readiness-path", says: "404"},
	{name: "an address from before", objects: backend("web", "app: web", serving) + service(ofWeb, "clusterIP: 10.96.251.7, "+ports), then: []string{"kubectl delete service web -n NS", "kubectl create service clusterip web -n NS --tcp=80:9376"}, ask: []string{"address", "10.96.251.7:80"}, at: "none", code: "address-free", says: "10.96.251.7"},
	{name: "a Pod's address from before", objects: service(ofWeb, ports), ask: []string{"address", "10.244.1.251:9376"}, at: "none", code: "address-no-pod", says: "10.244.1.251"},
	{name: "a Pod's address, wrong port", objects: fmt.Sprintf(pod, "web", "") + service(ofWeb, ports), then: []string{"kubectl wait -n NS --for=condition=Ready pod p --timeout=60s"}, ask: []string{"address", "POD:80"}, at: "none", code: "port-not-listening", says: "9376"},
	{name: "hosts of the Pod's own", objects: service(ofWeb, ports) + fmt.Sprintf(pod, "p", `hostAliases: [{ip: 192.0.2.9, hostnames: [web]}],`), ask: []string{"pod", "p"}, at: "none", code: "pod-hosts", says: "192.0.2.9"},
	{name: "ndots", objects: fmt.Sprintf(pod, "p", `dnsConfig: {options: [{name: ndots, value: "1"}]},`), ask: []string{"pod", "p"}, at: "none", code: "pod-dns-ndots", says: "ndots:1"},
	{name: "no search domains", objects: fmt.Sprintf(pod, "p", `dnsPolicy: None, dnsConfig: {nameservers: [10.96.0.10]},`), ask: []string{"pod", "p"}, at: "none", code: "pod-dns-search", says: "full names"},
	{name: "a further DNS server", objects: fmt.Sprintf(pod, "p", `dnsConfig: {nameservers: [192.0.2.53]},`), ask: []string{"pod", "p"}, at: "none", code: "pod-dns-server", says: "192.0.2.53"},
	{name: "ExternalName without svc", objects: alias("real.NS", "") + target(ports) + backend("real", "app: real", serving), at: "none", code: "externalname-unknown", says: "there is Service NS/real"},
	{name: "ExternalName with a typo", objects: alias("rael.NS.svc.cluster.local", "") + target(ports) + backend("real", "app: real", serving), at: "none", code: "externalname-unknown", says: "there is Service NS/real"},
	{name: "ExternalName in a circle", objects: alias("other.NS.svc.cluster.local", "") + strings.Replace(alias("web.NS.svc.cluster.local", ""), "name: web,", "name: other,", 1), at: "none", code: "externalname-loop", says: "itself"},
	{name: "ExternalName to a Service without Pods", objects: alias("real.NS.svc.cluster.local", "") + target(ports), at: "none", code: "selector-no-pods", says: "NS/real"},
	{name: "ExternalName that nobody knows", objects: alias("www.shop.invalid", ", ports: [{port: 80}]"), at: "none", code: "externalname-unknown", says: "www.shop.invalid"},
	{name: "a server that rejects the Host header", objects: alias("real.NS.svc.cluster.local", ", ports: [{port: 80}]") + target(ports) + server("real", "app: real", web("    self.status(200 if self.headers['Host'].startswith('real.') else 421)"), ""), at: "none", code: "externalname-host", says: "421"},
	{name: "a server with another's certificate", objects: alias("real.NS.svc.cluster.local", ", ports: [{port: 443}]") + target("ports: [{port: 443, targetPort: 9376}]") + backend("real", "app: real", strings.Replace(serving, "[echo,", "[echo, --tls,", 1)), at: "none", code: "externalname-tls", says: "certificate"},
	{name: "ExternalName to a port that is closed", objects: alias("real.NS.svc.cluster.local", ", ports: [{port: 8080}]") + target(ports) + backend("real", "app: real", serving), at: "none", code: "externalname-unreachable", says: "8080"},
}
