package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

const (
	sliceController = "endpointslice-controller.k8s.io"
	mirror          = "endpointslicemirroring-controller.k8s.io"
)

// checkSlices compares the slices of Services with the Pods that they select.
func checkSlices(v *View) (out []Finding) {
	if !v.sees("endpointslices", "pods") {
		return nil
	}
	for _, s := range v.subjects {
		if !s.selects() {
			continue
		}
		if f, ok := v.stale(s); ok {
			out = append(out, f)
		}
	}
	return out
}

// stale: ready Pods are not in the slices, or Pods that are gone are.
func (v *View) stale(s *Service) (Finding, bool) {
	listed := map[netip.Addr]bool{}
	var gone []string
	for _, slice := range s.Slices {
		if slice.Labels[discoveryv1.LabelManagedBy] != sliceController {
			continue
		}
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			for _, text := range e.Addresses {
				a, err := netip.ParseAddr(text)
				if err != nil {
					continue
				}
				listed[a.Unmap()] = true
				if p := e.TargetRef; p != nil && p.Kind == "Pod" && isReady(e) {
					if pod := v.pods[Key{p.Namespace, p.Name}]; pod == nil || ended(pod) || pod.UID != p.UID && p.UID != "" {
						gone = append(gone, fmt.Sprintf("%s is ready in EndpointSlice %s, and its Pod %s is gone", text, slice.Name, p.Name))
					}
				}
			}
		}
	}
	var missing []string
	var oldest time.Time
	for _, p := range s.Pods {
		ready, at, _ := podReady(p)
		if !ready || ended(p) || p.DeletionTimestamp != nil || v.Now.Sub(at) < settle || v.Now.Sub(s.CreationTimestamp.Time) < settle || !v.hasTarget(s, p) {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			a, err := netip.ParseAddr(ip.IP)
			if err == nil && wantsFamily(s, a) && !listed[a.Unmap()] {
				missing = append(missing, fmt.Sprintf("Pod %s (%s) is ready, and in no EndpointSlice of the Service", p.Name, a))
				if oldest.IsZero() || at.Before(oldest) {
					oldest = at
				}
			}
		}
	}
	if len(missing) == 0 && len(gone) == 0 {
		return Finding{}, false
	}
	f := Finding{Code: "endpoints-stale", Severity: Degraded, Sure: Certain, Object: s.ref(), Since: since(oldest), Evidence: limit(append(missing, gone...))}
	if ready, _ := s.endpoints(); ready == len(gone) {
		f.Severity = Broken
	}
	f.Verdict = fmt.Sprintf("%s: its EndpointSlices don't follow its Pods (%s): the controller that writes them does not keep up", s.ref(), firstOf(missing, gone))
	f.Fix = []string{kubectl("kube-system", "get leases")}
	return f, true
}

func firstOf(lists ...[]string) string {
	for _, list := range lists {
		if len(list) > 0 {
			return list[0]
		}
	}
	return ""
}

func limit(list []string) []string { return list[:min(len(list), 6)] }

// hasTarget: a Pod that has none of the Service's ports is in a slice without ports, or in none.
func (v *View) hasTarget(s *Service, p *corev1.Pod) bool {
	if len(s.Spec.Ports) == 0 {
		return s.headless()
	}
	return slices.ContainsFunc(s.Spec.Ports, func(port corev1.ServicePort) bool { return target(p, &port) != 0 })
}

func wantsFamily(s *Service, a netip.Addr) bool {
	if len(s.Spec.IPFamilies) == 0 {
		return a.Unmap().Is4()
	}
	return slices.Contains(s.Spec.IPFamilies, familyOf(a))
}

func familyOf(a netip.Addr) corev1.IPFamily {
	if a.Unmap().Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}

// noFamily: Pods that are ready, and none has an address of the Service's family; or for no reason that can be seen.
func (v *View) noFamily(s *Service) Finding {
	f := Finding{Code: "no-endpoints", Severity: Broken, Sure: Likely, Object: s.ref()}
	var have []string
	for _, p := range s.Pods {
		for _, ip := range p.Status.PodIPs {
			a, err := netip.ParseAddr(ip.IP)
			if err == nil && wantsFamily(s, a) {
				f.Verdict = fmt.Sprintf("%s has no endpoints, though %s match its selector: no EndpointSlice lists them", s.ref(), count(len(s.Pods), "Pod", "Pods"))
				f.Fix = []string{kubectl(s.Namespace, "get endpointslices -l kubernetes.io/service-name=%s -o yaml", s.Name)}
				return f
			}
			have = append(have, ip.IP)
		}
	}
	f.Code, f.Field, f.Sure = "pods-family", "spec.ipFamilies", Certain
	f.Verdict = fmt.Sprintf("%s has no endpoints: it is for %s, and its Pods have no such address (%s)", s.ref(), families(s), some(have))
	f.Fix = []string{recreate(s)}
	return f
}

// moving: a Pod has just become ready, or is about to.
func (v *View) moving(s *Service) bool {
	return slices.ContainsFunc(s.Pods, func(p *corev1.Pod) bool {
		_, at, _ := podReady(p)
		return v.Now.Sub(at) < settle
	})
}

