package compile

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/lb/config"
)

// findCertificate is the name of the Service's certificate, or empty: then it is said why, and the port stays closed.
func (s *served) findCertificate() string {
	ref := s.certificateRef(s.b.Certificate)
	name, problem := s.loadCertificate(ref)
	if problem != "" {
		s.problem(s.svc, CertificateUnavailable, "ports with TLS are closed: %s", problem)
	}
	return name
}

// certificateRef is the Secret that an annotation names. A cloud's identifier (ARN) is looked up in the ConfigMap by its last part; if that has nothing,
// it is the name of a Secret in the Service's namespace, as any other name is.
func (s *served) certificateRef(name string) SecretRef {
	id := name
	if strings.HasPrefix(name, "arn:") {
		id = name[strings.LastIndexAny(name, ":/")+1:]
	}
	if namespace, secret, found := strings.Cut(s.Certificates[id], "/"); found && id != name {
		return SecretRef{strings.TrimSpace(namespace), strings.TrimSpace(secret)}
	}
	return SecretRef{s.svc.Namespace, id}
}

// loadCertificate puts a Secret's certificate into the configuration. Without one, problem says why; both are empty if it is not known yet.
func (c *compiler) loadCertificate(ref SecretRef) (name, problem string) {
	name = ref.Namespace + "/" + ref.Name
	if c.out.Config.Certificates[name] != nil {
		return name, ""
	}
	secret := c.secret(ref)
	switch {
	case secret.Err != nil:
		return "", fmt.Sprintf("Secret %s can't be read: %v", name, secret.Err)
	case !secret.Known:
		return "", ""
	case secret.Data == nil:
		return "", fmt.Sprintf("there is no Secret %s", name)
	}
	chain, key := secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]
	if len(chain) == 0 || len(key) == 0 {
		return "", fmt.Sprintf("Secret %s has no %s or no %s: it must be of type %s", name, corev1.TLSCertKey, corev1.TLSPrivateKeyKey, corev1.SecretTypeTLS)
	}
	if _, err := tls.X509KeyPair(chain, key); err != nil {
		return "", fmt.Sprintf("Secret %s: %v", name, err) // which never has anything of the key
	}
	c.out.Config.Certificates[name] = &config.Certificate{Chain: chain, Key: key}
	return name, ""
}

// findPolicy is the TLS policy that the Service asks for.
func (s *served) findPolicy() TLSPolicy {
	name := s.b.NegotiationPolicy
	if name == "" {
		return TLSPolicy{}
	}
	p, found := s.Policy(name)
	switch {
	case !found:
		s.problem(s.svc, UnknownPolicy, "%q is no security policy that is known: TLS 1.2 and 1.3 are offered; portal lb policies lists those that are", name)
	case len(p.NotOffered) > 0:
		s.problem(s.svc, PolicyLimited, "the security policy %s is offered without %s, which this program has not", name, strings.Join(p.NotOffered, ", "))
	}
	return p
}

// endpointCA is what endpoints' certificates are verified with. Without a CA they are accepted as they are, which is said. blind: a CA was named and can't
// be had.
func (s *served) endpointCA() (verify *config.EndpointTLS, blind bool) {
	if s.b.EndpointCA == "" {
		s.problem(s.svc, EndpointNotVerified, "endpoints speak TLS, and their certificates are accepted without verification: portal.dev/endpoint-ca names a Secret with their CA (ca.crt)")
		return nil, false
	}
	ref := SecretRef{s.svc.Namespace, s.b.EndpointCA}
	secret := s.secret(ref)
	problem := ""
	switch ca := secret.Data["ca.crt"]; {
	case secret.Err != nil:
		problem = fmt.Sprintf("Secret %s/%s can't be read: %v", ref.Namespace, ref.Name, secret.Err)
	case !secret.Known:
		return nil, true
	case secret.Data == nil:
		problem = fmt.Sprintf("there is no Secret %s/%s", ref.Namespace, ref.Name)
	case !x509.NewCertPool().AppendCertsFromPEM(ca):
		problem = fmt.Sprintf("Secret %s/%s has no certificates as ca.crt", ref.Namespace, ref.Name)
	default:
		name := s.b.EndpointName
		if name == "" {
			name = s.svc.Name + "." + s.svc.Namespace + ".svc"
		}
		return &config.EndpointTLS{CA: ca, ServerName: name}, false
	}
	s.problem(s.svc, CertificateUnavailable, "ports with TLS to endpoints are closed: %s", problem)
	return nil, true
}
