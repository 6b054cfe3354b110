package ingress

import (
	"context"
	"fmt"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"

	"portal/internal/apiserver/registry/ingressclass"
	"portal/internal/apiserver/registry/rules"
)

func validateNew(_ context.Context, ing *networkingv1.Ingress) field.ErrorList {
	errs := append(rules.Finalizers(ing), lenience{}.spec(field.NewPath("spec"), &ing.Spec)...)
	class := ing.Spec.IngressClassName
	if name, annotated := ing.Annotations[classAnnotation]; annotated && class != nil && name != *class {
		errs = append(errs, field.Invalid(field.NewPath("annotations").Child(classAnnotation), name,
			fmt.Sprintf("must be %q, as spec.ingressClassName says, or be left out", *class)))
	}
	return errs
}

// validateUpdate validates an update. An Ingress may keep what was allowed when it was written.
func validateUpdate(_ context.Context, ing, old *networkingv1.Ingress) field.ErrorList {
	return append(rules.Finalizers(ing), lenienceFor(&old.Spec).spec(field.NewPath("spec"), &ing.Spec)...)
}

// lenience says which rules, younger than some stored Ingresses, are not asked.
type lenience struct {
	secretNames   bool
	wildcardRules bool
}

func lenienceFor(old *networkingv1.IngressSpec) lenience {
	var l lenience
	for _, tls := range old.TLS {
		l.secretNames = l.secretNames || len(secretName(nil, tls.SecretName)) > 0
	}
	for _, rule := range old.Rules {
		l.wildcardRules = l.wildcardRules || isWildcard(rule.Host) && len(validateHTTP(nil, rule.HTTP)) > 0
	}
	return l
}

func (l lenience) spec(path *field.Path, spec *networkingv1.IngressSpec) field.ErrorList {
	var errs field.ErrorList
	if len(spec.Rules) == 0 && spec.DefaultBackend == nil {
		errs = append(errs, field.Invalid(path, spec.Rules, "must have rules, a defaultBackend, or both"))
	}
	if spec.DefaultBackend != nil {
		errs = append(errs, validateBackend(path.Child("defaultBackend"), spec.DefaultBackend)...)
	}
	for i := range spec.Rules {
		errs = append(errs, l.rule(path.Child("rules").Index(i), &spec.Rules[i])...)
	}
	for i := range spec.TLS {
		errs = append(errs, l.tls(path.Child("tls").Index(i), &spec.TLS[i])...)
	}
	if class := spec.IngressClassName; class != nil {
		errs = append(errs, rules.Each(path.Child("ingressClassName"), *class, validation.NameIsDNSSubdomain(*class, false))...)
	}
	return errs
}

func (l lenience) rule(path *field.Path, rule *networkingv1.IngressRule) field.ErrorList {
	var errs field.ErrorList
	if rule.Host != "" {
		errs = append(errs, notIP(path.Child("host"), rule.Host)...)
		errs = append(errs, validateHost(path.Child("host"), rule.Host)...)
	}
	if l.wildcardRules && isWildcard(rule.Host) {
		return errs
	}
	return append(errs, validateHTTP(path.Child("http"), rule.HTTP)...)
}

func (l lenience) tls(path *field.Path, tls *networkingv1.IngressTLS) field.ErrorList {
	var errs field.ErrorList
	for i, host := range tls.Hosts {
		errs = append(errs, validateHost(path.Child("hosts").Index(i), host)...)
	}
	if !l.secretNames {
		errs = append(errs, secretName(path.Child("secretName"), tls.SecretName)...)
	}
	return errs
}

func secretName(path *field.Path, name string) field.ErrorList {
	if name == "" {
		return nil
	}
	return rules.Each(path, name, validation.NameIsDNSSubdomain(name, false))
}

func isWildcard(host string) bool { return strings.Contains(host, "*") }

func validateHost(path *field.Path, host string) field.ErrorList {
	if isWildcard(host) {
		return rules.Each(path, host, utilvalidation.IsWildcardDNS1123Subdomain(host))
	}
	return rules.DNSSubdomain(path, host)
}

// notIP rejects addresses: a client does not send one as the name it asks for.
func notIP(path *field.Path, host string) field.ErrorList {
	if netutils.ParseIPSloppy(host) == nil {
		return nil
	}
	return field.ErrorList{field.Invalid(path, host, "is an IP address; it must be a DNS name")}
}

func validateHTTP(path *field.Path, http *networkingv1.HTTPIngressRuleValue) field.ErrorList {
	if http == nil {
		return nil
	}
	path = path.Child("paths")
	if len(http.Paths) == 0 {
		return field.ErrorList{field.Required(path, "a rule for HTTP has at least one")}
	}
	var errs field.ErrorList
	for i := range http.Paths {
		errs = append(errs, validatePath(path.Index(i), &http.Paths[i])...)
	}
	return errs
}

