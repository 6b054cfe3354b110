package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/lb/compile"
	"portal/internal/reports"
)

// checkIngresses looks at what Ingresses refer to.
func checkIngresses(v *View) (out []Finding) {
	for i := range v.Ingresses {
		in := &v.Ingresses[i]
		out = append(out, v.ingressClass(in)...)
		for _, b := range backends(in) {
			out = append(out, v.backend(in, b)...)
		}
		for j, t := range in.Spec.TLS {
			out = append(out, v.ingressTLS(in, j, t)...)
		}
	}
	return out
}

func ingressRef(in *networkingv1.Ingress) Ref { return Ref{"Ingress", in.Namespace, in.Name} }

// ingressBackend is a Service that an Ingress leads to, and the field that says so.
type ingressBackend struct {
	*networkingv1.IngressServiceBackend
	field, path string
}

func backends(in *networkingv1.Ingress) (out []ingressBackend) {
	if b := in.Spec.DefaultBackend; b != nil && b.Service != nil {
		out = append(out, ingressBackend{b.Service, "spec.defaultBackend.service", "/spec/defaultBackend/service"})
	}
	for i := range in.Spec.Rules {
		if in.Spec.Rules[i].HTTP == nil {
			continue
		}
		for j := range in.Spec.Rules[i].HTTP.Paths {
			if b := in.Spec.Rules[i].HTTP.Paths[j].Backend.Service; b != nil {
				out = append(out, ingressBackend{b, fmt.Sprintf("spec.rules[%d].http.paths[%d].backend.service", i, j), fmt.Sprintf("/spec/rules/%d/http/paths/%d/backend/service", i, j)})
			}
		}
	}
	return out
}

// servedHere says whether an Ingress is one for Portal's load balancers, which need no IngressClass object.
func (v *View) servedHere(in *networkingv1.Ingress) bool {
	classes := make([]*networkingv1.IngressClass, len(v.IngressClasses))
	for i := range v.IngressClasses {
		classes[i] = &v.IngressClasses[i]
	}
	return len(compile.Served([]*networkingv1.Ingress{in}, classes)) > 0
}

func (v *View) ingressClass(in *networkingv1.Ingress) []Finding {
	if !v.sees("ingressclasses") || v.servedHere(in) {
		return nil
	}
	f := Finding{Code: "ingress-class", Severity: Broken, Sure: Certain, Object: ingressRef(in), Field: "spec.ingressClassName"}
	var names []string
	for i := range v.IngressClasses {
		names = append(names, v.IngressClasses[i].Name)
	}
	if name := in.Spec.IngressClassName; name != nil {
		if slices.Contains(names, *name) {
			return nil
		}
		f.Verdict = fmt.Sprintf("%s asks for the IngressClass %q, which does not exist, so nobody serves it", f.Object, *name)
	} else {
		if in.Annotations["kubernetes.io/ingress.class"] != "" || len(in.Status.LoadBalancer.Ingress) > 0 {
			return nil
		}
		if slices.ContainsFunc(v.IngressClasses, func(c networkingv1.IngressClass) bool {
			return c.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true"
		}) {
			return nil
		}
		f.Verdict = fmt.Sprintf("%s names no IngressClass, and none is the default, so nobody serves it", f.Object)
	}
	if len(names) > 0 {
		f.Evidence = []string{"IngressClasses: " + some(names)}
		f.Fix = []string{mergePatch(f.Object, map[string]any{"spec": map[string]any{"ingressClassName": names[0]}})}
	} else {
		f.Evidence = []string{"there is no IngressClass"}
		if slices.ContainsFunc(v.Parts, func(r reports.Report) bool { return r.Part == reports.LB }) {
			f.Evidence[0] += " object; Portal's load balancers serve the class " + compile.ClassName + " without one"
			f.Fix = []string{mergePatch(f.Object, map[string]any{"spec": map[string]any{"ingressClassName": compile.ClassName}})}
		}
	}
	return []Finding{f}
}

func (v *View) backend(in *networkingv1.Ingress, b ingressBackend) []Finding {
	f := Finding{Severity: Broken, Sure: Certain, Object: ingressRef(in), Field: b.field}
	s := v.Service(in.Namespace, b.Name)
	if s == nil {
		if !v.sees("services") {
			return nil
		}
		f.Code = "ingress-no-service"
		f.Verdict = fmt.Sprintf("%s leads to the Service %s, which does not exist in its namespace", f.Object, b.Name)
		if other := v.similar(Key{in.Namespace, b.Name}); other != nil {
			f.Verdict += "; there is " + other.ref().String()
			if other.Namespace == in.Namespace {
				f.Fix = []string{jsonPatch(f.Object, operation{"replace", b.path + "/name", other.Name})}
			}
		}
		return []Finding{f}
	}
	var have []string
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if b.Port.Name != "" && p.Name == b.Port.Name || b.Port.Name == "" && p.Port == b.Port.Number {
			return nil
		}
		have = append(have, strings.TrimSpace(fmt.Sprintf("%d %s", p.Port, p.Name)))
	}
	asked := b.Port.Name
	if asked == "" {
		asked = fmt.Sprint(b.Port.Number)
	}
	f.Code, f.Affects = "ingress-port", []Ref{s.ref()}
	f.Verdict = fmt.Sprintf("%s leads to port %s of %s, which has only: %s", f.Object, asked, s.ref(), some(have))
	if len(s.Spec.Ports) > 0 {
		f.Fix = []string{jsonPatch(f.Object, operation{"replace", b.path + "/port", map[string]any{"number": s.Spec.Ports[0].Port}})}
	}
	return []Finding{f}
}

