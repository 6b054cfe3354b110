package ingress

import (
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry/registrytest"
)

func service(name string, port networkingv1.ServiceBackendPort) networkingv1.IngressBackend {
	return networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: name, Port: port}}
}

func rule(host string, paths ...networkingv1.HTTPIngressPath) networkingv1.IngressRule {
	return networkingv1.IngressRule{Host: host, IngressRuleValue: networkingv1.IngressRuleValue{
		HTTP: &networkingv1.HTTPIngressRuleValue{Paths: paths},
	}}
}

func path(typ networkingv1.PathType, value string) networkingv1.HTTPIngressPath {
	return networkingv1.HTTPIngressPath{Path: value, PathType: &typ, Backend: service("web", networkingv1.ServiceBackendPort{Number: 80})}
}

func ingress(change ...func(*networkingv1.Ingress)) *networkingv1.Ingress {
	backend := service("web", networkingv1.ServiceBackendPort{Number: 80})
	ing := &networkingv1.Ingress{
		ObjectMeta: metav1.ObjectMeta{Name: "i", Namespace: "ns", ResourceVersion: "1"},
		Spec:       networkingv1.IngressSpec{DefaultBackend: &backend},
	}
	for _, c := range change {
		c(ing)
	}
	return ing
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	for _, c := range []struct {
		name   string
		change func(*networkingv1.Ingress)
		want   []string
	}{
		{"default backend alone", func(*networkingv1.Ingress) {}, nil},
		{"neither rules nor backend", func(i *networkingv1.Ingress) { i.Spec.DefaultBackend = nil }, []string{"spec FieldValueInvalid"}},
		{"class", func(i *networkingv1.Ingress) { i.Spec.IngressClassName = new("a.b") }, nil},
		{"bad class", func(i *networkingv1.Ingress) { i.Spec.IngressClassName = new("A") }, []string{"spec.ingressClassName FieldValueInvalid"}},
		{"class said twice alike", func(i *networkingv1.Ingress) {
			i.Annotations = map[string]string{classAnnotation: "a"}
			i.Spec.IngressClassName = new("a")
		}, nil},
		{"class said twice differently", func(i *networkingv1.Ingress) {
			i.Annotations = map[string]string{classAnnotation: "a"}
			i.Spec.IngressClassName = new("b")
		}, []string{"annotations.kubernetes.io/ingress.class FieldValueInvalid"}},
		{"tls", func(i *networkingv1.Ingress) {
			i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"a.b", "*.a.b", "1.2.3.4"}, SecretName: "s"}, {}}
		}, nil},
		{"bad tls", func(i *networkingv1.Ingress) {
			i.Spec.TLS = []networkingv1.IngressTLS{{Hosts: []string{"A", "a.*.b"}, SecretName: "S"}}
		}, []string{
			"spec.tls[0].hosts[0] FieldValueInvalid", "spec.tls[0].hosts[1] FieldValueInvalid", "spec.tls[0].secretName FieldValueInvalid",
		}},
		{"hosts", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{{Host: "a.b"}, {Host: "*.a.b"}, {}}
		}, nil},
		{"bad hosts", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{{Host: "a.b:80"}, {Host: "*"}, {Host: "1.2.3.4"}, {Host: "::1"}}
		}, []string{
			"spec.rules[0].host FieldValueInvalid", "spec.rules[1].host FieldValueInvalid", "spec.rules[2].host FieldValueInvalid",
			"spec.rules[3].host FieldValueInvalid", "spec.rules[3].host FieldValueInvalid",
		}},
		{"a rule without paths", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{rule("")}
		}, []string{"spec.rules[0].http.paths FieldValueRequired"}},
		{"paths", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{rule("", path("Exact", "/a"), path("Prefix", "/"), path("ImplementationSpecific", ""),
				path("ImplementationSpecific", "/a//b/.."))}
		}, nil},
		{"bad paths", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{rule("", path("Exact", ""), path("Prefix", "a"), path("ImplementationSpecific", "a"),
				path("prefix", "/"), path("Exact", "/a//b/.."), path("Exact", "/%2f"))}
		}, []string{
			"spec.rules[0].http.paths[0].path FieldValueInvalid",
			"spec.rules[0].http.paths[1].path FieldValueInvalid",
			"spec.rules[0].http.paths[2].path FieldValueInvalid",
			"spec.rules[0].http.paths[3].pathType FieldValueNotSupported",
			"spec.rules[0].http.paths[4].path FieldValueInvalid",
			"spec.rules[0].http.paths[4].path FieldValueInvalid",
			"spec.rules[0].http.paths[5].path FieldValueInvalid",
		}},
		{"a path without a type is not looked at further", func(i *networkingv1.Ingress) {
			i.Spec.Rules = []networkingv1.IngressRule{rule("", networkingv1.HTTPIngressPath{Path: "x"})}
		}, []string{"spec.rules[0].http.paths[0].pathType FieldValueRequired"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Create(t, ingress(c.change)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestBackends(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	type port = networkingv1.ServiceBackendPort
	for _, c := range []struct {
		name    string
		backend networkingv1.IngressBackend
		want    []string
	}{
		{"by number", service("web", port{Number: 65535}), nil},
		{"by name", service("1-web", port{Name: "http"}), nil},
		{"nothing", networkingv1.IngressBackend{}, []string{"spec.defaultBackend FieldValueInvalid"}},
		{"no name and no port", service("", port{}), []string{"spec.defaultBackend FieldValueRequired", "spec.defaultBackend.service.name FieldValueRequired"}},
		{"bad name", service("a.b", port{Number: 1}), []string{"spec.defaultBackend.service.name FieldValueInvalid"}},
		{"port both ways", service("web", port{Name: "http", Number: 1}), []string{"spec.defaultBackend FieldValueInvalid"}},
		{"bad port name", service("web", port{Name: "80"}), []string{"spec.defaultBackend.service.port.name FieldValueInvalid"}},
		{"bad port number", service("web", port{Number: 65536}), []string{"spec.defaultBackend.service.port.number FieldValueInvalid"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := rules.Create(t, ingress(func(i *networkingv1.Ingress) { i.Spec.DefaultBackend = &c.backend }))
			if !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestPrepare(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	reachable := func(i *networkingv1.Ingress) {
		i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{IP: "1.2.3.4"}}
	}
	created := ingress(reachable)
	if got := rules.Create(t, created); got != nil || created.Generation != 1 || created.Status.LoadBalancer.Ingress != nil {
		t.Errorf("created with generation %d and status %v (%q)", created.Generation, created.Status, got)
	}
	old := ingress(reachable, func(i *networkingv1.Ingress) { i.Generation = 3 })
	same := ingress()
	if got := rules.Update(t, same, old); got != nil || same.Generation != 3 || len(same.Status.LoadBalancer.Ingress) != 1 {
		t.Errorf("an update that changes nothing gave generation %d and status %v (%q)", same.Generation, same.Status, got)
	}
	changed := ingress(func(i *networkingv1.Ingress) { i.Spec.IngressClassName = new("x") })
	if got := rules.Update(t, changed, old); got != nil || changed.Generation != 4 {
		t.Errorf("a changed spec gave generation %d (%q)", changed.Generation, got)
	}
}

// An update may leave alone what an older server let in, and must not judge the annotation at all.
func TestUpdateIsLenient(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	badSecret := func(i *networkingv1.Ingress) { i.Spec.TLS = []networkingv1.IngressTLS{{SecretName: "S"}} }
	badWildcard := func(i *networkingv1.Ingress) { i.Spec.Rules = []networkingv1.IngressRule{rule("*.a.b")} }
	badRule := func(i *networkingv1.Ingress) { i.Spec.Rules = []networkingv1.IngressRule{rule("a.b")} }
	twoClasses := func(i *networkingv1.Ingress) {
		i.Annotations = map[string]string{classAnnotation: "a"}
		i.Spec.IngressClassName = new("b")
	}
	for _, c := range []struct {
		name     string
		old, now func(*networkingv1.Ingress)
		want     []string
	}{
		{"a bad secret name kept", badSecret, badSecret, nil},
		{"a bad secret name added", badWildcard, badSecret, []string{"spec.tls[0].secretName FieldValueInvalid"}},
		{"a bad wildcard rule kept", badWildcard, badWildcard, nil},
		{"a bad wildcard rule added", badSecret, badWildcard, []string{"spec.rules[0].http.paths FieldValueRequired"}},
		{"a bad rule kept", badRule, badRule, []string{"spec.rules[0].http.paths FieldValueRequired"}},
		{"two classes", func(*networkingv1.Ingress) {}, twoClasses, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Update(t, ingress(c.now), ingress(c.old)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestWarnings(t *testing.T) {
	annotated := ingress(func(i *networkingv1.Ingress) { i.Annotations = map[string]string{classAnnotation: "a"} })
	both := annotated.DeepCopy()
	both.Spec.IngressClassName = new("a")
	for _, c := range []struct {
		name     string
		now, old *networkingv1.Ingress
		want     int
	}{
		{"annotation alone", annotated, nil, 1}, {"both", both, nil, 0}, {"neither", ingress(), nil, 0}, {"on update", annotated, ingress(), 0},
	} {
		if got := warnings(t.Context(), c.now, c.old); len(got) != c.want {
			t.Errorf("%s: warned %q", c.name, got)
		}
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), networkingv1.AddToScheme)
	full := ingress(func(i *networkingv1.Ingress) {
		i.Spec.IngressClassName = new("nginx")
		i.Spec.TLS = []networkingv1.IngressTLS{{}}
		i.Spec.Rules = []networkingv1.IngressRule{{Host: "a"}, {}, {Host: "b"}, {Host: "c"}, {Host: "d"}}
		i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{
			{Hostname: "lb.example"}, {IP: "2.2.2.2", Hostname: "x"}, {IP: "1.1.1.1"}, {IP: "1.1.1.1"}, {},
		}
	})
	for obj, want := range map[*networkingv1.Ingress]map[string]any{
		ingress(): {"Name": "i", "Class": "<none>", "Hosts": "*", "Address": "", "Ports": "80"},
		full: {
			"Name": "i", "Class": "nginx", "Hosts": "a,b,c + 2 more...", "Address": "1.1.1.1,2.2.2.2,lb.example", "Ports": "80, 443",
		},
	} {
		row := rules.Row(t, obj)
		for col, cell := range want {
			if row[col] != cell {
				t.Errorf("%s is %v, want %v", col, row[col], cell)
			}
		}
	}
}