// unclear are parts of a path that clients and servers resolve before comparing, each in its own way; tails are the
// same at its end.
var (
	unclear = []string{"//", "/./", "/../", "%2f", "%2F"}
	tails   = []string{"/..", "/."}
)

func validatePath(path *field.Path, p *networkingv1.HTTPIngressPath) field.ErrorList {
	if p.PathType == nil {
		return field.ErrorList{field.Required(path.Child("pathType"), "Exact, Prefix or ImplementationSpecific")}
	}
	var errs field.ErrorList
	switch *p.PathType {
	case networkingv1.PathTypeExact, networkingv1.PathTypePrefix:
		errs = append(errs, absolute(path.Child("path"), p.Path)...)
		errs = append(errs, plain(path.Child("path"), p.Path)...)
	case networkingv1.PathTypeImplementationSpecific:
		if p.Path != "" {
			errs = append(errs, absolute(path.Child("path"), p.Path)...)
		}
	default:
		errs = append(errs, field.NotSupported(path.Child("pathType"), *p.PathType, []networkingv1.PathType{
			networkingv1.PathTypeExact, networkingv1.PathTypeImplementationSpecific, networkingv1.PathTypePrefix,
		}))
	}
	return append(errs, validateBackend(path.Child("backend"), &p.Backend)...)
}

func absolute(path *field.Path, value string) field.ErrorList {
	if strings.HasPrefix(value, "/") {
		return nil
	}
	return field.ErrorList{field.Invalid(path, value, "must begin with /")}
}

func plain(path *field.Path, value string) field.ErrorList {
	var errs field.ErrorList
	for _, part := range unclear {
		if strings.Contains(value, part) {
			errs = append(errs, field.Invalid(path, value, fmt.Sprintf("must not have %q in it", part)))
		}
	}
	for _, tail := range tails {
		if strings.HasSuffix(value, tail) {
			errs = append(errs, field.Invalid(path, value, fmt.Sprintf("must not end in %q", tail)))
		}
	}
	return errs
}

func validateBackend(path *field.Path, b *networkingv1.IngressBackend) field.ErrorList {
	switch {
	case b.Resource != nil && b.Service != nil:
		return field.ErrorList{field.Invalid(path, "", "must be a service or a resource, not both")}
	case b.Resource != nil:
		return ingressclass.ValidateReference(path.Child("resource"), b.Resource.APIGroup, b.Resource.Kind, b.Resource.Name)
	case b.Service != nil:
		return validateService(path, b.Service)
	}
	return field.ErrorList{field.Invalid(path, "", "must be a service or a resource")}
}

// validateService reports a port that is named both ways, or not at all, at the backend: neither field is the wrong
// one.
func validateService(path *field.Path, s *networkingv1.IngressServiceBackend) field.ErrorList {
	var errs field.ErrorList
	if s.Name == "" {
		errs = append(errs, field.Required(path.Child("service", "name"), "the Service's name"))
	} else {
		errs = append(errs, rules.DNSLabel(path.Child("service", "name"), s.Name)...)
	}
	port := path.Child("service", "port")
	switch {
	case s.Port.Name != "" && s.Port.Number != 0:
		errs = append(errs, field.Invalid(path, "", "must give the port's name or its number, not both"))
	case s.Port.Name != "":
		errs = append(errs, rules.Each(port.Child("name"), s.Port.Name, utilvalidation.IsValidPortName(s.Port.Name))...)
	case s.Port.Number != 0:
		errs = append(errs, rules.Port(port.Child("number"), int(s.Port.Number))...)
	default:
		errs = append(errs, field.Required(path, "the Service's port, by name or by number"))
	}
	return errs
}

func validateStatus(_ context.Context, ing, old *networkingv1.Ingress) field.ErrorList {
	errs := rules.MetaUpdate(ing, old)
	var had []string
	for _, point := range old.Status.LoadBalancer.Ingress {
		had = append(had, point.IP)
	}
	for i, point := range ing.Status.LoadBalancer.Ingress {
		path := statusPath.Index(i)
		if point.IP != "" {
			errs = append(errs, rules.IP(path.Child("ip"), point.IP, had...)...)
		}
		if point.Hostname != "" {
			errs = append(errs, rules.DNSSubdomain(path.Child("hostname"), point.Hostname)...)
			errs = append(errs, notIP(path.Child("hostname"), point.Hostname)...)
		}
	}
	return errs
}
