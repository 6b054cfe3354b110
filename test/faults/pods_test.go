//go:build faults

package faults

import (
	"fmt"
	"strings"
)

// server is a Deployment with a Python program; extra are further lines of its container.
func server(name, labels, program, extra string) string {
	text := strings.ReplaceAll(backend(name, labels, "        command: [/usr/bin/python3, -c, "+quote(program)+"]\n"+extra), "image: portal", "image: host")
	return strings.ReplaceAll(text, "\n\n", "\n")
}

func quote(program string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(program) + `"`
}

// web is a web server in Python; answer is the body of its do_GET.
func web(answer string) string {
	return `
import http.server, socket, time
class H(http.server.BaseHTTPRequestHandler):
  def log_message(self, *a): pass
  def status(self, code):
    self.send_response(code); self.send_header('Content-Length', '3'); self.end_headers(); self.wfile.write(b'ok\n')
  def do_GET(self):
` + answer + `
http.server.ThreadingHTTPServer(('0.0.0.0', 9376), H).serve_forever()
`
}

// pods puts lines in the Pod template of a Deployment.
func inTemplate(objects, lines string) string {
	return strings.Replace(objects, "      containers:", lines+"\n      containers:", 1)
}

const (
	fast   = "periodSeconds: 1, failureThreshold: 1"
	stuck  = `      initContainers: [{name: setup, image: host, command: [/usr/bin/sleep, "3600"]}]`
	broken = `      initContainers: [{name: setup, image: host, command: [/usr/bin/false]}]`
)

func probed(kind, probe string) string {
	often := fast
	if kind == "liveness" { // what kills a container that has just been started is no fault
		often = "periodSeconds: 1, failureThreshold: 5"
	}
	return serving + fmt.Sprintf("\n        %sProbe: {%s, %s}", kind, probe, often)
}

