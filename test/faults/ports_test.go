//go:build faults

package faults

import "strings"

const udp = `
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('0.0.0.0', 9376))
while True:
  data, peer = s.recvfrom(9000)
  s.sendto(data, peer)
`

// six is what a Service for IPv6 alone says.
const six = "ipFamilies: [IPv6], "

var ofPorts = []fault{
	{name: "two applications", objects: backend("web", "app: web, tier: front", serving) + backend("db", "app: db, tier: front", `        args: [echo, --listen, ":5432"]`) + service("selector: {tier: front},", ports), answers: true, code: "selector-too-wide", says: "Deployment NS/db"},
	{name: "two applications, a port by name", objects: backend("web", "app: web, tier: front", serving) + backend("db", "app: db, tier: front", `        args: [echo, --listen, ":5432"]`) + service("selector: {tier: front},", "ports: [{port: 80, targetPort: http}]"), answers: true, code: "selector-too-wide", says: "Deployment NS/db"},
	{name: "IPv4 only behind IPv6", objects: server("web", "app: web", web("    self.status(200)"), "") + service(ofWeb, six+ports), at: "none", code: "listens-other-family", says: "0.0.0.0:9376"},
	{name: "loopback of IPv6", objects: backend("web", "app: web", `        args: [echo, --listen, "[::1]:9376"]`) + service(ofWeb, six+ports), code: "listens-on-loopback", says: "loopback"},
	{name: "loopback by an environment variable", objects: server("web", "app: web", strings.Replace(strings.Replace(web("    self.status(200)"), "import http.server,", "import os, http.server,", 1), "('0.0.0.0', 9376)", "(os.environ['HOST'], 9376)", 1), `        env: [{name: HOST, value: "127.0.0.1"}]`) + service(ofWeb, ports), code: "listens-on-loopback", says: "loopback"},
	{name: "TCP in front of UDP", objects: server("web", "app: web", udp, "") + service(ofWeb, ports), at: "none", code: "port-protocol", says: "UDP"},
	{name: "a port's name for UDP", objects: server("web", "app: web", udp, "        ports: [{name: talk, containerPort: 9376, protocol: UDP}]") + service(ofWeb, "ports: [{port: 80, targetPort: talk}]"), at: "none", code: "target-port-name", says: "UDP"},
	{name: "a Pod of the node's network, wrong port", objects: inTemplate(backend("web", "app: web", `        args: [echo, --listen, ":19401"]
        ports: [{containerPort: 19401}]`), "      hostNetwork: true") + service(ofWeb, "ports: [{port: 80, targetPort: 19402}]"), code: "port-not-listening", says: "19402"},
	{name: "nothing listens at all", objects: strings.ReplaceAll(backend("web", "app: web", `        command: [/usr/bin/sleep, "3600"]`), "image: portal", "image: host") + service(ofWeb, ports), at: "none", code: "port-not-listening", says: "nothing listens"},
	{name: "the second of two containers listens elsewhere", objects: backend("web", "app: web", serving+"\n      - {name: side, image: portal, args: [echo, --listen, \":9400\"], ports: [{name: metrics, containerPort: 9401}]}") + service(ofWeb, "ports: [{port: 80, targetPort: metrics}]"), code: "port-not-listening", says: "9401"},
	{name: "a port too many in the targetPort", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80, targetPort: 93}]"), code: "port-not-listening", says: "port 93"},
	{name: "a slice of names", objects: service("", ports) + strings.ReplaceAll(handMade, "IPv4", "FQDN") + "ports: [{port: 9376}]\nendpoints: [{addresses: [www.example.com]}]\n", at: "none", code: "slice-family", says: "FQDN"},
	{name: "a slice of the other family", objects: service("", ports) + strings.ReplaceAll(handMade, "IPv4", "IPv6") + "ports: [{port: 9376}]\nendpoints: [{addresses: [\"fd00:244::99\"]}]\n", at: "none", code: "slice-family", says: "IPv6"},
	{name: "a slice for UDP", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + handMade + `ports: [{port: 9376, protocol: UDP}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "slice-port", says: "UDP"},
	{name: "a slice with the label of another Service", objects: backend("web", "app: web", serving) + service("", ports), then: []string{podIP + `echo '` + strings.Replace(handMade, "service-name: web", "service-name: wbe", 1) + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "slice-label", says: "service-name=web"},
	{name: "Local, and a slice that names no node", objects: backend("web", "app: web", serving) + service("", "internalTrafficPolicy: Local, "+ports), then: []string{podIP + `echo '` + handMade + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"]}]' | kubectl apply -f -`}, code: "policy-local", says: "internalTrafficPolicy"},
	{name: "Local, and a slice that names another node", objects: backend("web", "app: web", serving) + service("", "internalTrafficPolicy: Local, "+ports), then: []string{podIP + `echo '` + handMade + `ports: [{port: 9376}]
endpoints: [{addresses: ["'$ip'"], nodeName: node77}]' | kubectl apply -f -`}, code: "policy-local", says: "internalTrafficPolicy"},
	{name: "Endpoints that are not ready", objects: service("", ports) + "apiVersion: v1\nkind: Endpoints\nmetadata: {name: web, namespace: NS}\nsubsets: [{notReadyAddresses: [{ip: 10.244.1.200}], ports: [{port: 9376}]}]\n", at: "none", code: "endpoints-not-ready", says: "ready"},
	{name: "an external IP that two have", objects: backend("web", "app: web", serving) + service(ofWeb, "externalIPs: [198.51.100.201], "+ports) + strings.Replace(service(ofWeb, "externalIPs: [198.51.100.201], "+ports), "name: web,", "name: other,", 1), answers: true, code: "external-ip-conflict", says: "198.51.100.201"},
	{name: "a cluster IP of no range", objects: backend("web", "app: web", serving) + "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: NS}\nspec: {cidrs: [10.199.0.0/24]}\n---\n", then: []string{
		"kubectl wait servicecidr NS --for=condition=Ready --timeout=60s", "for i in $(seq 60); do echo '" + service(ofWeb, "clusterIP: 10.199.0.77, "+ports) + "' | kubectl apply -f - && break; sleep 1; done",
		`kubectl delete servicecidr NS --wait=false && kubectl patch servicecidr NS --type=merge -p '{"metadata":{"finalizers":null}}'`}, answers: true, code: "cluster-ip-outside", says: "10.199.0.77"},
	{name: "a node port behind a firewall", objects: backend("web", "app: web", serving) + service(ofWeb, "type: NodePort, ports: [{port: 80, targetPort: 9376, nodePort: 31301}]"), then: []string{
		"portal lab exec --name $LAB node1 -- nft 'add table inet NS; add chain inet NS drops { type filter hook prerouting priority -300; }; add rule inet NS drops tcp dport 31301 drop'"},
		ask: []string{"address", "192.168.100.11:31301"}, at: "none", code: "node-port-unreachable", says: "31301"},
	{name: "a node port behind a firewall, asked about the Service", objects: backend("web", "app: web", serving) + service(ofWeb, "type: NodePort, ports: [{port: 80, targetPort: 9376, nodePort: 31302}]"), then: []string{
		"portal lab exec --name $LAB node1 -- nft 'add table inet NS; add chain inet NS drops { type filter hook prerouting priority -300; }; add rule inet NS drops tcp dport 31302 reject with tcp reset'"},
		at: "none", code: "node-port-unreachable", says: "192.168.100.11"},
	{name: "a cluster IP behind a firewall", objects: backend("web", "app: web", serving) + service(ofWeb, "clusterIP: 10.96.250.9, "+ports), then: []string{
		"portal lab exec --name $LAB node2 -- nft 'add table inet NS; add chain inet NS drops { type filter hook output priority -300; }; add rule inet NS drops ip daddr 10.96.250.9 drop'"},
		at: "none", code: "service-unreachable", says: "from node node2"},
}
