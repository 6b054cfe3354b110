package compile

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
)

// withTLS adds an Ingress of a namespace, with routes for the hosts, and tls entries SECRET HOST….
func (w *world) withTLS(t *testing.T, namespace, name, hosts string, entries ...string) *networkingv1.Ingress {
	t.Helper()
	var routes []string
	for _, host := range strings.Fields(hosts) {
		routes = append(routes, host+" /"+name+" Prefix web:80")
	}
	in := w.ingress(name, routes...)
	in.Namespace = namespace
	for _, entry := range entries {
		f := strings.Fields(entry)
		in.Spec.TLS = append(in.Spec.TLS, networkingv1.IngressTLS{SecretName: f[0], Hosts: f[1:]})
		if key := namespace + "/" + f[0]; w.secrets[key].Data == nil {
			w.secrets[key] = Secret{Known: true, Data: keyPair(t, "app.example.com")} // the names in it do not matter
		}
	}
	return in
}

// shown is which certificates are shown for which names, in words; "" is for all others.
func shown(out Output) string {
	var list []string
	for _, l := range out.Config.Listeners {
		if l.TLS == nil {
			continue
		}
		list = append(list, "else "+l.TLS.Certificates[0])
		for _, name := range slices.Sorted(maps.Keys(l.TLS.Names)) {
			list = append(list, name+" "+strings.Join(l.TLS.Names[name], "+"))
		}
		for _, name := range l.TLS.Certificates {
			if out.Config.Certificates[name] == nil {
				list = append(list, "no "+name)
			}
		}
	}
	return strings.Join(list, ", ")
}

// TestIngressCertificates: which certificate is shown for a server name is up to the Ingress that has the host, and never to the names in other
// people's certificates.
func TestIngressCertificates(t *testing.T) {
	for _, c := range []struct {
		name  string
		make  func(t *testing.T, w *world)
		shown string
		// conflicts are the Ingresses with an Event IngressConflict, and a part of its message.
		conflicts []string
	}{
		{"a name in somebody else's certificate", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com", "wild app.example.com")
			w.withTLS(t, "b", "b", "b.example.com", "evil b.example.com")
		}, "else a/wild, app.example.com a/wild, b.example.com b/evil", nil},
		{"two name a host", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com", "cert App.Example.com")
			w.withTLS(t, "b", "b", "app.example.com", "evil app.example.com")
		}, "else a/cert, app.example.com a/cert", []string{"b: evil is not shown for app.example.com, which the Ingress a/a serves"}},
		{"the one with the host has only a wildcard", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com", "wild *.example.com")
			w.withTLS(t, "b", "b", "b.example.com", "evil app.example.com")
		}, "else a/wild, *.example.com a/wild", []string{"b: app.example.com, which the Ingress a/a serves"}},
		{"the host is one of somebody's wildcard", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "*.example.com", "wild *.example.com")
			w.withTLS(t, "b", "b", "b.example.org", "evil app.example.com b.example.org")
		}, "else a/wild, *.example.com a/wild, b.example.org b/evil", []string{"b: app.example.com, which the Ingress a/a serves"}},
		{"a host below somebody's wildcard with a route of its own", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "*.example.com", "wild *.example.com")
			w.withTLS(t, "b", "b", "app.example.com", "cert app.example.com")
		}, "else a/wild, *.example.com a/wild, app.example.com b/cert", nil},
		{"the one with the host has no certificate", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com")
			w.withTLS(t, "b", "b", "app.example.com b.example.com", "evil app.example.com", "cert b.example.com")
		}, "else b/cert, b.example.com b/cert", []string{"b: app.example.com, which the Ingress a/a serves"}},
		{"an older one names the host and has no route for it", func(t *testing.T, w *world) {
			w.withTLS(t, "b", "b", "b.example.com", "evil app.example.com b.example.com")
			w.withTLS(t, "a", "a", "app.example.com", "cert app.example.com")
		}, "else b/evil, app.example.com a/cert, b.example.com b/evil", []string{"b: app.example.com, which the Ingress a/a serves"}},
		{"nobody has a route", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "-", "cert app.example.com")
			w.withTLS(t, "b", "b", "-", "evil app.example.com")
		}, "else a/cert, app.example.com a/cert", []string{"b: the older Ingress a/a has another one"}},
		{"two Ingresses of a namespace share a host", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com")
			w.withTLS(t, "a", "b", "app.example.com", "cert app.example.com")
			w.withTLS(t, "a", "c", "app.example.com", "cert app.example.com")
			w.withTLS(t, "a", "d", "app.example.com", "other app.example.com")
		}, "else a/cert, app.example.com a/cert", []string{"d: the older Ingress a/b has another one"}},
		{"one for each kind of key", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com", "rsa app.example.com", "ecdsa app.example.com")
		}, "else a/rsa, app.example.com a/rsa+a/ecdsa", nil},
		{"an entry without hosts", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com *.example.org", "cert")
			w.withTLS(t, "b", "b", "b.example.com", "own b.example.com")
		}, "else a/cert, *.example.org a/cert, app.example.com a/cert, b.example.com b/own", nil},
		{"the default backend's certificate is for all other names", func(t *testing.T, w *world) {
			w.withTLS(t, "a", "a", "app.example.com", "cert app.example.com")
			for _, name := range []string{"b", "c"} {
				in := w.withTLS(t, name, name, "", "rest")
				in.Spec.DefaultBackend = &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "web", Port: networkingv1.ServiceBackendPort{Number: 80}}}
			}
		}, "else b/rest, app.example.com a/cert", []string{"c: served by the older Ingress b/b", "c: all other hosts, which the Ingress b/b serves"}},
		{"a missing Secret", func(t *testing.T, w *world) {
			w.secrets["a/none"] = Secret{Known: true}
			w.withTLS(t, "a", "a", "app.example.com").Spec.TLS = []networkingv1.IngressTLS{{SecretName: "none", Hosts: []string{"app.example.com"}}}
			w.withTLS(t, "b", "b", "b.example.com", "evil app.example.com", "own b.example.com")
			w.withTLS(t, "a", "c", "c.example.com", "good app.example.com")
		}, "else b/own, app.example.com a/good, b.example.com b/own", []string{"b: app.example.com, which the Ingress a/a serves"}},
		{"a Secret that is not known yet", func(t *testing.T, w *world) {
			w.secrets["a/later"] = Secret{}
			w.withTLS(t, "a", "a", "-").Spec.TLS = []networkingv1.IngressTLS{{SecretName: "later", Hosts: []string{"app.example.com"}}}
			w.withTLS(t, "b", "b", "b.example.com", "evil app.example.com", "own b.example.com")
		}, "else b/own, b.example.com b/own", []string{"b: the older Ingress a/a has another one"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.service("web", nil)
			w.withEntry()
			c.make(t, w)
			slices.Reverse(w.Ingresses)
			out := w.compile(t)
			if got := shown(out); got != c.shown {
				t.Errorf("shown:\n%s\nwant\n%s", got, c.shown)
			}
			var conflicts []string
			for _, p := range out.Problems {
				if p.Reason == IngressConflict {
					conflicts = append(conflicts, fmt.Sprintf("%s: %s", p.Ingress.Name, p.Message))
				}
			}
			if !slices.EqualFunc(conflicts, c.conflicts, func(got, want string) bool {
				who, part, _ := strings.Cut(want, ": ")
				return strings.HasPrefix(got, who+": ") && strings.Contains(got, part)
			}) {
				t.Errorf("conflicts:\n%s\nwant\n%s", strings.Join(conflicts, "\n"), strings.Join(c.conflicts, "\n"))
			}
		})
	}
}