var ofPods = []fault{
	{name: "readiness gets 500", objects: server("web", "app: web", web("    self.status(500 if self.path == '/ready' else 200)"), "        readinessProbe: {httpGet: {port: 9376, path: /ready}, "+fast+"}") + service(ofWeb, ports), code: "pods-unready", says: "500"},
	{name: "readiness takes too long", objects: server("web", "app: web", web("    time.sleep(2.5 if self.path == '/ready' else 0); self.status(200)"), "        readinessProbe: {httpGet: {port: 9376, path: /ready}, timeoutSeconds: 1, "+fast+"}") + service(ofWeb, ports), code: "readiness-timeout", says: "in time"},
	{name: "readiness speaks TLS", objects: backend("web", "app: web", probed("readiness", "httpGet: {port: 9376, scheme: HTTPS}")) + service(ofWeb, ports), code: "readiness-scheme", says: "HTTPS"},
	{name: "readiness does not speak TLS", objects: backend("web", "app: web", strings.Replace(probed("readiness", "httpGet: {port: 9376}"), "[echo,", "[echo, --tls,", 1)) + service(ofWeb, ports), at: "none", code: "readiness-scheme", says: "TLS"},
	{name: "readiness begins late", objects: backend("web", "app: web", serving+"\n        readinessProbe: {httpGet: {port: 9376}, initialDelaySeconds: 900}") + service(ofWeb, ports), code: "readiness-delay", says: "initialDelaySeconds"},
	{name: "readiness runs a command that is not there", objects: backend("web", "app: web", probed("readiness", "exec: {command: [/bin/check]}")) + service(ofWeb, ports), code: "readiness-command", says: "command"},
	{name: "startup asks the wrong port", objects: backend("web", "app: web", serving+"\n        startupProbe: {tcpSocket: {port: 9377}, periodSeconds: 1, failureThreshold: 900}") + service(ofWeb, ports), code: "startup-port", says: "9377"},
	{name: "startup asks for a wrong page", objects: backend("web", "app: web", serving+"\n        startupProbe: {httpGet: {port: 9376, path: /up}, periodSeconds: 1, failureThreshold: 900}") + service(ofWeb, ports), code: "startup-path", says: "404"},
	{name: "liveness asks for a wrong page", objects: backend("web", "app: web", probed("liveness", "httpGet: {port: 9376, path: /alive}")) + service(ofWeb, ports), answers: true, code: "liveness-path", says: "liveness"},
	{name: "too little memory", objects: server("web", "app: web", "x = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\n"+web("    self.status(200)"), "        resources: {limits: {memory: 40Mi}}") + service(ofWeb, ports), code: "pods-memory", says: "40Mi"},
	{name: "an init container that does not end", objects: inTemplate(backend("web", "app: web", serving), stuck) + service(ofWeb, ports), at: "none", code: "pods-init", says: "setup"},
	{name: "an init container that fails", objects: inTemplate(backend("web", "app: web", serving), broken) + service(ofWeb, ports), at: "none", code: "pods-crashing", says: "setup"},
	{name: "a container that ends", objects: strings.ReplaceAll(backend("web", "app: web", "        command: [/usr/bin/true]"), "image: portal", "image: host") + service(ofWeb, ports), at: "none", code: "pods-crashing", says: "exit code 0"},
	{name: "an image's name that is none", objects: strings.ReplaceAll(backend("web", "app: web", serving), "image: portal", `image: "web:v1:x"`) + service(ofWeb, ports), at: "none", code: "pods-image", says: "InvalidImageName"},
	{name: "a command that is not there", objects: strings.ReplaceAll(backend("web", "app: web", "        command: [/usr/bin/no-such-server]"), "image: portal", "image: host") + service(ofWeb, ports), at: "none", code: "pods-config", says: "no-such-server"},
	{name: "a Secret that is not there", objects: inTemplate(backend("web", "app: web", serving), "      volumes: [{name: v, secret: {secretName: none}}]") + service(ofWeb, ports), code: "pods-pending", says: "none"},
	{name: "a node selector with a typo", objects: inTemplate(backend("web", "app: web", serving), "      nodeSelector: {kubernetes.io/hostname: node22}") + service(ofWeb, ports), code: "pods-pending", says: "node22"},
	{name: "a node selector that nobody has", objects: inTemplate(backend("web", "app: web", serving), "      nodeSelector: {disk: ssd}") + service(ofWeb, ports), code: "pods-pending", says: "disk=ssd"},
	{name: "too many processors", objects: backend("web", "app: web", serving+"\n        resources: {requests: {cpu: 640}}") + service(ofWeb, ports), code: "pods-pending", says: "640 cpu"},
	{name: "too much memory asked for", objects: backend("web", "app: web", serving+"\n        resources: {requests: {memory: 9Ti}}") + service(ofWeb, ports), code: "pods-pending", says: "9Ti memory"},
	{name: "an affinity that no node has", objects: inTemplate(backend("web", "app: web", serving), "      affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: Exists}]}]}}}") + service(ofWeb, ports), code: "pods-pending", says: "affinity"},
	{name: "a host port that is taken", objects: onNode2(backend("first", "app: first", strings.ReplaceAll(serving, "containerPort: 9376", "containerPort: 9376, hostPort: 17001"))) + onNode2(backend("web", "app: web", strings.ReplaceAll(serving, "containerPort: 9376", "containerPort: 9376, hostPort: 17001"))) + service(ofWeb, ports), then: []string{"kubectl rollout status -n NS deployment first --timeout=60s || kubectl delete pod -n NS -l app=web"}, code: "pods-pending", says: "17001", at: "none"},
	{name: "a scheduling gate", objects: inTemplate(backend("web", "app: web", serving), "      schedulingGates: [{name: example.com/wait}]") + service(ofWeb, ports), code: "pods-pending", says: "example.com/wait"},
	{name: "another scheduler", objects: inTemplate(backend("web", "app: web", serving), "      schedulerName: mine") + service(ofWeb, ports), code: "pods-pending", says: `"mine"`},
	{name: "a node that does not exist", objects: inTemplate(backend("web", "app: web", serving), "      nodeName: node9") + service(ofWeb, ports), code: "pod-lost", says: "node9"},
	{name: "a paused Deployment", objects: strings.Replace(backend("web", "app: web", serving), "replicas: 1", "paused: true\n  replicas: 1", 1) + service(ofWeb, ports), code: "workload-empty", says: "paused"},
	{name: "a quota that asks for requests", objects: quota("requests.cpu: 1") + service(ofWeb, ports), then: []string{quotaCounts, applied(backend("web", "app: web", serving))}, code: "workload-empty", says: "requests.cpu"},
	{name: "a quota for the second Pod", objects: quota("pods: 1") + service(ofWeb, ports), then: []string{quotaCounts, applied(strings.Replace(backend("web", "app: web", serving), "replicas: 1", "replicas: 2", 1))}, answers: true, code: "workload-short", says: "1 of the 2"},
	{name: "a ServiceAccount that is not there", objects: inTemplate(backend("web", "app: web", serving), "      serviceAccountName: shop") + service(ofWeb, ports), code: "workload-empty", says: "shop"},
	{name: "a DaemonSet for no node", objects: strings.NewReplacer("kind: Deployment", "kind: DaemonSet", "  replicas: 1\n", "").Replace(inTemplate(backend("web", "app: web", serving), "      nodeSelector: {disk: ssd}")) + service(ofWeb, ports), code: "workload-empty", says: "disk=ssd"},
	{name: "a Pod that does not go", objects: strings.Replace(fmt.Sprintf(pod, "web", ""), "labels:", "finalizers: [example.com/hold], labels:", 1) + service(ofWeb, ports), then: []string{"kubectl wait -n NS --for=condition=Ready pod p --timeout=60s", "kubectl delete pod -n NS p --wait=false"}, at: "none", code: "pods-terminating", says: "example.com/hold"},
	{name: "a Pod that has ended", objects: fmt.Sprintf(pod, "web", "activeDeadlineSeconds: 2, restartPolicy: Never,") + service(ofWeb, ports), at: "none", code: "pods-ended", says: "DeadlineExceeded"},
	{name: "a Service that does not go", objects: backend("web", "app: web", serving) + strings.Replace(service(ofWeb, ports), "name: web,", "finalizers: [example.com/hold], name: web,", 1), then: []string{"kubectl delete service web -n NS --wait=false"}, at: "none", code: "service-deleting", says: "example.com/hold"},
	{name: "a namespace that does not go", objects: backend("web", "app: web", serving) + strings.Replace(service(ofWeb, ports), "name: web,", "finalizers: [example.com/hold], name: web,", 1), then: []string{"kubectl delete namespace NS --wait=false"}, at: "none", code: "namespace-terminating", says: "NS"},
}
