package compile

import (
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/lb/config"
)

// tls says which certificates the entry shows for which server names; nil: there are none. A certificate is shown for the hosts that its Ingress names in
// tls, whatever names are in it, and only as far as these hosts are the Ingress': a certificate must not come between others and their clients.
// A host is that of the namespace whose Ingress is the oldest with a route for it. If there is no route, the oldest Ingress that names it in tls has it.
func (t *site) tls() *config.TLS {
	out := &config.TLS{Names: map[string][]string{}}
	named := map[string]*networkingv1.Ingress{} // who was the first to have a certificate for a host
	for _, in := range t.out.Ingresses {
		for _, entry := range in.Spec.TLS {
			if entry.SecretName == "" {
				continue
			}
			hosts := certified(in, entry)
			name, problem := t.loadCertificate(SecretRef{in.Namespace, entry.SecretName})
			if problem != "" {
				t.ingressProblem(in, CertificateUnavailable, "no TLS for %s: %s", hostsText(hosts), problem)
				continue
			}
			for _, host := range hosts {
				owner, first := t.owner(host), named[host]
				switch {
				case owner != nil && owner.Namespace != in.Namespace:
					t.ingressProblem(in, IngressConflict, "the certificate in Secret %s is not shown for %s, which the Ingress %s/%s serves", entry.SecretName, hostsText([]string{host}), owner.Namespace, owner.Name)
					continue
				case first == nil:
					named[host] = in // also while the certificate is not known yet
				case first != in:
					if !slices.Contains(out.Names[host], name) {
						t.ingressProblem(in, IngressConflict, "the certificate in Secret %s is not shown for %s: the older Ingress %s/%s has another one for it", entry.SecretName, hostsText([]string{host}), first.Namespace, first.Name)
					}
					continue
				}
				if name != "" && !slices.Contains(out.Names[host], name) {
					out.Names[host] = append(out.Names[host], name)
					out.Certificates = append(out.Certificates, name)
				}
			}
		}
	}
	// The first is shown for names that have none: that of the Ingress for all other hosts, or else the oldest.
	out.Certificates = slices.Concat(out.Names[""], out.Certificates)
	delete(out.Names, "")
	seen := map[string]bool{}
	out.Certificates = slices.DeleteFunc(out.Certificates, func(name string) bool {
		again := seen[name]
		seen[name] = true
		return again
	})
	if len(out.Certificates) == 0 {
		return nil
	}
	return out
}

// owner is the oldest Ingress with a route for a host, or for the wildcard above it.
func (t *site) owner(host string) *networkingv1.Ingress {
	if in := t.hosts[host]; in != nil {
		return in
	}
	_, parent, _ := strings.Cut(host, ".")
	return t.hosts["*."+parent]
}

// certified are the hosts that an entry of tls is for: without any, all of the Ingress' own. An empty one stands for those that no Ingress has.
func certified(in *networkingv1.Ingress, entry networkingv1.IngressTLS) []string {
	hosts := map[string]bool{}
	for _, h := range entry.Hosts {
		hosts[strings.ToLower(h)] = true
	}
	if len(hosts) == 0 {
		for _, rule := range in.Spec.Rules {
			hosts[strings.ToLower(rule.Host)] = true
		}
		if in.Spec.DefaultBackend != nil {
			hosts[""] = true
		}
	}
	return slices.Sorted(maps.Keys(hosts))
}

func hostsText(hosts []string) string {
	var out []string
	for _, h := range hosts {
		if h == "" {
			h = "all other hosts"
		}
		out = append(out, h)
	}
	return strings.Join(out, ", ")
}