func (v *View) ingressTLS(in *networkingv1.Ingress, index int, t networkingv1.IngressTLS) []Finding {
	if t.SecretName == "" {
		return nil
	}
	r := Ref{"Secret", in.Namespace, t.SecretName}
	f := Finding{Severity: Broken, Sure: Certain, Object: ingressRef(in), Affects: []Ref{r}, Field: fmt.Sprintf("spec.tls[%d].secretName", index)}
	if exists, known := v.Secrets[r]; known && !exists {
		f.Code = "ingress-secret"
		f.Verdict = fmt.Sprintf("%s has its certificate in %s, which does not exist", f.Object, r)
		f.Fix = []string{kubectl(in.Namespace, "create secret tls %s --cert=FILE --key=FILE", t.SecretName)}
		return []Finding{f}
	}
	for i := range v.Certificates {
		c := &v.Certificates[i]
		if c.Object != r || c.Err != "" {
			continue
		}
		for _, host := range t.Hosts {
			if !covers(c.Names, host) {
				f.Code = "ingress-certificate"
				f.Verdict = fmt.Sprintf("%s serves %s with the certificate in %s, which is for %s", f.Object, host, r, some(c.Names))
				return []Finding{f}
			}
		}
	}
	return nil
}

// covers says whether a certificate is for a host: by name, or by a wildcard for one label.
func covers(names []string, host string) bool {
	host = strings.ToLower(host)
	return slices.ContainsFunc(names, func(name string) bool {
		name = strings.ToLower(name)
		if name == host {
			return true
		}
		if below, ok := strings.CutPrefix(name, "*."); ok {
			_, rest, found := strings.Cut(host, ".")
			return found && rest == below
		}
		a, err1 := netip.ParseAddr(name)
		b, err2 := netip.ParseAddr(host)
		return err1 == nil && err2 == nil && a == b
	})
}

// soon is when a certificate's end is worth a word.
const soon = 14 * 24 * time.Hour

// checkCertificates looks at those that could be read.
func checkCertificates(v *View) (out []Finding) {
	for i := range v.Certificates {
		c := &v.Certificates[i]
		f := Finding{Severity: Broken, Sure: Certain, Object: c.Object, Affects: v.usesSecret(c.Object)}
		switch {
		case c.Err != "":
			f.Code = "certificate-unreadable"
			f.Verdict = fmt.Sprintf("%s holds no certificate that can be read: %s", c.Object, c.Err)
		case v.Now.After(c.NotAfter):
			f.Code, f.Since = "certificate-expired", since(c.NotAfter)
			f.Verdict = fmt.Sprintf("the certificate in %s expired %s ago, on %s", c.Object, ago(v.Now.Sub(c.NotAfter)), c.NotAfter.UTC().Format(time.DateTime))
		case v.Now.Before(c.NotBefore):
			f.Code = "certificate-early"
			f.Verdict = fmt.Sprintf("the certificate in %s is not valid before %s", c.Object, c.NotBefore.UTC().Format(time.DateTime))
		case c.NotAfter.Sub(v.Now) < soon && c.NotAfter.Sub(c.NotBefore) > 2*soon:
			f.Code, f.Severity = "certificate-ends", Degraded
			f.Verdict = fmt.Sprintf("the certificate in %s ends in %s, on %s", c.Object, ago(c.NotAfter.Sub(v.Now)), c.NotAfter.UTC().Format(time.DateTime))
		default:
			continue
		}
		if len(c.Names) > 0 {
			f.Evidence = []string{"it is for " + some(c.Names)}
		}
		if c.Object.Kind == "Secret" {
			f.Fix = []string{kubectl(c.Object.Namespace, "create secret tls %s --cert=FILE --key=FILE --dry-run=client -o yaml | kubectl apply -f -", c.Object.Name)}
		} else {
			f.Fix = []string{"portal certs renew"}
		}
		out = append(out, f)
	}
	return out
}

func (v *View) usesSecret(r Ref) (out []Ref) {
	for i := range v.Ingresses {
		in := &v.Ingresses[i]
		if in.Namespace == r.Namespace && slices.ContainsFunc(in.Spec.TLS, func(t networkingv1.IngressTLS) bool { return t.SecretName == r.Name }) {
			out = append(out, ingressRef(in))
		}
	}
	return out
}
