package compile

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/lb/capture"
	"portal/internal/lb/spec"
)

type capturePort = capture.Port

// withEntry adds the Service whose address Ingresses share.
func (w *world) withEntry() {
	w.Services = append(w.Services, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "portal-ingress"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}, {Port: 443}}},
		Status:     corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.80"}}}},
	})
}

// ingress adds one, later than those before, with routes HOST PATH TYPE SERVICE:PORT.
func (w *world) ingress(name string, routes ...string) *networkingv1.Ingress {
	in := &networkingv1.Ingress{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(1000+len(w.Ingresses)), 0))},
		Spec:       networkingv1.IngressSpec{IngressClassName: ptr.To(ClassName)},
	}
	for _, text := range routes {
		f := strings.Fields(text)
		service, port, _ := strings.Cut(f[3], ":")
		backend := networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: service}}
		if _, err := fmt.Sscan(port, &backend.Service.Port.Number); err != nil {
			backend.Service.Port.Name = port
		}
		host := f[0]
		if host == "-" {
			host = ""
		}
		in.Spec.Rules = append(in.Spec.Rules, networkingv1.IngressRule{Host: host, IngressRuleValue: networkingv1.IngressRuleValue{HTTP: &networkingv1.HTTPIngressRuleValue{
			Paths: []networkingv1.HTTPIngressPath{{Path: f[1], PathType: ptr.To(networkingv1.PathType(f[2])), Backend: backend}},
		}}})
	}
	w.Ingresses = append(w.Ingresses, in)
	return in
}

// routesOf are a port's routes, in words.
func routesOf(out Output, port uint16) (list []string) {
	for _, l := range out.Config.Listeners {
		if l.Address.Port() != port {
			continue
		}
		for _, r := range l.Routes {
			to := r.Pool
			switch {
			case r.Redirect != nil:
				to = fmt.Sprint(r.Redirect.Scheme, " ", r.Redirect.Status)
			case r.Status != 0:
				to = fmt.Sprint(r.Status)
			}
			list = append(list, fmt.Sprintf("%s%s %s → %s", r.Host, r.Path, r.Match, to))
		}
	}
	return list
}

func expectRoutes(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestIngressRoutes: hosts, paths and backends become routes; what can't be used is answered with 503 and said.
func TestIngressRoutes(t *testing.T) {
	w := newWorld()
	w.service("web", nil)
	w.withEntry()
	in := w.ingress("one", "Shop.example /cart Exact web:http", "shop.example / Prefix web:443", "*.example /x ImplementationSpecific web:80", "- / Prefix web:81", "gone.example / Prefix none:80")
	in.Spec.DefaultBackend = &networkingv1.IngressBackend{Resource: &corev1.TypedLocalObjectReference{Kind: "Bucket", Name: "static"}}
	out := w.compile(t)
	expectRoutes(t, "routes", routesOf(out, 80),
		"shop.example/cart Exact → ingress/ns/web/80", "shop.example/ Prefix → ingress/ns/web/443", "*.example/x Prefix → ingress/ns/web/80",
		"/ Prefix → 503", "gone.example/ Prefix → 503", " Prefix → 503")
	if got := reasons(out); got != "BackendNotFound, BackendNotFound, BackendUnsupported" {
		t.Errorf("problems: %+v", out.Problems)
	}
	if routesOf(out, 443) != nil || !slices.Contains(out.Capture.Ports, capturePort{Address: netip.MustParseAddrPort("192.0.2.80:443"), Strict: true}) {
		t.Errorf("without a certificate, port 443 is %v, captured: %v", routesOf(out, 443), out.Capture.Ports)
	}
}

// TestIngressSources: the entry's source ranges hold, which the proxy can't enforce on what is led to the balancing process.
func TestIngressSources(t *testing.T) {
	w := newWorld()
	w.service("web", nil)
	w.withEntry()
	w.Services[1].Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8"}
	w.ingress("one", "shop.example / Prefix web:80")
	if out := w.compile(t); len(out.Capture.Filters) != 2 || len(out.Capture.Filters[0].Allowed) != 1 {
		t.Errorf("%+v", out.Capture.Filters)
	}
}

// TestIngressTLS: hosts with TLS are led to HTTPS, unless somebody says otherwise, and also while their certificate is missing.
func TestIngressTLS(t *testing.T) {
	w := newWorld()
	w.service("web", nil)
	w.withEntry()
	w.secrets["ns/cert"], w.secrets["ns/none"] = Secret{Known: true, Data: keyPair(t, "shop.example")}, Secret{Known: true}
	w.ingress("one", "shop.example / Prefix web:80", "plain.example / Prefix web:80").Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"shop.example"}, SecretName: "cert"}}
	both := w.ingress("two", "both.example / Prefix web:80")
	both.Spec.TLS, both.Annotations = []networkingv1.IngressTLS{{SecretName: "cert"}}, map[string]string{RedirectAnnotation: "false"}
	w.ingress("three", "late.example / Prefix web:80").Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"late.example"}, SecretName: "none"}}
	w.ingress("four", "a.wild.example / Prefix web:80").Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"*.wild.example"}, SecretName: "cert"}}
	out := w.compile(t)
	expectRoutes(t, "without TLS", routesOf(out, 80),
		"shop.example/ Prefix → https 308", "plain.example/ Prefix → ingress/ns/web/80", "both.example/ Prefix → ingress/ns/web/80", "late.example/ Prefix → https 308", "a.wild.example/ Prefix → https 308")
	expectRoutes(t, "with TLS", routesOf(out, 443),
		"shop.example/ Prefix → ingress/ns/web/80", "plain.example/ Prefix → ingress/ns/web/80", "both.example/ Prefix → ingress/ns/web/80", "late.example/ Prefix → ingress/ns/web/80", "a.wild.example/ Prefix → ingress/ns/web/80")
	if got := reasons(out); got != CertificateUnavailable {
		t.Errorf("problems: %+v", out.Problems)
	}
	if len(out.Config.Certificates) != 1 || len(out.Secrets) != 2 {
		t.Errorf("%v, %v", out.Config.Certificates, out.Secrets)
	}
}

