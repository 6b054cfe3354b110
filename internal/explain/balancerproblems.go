package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/lb/compile"
	"portal/internal/lb/spec"
)

// serious are the reasons because of which requests fail; the rest is without effect.
var serious = map[string]string{
	compile.CertificateUnavailable: "balancer-certificate", compile.SecurityGroupNotFound: "balancer-group",
	compile.IngressConflict: "ingress-conflict", compile.BackendUnsupported: "ingress-backend", spec.InvalidSpec: "ingress-path",
}

// balancerProblems are what Portal's load balancers have to say about Services and Ingresses.
func (v *View) balancerProblems(portals bool) (out []Finding) {
	if !portals {
		return nil
	}
	add := func(r Ref, p spec.Problem) {
		f := Finding{Code: "balancer-annotation", Severity: Notice, Sure: Certain, Object: r, Verdict: fmt.Sprintf("%s: %s", r, p.Message)}
		if code, ok := serious[p.Reason]; ok {
			f.Code, f.Severity = code, Broken
		}
		if secret, ok := v.missingSecret(r); ok && f.Code == "balancer-certificate" {
			f.Evidence, f.Fix = []string{selfSigned}, newCertificate(secret, nil)
			out = append(out, f)
			return
		}
		if p.Reason == spec.InvalidAnnotation {
			f.Severity = Degraded
		}
		f.Fix = []string{kubectl(r.Namespace, "describe %s %s", strings.ToLower(r.Kind), r.Name)}
		for _, key := range slices.Sorted(maps.Keys(v.annotations(r))) {
			if strings.HasPrefix(p.Message, key+":") || p.Reason == spec.UnknownAnnotation && strings.Contains(p.Message, key) {
				f.Field = "metadata.annotations"
				f.Fix = []string{kubectl(r.Namespace, "annotate %s %s %s-", strings.ToLower(r.Kind), r.Name, key)}
			}
		}
		out = append(out, f)
	}
	for _, p := range v.compiled().Problems {
		switch {
		case p.Reason == compile.BackendNotFound || p.Ingress != nil && p.Reason == compile.CertificateUnavailable:
			// See checkIngresses, which knows more.
		case p.Reason == compile.SecurityGroupNotFound && !v.sees("configmaps"):
		case p.Service != nil:
			add(Ref{"Service", p.Service.Namespace, p.Service.Name}, p.Problem)
		default:
			add(ingressRef(p.Ingress), p.Problem)
		}
	}
	for _, s := range v.order {
		if !balances(s.Service) {
			continue
		}
		asked, problems := spec.Read(s.Service)
		if asked.ProxyProtocol > 0 {
			out = append(out, Finding{
				Code: "balancer-proxy-protocol", Severity: Notice, Sure: Possible, Object: s.ref(), Field: "metadata.annotations",
				Verdict: fmt.Sprintf("%s has its load balancer begin each connection with a PROXY header (version %d): endpoints that don't expect one close it", s.ref(), asked.ProxyProtocol),
				Fix:     []string{kubectl(s.Namespace, "annotate service %s service.beta.kubernetes.io/aws-load-balancer-proxy-protocol-", s.Name)},
			})
		}
		for _, p := range problems {
			add(s.ref(), p)
		}
	}
	return out
}

func (v *View) annotations(r Ref) map[string]string {
	if s := v.Service(r.Namespace, r.Name); s != nil && r.Kind == "Service" {
		return s.Annotations
	}
	if in := v.ingressOf(r); in != nil {
		return in.Annotations
	}
	return nil
}

// missingSecret is a Secret that a Service's balancer needs, and that is not there.
func (v *View) missingSecret(r Ref) (Ref, bool) {
	s := v.Service(r.Namespace, r.Name)
	if s == nil || r.Kind != "Service" {
		return Ref{}, false
	}
	for _, needed := range v.compiled(s).Secrets {
		secret := Ref{"Secret", needed.Namespace, needed.Name}
		if exists, known := v.Secrets[secret]; known && !exists {
			return secret, true
		}
	}
	return Ref{}, false
}

func (v *View) ingressOf(r Ref) *networkingv1.Ingress {
	for i := range v.Ingresses {
		if r == ingressRef(&v.Ingresses[i]) {
			return &v.Ingresses[i]
		}
	}
	return nil
}
