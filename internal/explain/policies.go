package explain

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"portal/internal/lb/spec"
)

// checkPolicies looks at fields that keep traffic away from endpoints that are there.
func checkPolicies(v *View) (out []Finding) {
	for _, s := range v.subjects {
		if !s.proxied() {
			continue
		}
		if name, ok := s.Labels["service.kubernetes.io/service-proxy-name"]; ok {
			out = append(out, Finding{
				Code: "service-proxy-name", Severity: Broken, Sure: Likely, Object: s.ref(), Field: "metadata.labels",
				Verdict: fmt.Sprintf("%s is left to another proxy: its label service.kubernetes.io/service-proxy-name is %q, so the nodes' own proxies don't serve it", s.ref(), name),
				Fix:     []string{kubectl(s.Namespace, "label service %s service.kubernetes.io/service-proxy-name-", s.Name)},
			})
		}
		out = append(out, headlessLabel(s)...)
		if !s.served() {
			continue
		}
		out = append(out, v.local(s)...)
		out = append(out, v.sources(s)...)
	}
	return out
}

// headlessLabel: a label by which proxies leave out headless Services, on one that is not, or on its slices.
func headlessLabel(s *Service) (out []Finding) {
	if _, ok := s.Labels[corev1.IsHeadlessService]; ok {
		out = append(out, Finding{
			Code: "headless-label", Severity: Broken, Sure: Likely, Object: s.ref(), Field: "metadata.labels",
			Verdict: fmt.Sprintf("%s has the label %s, by which proxies leave it out, though it has a cluster IP", s.ref(), corev1.IsHeadlessService),
			Fix:     []string{kubectl(s.Namespace, "label service %s %s-", s.Name, corev1.IsHeadlessService)},
		})
	}
	for _, slice := range s.Slices {
		if _, ok := slice.Labels[corev1.IsHeadlessService]; ok && slice.Labels[discoveryv1.LabelManagedBy] != sliceController {
			r := Ref{"EndpointSlice", slice.Namespace, slice.Name}
			out = append(out, Finding{
				Code: "headless-label", Severity: Degraded, Sure: Likely, Object: s.ref(), Field: "metadata.labels", Affects: []Ref{r},
				Verdict: fmt.Sprintf("%s has the label %s, by which kube-proxy leaves it out, though %s has a cluster IP", r, corev1.IsHeadlessService, s.ref()),
				Fix:     []string{kubectl(s.Namespace, "label endpointslice %s %s-", slice.Name, corev1.IsHeadlessService)},
			})
		}
	}
	return out
}

// local: a policy of Local, and nodes without endpoints.
func (v *View) local(s *Service) (out []Finding) {
	inside := s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	outside := s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	if !inside && !outside {
		return nil
	}
	with := map[string]bool{}
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			if e := &slice.Endpoints[i]; isReady(e) && e.NodeName != nil && (v.nodes[*e.NodeName] != nil || !v.sees("nodes")) {
				with[*e.NodeName] = true
			}
		}
	}
	var without []string
	for name, n := range v.nodes {
		if !with[name] && nodeReady(n) {
			without = append(without, name)
		}
	}
	if len(without) == 0 {
		return nil
	}
	slices.Sort(without)
	var names []string
	for n := range with {
		names = append(names, n)
	}
	slices.Sort(names)
	f := Finding{Code: "policy-local", Severity: Notice, Sure: Certain, Object: s.ref()}
	evidence := fmt.Sprintf("ready endpoints are on: %s", some(names))
	if len(names) == 0 {
		f.Severity = Broken
		evidence = "no endpoint says that it is on a node of this cluster (nodeName), so none is local anywhere"
	}
	f.Evidence = []string{evidence}
	if inside {
		one := f
		one.Field = "spec.internalTrafficPolicy"
		one.Verdict = fmt.Sprintf("%s can't be reached from %s: spec.internalTrafficPolicy is Local, and there is no endpoint on %s", s.ref(), nodesText(without), itThem(len(without)))
		one.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"internalTrafficPolicy": "Cluster"}})}
		out = append(out, one)
	}
	atNodes := s.Spec.Type == corev1.ServiceTypeNodePort || len(s.Spec.ExternalIPs) > 0
	if outside && (atNodes || s.Spec.Type == corev1.ServiceTypeLoadBalancer && f.Severity == Broken) {
		one := f
		one.Field = "spec.externalTrafficPolicy"
		one.Verdict = fmt.Sprintf("%s drops what comes from outside to %s: spec.externalTrafficPolicy is Local, and there is no endpoint on %s", s.ref(), nodesText(without), itThem(len(without)))
		one.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalTrafficPolicy": "Cluster"}})}
		out = append(out, one)
	}
	return out
}