// TestIngressConflicts: of two with the same host and path the older has it, whatever the order of the list.
func TestIngressConflicts(t *testing.T) {
	w := newWorld()
	w.service("web", nil)
	w.withEntry()
	w.ingress("old", "shop.example / Prefix web:80")
	w.ingress("new", "shop.example / Prefix web:443", "shop.example / Exact web:443")
	slices.Reverse(w.Ingresses)
	out := w.compile(t)
	expectRoutes(t, "routes", routesOf(out, 80), "shop.example/ Prefix → ingress/ns/web/80", "shop.example/ Exact → ingress/ns/web/443")
	if len(out.Problems) != 1 || out.Problems[0].Reason != IngressConflict || out.Problems[0].Ingress.Name != "new" || !strings.Contains(out.Problems[0].Message, "ns/old") {
		t.Errorf("problems: %+v", out.Problems)
	}
}

// TestIngressSamePath: paths that no request can tell apart are one, in whatever way they are spelt. The newer Ingress hears that it is not served.
func TestIngressSamePath(t *testing.T) {
	for _, tc := range []struct{ old, new string }{
		{"shop.example /cart Prefix", "shop.example /cart/ Prefix"},
		{"shop.example /cart Prefix", "shop.example /c%61rt Prefix"},
		{"shop.example /cart Exact", "shop.example /c%61rt Exact"},
		{"- / Prefix", ""},
	} {
		w := newWorld()
		w.service("web", nil)
		w.withEntry()
		w.ingress("old", tc.old+" web:80")
		if tc.new != "" {
			w.ingress("new", tc.new+" web:443")
		} else {
			w.ingress("new").Spec.DefaultBackend = &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "web", Port: networkingv1.ServiceBackendPort{Number: 443}}}
		}
		out := w.compile(t)
		if routes := routesOf(out, 80); len(routes) != 1 {
			t.Errorf("%s and %s: routes %q", tc.old, tc.new, routes)
		}
		if len(out.Problems) != 1 || out.Problems[0].Reason != IngressConflict || out.Problems[0].Ingress.Name != "new" || !strings.Contains(out.Problems[0].Message, "ns/old") {
			t.Errorf("%s and %s: problems %+v", tc.old, tc.new, out.Problems)
		}
	}
	// Exact paths with and without a slash at their end are two.
	w := newWorld()
	w.service("web", nil)
	w.withEntry()
	w.ingress("old", "shop.example /cart Exact web:80")
	w.ingress("new", "shop.example /cart/ Exact web:443")
	if out := w.compile(t); len(out.Problems) != 0 || len(routesOf(out, 80)) != 2 {
		t.Errorf("problems %+v, routes %q", out.Problems, routesOf(out, 80))
	}
}

