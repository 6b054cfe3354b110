package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"portal/internal/lb/compile"
	"portal/internal/lb/spec"
	"portal/internal/lb/tlspolicy"
)

const (
	// balancerLease is held by the leader of Portal's load balancers; announcers have Leases of their own.
	balancerLease = "portal-lb"
	balancerClass = "portal.dev/lb"
	// BalancerEntry is the Service whose addresses Ingresses share.
	BalancerEntry = "kube-system/portal-ingress"
)

// balances says whether a Service has its balancer from Portal.
func balances(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer && (s.Spec.LoadBalancerClass == nil || *s.Spec.LoadBalancerClass == balancerClass)
}

// lease is one of kube-system, or nil.
func (v *View) lease(name string) *coordinationv1.Lease {
	for i := range v.Leases {
		if l := &v.Leases[i]; l.Namespace == "kube-system" && l.Name == name {
			return l
		}
	}
	return nil
}

// checkBalancers looks at Services of type LoadBalancer that have no address, or that nobody announces.
func checkBalancers(v *View) (out []Finding) {
	leader := v.lease(balancerLease)
	stopped := leader != nil && v.expired(leader)
	var left []Ref
	for _, s := range v.order {
		if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		if balances(s.Service) {
			left = append(left, s.ref())
		}
		out = append(out, otherAddress(s)...)
		if len(s.Status.LoadBalancer.Ingress) > 0 || v.Now.Sub(s.CreationTimestamp.Time) < settle || stopped && balances(s.Service) {
			continue
		}
		out = append(out, v.pending(s, leader != nil))
	}
	if stopped && len(left) > 0 {
		f := Finding{
			Code: "balancer-stopped", Severity: Broken, Sure: Certain, Object: Ref{"Lease", "kube-system", balancerLease}, Affects: left, Since: since(leader.Spec.RenewTime.Time),
			Verdict: fmt.Sprintf("no load balancer runs: the Lease %s has not been renewed for %s, so Services get no addresses and nobody announces those that they have", balancerLease, ago(v.Now.Sub(leader.Spec.RenewTime.Time))),
			Fix:     []string{"portal lb --pool 192.0.2.240-192.0.2.250"},
		}
		if leader.Spec.HolderIdentity != nil && *leader.Spec.HolderIdentity != "" {
			f.Evidence = []string{"the last leader was " + *leader.Spec.HolderIdentity}
		}
		out = append(out, f)
	}
	out = append(out, v.excluded(left)...)
	return append(out, v.balancerProblems(leader != nil)...)
}

// excluded: no node may announce addresses.
func (v *View) excluded(left []Ref) []Finding {
	first := ""
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		n := v.nodes[name]
		if _, out := n.Labels[corev1.LabelNodeExcludeBalancers]; !out && nodeReady(n) {
			return nil
		} else if out && first == "" {
			first = name
		}
	}
	if first == "" || len(left) == 0 {
		return nil
	}
	return []Finding{{
		Code: "balancer-no-node", Severity: Broken, Sure: Certain, Object: Ref{"Node", "", first}, Field: "metadata.labels", Affects: left,
		Verdict: fmt.Sprintf("no node announces the addresses of load balancers: all ready nodes have the label %s", corev1.LabelNodeExcludeBalancers),
		Fix:     []string{kubectl("", "label node %s %s-", first, corev1.LabelNodeExcludeBalancers)},
	}}
}

// otherAddress: a Service has an address of a balancer, and asked for another.
func otherAddress(s *Service) []Finding {
	asked := s.Spec.LoadBalancerIP
	if text := s.Annotations["portal.dev/load-balancer-ips"]; text != "" {
		asked = text
	}
	have := balancerAddresses(s)
	if asked == "" || len(have) == 0 {
		return nil
	}
	for text := range strings.SplitSeq(asked, ",") {
		if a, err := netip.ParseAddr(strings.TrimSpace(text)); err == nil && !slices.Contains(have, a.Unmap()) {
			return []Finding{{
				Code: "balancer-address", Severity: Notice, Sure: Certain, Object: s.ref(), Field: "spec.loadBalancerIP",
				Verdict: fmt.Sprintf("%s asks for the address %s and has %s: no pool has that address for it", s.ref(), a, have[0]),
				Fix:     []string{kubectl(s.Namespace, "describe service %s", s.Name)},
			}}
		}
	}
	return nil
}

