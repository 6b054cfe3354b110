package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/clusterdns"
)

// dnsService is the Service by which Pods reach the cluster's DNS.
func (v *View) dnsService() *Service { return v.Service("kube-system", clusterdns.ServiceName) }

// checkDNS looks at the cluster's DNS Service.
func checkDNS(v *View) []Finding {
	if !v.sees("services", "endpointslices") || v.Limited != "" && v.Limited != "kube-system" {
		return nil
	}
	s := v.dnsService()
	r := Ref{"Service", "kube-system", clusterdns.ServiceName}
	if s == nil {
		return []Finding{{
			Code: "dns-no-service", Severity: Degraded, Sure: Likely, Object: r,
			Verdict: "there is no Service kube-system/kube-dns, which is where Pods look for names",
			Fix:     []string{"portal controllers --controllers=cluster-dns"},
		}}
	}
	if s.served() || s.selects() && len(s.Pods) > 0 {
		return nil // what is wrong with its Pods is said elsewhere
	}
	if s.selects() {
		return nil
	}
	if v.sees("nodes") && len(v.nodes) == 0 {
		return nil // there is nobody who would look for names there: `portal up` without root has its DNS elsewhere
	}
	f := Finding{
		Code: "dns-no-endpoints", Severity: Broken, Sure: Certain, Object: r,
		Verdict: "no name of the cluster is resolved: Service kube-system/kube-dns has no endpoints, as no ready node serves names",
	}
	for name, n := range v.nodes {
		if len(clusterdns.Announced(n)) > 0 {
			f.Evidence = append(f.Evidence, fmt.Sprintf("node %s serves names (annotation %s), ready: %t", name, clusterdns.Annotation, nodeReady(n)))
		}
	}
	slices.Sort(f.Evidence)
	if len(f.Evidence) == 0 {
		f.Evidence = []string{"no Node has the annotation " + clusterdns.Annotation + ": no DNS server runs as part of a node"}
	}
	f.Fix = []string{kubectl("", "get nodes -o custom-columns='NAME:.metadata.name,DNS:.metadata.annotations.portal\\.dev/dns'")}
	return []Finding{f}
}

// checkPodDNS looks at Pods that ask the wrong server. It is about the Pods, not about the Services that they are behind.
func checkPodDNS(v *View) (out []Finding) {
	dns := v.dnsService()
	if dns == nil {
		return nil
	}
	for i := range v.Evidence.Pods {
		p := &v.Evidence.Pods[i]
		if ended(p) || p.Namespace == "kube-system" {
			continue
		}
		if f, ok := v.podDNS(p, dns); ok {
			out = append(out, f)
		}
		out = append(out, v.podHosts(p)...)
	}
	return out
}