// TestIngressEndpointCA: certificates of an Ingress' endpoints are verified with the CA that their Service names. If it can't be had, they get nothing.
func TestIngressEndpointCA(t *testing.T) {
	for _, tc := range []struct{ secret, route, reasons string }{
		{"", "shop.example/ Prefix → ingress/ns/web/443", EndpointNotVerified},
		{"ca", "shop.example/ Prefix → ingress/ns/web/443", ""},
		{"none", "shop.example/ Prefix → 503", CertificateUnavailable},
		{"later", "shop.example/ Prefix → 503", ""},
	} {
		w := newWorld()
		svc := w.service("web", map[string]string{})
		svc.Spec.Type, svc.Status = corev1.ServiceTypeClusterIP, corev1.ServiceStatus{}
		svc.Spec.Ports[1].AppProtocol = ptr.To("https")
		if tc.secret != "" {
			svc.Annotations[spec.EndpointCAAnnotation] = tc.secret
		}
		ca := keyPair(t, "ca")[corev1.TLSCertKey]
		w.secrets["ns/ca"], w.secrets["ns/none"] = Secret{Known: true, Data: map[string][]byte{"ca.crt": ca}}, Secret{Known: true}
		w.withEntry()
		w.ingress("one", "shop.example / Prefix web:443")
		out := w.compile(t)
		expectRoutes(t, tc.secret, routesOf(out, 80), tc.route)
		if got := reasons(out); got != tc.reasons {
			t.Errorf("%q: problems: %+v", tc.secret, out.Problems)
		}
		if pool := out.Config.Pools["ingress/ns/web/443"]; tc.secret == "ca" && (pool.TLS == nil || !bytes.Equal(pool.TLS.CA, ca) || pool.TLS.ServerName != "web.ns.svc") {
			t.Errorf("pool %+v", pool)
		}
	}
}

// TestIngressExternalName: names are resolved and followed; an address is refused, and so is a name that leads inside.
func TestIngressExternalName(t *testing.T) {
	w := newWorld()
	w.withEntry()
	external := func(service, name string) {
		svc := w.service(service, nil)
		svc.Spec.Type, svc.Spec.ExternalName, svc.Status = corev1.ServiceTypeExternalName, name, corev1.ServiceStatus{}
	}
	external("there", "There.example.")
	external("ip", "192.0.2.7")
	external("inside", "localhost")
	external("unknown", "later.example")
	w.Resolve = func(name string) ([]netip.Addr, bool) {
		switch name {
		case "there.example":
			return []netip.Addr{netip.MustParseAddr("198.51.100.7")}, true
		case "localhost":
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, true
		}
		return nil, false
	}
	w.ingress("one", "a / Prefix there:8080", "b / Prefix ip:80", "c / Prefix inside:80", "d / Prefix unknown:80")
	out := w.compile(t)
	expectRoutes(t, "routes", routesOf(out, 80), "a/ Prefix → external/ns/there/8080", "b/ Prefix → 503", "c/ Prefix → 503", "d/ Prefix → external/ns/unknown/80")
	if got := reasons(out); got != "BackendUnsupported, BackendUnsupported" {
		t.Errorf("problems: %+v", out.Problems)
	}
	if e := out.Config.Pools["external/ns/there/8080"].Endpoints; len(e) != 1 || e[0].Address.String() != "198.51.100.7:8080" {
		t.Errorf("endpoints: %+v", e)
	}
	if !slices.Equal(out.Names, []string{"later.example", "localhost", "there.example"}) {
		t.Errorf("to be resolved: %v", out.Names)
	}
}

// TestIngressClasses: whose Ingresses are served.
func TestIngressClasses(t *testing.T) {
	class := func(name, controller string, byDefault bool) *networkingv1.IngressClass {
		return &networkingv1.IngressClass{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: fmt.Sprint(byDefault)}},
			Spec:       networkingv1.IngressClassSpec{Controller: controller},
		}
	}
	for _, c := range []struct {
		name    string
		classes []*networkingv1.IngressClass
		want    string
	}{
		{"no classes", nil, "portal annotated"},
		{"ours", []*networkingv1.IngressClass{class("portal", ClassController, false)}, "portal annotated"},
		{"ours by default", []*networkingv1.IngressClass{class("portal", ClassController, true)}, "portal annotated none"},
		{"another name", []*networkingv1.IngressClass{class("other", ClassController, false)}, "portal annotated other"},
		{"somebody else's", []*networkingv1.IngressClass{class("portal", "example.com/x", true)}, ""},
	} {
		w := newWorld()
		w.ingress("portal")
		annotated := w.ingress("annotated")
		annotated.Spec.IngressClassName, annotated.Annotations = nil, map[string]string{"kubernetes.io/ingress.class": "portal"}
		w.ingress("other").Spec.IngressClassName = ptr.To("other")
		w.ingress("none").Spec.IngressClassName = nil
		var got []string
		for _, in := range Served(w.Ingresses, c.classes) {
			got = append(got, in.Name)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %v, want %s", c.name, got, c.want)
		}
	}
}
