//go:build faults

package faults

import (
	"fmt"
	"strings"
)

// pools are those of the lab's load balancers: one for all, and one with a single address for who asks for it.
var pools = []string{"192.168.100.150-192.168.100.239", "tiny=192.168.100.240;manual"}

func balanced(annotations, spec string) string {
	return strings.Replace(service(ofWeb, "type: LoadBalancer, "+spec+ports), "namespace: NS", "namespace: NS, annotations: {"+annotations+"}", 1)
}

// ingress is one of Portal's class, for the host NS.example.
func ingress(class, path, more string) string {
	return fmt.Sprintf("apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: in, namespace: NS}\nspec: {%s %s rules: [{host: NS.example, http: {paths: [%s]}}]}\n---\n", class, more, path)
}

const (
	class     = "ingressClassName: portal,"
	toWeb     = "{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}"
	atIngress = "-H Host:NS.example http://ENTRY/"
	atTLS     = "-k --resolve NS.example:443:ENTRY https://NS.example/"
	atLB      = "http://LBIP/"
)

// certificate makes a Secret with a certificate for a host, that ends after some days.
func certificate(host string, days int) string {
	return fmt.Sprintf(`d=$(mktemp -d) && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout $d/k -out $d/c -days %d -subj /CN=%[2]s -addext subjectAltName=DNS:%[2]s 2>/dev/null && kubectl create secret tls cert -n NS --cert=$d/c --key=$d/k`, days, host)
}

const tlsOfNS = "tls: [{hosts: [NS.example], secretName: cert}],"

var served = backend("web", "app: web", serving) + service(ofWeb, ports)