func (v *View) podDNS(p *corev1.Pod, dns *Service) (Finding, bool) {
	f := Finding{Severity: Notice, Sure: Likely, Object: podRef(p), Field: "spec.dnsPolicy"}
	var servers, searches []string
	if p.Spec.DNSConfig != nil {
		servers, searches = p.Spec.DNSConfig.Nameservers, p.Spec.DNSConfig.Searches
	}
	asks := slices.ContainsFunc(servers, func(text string) bool {
		a, err := netip.ParseAddr(text)
		return err == nil && (slices.Contains(dns.Spec.ClusterIPs, a.String()) || v.servesNames(a))
	})
	switch {
	case p.Spec.HostNetwork && p.Spec.DNSPolicy == corev1.DNSClusterFirst && !asks:
		f.Code = "pod-dns-hostnetwork"
		f.Verdict = fmt.Sprintf("%s can't resolve names of the cluster: it uses its node's network, where dnsPolicy ClusterFirst means the node's own resolver", podRef(p))
		f.Fix = v.templatePatch(p, map[string]any{"dnsPolicy": "ClusterFirstWithHostNet"})
	case p.Spec.DNSPolicy == corev1.DNSDefault && !asks:
		f.Code = "pod-dns-policy"
		f.Verdict = fmt.Sprintf("%s can't resolve names of the cluster: its dnsPolicy is Default, which means the node's own resolver", podRef(p))
		f.Fix = v.templatePatch(p, map[string]any{"dnsPolicy": "ClusterFirst"})
	case p.Spec.DNSPolicy == corev1.DNSNone && !asks:
		f.Code, f.Field = "pod-dns-server", "spec.dnsConfig.nameservers"
		f.Verdict = fmt.Sprintf("%s asks the DNS server %s, which is not the cluster's (%s): names of Services are unknown there", podRef(p), some(servers), strings.Join(dns.Spec.ClusterIPs, ", "))
		f.Fix = v.templatePatch(p, map[string]any{"dnsPolicy": "ClusterFirst", "dnsConfig": nil})
	case p.Spec.DNSPolicy == corev1.DNSNone && !slices.Contains(searches, p.Namespace+".svc."+v.Zone):
		f.Code, f.Field = "pod-dns-search", "spec.dnsConfig.searches"
		f.Verdict = fmt.Sprintf("%s finds Services by their full names only: spec.dnsConfig.searches lacks %s.svc.%s", podRef(p), p.Namespace, v.Zone)
		f.Fix = v.templatePatch(p, map[string]any{"dnsPolicy": "ClusterFirst", "dnsConfig": nil})
	case len(servers) > 0 && p.Spec.DNSPolicy != corev1.DNSNone && !asks:
		f.Code, f.Field, f.Sure = "pod-dns-server", "spec.dnsConfig.nameservers", Possible
		f.Verdict = fmt.Sprintf("%s may ask the DNS server %s (spec.dnsConfig.nameservers) beside the cluster's: names of Services are unknown there", podRef(p), some(servers))
		f.Fix = v.templatePatch(p, map[string]any{"dnsConfig": nil})
	case fewDots(p):
		f.Code, f.Field, f.Sure = "pod-dns-ndots", "spec.dnsConfig.options", Likely
		f.Verdict = fmt.Sprintf("%s looks names such as SERVICE.NAMESPACE up as they are first: spec.dnsConfig.options has ndots:%s, and resolvers like musl's never try the search domains then", podRef(p), dots(p))
		f.Fix = v.templatePatch(p, map[string]any{"dnsConfig": nil})
	default:
		return f, false
	}
	return f, true
}

// dots is the option ndots of a Pod, or empty.
func dots(p *corev1.Pod) string {
	if p.Spec.DNSConfig == nil {
		return ""
	}
	for _, o := range p.Spec.DNSConfig.Options {
		if o.Name == "ndots" && o.Value != nil {
			return *o.Value
		}
	}
	return ""
}

// fewDots: names with one dot are not completed.
func fewDots(p *corev1.Pod) bool { return dots(p) == "0" || dots(p) == "1" }

// podHosts looks at names in a Pod's /etc/hosts that are those of Services.
func (v *View) podHosts(p *corev1.Pod) (out []Finding) {
	for _, alias := range p.Spec.HostAliases {
		for _, name := range alias.Hostnames {
			parts := strings.Split(strings.TrimSuffix(strings.TrimSuffix(name, "."+v.Zone), ".svc"), ".")
			k := Key{p.Namespace, parts[0]}
			if len(parts) == 2 {
				k.Namespace = parts[1]
			}
			s := v.services[k]
			if s == nil || len(parts) > 2 || slices.Contains(s.Spec.ClusterIPs, alias.IP) {
				continue
			}
			out = append(out, Finding{
				Code: "pod-hosts", Severity: Notice, Sure: Likely, Object: podRef(p), Field: "spec.hostAliases",
				Verdict:  fmt.Sprintf("%s does not reach %s by the name %s: spec.hostAliases says that it is %s, which comes before DNS", podRef(p), s.ref(), name, alias.IP),
				Evidence: []string{fmt.Sprintf("the cluster IP is %s", strings.Join(s.Spec.ClusterIPs, ", "))},
				Fix:      v.templatePatch(p, map[string]any{"hostAliases": nil}),
			})
		}
	}
	return out
}

func (v *View) servesNames(a netip.Addr) bool {
	for _, n := range v.nodes {
		if slices.Contains(clusterdns.Announced(n), a.Unmap()) {
			return true
		}
	}
	return false
}
