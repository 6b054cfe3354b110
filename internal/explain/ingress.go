package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

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
	byDefault := false
	for i := range v.IngressClasses {
		names = append(names, v.IngressClasses[i].Name)
		byDefault = byDefault || v.IngressClasses[i].Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true"
	}
	annotation := in.Annotations["kubernetes.io/ingress.class"]
	switch name := in.Spec.IngressClassName; {
	case name != nil && slices.Contains(names, *name):
		return v.otherController(in)
	case name != nil:
		f.Verdict = fmt.Sprintf("%s asks for the IngressClass %q, which does not exist, so nobody serves it", f.Object, *name)
	case len(in.Status.LoadBalancer.Ingress) > 0:
		return nil
	case annotation != "" && v.portals() && !slices.Contains(names, annotation):
		f.Sure, f.Field = Likely, "metadata.annotations"
		f.Verdict = fmt.Sprintf("%s asks for the IngressClass %q (annotation kubernetes.io/ingress.class), which does not exist, and nobody has served it", f.Object, annotation)
	case annotation != "" || byDefault:
		return nil
	default:
		f.Verdict = fmt.Sprintf("%s names no IngressClass, and none is the default, so nobody serves it", f.Object)
	}
	f.Evidence = []string{"there is no IngressClass object"}
	if len(names) > 0 {
		f.Evidence[0] = "IngressClasses: " + some(names)
	}
	right := v.rightClass(in)
	if right == compile.ClassName && !slices.Contains(names, right) {
		f.Evidence = append(f.Evidence, "Portal's load balancers serve the class "+right+" without such an object")
	}
	if right != "" {
		f.Verdict += "; there is the class " + right
		f.Fix = []string{mergePatch(f.Object, map[string]any{"spec": map[string]any{"ingressClassName": right}})}
	}
	return []Finding{f}
}

// otherController: the class exists, Portal's load balancers run, and the class is another controller's, of which nothing is to be seen.
func (v *View) otherController(in *networkingv1.Ingress) []Finding {
	right := v.rightClass(in)
	if len(in.Status.LoadBalancer.Ingress) > 0 || v.Now.Sub(in.CreationTimestamp.Time) < settle || !v.portals() || right == "" || right == *in.Spec.IngressClassName {
		return nil
	}
	class := v.classOf(in)
	if class == nil || slices.ContainsFunc(v.Ingresses, func(other networkingv1.Ingress) bool {
		return other.Spec.IngressClassName != nil && *other.Spec.IngressClassName == class.Name && len(other.Status.LoadBalancer.Ingress) > 0
	}) {
		return nil
	}
	r := ingressRef(in)
	return []Finding{{
		Code: "ingress-class", Severity: Broken, Sure: Likely, Object: r, Field: "spec.ingressClassName", Since: since(in.CreationTimestamp.Time),
		Verdict:  fmt.Sprintf("%s has no address: its IngressClass %s is for the controller %s, which has served no Ingress of it; Portal's load balancers serve the class %s", r, class.Name, class.Spec.Controller, right),
		Evidence: []string{"status.loadBalancer is empty"},
		Fix:      []string{mergePatch(r, map[string]any{"spec": map[string]any{"ingressClassName": right}})},
	}}
}

// classOf is the IngressClass object that an Ingress names, or nil.
func (v *View) classOf(in *networkingv1.Ingress) *networkingv1.IngressClass {
	for i := range v.IngressClasses {
		if c := &v.IngressClasses[i]; in.Spec.IngressClassName != nil && c.Name == *in.Spec.IngressClassName {
			return c
		}
	}
	return nil
}

// rightClass is the class that an Ingress without a usable one most probably should have: one that is written almost so, the default, that of
// Portal's load balancers if they run, that of Ingresses that have an address, or the only one.
func (v *View) rightClass(in *networkingv1.Ingress) string {
	var all []string
	served, own := "", ""
	known := false
	for i := range v.IngressClasses {
		c := &v.IngressClasses[i]
		all = append(all, c.Name)
		known = known || c.Name == compile.ClassName
		if c.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true" {
			served = c.Name
		}
		if c.Spec.Controller == compile.ClassController {
			own = c.Name
		}
	}
	if !known {
		own = compile.ClassName
	}
	if !v.portals() {
		own = ""
	} else if own != "" {
		all = append(all, own)
	}
	if name := in.Spec.IngressClassName; name != nil {
		if i := slices.IndexFunc(all, func(c string) bool { return near(c, *name) }); i >= 0 {
			return all[i]
		}
	}
	for i := range v.Ingresses {
		if other := &v.Ingresses[i]; served == "" && own == "" && other.Spec.IngressClassName != nil && len(other.Status.LoadBalancer.Ingress) > 0 {
			served = *other.Spec.IngressClassName
		}
	}
	if len(all) == 1 {
		return all[0]
	}
	return cmp.Or(served, own)
}

// portals says whether Portal's load balancers run.
func (v *View) portals() bool {
	return v.lease(balancerLease) != nil || slices.ContainsFunc(v.Parts, func(r reports.Report) bool { return r.Part == reports.LB })
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
		f.Evidence, f.Fix = []string{selfSigned}, newCertificate(r, t.Hosts)
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
				f.Evidence, f.Fix = []string{selfSigned}, newCertificate(r, t.Hosts)
				return []Finding{f}
			}
		}
	}
	return nil
}

// isEntry says whether a Service is there for its addresses alone, at which Ingresses are served.
func (v *View) isEntry(s *Service) bool {
	if s.Namespace+"/"+s.Name == BalancerEntry {
		return true
	}
	own := balancerAddresses(s)
	for i := range v.Ingresses {
		for _, at := range v.Ingresses[i].Status.LoadBalancer.Ingress {
			if a, err := netip.ParseAddr(at.IP); err == nil && slices.Contains(own, a.Unmap()) {
				return true
			}
		}
	}
	return false
}