func nodesText(names []string) string {
	if len(names) == 1 {
		return "node " + names[0]
	}
	return "the nodes " + some(names)
}

func itThem(n int) string {
	if n == 1 {
		return "it"
	}
	return "them"
}

// sources: source ranges that leave nobody, none of this cluster's nodes, or some clients.
func (v *View) sources(s *Service) []Finding {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil
	}
	asked, _ := spec.Read(s.Service)
	if len(asked.SourceRanges) == 0 || slices.ContainsFunc(asked.SourceRanges, func(p netip.Prefix) bool { return p.Bits() == 0 }) {
		return nil
	}
	f := Finding{
		Code: "source-ranges", Severity: Notice, Sure: Possible, Object: s.ref(), Field: "spec.loadBalancerSourceRanges",
		Fix: []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"loadBalancerSourceRanges": nil}})},
	}
	if asked.RangesFrom != "" {
		f.Field = "metadata.annotations"
		f.Fix = []string{kubectl(s.Namespace, "annotate service %s %s-", s.Name, asked.RangesFrom)}
	}
	var ranges []string
	for _, p := range asked.SourceRanges {
		ranges = append(ranges, p.String())
	}
	f.Verdict = fmt.Sprintf("%s drops clients of its load balancer's addresses whose own address is not in %s: %s", s.ref(), rangesField(asked), some(ranges))
	// People try from machines like these.
	if !slices.ContainsFunc(asked.SourceRanges, v.hasNode) && len(v.nodes) > 0 {
		f.Sure = Likely
		f.Evidence = []string{"no node of this cluster is among them"}
	}
	// Proxies look at the ranges of an address's own family alone.
	at := balancerAddresses(s)
	if len(at) > 0 && asked.RangesFrom == "" && !slices.ContainsFunc(at, func(a netip.Addr) bool {
		return slices.ContainsFunc(asked.SourceRanges, func(p netip.Prefix) bool { return familyOf(p.Addr()) == familyOf(a) })
	}) {
		f.Sure, f.Evidence = Likely, nil
		f.Verdict = fmt.Sprintf("%s lets all clients of its load balancer's address %s in: spec.loadBalancerSourceRanges has no range of %s, only %s", s.ref(), at[0], familyOf(at[0]), some(ranges))
		f.Fix = []string{kubectl(s.Namespace, "edit service %s", s.Name)}
	}
	return []Finding{f}
}

func rangesField(b *spec.Balancer) string {
	return cmp.Or(b.RangesFrom, "spec.loadBalancerSourceRanges")
}

// hasNode says whether a node's address is in a range.
func (v *View) hasNode(p netip.Prefix) bool {
	for _, n := range v.nodes {
		for _, x := range n.Status.Addresses {
			if a, err := netip.ParseAddr(x.Address); err == nil && p.Contains(a.Unmap()) {
				return true
			}
		}
	}
	return false
}