var ofBalancers = []fault{
	{name: "source ranges", objects: backend("web", "app: web", serving) + balanced("", "loadBalancerSourceRanges: [198.51.100.0/24], "), from: "client", at: atLB, code: "source-ranges", says: "198.51.100.0/24"},
	{name: "a class that nobody serves", objects: backend("web", "app: web", serving) + balanced("", "loadBalancerClass: example.com/lb, "), from: "client", at: atLB, code: "balancer-pending", says: "example.com/lb"},
	{name: "a pool that is empty", objects: backend("web", "app: web", serving) + strings.Replace(balanced("portal.dev/load-balancer-pool: tiny", ""), "name: web,", "name: first,", 1) + balanced("portal.dev/load-balancer-pool: tiny", ""), from: "client", at: atLB, answers: true, code: "balancer-pending", says: "load balancer's address"},
	{name: "a pool that is not there", objects: backend("web", "app: web", serving) + balanced("portal.dev/load-balancer-pool: none", ""), from: "client", at: atLB, answers: true, code: "balancer-pending", says: "none"},
	{name: "an address of no pool", objects: backend("web", "app: web", serving) + balanced("", "loadBalancerIP: 203.0.113.9, "), from: "client", at: "none", code: "balancer-address", says: "203.0.113.9"},
	{name: "an annotation with a wrong value", objects: backend("web", "app: web", serving) + balanced(`service.beta.kubernetes.io/aws-load-balancer-proxy-protocol: "yes"`, ""), from: "client", at: atLB, answers: true, code: "balancer-annotation", says: "proxy-protocol"},
	{name: "an annotation with a typo", objects: backend("web", "app: web", serving) + balanced(`service.beta.kubernetes.io/aws-load-balancer-ssl-crt: cert`, ""), from: "client", at: atLB, answers: true, code: "balancer-annotation", says: "ssl-crt"},
	{name: "a certificate that is not there", objects: backend("web", "app: web", serving) + balanced(`service.beta.kubernetes.io/aws-load-balancer-ssl-cert: cert, service.beta.kubernetes.io/aws-load-balancer-backend-protocol: http`, ""), from: "client", at: "-k https://LBIP:80/", code: "balancer-certificate", says: "Secret NS/cert"},
	{name: "a security group that is not there", objects: backend("web", "app: web", serving) + balanced(`service.beta.kubernetes.io/aws-load-balancer-security-groups: sg-none`, ""), at: "none", code: "balancer-group", says: "sg-none"},
	{name: "a load balancer's address behind the wrong selector", objects: backend("web", "app: wbe", serving) + balanced("", ""), from: "client", at: atLB, code: "selector-typo", says: "app=web"},
	{name: "an Ingress without a class", objects: served + ingress("", toWeb, ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-class", says: "no IngressClass"},
	{name: "an Ingress of another class", objects: served + ingress("ingressClassName: nginx,", toWeb, ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-class", says: `"nginx"`},
	{name: "an Ingress to no Service", objects: served + ingress(class, strings.Replace(toWeb, "name: web", "name: wbe", 1), ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-no-service", says: "wbe"},
	{name: "an Ingress to no port", objects: served + ingress(class, strings.Replace(toWeb, "number: 80", "number: 8080", 1), ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-port", says: "8080"},
	{name: "an Ingress to a port by a wrong name", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{name: http, port: 80, targetPort: 9376}]") + ingress(class, strings.Replace(toWeb, "number: 80", "name: web", 1), ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "ingress-port", says: "80 http"},
	{name: "an Ingress to a resource", objects: served + ingress(class, "{path: /, pathType: Prefix, backend: {resource: {apiGroup: example.com, kind: Bucket, name: b}}}", ""), ask: []string{"ingress", "in"}, at: "none", code: "ingress-backend", says: "Bucket"},
	{name: "an Ingress to a Service without Pods", objects: service("selector: {app: NS-none},", ports) + ingress(class, toWeb, ""), ask: []string{"ingress", "in"}, at: "none", code: "selector-no-pods", says: "NS/web"},
	{name: "an Ingress to a wrong targetPort", objects: backend("web", "app: web", serving) + service(ofWeb, "ports: [{port: 80, targetPort: 8080}]") + ingress(class, toWeb, ""), ask: []string{"ingress", "in"}, from: "client", at: atIngress, code: "port-not-listening", says: "8080"},
	{name: "an Ingress that another one precedes", objects: served + strings.Replace(ingress(class, toWeb, ""), "name: in,", "name: first,", 1), then: []string{"sleep 2; echo '" + ingress(class, toWeb, "") + "' | kubectl apply -f -"}, ask: []string{"ingress", "in"}, at: "none", code: "ingress-conflict", says: "NS/first"},
	{name: "an Ingress without its Secret", objects: served + ingress(class, toWeb, tlsOfNS), ask: []string{"ingress", "in"}, from: "client", at: atTLS, answers: true, code: "ingress-secret", says: "NS/cert"},
	{name: "an Ingress with another host's certificate", objects: served + ingress(class, toWeb, tlsOfNS), then: []string{certificate("other.example", 90)}, ask: []string{"ingress", "in"}, from: "client", at: atTLS, answers: true, code: "ingress-certificate", says: "other.example"},
	{name: "an Ingress with a certificate that ends soon", objects: served + ingress(class, toWeb, tlsOfNS), then: []string{strings.Replace(expired, "-enddate 20250101000000Z", "-enddate $(date -u -d '+3 days' +%Y%m%d%H%M%SZ)", 1)}, ask: []string{"ingress", "in"}, from: "client", at: atTLS, answers: true, code: "certificate-ends", says: "ends in"},
	{name: "an Ingress with a certificate that has ended", objects: served + ingress(class, toWeb, tlsOfNS), then: []string{expired}, ask: []string{"ingress", "in"}, from: "client", at: atTLS, answers: true, code: "certificate-expired", says: "expired"},
	{name: "a Secret that is no certificate", objects: served + ingress(class, toWeb, tlsOfNS), then: []string{"kubectl create secret generic cert -n NS --from-literal=tls.crt=x --from-literal=tls.key=y"}, ask: []string{"ingress", "in"}, from: "client", at: atTLS, answers: true, code: "certificate-unreadable", says: "NS/cert"},
	{name: "a key that is another certificate's", objects: served + ingress(class, toWeb, tlsOfNS), then: []string{strings.Replace(certificate("NS.example", 90), "&& kubectl create", "&& openssl ecparam -name prime256v1 -genkey -noout -out $d/k2 && c=$(base64 -w0 $d/c) k=$(base64 -w0 $d/k2) && echo '{\"apiVersion\":\"v1\",\"kind\":\"Secret\",\"metadata\":{\"name\":\"cert\",\"namespace\":\"NS\"},\"data\":{\"tls.crt\":\"'$c'\",\"tls.key\":\"'$k'\"}}' | kubectl apply -f - ; true || kubectl create", 1)}, ask: []string{"ingress", "in"}, from: "client", at: atTLS, answers: true, code: "certificate-unreadable", says: "NS/cert"},
	{name: "an Ingress's path that is none", objects: served + ingress(class, strings.Replace(toWeb, "path: /,", "path: /x,", 1), "defaultBackend: {service: {name: wbe, port: {number: 80}}},"), ask: []string{"ingress", "in"}, at: "none", code: "ingress-no-service", says: "wbe"},
}

// expired makes a Secret with a certificate that has ended, with a small CA, as openssl req only counts days from now.
const expired = `d=$(mktemp -d) && cd $d && openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout k -out r -subj /CN=NS.example 2>/dev/null && touch db && echo 01 > serial && printf '[ca]\ndefault_ca=d\n[d]\ndatabase=db\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\nx509_extensions=e\n[p]\ncommonName=supplied\n[e]\nsubjectAltName=DNS:NS.example\n' > conf && openssl ca -config conf -selfsign -keyfile k -in r -out c -batch -notext -startdate 20240101000000Z -enddate 20250101000000Z 2>/dev/null && kubectl create secret tls cert -n NS --cert=c --key=k`
