//go:build faults

package faults

import (
	"fmt"
	"strings"
)

// labelled gives the Service web a label.
func labelled(label, objects string) string {
	return strings.Replace(objects, "namespace: NS}", "namespace: NS, labels: {"+label+"}}", 1)
}

// soonUnhealthy has a load balancer take an endpoint out after 10 s.
const soonUnhealthy = `service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval: "5", service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold: "2"`

// strangers are faults that were invented without looking at what explain knows: only the words of the verdict count, and that the fix helps.
var strangers = []fault{
	{name: "a hash of a ReplicaSet in the selector", objects: backend("web", "app: web", serving) + service("selector: {app: web, pod-template-hash: 5d4f8c7b9},", ports), says: "pod-template-hash"},
	{name: "the version from before", objects: backend("web", "app: web, version: v2", serving) + service("selector: {app: web, version: v1},", ports), says: "version=v1"},
	{name: "labels on the Deployment only", objects: backend("web", "x: z", serving) + service(ofWeb, ports), says: "app=web"},
	{name: "the Deployment's name and -svc", objects: backend("web", "app: web", serving) + service("selector: {app: web-svc},", ports), says: "app=web-svc"},
	{name: "both labels wrong", objects: backend("web", "app: web, tier: front", serving) + service("selector: {app: wbe, tier: fornt},", ports), says: "app=wbe"},
	{name: "a StatefulSet that is scaled to 0", objects: strings.Replace(stateful("web", serving), "replicas: 1", "replicas: 0", 1) + service(ofWeb, ports), says: "scaled to 0"},
	{name: "a selector that was taken away", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{"kubectl rollout status -n NS deployment web --timeout=60s", `kubectl patch service web -n NS --type=merge -p '{"spec":{"selector":null}}'`, "kubectl delete pod -n NS --all --wait=true"}, says: "selector"},
	{name: "port and targetPort the other way round", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 9376, targetPort: 80}]"), says: "port 80"},
	{name: "a node port as targetPort", objects: backend("web", "app: web", serving) + service(ofWeb, "type: NodePort, ports: [{port: 80, targetPort: 31399, nodePort: 31399}]"), code: "port-not-listening", says: "31399"},
	{name: "the Service's port at a node's address", objects: backend("web", "app: web", serving) + service(ofWeb, "type: NodePort, ports: [{port: 8123, targetPort: 9376, nodePort: 31398}]"), ask: []string{"address", "192.168.100.11:8123"}, at: "none", says: "31398"},
	{name: "a node port at a cluster IP", objects: backend("web", "app: web", serving) + service(ofWeb, "type: NodePort, ports: [{port: 80, targetPort: 9376, nodePort: 31397}]"), ask: []string{"address", "VIP:31397"}, at: "none", says: "node port"},
	{name: "readiness asks another host", objects: backend("web", "app: web", probed("readiness", "httpGet: {port: 9376, host: 192.0.2.1}")) + service(ofWeb, ports), says: "192.0.2.1"},
	{name: "readiness speaks gRPC", objects: backend("web", "app: web", probed("readiness", "grpc: {port: 9376}")) + service(ofWeb, ports), says: "readiness probe"},
	{name: "readiness by a command that says no", objects: strings.ReplaceAll(backend("web", "app: web", "        command: [/usr/bin/python3, -m, http.server, \"9376\"]\n        readinessProbe: {exec: {command: [/usr/bin/test, -e, /tmp/ready]}, "+fast+"}"), "image: portal", "image: host") + service(ofWeb, ports), says: "exit code 1"},
	{name: "two containers at one port", objects: backend("web", "app: web", serving+"\n      - {name: twin, image: portal, args: [echo, --listen, \":9376\"]}") + service(ofWeb, ports), at: "none", says: "again and again"},
	{name: "an init container without memory", objects: inTemplate(backend("web", "app: web", serving), `      initContainers: [{name: setup, image: host, command: [/usr/bin/python3, -c, "x = bytearray(200 << 20)"], resources: {limits: {memory: 30Mi}}}]`) + service(ofWeb, ports), at: "none", says: "OOMKilled"},
	{name: "a volume whose path is not there", objects: inTemplate(backend("web", "app: web", serving), "      volumes: [{name: v, hostPath: {path: /no/such/folder, type: Directory}}]") + service(ofWeb, ports), at: "none", says: "/no/such/folder"},
	{name: "a key that the ConfigMap lacks", objects: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: conf, namespace: NS}\ndata: {a: b}\n---\n" + backend("web", "app: web", serving+"\n        env: [{name: A, valueFrom: {configMapKeyRef: {name: conf, key: b}}}]") + service(ofWeb, ports), says: "conf"},
	{name: "anti-affinity of two replicas", objects: strings.Replace(inTemplate(backend("web", "app: web", serving), "      affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: kubernetes.io/os, labelSelector: {matchLabels: {app: web}}}]}}"), "replicas: 1", "replicas: 2", 1) + service(ofWeb, "internalTrafficPolicy: Cluster, "+ports), answers: true, at: "none", says: "affinity"},
	{name: "a slice in another namespace", objects: service("", ports) + strings.Replace(handMade, "namespace: NS", "namespace: default", 1) + "ports: [{port: 9376}]\nendpoints: [{addresses: [10.244.1.250]}]\n", then: []string{"true"}, at: "none", says: "namespace default"},
	{name: "a slice with the address of another application", objects: backend("other", "app: other", `        args: [echo, --listen, ":5432"]`) + service("", ports), then: []string{podIP + `echo '` + handMade + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, at: "none", says: "refuses"},
	{name: "a slice without a port's number", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + handMade + `ports: [{protocol: TCP}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, says: "port"},
	{name: "the label of headless Services", objects: backend("web", "app: web", serving) + labelled(`service.kubernetes.io/headless: ""`, service(ofWeb, ports)), says: "service.kubernetes.io/headless", answers: true},
	{name: "a slice with the label of headless Services", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + strings.Replace(handMade, "labels: {", `labels: {service.kubernetes.io/headless: "", `, 1) + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, says: "service.kubernetes.io/headless", answers: true},
	{name: "an external IP that is a Pod's", objects: backend("web", "app: web", serving) + fmt.Sprintf(pod, "p", ""), then: []string{"kubectl wait -n NS --for=condition=Ready pod p --timeout=60s", "echo '" + service(ofWeb, "externalIPs: [POD], "+ports) + "' | sed s/POD/$(kubectl get pod p -n NS -o jsonpath={.status.podIP})/ | kubectl apply -f -"}, answers: true, says: "takes traffic of Pod"},
	{name: "an external IP that another one's load balancer has", objects: backend("web", "app: web", serving) + balanced("", ""), then: []string{"for i in $(seq 60); do ip=$(kubectl get service web -n NS -o jsonpath='{.status.loadBalancer.ingress[0].ip}'); [ -n \"$ip\" ] && break; sleep 1; done; kubectl create service clusterip thief -n NS --tcp=80:9376; kubectl patch service thief -n NS --type=merge -p '{\"spec\":{\"externalIPs\":[\"'$ip'\"]}}'"}, answers: true, at: "none", says: "thief"},
	{name: "a Pod's port that the firewall of its node drops", objects: onNode2(backend("web", "app: web", strings.ReplaceAll(serving, "9376", "9561"))) + service(ofWeb, "ports: [{port: 80, targetPort: 9561}]"), then: []string{
		"portal lab exec --name $LAB node2 -- nft 'add table inet NS; add chain inet NS drops { type filter hook forward priority -300; }; add rule inet NS drops tcp dport 9561 drop'"}, at: "none", says: "9561"},
	{name: "an IngressClass of somebody else", objects: served + "apiVersion: networking.k8s.io/v1\nkind: IngressClass\nmetadata: {name: NS}\nspec: {controller: example.com/ingress}\n---\n" + ingress("ingressClassName: NS,", toWeb, ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, says: "IngressClass"},
	{name: "an Ingress to a headless Service without Pods", objects: service(ofWeb, headless) + ingress(class, strings.Replace(toWeb, "number: 80", "number: 9376", 1), ""), ask: []string{"ingress", "in"}, at: "none", says: "selects no Pod"},
	{name: "an Ingress to a Service in another namespace", objects: ingress(class, strings.Replace(toWeb, "name: web", "name: kube-dns", 1), ""), ask: []string{"ingress", "in"}, at: "none", says: "kube-system/kube-dns"},
	{name: "an Ingress to a UDP port", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80, targetPort: 9376, protocol: UDP}]") + ingress(class, toWeb, ""), ask: []string{"ingress", "in"}, at: "none", says: "UDP"},
	{name: "an Ingress that is not there", objects: served, ask: []string{"ingress", "front"}, at: "none", says: "no Ingress front"},
	{name: "a Pod that is not there", objects: served, ask: []string{"pod", "web-0"}, at: "none", says: "no Pod web-0"},
	{name: "a namespace that is not there", objects: served, ask: []string{"service", "nowhere/web"}, at: "none", says: "no namespace nowhere"},
	{name: "a name without its namespace", objects: served, ask: []string{"name", "web.svc.cluster.local"}, at: "none", says: "namespace"},
	{name: "a name with the zone twice", objects: served, ask: []string{"name", "web.NS.svc.cluster.local.NS.svc.cluster.local"}, at: "none", says: "web.NS.svc.cluster.local"},
	{name: "a name in the old way", objects: served, ask: []string{"name", "web.NS.cluster.local"}, at: "none", says: ".svc.cluster.local"},
	{name: "a Pod's name with the Service's port", objects: served, ask: []string{"name", "web.NS.svc.cluster.local:9376"}, at: "none", answers: true, says: "cluster IP"},
	{name: "ExternalName to a URL's host with a port", objects: alias("db.NS.svc.cluster.local", ", ports: [{port: 5432}]"), at: "none", says: "no Service db"},
	{name: "ExternalName to a headless Service without Pods", objects: alias("real.NS.svc.cluster.local", "") + target(headless), at: "none", says: "NS/real"},
	{name: "a load balancer for IPv6 without such a pool", objects: backend("web", "app: web", serving) + balanced("", six), at: "none", says: "IPv6"},
	{name: "an address that another Service has", objects: backend("web", "app: web", serving) + strings.Replace(balanced("", "loadBalancerIP: 192.168.100.230, "), "name: web,", "name: first,", 1), then: []string{"for i in $(seq 60); do kubectl get service first -n NS -o jsonpath='{.status.loadBalancer.ingress[0].ip}' | grep -q . && break; sleep 1; done; echo '" + balanced("", "loadBalancerIP: 192.168.100.230, ") + "' | kubectl apply -f -"}, from: "client", at: atLB, answers: true, says: "192.168.100.230"},
	{name: "health checks of a load balancer that fail", objects: backend("web", "app: web", serving) + balanced(`service.beta.kubernetes.io/aws-load-balancer-backend-protocol: http, service.beta.kubernetes.io/aws-load-balancer-healthcheck-path: /none, service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol: http, `+soonUnhealthy, ""), from: "client", at: atLB, answers: true, code: "balancer-health", says: "404"},
	{name: "a PROXY header for a server that wants none", objects: backend("web", "app: web", serving) + balanced(`service.beta.kubernetes.io/aws-load-balancer-proxy-protocol: "*"`, ""), at: "none", answers: true, says: "PROXY"},
}