// checkExternalIPs looks at external IPs that are somebody else's.
func checkExternalIPs(v *View) (out []Finding) {
	type at struct {
		addr     netip.Addr
		port     int32
		protocol corev1.Protocol
	}
	first := map[at]*Service{}
	for _, s := range v.order {
		for _, text := range s.Spec.ExternalIPs {
			a, err := netip.ParseAddr(text)
			if err != nil {
				continue
			}
			a = a.Unmap()
			f := Finding{Code: "external-ip-theft", Severity: Broken, Sure: Certain, Object: s.ref(), Field: "spec.externalIPs"}
			f.Fix = []string{v.withoutExternalIP(s, text)}
			if other := v.clusterIPs[a]; other != nil && other != s {
				f.Affects = []Ref{other.ref()}
				f.Verdict = fmt.Sprintf("%s takes traffic of %s: %s in spec.externalIPs is the cluster IP of that Service", s.ref(), other.ref(), a)
				out = append(out, f)
				continue
			}
			if other := v.balancedAt(a, s); other != nil {
				f.Affects = []Ref{other.ref()}
				f.Verdict = fmt.Sprintf("%s takes traffic of %s: %s in spec.externalIPs is its load balancer's address", s.ref(), other.ref(), a)
				out = append(out, f)
				continue
			}
			if p := v.podIPs[a]; p != nil {
				f.Affects = []Ref{podRef(p)}
				f.Verdict = fmt.Sprintf("%s takes traffic of %s: %s in spec.externalIPs is that Pod's address", s.ref(), podRef(p), a)
				out = append(out, f)
				continue
			}
			if other, port := v.endpointAt(a, s); other != nil {
				f.Affects = []Ref{other.ref()}
				f.Verdict = fmt.Sprintf("%s takes traffic of an endpoint of %s: %s in spec.externalIPs is its address, and port %d its port", s.ref(), other.ref(), a, port)
				out = append(out, f)
				continue
			}
			for i := range s.Spec.Ports {
				key := at{a, s.Spec.Ports[i].Port, protocolOf(&s.Spec.Ports[i])}
				other := first[key]
				if other == nil {
					first[key] = s
					continue
				}
				if other == s {
					continue
				}
				conflict := f
				conflict.Code, conflict.Affects = "external-ip-conflict", []Ref{other.ref()}
				conflict.Verdict = fmt.Sprintf("%s and %s both ask for %s port %d (spec.externalIPs): only one gets the traffic", s.ref(), other.ref(), a, key.port)
				out = append(out, conflict)
			}
		}
	}
	return out
}

// endpointAt is another Service with an endpoint at an address and a port of this one: its packets would be led elsewhere.
func (v *View) endpointAt(a netip.Addr, s *Service) (*Service, int32) {
	for i := range v.Evidence.Slices {
		slice := &v.Evidence.Slices[i]
		other := v.services[Key{slice.Namespace, slice.Labels[discoveryv1.LabelServiceName]}]
		if other == nil || other == s || !slices.ContainsFunc(slice.Endpoints, func(e discoveryv1.Endpoint) bool { return slices.Contains(e.Addresses, a.String()) }) {
			continue
		}
		for j := range slice.Ports {
			p := &slice.Ports[j]
			if p.Port != nil && slices.ContainsFunc(s.Spec.Ports, func(own corev1.ServicePort) bool { return own.Port == *p.Port && protocolOf(&own) == sliceProtocol(p) }) {
				return other, *p.Port
			}
		}
	}
	return nil, 0
}

// balancedAt is another Service that has an address from a load balancer, and a port of this one.
func (v *View) balancedAt(a netip.Addr, s *Service) *Service {
	for _, other := range v.order {
		if other == s || !slices.Contains(balancerAddresses(other), a) {
			continue
		}
		for i := range s.Spec.Ports {
			if slices.ContainsFunc(other.Spec.Ports, func(p corev1.ServicePort) bool {
				return p.Port == s.Spec.Ports[i].Port && p.Protocol == s.Spec.Ports[i].Protocol
			}) {
				return other
			}
		}
	}
	return nil
}

func (v *View) withoutExternalIP(s *Service, text string) string {
	rest := slices.DeleteFunc(slices.Clone(s.Spec.ExternalIPs), func(a string) bool { return a == text })
	if len(rest) == 0 {
		return mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalIPs": nil}})
	}
	return mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalIPs": rest}})
}