// pending: a Service without the address of a balancer.
func (v *View) pending(s *Service, portals bool) Finding {
	f := Finding{Code: "balancer-pending", Severity: Broken, Sure: Certain, Object: s.ref(), Field: "status.loadBalancer", Since: since(s.CreationTimestamp.Time)}
	f.Evidence = []string{fmt.Sprintf("created %s ago; its cluster IP and node ports work all the same", ago(v.Now.Sub(s.CreationTimestamp.Time)))}
	class := s.Spec.LoadBalancerClass
	switch why := v.balancerMessage(s); {
	case class != nil && *class != balancerClass && why == "":
		f.Verdict = fmt.Sprintf("%s has no load balancer's address: nobody answers for spec.loadBalancerClass %q", s.ref(), *class)
		if portals {
			f.Evidence = append(f.Evidence, fmt.Sprintf("Portal's load balancers serve the class %s, and Services without one", balancerClass))
			// The class can't be changed as long as the type is.
			f.Fix = []string{
				mergePatch(s.ref(), map[string]any{"spec": map[string]any{"type": "ClusterIP", "loadBalancerClass": nil}}),
				mergePatch(s.ref(), map[string]any{"spec": map[string]any{"type": "LoadBalancer"}}),
			}
		} else {
			f.Fix = []string{kubectl(s.Namespace, "get service %s -o yaml", s.Name)}
		}
	case why != "":
		f.Verdict = fmt.Sprintf("%s has no load balancer's address: %s", s.ref(), why)
		f.Fix = v.addressFix(s)
	default:
		f.Verdict = fmt.Sprintf("%s has no load balancer's address: nothing in this cluster gives addresses to Services of type LoadBalancer, or its pools are empty", s.ref())
		f.Fix = []string{"portal lb --pool 192.0.2.240-192.0.2.250"}
	}
	return f
}

// addressFix takes away what a Service asks for besides an address; else it shows what there is.
func (v *View) addressFix(s *Service) []string {
	var out []string
	for _, key := range []string{"portal.dev/load-balancer-pool", "portal.dev/load-balancer-ips"} {
		if s.Annotations[key] != "" {
			out = append(out, kubectl(s.Namespace, "annotate service %s %s-", s.Name, key))
		}
	}
	if asked, _ := spec.Read(s.Service); asked.Internal { // whichever annotation asked for it
		for _, key := range slices.Sorted(maps.Keys(s.Annotations)) {
			if strings.Contains(key, "internal") || strings.Contains(key, "scheme") || strings.Contains(key, "load-balancer-type") {
				out = append(out, kubectl(s.Namespace, "annotate service %s %s-", s.Name, key))
			}
		}
	}
	if s.Spec.LoadBalancerIP != "" {
		out = append(out, mergePatch(s.ref(), map[string]any{"spec": map[string]any{"loadBalancerIP": nil}}))
	}
	if len(out) > 0 {
		return out
	}
	return []string{kubectl(s.Namespace, "describe service %s", s.Name), kubectl("", "get services --all-namespaces --field-selector=spec.type=LoadBalancer")}
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

// compiled is what Portal's load balancers make of Services and Ingresses; or of some Services alone.
func (v *View) compiled(only ...*Service) compile.Output {
	in := compile.Input{
		Ours: balances, Entry: BalancerEntry, Groups: v.ConfigMaps[compile.GroupsName], Certificates: v.ConfigMaps[compile.CertificatesName],
		Slices: func(namespace, name string) []*discoveryv1.EndpointSlice {
			if s := v.Service(namespace, name); s != nil {
				return s.Slices
			}
			return nil
		},
		Secret: func(namespace, name string) compile.Secret {
			exists, known := v.Secrets[Ref{"Secret", namespace, name}]
			return compile.Secret{Known: known && !exists} // the others are looked at as certificates
		},
		Policy: func(name string) (compile.TLSPolicy, bool) {
			_, ok := tlspolicy.Lookup(name)
			return compile.TLSPolicy{}, ok
		},
		Resolve: func(string) ([]netip.Addr, bool) { return nil, false },
	}
	all := only
	if len(only) == 0 {
		all = v.order
	}
	for _, s := range all {
		in.Services = append(in.Services, s.Service)
	}
	for i := range v.Ingresses {
		if len(only) > 0 {
			break
		}
		in.Ingresses = append(in.Ingresses, &v.Ingresses[i])
	}
	for i := range v.IngressClasses {
		in.Classes = append(in.Classes, &v.IngressClasses[i])
	}
	return compile.Compile(in)
}

// NeededSecrets are those with certificates of Services and Ingresses.
func NeededSecrets(e *Evidence) (out []Ref) {
	v := newView(e)
	v.indexServices() // neither Pods nor nodes matter
	for _, s := range v.compiled().Secrets {
		out = append(out, Ref{"Secret", s.Namespace, s.Name})
	}
	for i := range e.Ingresses {
		for _, t := range e.Ingresses[i].Spec.TLS {
			if r := (Ref{"Secret", e.Ingresses[i].Namespace, t.SecretName}); t.SecretName != "" && !slices.Contains(out, r) {
				out = append(out, r)
			}
		}
	}
	return out
}
