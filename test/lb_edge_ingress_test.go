package test

import (
	"bytes"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lab"
)

// ingress: many Services have one entry: hosts, wildcards, paths, the default backend, TLS by name, redirects, and clear words about what can't be.
func (e *edge) ingress(t *testing.T) {
	e.certificate(t, "shop-tls", "shop.example")
	e.certificate(t, "other-tls", "other.example")
	labKubectl(t, e.Lab, serviceManifest("shop", "ClusterIP", "web", "ports: [{name: web, port: 8080, targetPort: 9376}]")+serviceManifest("default", "ClusterIP", "secret", "ports: [{port: 443, targetPort: 9376, appProtocol: https}]")+`
---
apiVersion: v1
kind: Service
metadata: {name: ip}
spec: {type: ExternalName, externalName: 192.0.2.7}
---
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: portal, annotations: {ingressclass.kubernetes.io/is-default-class: "true"}}
spec: {controller: portal.dev/ingress}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: shop}
spec:
  ingressClassName: portal
  tls: [{hosts: [shop.example], secretName: shop-tls}]
  rules:
  - host: shop.example
    http: {paths: [{path: /header, pathType: Exact, backend: {service: {name: shop, port: {name: web}}}}]}
  - host: "*.plain.example"
    http:
      paths:
      - {path: /client, pathType: Prefix, backend: {service: {name: shop, port: {number: 8080}}}}
      - {path: /static, pathType: Prefix, backend: {resource: {apiGroup: example.com, kind: Bucket, name: static}}}
      - {path: /ip, pathType: Prefix, backend: {service: {name: ip, port: {number: 80}}}}
`, "apply")
	// Which is the older one is known to the second.
	eventually(t, lbLimit, "an older Ingress", func() string {
		in, err := e.API.NetworkingV1().Ingresses("default").Get(t.Context(), "shop", metav1.GetOptions{})
		if err != nil || time.Since(in.CreationTimestamp.Time) < time.Second {
			return "not yet"
		}
		return ""
	})
	labKubectl(t, e.Lab, `
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: later}
spec:
  defaultBackend: {service: {name: default, port: {number: 443}}}
  tls: [{hosts: [other.example], secretName: other-tls}]
  rules:
  - host: shop.example
    http: {paths: [{path: /header, pathType: Exact, backend: {service: {name: default, port: {number: 443}}}}]}
`, "apply")
	var a string
	eventually(t, lbLimit, "the entry's address", func() string {
		in, err := e.API.NetworkingV1().Ingresses("default").Get(t.Context(), "later", metav1.GetOptions{})
		if err != nil || len(in.Status.LoadBalancer.Ingress) == 0 {
			return "none"
		}
		a = in.Status.LoadBalancer.Ingress[0].IP
		return ""
	})
	if !netip.MustParsePrefix("192.168.100.192/26").Contains(netip.MustParseAddr(a)) {
		t.Errorf("the entry is %s", a)
	}
	at := func(host, port string) string { return host + ":" + port + ":" + a }
	get := func(what string, wrong func(string, error) string, args ...string) {
		t.Helper()
		e.until(t, what, wrong, args...)
	}
	get("a redirect to HTTPS", has("308", "https://shop.example/header"), "-i", "--resolve", at("shop.example", "80"), "http://shop.example/header")
	get("the path with TLS", has("X-Forwarded-Proto: https\n", "Host: shop.example"), "-k", "--resolve", at("shop.example", "443"), "https://shop.example/header")
	get("the certificate of the name", has("CN=shop.example"), "-k", "-v", "--stderr", "-", "--resolve", at("shop.example", "443"), "https://shop.example/header")
	get("the certificate of the other name", has("CN=other.example"), "-k", "-v", "--stderr", "-", "--resolve", at("other.example", "443"), "https://other.example/")
	get("a wildcard and a prefix", has("10.244."), "--resolve", at("a.plain.example", "80"), "http://a.plain.example/client")
	get("the default backend, for a path that no rule has", has("secret-"), "--resolve", at("a.plain.example", "80"), "http://a.plain.example/")
	get("the default backend, for two labels", has("secret-"), "--resolve", at("a.b.plain.example", "80"), "http://a.b.plain.example/")
	get("no resource backends", has("503"), "-i", "--resolve", at("a.plain.example", "80"), "http://a.plain.example/static/x")
	get("no address as a name", has("503"), "-i", "--resolve", at("a.plain.example", "80"), "http://a.plain.example/ip")
	for name, reasons := range map[string][]string{"shop": {"BackendUnsupported: ", "Bucket static", "IP address"}, "later": {"IngressConflict: ", "default/shop"}} {
		eventually(t, lbLimit, "the Events of "+name, func() string {
			list, err := e.API.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.kind=Ingress,involvedObject.name=" + name})
			if err != nil {
				return err.Error()
			}
			var all strings.Builder
			for _, event := range list.Items {
				all.WriteString(event.Reason + ": " + event.Message + "\n")
			}
			for _, part := range reasons {
				if !strings.Contains(all.String(), part) {
					return all.String() + " without " + part
				}
			}
			return ""
		})
	}
	labKubectl(t, e.Lab, "", "delete", "ingress,service", "shop", "later", "default", "ip", "--ignore-not-found", "--timeout=60s")
}

// accessLog: the requests of the Service with access logs are in the bucket when the balancing process ends, under the prefix and in the format of ELB.
func (e *edge) accessLog(t *testing.T) {
	for _, node := range e.NodeNames() {
		on(t, e.Node(node), "curl", "-sS", "--max-time", "20", "-X", "POST", "--unix-socket", filepath.Join(lab.NodeDir(e.Dir, node), "balancing", "control"), "http://worker/drain?timeout=1s")
	}
	eventually(t, lbLimit, "a line of the access log", func() string {
		var seen []string
		found := false
		_ = filepath.WalkDir(e.logs, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return nil
			}
			data, _ := os.ReadFile(path)
			seen = append(seen, path+": "+string(data))
			found = found || strings.HasPrefix(path, filepath.Join(e.logs, "my-bucket-prefix/prod/AWSLogs")) && bytes.Contains(data, []byte(" 203.0.113.10:"))
			return nil
		})
		if !found {
			return strings.Join(seen, "\n")
		}
		return ""
	})
}
