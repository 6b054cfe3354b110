package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/lb/compile"
)

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
		f := Finding{Severity: Broken, Sure: Certain, Object: c.Object}
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
		f.Affects = v.usesSecret(c.Object)
		if len(c.Names) > 0 {
			f.Evidence = []string{"it is for " + some(c.Names)}
		}
		if c.Object.Kind == "Secret" {
			f.Evidence, f.Fix = append(f.Evidence, selfSigned), newCertificate(c.Object, v.hostsOf(c))
		} else {
			f.Fix = []string{"portal certs renew"}
		}
		out = append(out, f)
	}
	return out
}

// usesSecret are the Ingresses and Services with a certificate in a Secret.
func (v *View) usesSecret(r Ref) (out []Ref) {
	if r.Kind != "Secret" {
		return nil
	}
	for i := range v.Ingresses {
		in := &v.Ingresses[i]
		if in.Namespace == r.Namespace && slices.ContainsFunc(in.Spec.TLS, func(t networkingv1.IngressTLS) bool { return t.SecretName == r.Name }) {
			out = append(out, ingressRef(in))
		}
	}
	for _, s := range v.order {
		if !balances(s.Service) || len(s.Annotations) == 0 {
			continue
		}
		if slices.Contains(v.compiled(s).Secrets, compile.SecretRef{Namespace: r.Namespace, Name: r.Name}) {
			out = append(out, s.ref())
		}
	}
	return out
}

// hostsOf are the hosts that Ingresses use a certificate for; without any, those that it has been for.
func (v *View) hostsOf(c *Certificate) (out []string) {
	for i := range v.Ingresses {
		for _, t := range v.Ingresses[i].Spec.TLS {
			if v.Ingresses[i].Namespace == c.Object.Namespace && t.SecretName == c.Object.Name {
				out = append(out, t.Hosts...)
			}
		}
	}
	if len(out) > 0 {
		return out
	}
	return c.Names
}

// selfSigned is said beside a certificate that can be made on the spot.
const selfSigned = "the commands make a certificate that signs itself, so that the port answers: clients that verify it want one of an authority that they trust"

// newCertificate are commands that put a certificate for hosts into a Secret, whether it exists or not, and of whatever type.
func newCertificate(r Ref, hosts []string) []string {
	if len(hosts) == 0 {
		hosts = []string{"localhost"}
	}
	var names []string
	for _, h := range slices.Compact(slices.Sorted(slices.Values(hosts))) {
		kind := "DNS:"
		if _, err := netip.ParseAddr(h); err == nil {
			kind = "IP:"
		}
		names = append(names, kind+h)
	}
	return []string{
		fmt.Sprintf("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 90 -subj '/CN=%[1]s' -addext 'subjectAltName=%[2]s' -keyout %[3]s.key -out %[3]s.crt", hosts[0], strings.Join(names, ","), r.Name),
		kubectl(r.Namespace, "create secret tls %[1]s --cert=%[1]s.crt --key=%[1]s.key --dry-run=client -o yaml", r.Name) + " | kubectl replace --force -f -",
	}
}
