package faults

const listening9376 = `        args: [echo, --listen, ":9376"]`

const handMade = `apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, namespace: NS, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
`

// podIP is a command that writes the address of the only Pod into a hand-made slice.
const podIP = `ip=; for i in $(seq 300); do ip=$(kubectl get pods -n NS -o jsonpath='{.items[0].status.podIP}'); [ -n "$ip" ] && break; sleep 0.2; done; `

var faults = append([]fault{
	{name: "typo in a value", objects: backend("web", "app: web", serving) + service("selector: {app: wbe},", ports), code: "selector-typo", says: "app=wbe"},
	{name: "typo in a key", objects: backend("web", "app: web", serving) + service("selector: {ap: web},", ports), code: "selector-typo", says: "ap=web"},
	{name: "one label too many", objects: backend("web", "app: web", serving) + service("selector: {app: web, tier: front},", ports), code: "selector-typo", says: "tier=front"},
	{name: "all different", objects: backend("web", "app: web", serving) + service("selector: {app: shop},", ports), code: "selector-typo", says: "app=shop"},
	{name: "no selector", objects: backend("web", "app: web", serving) + service("", ports), code: "no-endpoints", says: "no selector"},
	{name: "scaled to zero", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{"kubectl scale -n NS deployment web --replicas=0", "kubectl wait -n NS --for=delete pod -l app=web --timeout=60s"}, code: "workload-empty", says: "scaled to 0"},
	{name: "wrong targetPort", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80, targetPort: 8080}]"), code: "port-not-listening", says: "8080"},
	{name: "no targetPort", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80}]"), code: "port-not-listening", says: "leads to port 80"},
	{name: "typo in a port's name", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80, targetPort: htpp}]"), code: "target-port-name", says: `"htpp"`},
	{name: "port without a name", objects: backend("web", "app: web", listening9376) + service(ofWeb, "ports: [{port: 80, targetPort: http}]"), code: "target-port-name", says: `"http"`},
	{name: "listens at loopback", objects: backend("web", "app: web", `        args: [echo, --listen, "127.0.0.1:9376"]`) + service(ofWeb, ports), code: "listens-on-loopback", says: "loopback"},
	{name: "UDP instead of TCP", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80, targetPort: 9376, protocol: UDP}]"), code: "port-protocol", says: "UDP"},
	{name: "readiness asks the wrong port", objects: backend("web", "app: web", serving+"\n        readinessProbe: {httpGet: {port: 8081}, periodSeconds: 1}") + service(ofWeb, ports), code: "readiness-port", says: "8081"},
	{name: "readiness asks for a wrong page", objects: backend("web", "app: web", serving+"\n        readinessProbe: {httpGet: {port: 9376, path: /healthz}, periodSeconds: 1}") + service(ofWeb, ports), code: "readiness-path", says: "404"},
	{name: "slice without its label", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + handMade + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | sed 's/, labels: {[^}]*}//' | kubectl apply -f -`}, code: "slice-label", says: "web-1"},
	{name: "slice with the wrong port name", objects: backend("web", "app: web", serving) + service("", "ports: [{name: http, port: 80, targetPort: 9376}]"), then: []string{podIP + `echo '` + handMade + `ports: [{name: web, port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "slice-port", says: `"http"`},
	{name: "endpoints that are not ready", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + handMade + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"], conditions: {ready: false}}]' | kubectl apply -f -`}, code: "endpoints-not-ready", says: "ready: false"},
	{name: "another proxy's label", objects: backend("web", "app: web", serving) + service(ofWeb, ports), then: []string{"kubectl label -n NS service web service.kubernetes.io/service-proxy-name=other"}, code: "service-proxy-name", says: "other"},
	{name: "ExternalName that is an address", objects: service("type: ExternalName,", "externalName: 10.96.0.1"), code: "externalname-ip", says: "10.96.0.1", at: "none"},
	{name: "a Service that is not there", objects: backend("web", "app: web", serving) + service(ofWeb, ports), ask: []string{"name", "wbe"}, at: "none", code: "name-unknown", says: "there is Service NS/web"},
	{name: "a port that is not the Service's", objects: backend("web", "app: web", serving) + service(ofWeb, ports), ask: []string{"address", "VIP:9376"}, at: "none", code: "address-port", says: "9376 is the port of its Pods"},
}, further...)
