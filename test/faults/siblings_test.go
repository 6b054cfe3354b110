//go:build faults

package faults

import (
	"fmt"
	"strings"
)

// onlySix is a server for IPv6 alone.
const onlySix = `
import http.server, socket
class S(http.server.ThreadingHTTPServer):
  address_family = socket.AF_INET6
  def server_bind(self):
    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    super().server_bind()
S(('::', 9376), http.server.SimpleHTTPRequestHandler).serve_forever()
`

const (
	aws   = "service.beta.kubernetes.io/aws-load-balancer-"
	dual  = "ipFamilyPolicy: RequireDualStack, "
	atVIP = "udp VIP:80"
	both  = "ports: [{name: http, port: 80, targetPort: 9376}, {name: metrics, port: 81, targetPort: 9377}]"
)

// named gives the Service web of some objects another name.
func named(name, objects string) string {
	return strings.ReplaceAll(objects, "name: web,", "name: "+name+",")
}

// annotated gives the first object annotations.
func annotated(annotations, object string) string {
	return strings.Replace(object, "namespace: NS", "namespace: NS, annotations: {"+annotations+"}", 1)
}

// alone is the Pod p without a workload.
func alone(container string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: NS, labels: {app: web}}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers:\n  - " + container + "\n---\n"
}

// bare is a ReplicaSet that no Deployment has.
func bare(objects string) string {
	return strings.ReplaceAll(objects, "kind: Deployment", "kind: ReplicaSet")
}

