package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// checkPolicies looks at fields that keep traffic away from endpoints that are there.
func checkPolicies(v *View) (out []Finding) {
	for _, s := range v.order {
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
		if !s.served() {
			continue
		}
		out = append(out, v.local(s)...)
		out = append(out, v.sources(s)...)
	}
	return out
}

// local: a policy of Local, and nodes without endpoints.
func (v *View) local(s *Service) (out []Finding) {
	with := map[string]bool{}
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			if e := &slice.Endpoints[i]; isReady(e) && e.NodeName != nil {
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
		evidence = "no endpoint says which node it is on, so none is local anywhere"
	}
	f.Evidence = []string{evidence}
	if s.Spec.InternalTrafficPolicy != nil && *s.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal {
		one := f
		one.Field = "spec.internalTrafficPolicy"
		one.Verdict = fmt.Sprintf("%s can't be reached from %s: spec.internalTrafficPolicy is Local, and there is no endpoint on %s", s.ref(), nodesText(without), itThem(len(without)))
		one.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"internalTrafficPolicy": "Cluster"}})}
		out = append(out, one)
	}
	outside := s.Spec.Type == corev1.ServiceTypeNodePort || len(s.Spec.ExternalIPs) > 0 || s.Spec.Type == corev1.ServiceTypeLoadBalancer && f.Severity == Broken
	if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && outside {
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

// sources: source ranges that leave nobody, or not those of the Service's family.
func (v *View) sources(s *Service) []Finding {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer || len(s.Spec.LoadBalancerSourceRanges) == 0 {
		return nil
	}
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		if p, err := netip.ParsePrefix(strings.TrimSpace(text)); err == nil && p.Bits() == 0 {
			return nil
		}
	}
	return []Finding{{
		Code: "source-ranges", Severity: Notice, Sure: Possible, Object: s.ref(), Field: "spec.loadBalancerSourceRanges",
		Verdict: fmt.Sprintf("%s drops clients of its load balancer's addresses whose own address is not in spec.loadBalancerSourceRanges: %s", s.ref(), some(s.Spec.LoadBalancerSourceRanges)),
		Fix:     []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"loadBalancerSourceRanges": nil}})},
	}}
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
			if p := v.podIPs[a]; p != nil {
				f.Affects = []Ref{podRef(p)}
				f.Verdict = fmt.Sprintf("%s takes traffic of %s: %s in spec.externalIPs is that Pod's address", s.ref(), podRef(p), a)
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

func (v *View) withoutExternalIP(s *Service, text string) string {
	rest := slices.DeleteFunc(slices.Clone(s.Spec.ExternalIPs), func(a string) bool { return a == text })
	if len(rest) == 0 {
		return mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalIPs": nil}})
	}
	return mergePatch(s.ref(), map[string]any{"spec": map[string]any{"externalIPs": rest}})
}

// checkBalancers looks at Services of type LoadBalancer that have no address.
func checkBalancers(v *View) (out []Finding) {
	for _, s := range v.order {
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer || len(s.Status.LoadBalancer.Ingress) > 0 || v.Now.Sub(s.CreationTimestamp.Time) < settle {
			continue
		}
		f := Finding{Code: "balancer-pending", Severity: Broken, Sure: Certain, Object: s.ref(), Field: "status.loadBalancer", Since: since(s.CreationTimestamp.Time)}
		why := v.balancerMessage(s)
		switch {
		case why != "":
			f.Verdict = fmt.Sprintf("%s has no load balancer's address: %s", s.ref(), why)
			f.Fix = []string{kubectl(s.Namespace, "describe service %s", s.Name)}
		case s.Spec.LoadBalancerClass != nil:
			f.Verdict = fmt.Sprintf("%s has no load balancer's address: nobody answers for spec.loadBalancerClass %q", s.ref(), *s.Spec.LoadBalancerClass)
			f.Fix = []string{kubectl(s.Namespace, "get service %s -o yaml", s.Name)}
		default:
			f.Verdict = fmt.Sprintf("%s has no load balancer's address: nothing in this cluster gives addresses to Services of type LoadBalancer, or its pools are empty", s.ref())
			f.Fix = []string{"portal lb --pool 192.0.2.240-192.0.2.250"}
		}
		f.Evidence = []string{fmt.Sprintf("created %s ago; its cluster IP and node ports work all the same", ago(v.Now.Sub(s.CreationTimestamp.Time)))}
		out = append(out, f)
	}
	return out
}

func (v *View) balancerMessage(s *Service) string {
	var newest *corev1.Event
	for _, e := range v.events[s.ref()] {
		if e.Type == corev1.EventTypeWarning && (newest == nil || lastSeen(e).After(lastSeen(newest))) {
			newest = e
		}
	}
	if newest == nil {
		return ""
	}
	return firstLine(newest.Message)
}