// checkEndpointAddresses looks at where endpoints are: at cluster IPs, at Pods that don't exist, in the wrong family.
func checkEndpointAddresses(v *View) (out []Finding) {
	for _, s := range v.subjects {
		if !s.proxied() {
			continue
		}
		for _, slice := range s.Slices {
			if slice.Labels[discoveryv1.LabelManagedBy] == sliceController {
				continue
			}
			out = append(out, v.misplaced(s, slice)...)
		}
	}
	return out
}

func (v *View) misplaced(s *Service, slice *discoveryv1.EndpointSlice) (out []Finding) {
	r := Ref{"EndpointSlice", slice.Namespace, slice.Name}
	base := Finding{Severity: Broken, Sure: Certain, Object: s.ref(), Affects: []Ref{r}}
	if len(slice.Endpoints) > 0 && !familyServed(s, slice.AddressType) {
		if s.inFamily() {
			return nil // the same endpoints may have addresses of several families
		}
		f := base
		f.Code, f.Field = "slice-family", "spec.ipFamilies"
		f.Verdict = fmt.Sprintf("%s is of %v, and the endpoints in %s are of type %s, which no proxy leads its addresses to", s.ref(), s.Spec.IPFamilies, r, slice.AddressType)
		f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"ipFamilyPolicy": "PreferDualStack"}})}
		if slice.AddressType == discoveryv1.AddressTypeFQDN {
			f.Fix = []string{kubectl(s.Namespace, "delete endpointslice %s", slice.Name)}
		}
		return []Finding{f}
	}
	for i := range slice.Endpoints {
		for _, text := range slice.Endpoints[i].Addresses {
			a, err := netip.ParseAddr(text)
			if err != nil {
				continue
			}
			if other := v.clusterIPs[a]; other != nil && !(s.Namespace == metaDefault && s.Name == "kubernetes") {
				f := base
				f.Code = "endpoint-is-cluster-ip"
				f.Verdict = fmt.Sprintf("%s has the endpoint %s, which is the cluster IP of %s: packets can't be led twice, so connections fail", s.ref(), a, other.ref())
				f.Evidence = []string{fmt.Sprintf("endpoints[%d] of %s", i, r)}
				f.Fix = v.insteadOfVIP(s, other, slice)
				return []Finding{f}
			}
			if v.noPod(a) && isReady(&slice.Endpoints[i]) {
				f := base
				f.Code, f.Severity, f.Sure = "endpoint-no-pod", Degraded, Likely
				f.Verdict = fmt.Sprintf("%s has the endpoint %s, written by hand: it is among the Pods' addresses, and no Pod has it", s.ref(), a)
				if len(slice.Endpoints) == 1 && len(s.Slices) == 1 {
					f.Severity = Broken
				}
				f.Fix = []string{kubectl(s.Namespace, "get pods -o wide")}
				out = append(out, f)
			}
		}
	}
	return out
}

// insteadOfVIP leads a Service to the Pods of another one of its namespace; else by name.
func (v *View) insteadOfVIP(s, other *Service, slice *discoveryv1.EndpointSlice) []string {
	remove := kubectl(slice.Namespace, "delete endpointslice %s", slice.Name)
	if slice.Labels[discoveryv1.LabelManagedBy] == mirror {
		remove = kubectl(slice.Namespace, "delete endpoints %s", s.Name)
	}
	if other.Namespace == s.Namespace && other.selects() {
		return []string{remove, mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": other.Spec.Selector}})}
	}
	return []string{remove, mergePatch(s.ref(), map[string]any{"spec": map[string]any{
		"type": "ExternalName", "externalName": fmt.Sprintf("%s.%s.svc.%s", other.Name, other.Namespace, v.Zone), "clusterIP": nil, "clusterIPs": nil,
	}})}
}

// noPod: an address in a node's Pod range that no Pod and no node has.
func (v *View) noPod(a netip.Addr) bool {
	if !v.sees("pods", "nodes") || v.Limited != "" || v.podIPs[a.Unmap()] != nil {
		return false
	}
	for _, n := range v.nodes {
		if strings.Contains(n.Annotations["portal.dev/dns"], a.String()) {
			return false
		}
	}
	for _, n := range v.nodes { // ranges of several may have it
		for _, text := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil && p.Contains(a) {
				return true
			}
		}
	}
	return false
}

// inFamily says whether there are endpoints of a family that the Service has.
func (s *Service) inFamily() bool {
	return slices.ContainsFunc(s.Slices, func(slice *discoveryv1.EndpointSlice) bool {
		return len(slice.Endpoints) > 0 && familyServed(s, slice.AddressType)
	})
}

func familyServed(s *Service, t discoveryv1.AddressType) bool {
	if len(s.Spec.IPFamilies) == 0 {
		return t != discoveryv1.AddressTypeFQDN
	}
	return slices.Contains(s.Spec.IPFamilies, corev1.IPFamily(t))
}