// siblings are faults of the kinds of the others, with other protocols, families, objects and fields.
var siblings = []fault{
	{name: "UDP, wrong targetPort", objects: server("web", "app: web", udp, "") + service(ofWeb, "ports: [{port: 80, targetPort: 9377, protocol: UDP}]"), at: atVIP, code: "port-not-listening", says: "port 9376 is open"},
	{name: "UDP, wrong selector", objects: server("web", "app: web", udp, "") + service("selector: {app: wbe},", "ports: [{port: 80, targetPort: 9376, protocol: UDP}]"), at: atVIP, code: "selector-typo", says: "app=wbe"},
	{name: "UDP at loopback", objects: server("web", "app: web", strings.Replace(udp, "0.0.0.0", "127.0.0.1", 1), "") + service(ofWeb, "ports: [{port: 80, targetPort: 9376, protocol: UDP}]"), at: atVIP, code: "listens-on-loopback", says: "loopback"},
	{name: "wrong protocol and wrong targetPort", objects: server("web", "app: web", udp, "") + service(ofWeb, "ports: [{port: 80, targetPort: 9377}]"), at: atVIP, code: "port-not-listening", says: "UDP port 9376 is open"},
	{name: "IPv6, wrong targetPort", objects: backend("web", "app: web", serving) + service(ofWeb, six+"ports: [{port: 80, targetPort: 9377}]"), code: "port-not-listening", says: "9377"},
	{name: "IPv6, wrong selector", objects: backend("web", "app: web", serving) + service("selector: {app: webb},", six+ports), code: "selector-typo", says: "app=webb"},
	{name: "dual stack, and a server for IPv4", objects: server("web", "app: web", web("    self.status(200)"), "") + service(ofWeb, dual+ports), at: "none", code: "listens-other-family", says: "by IPv6"},
	{name: "a server for IPv6 alone", objects: server("web", "app: web", onlySix, "") + service(ofWeb, ports), at: "none", code: "listens-other-family", says: "IPv6 alone"},
	{name: "loopback, a flag of its own", objects: strings.ReplaceAll(backend("web", "app: web", `        command: [/usr/bin/python3, -m, http.server, "9376", --bind, 127.0.0.1]`), "image: portal", "image: host") + service(ofWeb, ports), code: "listens-on-loopback", says: "loopback"},
	{name: "loopback, inside of a program", objects: server("web", "app: web", strings.Replace(web("    self.status(200)"), "0.0.0.0", "127.0.0.1", 1), "") + service(ofWeb, ports), code: "listens-on-loopback", says: "loopback"},
	{name: "no selector, and Pods of another name", objects: backend("shop", "app: shop", serving) + service("", ports), code: "no-endpoints", says: "no selector"},
	{name: "an alias of an alias of the wrong selector", objects: alias("other.NS.svc.cluster.local", ", ports: [{port: 80}]") + named("other", alias("real.NS.svc.cluster.local", "")) + target(ports) + backend("real", "app: rael", serving), at: "none", code: "selector-typo", says: "app=real"},
	{name: "an alias of a wrong targetPort", objects: alias("real.NS.svc.cluster.local", ", ports: [{port: 80}]") + target("ports: [{port: 80, targetPort: 8080}]") + backend("real", "app: real", serving), at: "none", code: "port-not-listening", says: "8080"},
	{name: "HTTPS by name", objects: served, ask: []string{"name", "https://web.NS/path"}, at: "none", answers: true, code: "address-port", says: "no port 443"},
	{name: "headless, by name and the Service's port", objects: backend("web", "app: web", serving) + service(ofWeb, "clusterIP: None, "+ports), ask: []string{"name", "web.NS:80"}, at: "none", answers: true, code: "address-port", says: "9376"},
	{name: "Endpoints with another port's name", objects: backend("web", "app: web", serving) + service("", "ports: [{name: http, port: 80, targetPort: 9376}]"), then: []string{podIP + `echo 'apiVersion: v1
kind: Endpoints
metadata: {name: web, namespace: NS}
subsets: [{addresses: [{ip: '$ip'}], ports: [{name: web, port: 9376}]}]' | kubectl apply -f -`}, code: "slice-port", says: `named "http"`},
	{name: "Endpoints of a Pod that are not ready", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo 'apiVersion: v1
kind: Endpoints
metadata: {name: web, namespace: NS}
subsets: [{notReadyAddresses: [{ip: '$ip'}], ports: [{port: 9376}]}]' | kubectl apply -f -`}, code: "endpoints-not-ready", says: "notReadyAddresses"},
	{name: "a slice with another label's key", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + strings.NewReplacer("web-1", "backends", "kubernetes.io/service-name", "kubernetes.io/servicename").Replace(handMade) + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "slice-label", says: "backends"},
	{name: "a slice that is another Service's", objects: backend("web", "app: web", serving) + service("", ports) + named("other", service("", ports)), then: []string{podIP + `echo '` + strings.Replace(handMade, "service-name: web", "service-name: other", 1) + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "slice-label", says: "service-name=other"},
	{name: "a slice with one of two ports", objects: backend("web", "app: web", serving) + service("", both), then: []string{podIP + `echo '` + handMade + `ports: [{name: http, port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, answers: true, code: "slice-port", says: `named "metrics"`},
	{name: "the second container's readiness", objects: backend("web", "app: web", probed("readiness", "httpGet: {port: 9376}")+"\n      - {name: side, image: portal, args: [echo, --listen, \":9400\"], readinessProbe: {httpGet: {port: 9400, path: /up}, "+fast+"}}") + service(ofWeb, ports), code: "readiness-path", says: "404"},
	{name: "a resource that no node has", objects: backend("web", "app: web", serving+"\n        resources: {limits: {example.com/gpu: 1}}") + service(ofWeb, ports), code: "pods-pending", says: "example.com/gpu"},
	{name: "an init container that asks for too much", objects: inTemplate(backend("web", "app: web", serving), `      initContainers: [{name: setup, image: portal, args: [version], resources: {requests: {cpu: 640}}}]`) + service(ofWeb, ports), code: "pods-pending", says: "640 cpu"},
	{name: "spread over a label that no node has", objects: inTemplate(backend("web", "app: web", serving), "      topologySpreadConstraints: [{maxSkew: 1, topologyKey: rack, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: web}}}]") + service(ofWeb, ports), code: "pods-pending", says: "topologySpreadConstraints"},
	{name: "variables of a Secret that is not there", objects: backend("web", "app: web", serving+"\n        envFrom: [{secretRef: {name: none}}]") + service(ofWeb, ports), code: "pods-config", says: "none"},
	{name: "a variable of a ConfigMap that is not there", objects: backend("web", "app: web", serving+"\n        env: [{name: A, valueFrom: {configMapKeyRef: {name: conf, key: a}}}]") + service(ofWeb, ports), code: "pods-config", says: "conf"},
	{name: "a file of a ConfigMap that lacks the key", objects: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: conf, namespace: NS}\ndata: {a: b}\n---\n" + inTemplate(backend("web", "app: web", serving+"\n        volumeMounts: [{name: v, mountPath: /conf}]"), "      volumes: [{name: v, configMap: {name: conf, items: [{key: b, path: b}]}}]") + service(ofWeb, ports), code: "pods-pending", says: "conf"},
	{name: "a StatefulSet behind the wrong selector", objects: stateful("web", serving) + service("selector: {app: web, role: leader},", headless), ask: []string{"name", "web-0.web"}, at: "none", says: "role=leader"},
	{name: "a DaemonSet at another port", objects: strings.NewReplacer("kind: Deployment", "kind: DaemonSet", "  replicas: 1\n", "").Replace(backend("web", "app: web", serving)) + service(ofWeb, "ports: [{port: 80, targetPort: 9375}]"), code: "port-not-listening", says: "9375"},
	{name: "an IngressClass with a typo", objects: served + ingress("ingressClassName: protal,", toWeb, ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-class", says: `"protal"`},
	{name: "an IngressClass in an annotation", objects: served + annotated("kubernetes.io/ingress.class: nginx", ingress("", toWeb, "")), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-class", says: `"nginx"`},
	{name: "a load balancer's certificate that has ended", objects: backend("web", "app: web", serving) + balanced(aws+"ssl-cert: cert, "+aws+"backend-protocol: http", ""), then: []string{expired}, from: "client", at: "-k https://LBIP:80/", answers: true, code: "certificate-expired", says: "expired"},
	{name: "a load balancer's certificate that is none", objects: backend("web", "app: web", serving) + balanced(aws+"ssl-cert: cert, "+aws+"backend-protocol: http", ""), then: []string{"kubectl create secret generic cert -n NS --from-literal=tls.crt=x --from-literal=tls.key=y"}, from: "client", at: "-k https://LBIP:80/", code: "certificate-unreadable", says: "NS/cert"},
	{name: "a load balancer's health checks at another port", objects: backend("web", "app: web", serving) + balanced(aws+`healthcheck-port: "9999", `+soonUnhealthy, ""), from: "client", at: atLB, answers: true, code: "balancer-health", says: "9999"},
	{name: "source ranges of the other family", objects: backend("web", "app: web", serving) + balanced("", `loadBalancerSourceRanges: ["2001:db8::/32"], `), at: "none", answers: true, code: "source-ranges", says: "2001:db8::/32"},
	{name: "source ranges in an annotation", objects: backend("web", "app: web", serving) + balanced("service.beta.kubernetes.io/load-balancer-source-ranges: 198.51.100.0/24", ""), from: "client", at: atLB, code: "source-ranges", says: "198.51.100.0/24"},
	{name: "an external IP that is another's endpoint", objects: backend("web", "app: web", serving) + service(ofWeb, "externalIPs: [192.0.2.80], "+ports) + named("db", service("", "ports: [{port: 5432, targetPort: 80}]")) + strings.NewReplacer("web-1", "db-1", "service-name: web", "service-name: db").Replace(handMade) + "ports: [{port: 80}]\nendpoints: [{addresses: [192.0.2.80]}]\n", answers: true, code: "external-ip-theft", says: "endpoint of Service NS/db"},
	{name: "two Services, one with a typo", objects: served + named("api", service("selector: {app: wbe},", ports)), ask: []string{"service", "api"}, at: "none", code: "selector-typo", says: "app=wbe"},
	{name: "a Service of two ports, both wrong", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{name: a, port: 80, targetPort: 8080}, {name: b, port: 81, targetPort: htpp}]"), code: "port-not-listening", says: "8080"},
	{name: "a Pod of the node's network at a port that is taken", objects: onNode2(inTemplate(backend("first", "app: first", fmt.Sprintf("        args: [echo, --listen, %q]", ":19501")), "      hostNetwork: true")) + onNode2(inTemplate(backend("web", "app: web", fmt.Sprintf("        args: [echo, --listen, %q]", ":19501")), "      hostNetwork: true")) + service(ofWeb, "ports: [{port: 80, targetPort: 19501}]"), then: []string{"kubectl rollout status -n NS deployment first --timeout=60s || kubectl delete pod -n NS -l app=web"}, at: "none", says: "again and again"},
	{name: "a Pod without a workload at loopback", objects: alone(`{name: c, image: portal, args: [echo, --listen, "127.0.0.1:9376"]}`) + service(ofWeb, ports), code: "listens-on-loopback", says: "loopback"},
	{name: "a Pod without a workload, wrong page", objects: alone(`{name: c, image: portal, args: [echo, --listen, ":9376"], readinessProbe: {httpGet: {port: 9376, path: /up}, `+fast+`}}`) + service(ofWeb, ports), code: "readiness-path", says: "404"},
	{name: "a Pod without a workload, too big", objects: alone(`{name: c, image: portal, args: [echo, --listen, ":9376"], resources: {requests: {memory: 9Ti}}}`) + service(ofWeb, ports), code: "pods-pending", says: "9Ti memory"},
	{name: "a Pod without a workload, asked about", objects: alone(`{name: c, image: "web.invalid/web:2", imagePullPolicy: Never}`) + service(ofWeb, ports), ask: []string{"pod", "p"}, at: "none", code: "pods-image", says: "web.invalid/web:2"},
	{name: "a Pod's address at loopback", objects: alone(`{name: c, image: portal, args: [echo, --listen, "127.0.0.1:9376"]}`) + service(ofWeb, ports), then: []string{"kubectl wait -n NS --for=condition=Ready pod p --timeout=60s"}, ask: []string{"address", "POD:9376"}, code: "listens-on-loopback", says: "loopback"},
	{name: "a StatefulSet whose probe asks the wrong port", objects: stateful("web", probed("readiness", "httpGet: {port: 9377}")) + service(ofWeb, ports), code: "readiness-port", says: "9377"},
	{name: "a StatefulSet on no node", objects: inTemplate(stateful("web", serving), "      nodeSelector: {disk: ssd}") + service(ofWeb, ports), code: "pods-pending", says: "disk=ssd"},
	{name: "a ReplicaSet whose probe asks for a wrong page", objects: bare(backend("web", "app: web", probed("readiness", "httpGet: {port: 9376, path: /up}"))) + service(ofWeb, ports), code: "readiness-path", says: "404"},
	{name: "one of three labels", objects: backend("web", "app: web, tier: front, env: prod", serving) + backend("other", "app: other, tier: front, env: prod", serving) + service("selector: {app: web, tier: front, env: production},", ports), code: "selector-typo", says: "env=production"},
	{name: "an internal load balancer without such a pool", objects: backend("web", "app: web", serving) + balanced(aws+`internal: "true"`, ""), from: "client", at: atLB, answers: true, code: "balancer-pending", says: "internal"},
	{name: "an Ingress to a wrong selector", objects: backend("web", "app: wbe", serving) + service(ofWeb, ports) + ingress(class, toWeb, ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "selector-typo", says: "app=web"},
	{name: "an Ingress to an alias of an address", objects: alias("10.244.1.9", ", ports: [{port: 80}]") + ingress(class, toWeb, ""), ask: []string{"ingress", "in"}, at: "none", says: "10.244.1.9"},
	{name: "an alias with a wrong namespace", objects: alias("real.NSx.svc.cluster.local", "") + target(ports) + backend("real", "app: real", serving), at: "none", code: "externalname-unknown", says: "there is Service NS/real"},
	{name: "a subdomain of another Service", objects: strings.Replace(alone(`{name: c, image: portal, args: [echo, --listen, ":9376"]}`), "spec:", "spec:\n  hostname: p\n  subdomain: wbe", 1) + service(ofWeb, headless), ask: []string{"name", "p.web"}, at: "none", code: "name-unknown", says: `"wbe"`},
	{name: "liveness asks the wrong port", objects: backend("web", "app: web", probed("liveness", "httpGet: {port: 9377}")) + service(ofWeb, ports), answers: true, code: "liveness-port", says: "9377"},
	{name: "startup gives up", objects: backend("web", "app: web", probed("startup", "httpGet: {port: 9376, path: /up}")) + service(ofWeb, ports), code: "startup-path", says: "404"},
	{name: "a container that may not be root", objects: backend("web", "app: web", serving+"\n        securityContext: {runAsNonRoot: true}") + service(ofWeb, ports), code: "pods-config", says: "runAsNonRoot"},
	{name: "a claim that is not there", objects: inTemplate(backend("web", "app: web", serving), "      volumes: [{name: v, persistentVolumeClaim: {claimName: data}}]") + service(ofWeb, ports), at: "none", says: "volume v"},
	{name: "a Job that is done", objects: "apiVersion: batch/v1\nkind: Job\nmetadata: {name: web, namespace: NS}\nspec: {template: {metadata: {labels: {app: web}}, spec: {restartPolicy: Never, containers: [{name: c, image: portal, args: [version]}]}}}\n---\n" + service(ofWeb, ports), at: "none", code: "pods-ended", says: "Succeeded"},
	{name: "the last Pod goes slowly", objects: strings.Replace(server("web", "app: web", "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)", ""), "terminationGracePeriodSeconds: 1", "terminationGracePeriodSeconds: 40", 1) + service(ofWeb, "publishNotReadyAddresses: false, "+ports), then: []string{"kubectl rollout status -n NS deployment web --timeout=60s", "kubectl scale -n NS deployment web --replicas=0"}, at: "none", says: "scaled to 0"},
}
