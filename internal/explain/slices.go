package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	for _, s := range v.order {
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
	family := corev1.IPv6Protocol
	if a.Unmap().Is4() {
		family = corev1.IPv4Protocol
	}
	return slices.Contains(s.Spec.IPFamilies, family)
}

// checkHandMade looks at Services whose endpoints people write, and at what people wrote for others.
func checkHandMade(v *View) (out []Finding) {
	if !v.sees("endpointslices") {
		return nil
	}
	for _, s := range v.order {
		if s.Spec.Type == corev1.ServiceTypeExternalName {
			continue
		}
		if s.selects() {
			out = append(out, v.intruders(s)...)
			continue
		}
		if s.Namespace == metaDefault && s.Name == "kubernetes" {
			continue
		}
		if s.Namespace == "kube-system" && s.Name == "kube-dns" {
			continue // see checkDNS
		}
		out = append(out, v.unmade(s)...)
	}
	return append(out, v.handMadePorts()...)
}

const metaDefault = "default"

// intruders are slices for a Service with a selector that no controller wrote: the proxy adds them to the Pods.
func (v *View) intruders(s *Service) (out []Finding) {
	for _, slice := range s.Slices {
		by := slice.Labels[discoveryv1.LabelManagedBy]
		if by == sliceController || len(slice.Endpoints) == 0 || strings.HasSuffix(by, "k8s.io") && by != mirror {
			continue
		}
		var addrs []string
		for i := range slice.Endpoints {
			addrs = append(addrs, slice.Endpoints[i].Addresses...)
		}
		r := Ref{"EndpointSlice", slice.Namespace, slice.Name}
		f := Finding{
			Code: "slice-by-hand", Severity: Degraded, Sure: Likely, Object: s.ref(), Affects: []Ref{r}, Since: since(slice.CreationTimestamp.Time),
			Verdict:  fmt.Sprintf("%s has a selector, and %s, which no controller wrote, adds %s to its endpoints", s.ref(), r, some(addrs)),
			Evidence: []string{fmt.Sprintf("the label %s of %s is %q", discoveryv1.LabelManagedBy, slice.Name, by)},
			Fix:      []string{kubectl(slice.Namespace, "delete endpointslice %s", slice.Name)},
		}
		if by == mirror {
			f.Evidence = append(f.Evidence, "it mirrors an Endpoints object from before the Service had a selector")
		}
		if ready, _ := s.endpoints(); ready == len(addrs) {
			f.Severity = Broken
		}
		out = append(out, f)
	}
	return out
}

// unmade: a Service without selector and endpoints.
func (v *View) unmade(s *Service) []Finding {
	if s.served() {
		return nil
	}
	f := Finding{Severity: Broken, Sure: Certain, Object: s.ref()}
	if slice := v.stray(s); slice != nil {
		r := Ref{"EndpointSlice", slice.Namespace, slice.Name}
		f.Code, f.Affects, f.Field = "slice-label", []Ref{r}, "metadata.labels"
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s lacks the label %s=%s by which it would be the Service's", s.ref(), r, discoveryv1.LabelServiceName, s.Name)
		f.Evidence = []string{fmt.Sprintf("its labels are %q", pairs(slice.Labels))}
		f.Fix = []string{kubectl(slice.Namespace, "label endpointslice %s %s=%s --overwrite", slice.Name, discoveryv1.LabelServiceName, s.Name)}
		return []Finding{f}
	}
	if e := s.Endpoints; e != nil && len(e.Subsets) > 0 && len(s.Slices) == 0 {
		return []Finding{v.unmirrored(f, s)}
	}
	if _, all := s.endpoints(); all > 0 {
		f.Code = "endpoints-not-ready"
		f.Verdict = fmt.Sprintf("%s has no ready endpoint: its EndpointSlices say ready: false of all %s, and it has no selector, so whoever wrote them has to change that", s.ref(), count(all, "endpoint", "endpoints"))
		for _, slice := range s.Slices {
			r := Ref{"EndpointSlice", slice.Namespace, slice.Name}
			f.Affects = append(f.Affects, r)
			for i := range slice.Endpoints {
				f.Fix = append(f.Fix, jsonPatch(r, operation{"add", fmt.Sprintf("/endpoints/%d/conditions/ready", i), true}))
			}
		}
		return []Finding{f}
	}
	f.Code, f.Field = "no-endpoints", "spec.selector"
	f.Verdict = fmt.Sprintf("%s has no endpoints: it has no selector, and nobody wrote EndpointSlices for it", s.ref())
	for _, set := range v.labelsOf(s.Namespace).sets {
		for _, k := range []string{"app", "app.kubernetes.io/name", "k8s-app", "run", "name"} {
			if set.labels[k] == s.Name {
				f.Evidence = []string{fmt.Sprintf("%s has the label %s=%s", set.example, k, s.Name)}
				f.Fix = []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": map[string]string{k: s.Name}}})}
				return []Finding{f}
			}
		}
	}
	f.Fix = []string{kubectl(s.Namespace, "set selector service %s app=%s", s.Name, s.Name)}
	return []Finding{f}
}

// stray is a slice that was meant for a Service and is not its own.
func (v *View) stray(s *Service) *discoveryv1.EndpointSlice {
	for _, slice := range v.strays[s.Namespace] {
		name := slice.Labels[discoveryv1.LabelServiceName]
		if name != "" && !near(name, s.Name) {
			continue
		}
		owned := slices.ContainsFunc(slice.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Service" && o.Name == s.Name })
		if name != "" || owned || slice.Name == s.Name || strings.HasPrefix(slice.Name, s.Name+"-") {
			return slice
		}
	}
	return nil
}

func (v *View) unmirrored(f Finding, s *Service) Finding {
	r := Ref{"Endpoints", s.Namespace, s.Name}
	f.Code, f.Affects = "endpoints-unmirrored", []Ref{r}
	if s.Endpoints.Labels["endpointslice.kubernetes.io/skip-mirror"] == "true" {
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s has the label endpointslice.kubernetes.io/skip-mirror=true, so no EndpointSlice is made of it", s.ref(), r)
		f.Fix = []string{kubectl(s.Namespace, "label endpoints %s endpointslice.kubernetes.io/skip-mirror-", s.Name)}
		return f
	}
	ready := 0
	for _, subset := range s.Endpoints.Subsets {
		ready += len(subset.Addresses)
	}
	if ready == 0 {
		f.Code = "endpoints-not-ready"
		f.Verdict = fmt.Sprintf("%s has no ready endpoint: all addresses of %s are among notReadyAddresses", s.ref(), r)
		f.Fix = []string{kubectl(s.Namespace, "edit endpoints %s", s.Name)}
		return f
	}
	f.Verdict = fmt.Sprintf("%s has no endpoints: %s has not been mirrored to an EndpointSlice, which is what proxies read", s.ref(), r)
	f.Fix = []string{kubectl("kube-system", "get leases")}
	return f
}

// handMadePorts compares the names of ports in slices that people wrote with those of their Services.
func (v *View) handMadePorts() (out []Finding) {
	for _, s := range v.order {
		if s.selects() || s.headless() || len(s.Slices) == 0 {
			continue
		}
		for i := range s.Spec.Ports {
			if f, ok := v.slicePort(s, i); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

func (v *View) slicePort(s *Service, index int) (Finding, bool) {
	port := &s.Spec.Ports[index]
	var have []string
	var in *discoveryv1.EndpointSlice
	at := 0
	for _, slice := range s.Slices {
		if len(slice.Endpoints) == 0 {
			continue
		}
		if in == nil {
			in = slice
		}
		for j := range slice.Ports {
			p := &slice.Ports[j]
			if sliceName(p) == port.Name && sliceProtocol(p) == protocolOf(port) && p.Port != nil {
				return Finding{}, false
			}
			if sliceProtocol(p) == protocolOf(port) && len(s.Spec.Ports) == 1 {
				in, at = slice, j
			}
			have = append(have, fmt.Sprintf("%q %s", sliceName(p), sliceProtocol(p)))
		}
	}
	if in == nil {
		return Finding{}, false
	}
	r := Ref{"EndpointSlice", in.Namespace, in.Name}
	f := Finding{Code: "slice-port", Severity: Broken, Sure: Certain, Object: s.ref(), Field: fmt.Sprintf("spec.ports[%d].name", index), Affects: []Ref{r}}
	if len(have) == 0 {
		f.Verdict = fmt.Sprintf("%s gets no traffic through: %s has no ports, and endpoints belong to a Service's port by its name", s.ref(), r)
		number := target(&corev1.Pod{}, port)
		if number == 0 {
			number = port.Port
		}
		f.Fix = []string{jsonPatch(r, operation{"add", "/ports", []map[string]any{{"name": port.Name, "port": number, "protocol": protocolOf(port)}}})}
		return f, true
	}
	f.Verdict = fmt.Sprintf("%s: port %d is named %q (%s), and %s has only %s: endpoints belong to a Service's port by name and protocol", s.ref(), port.Port, port.Name, protocolOf(port), r, some(have))
	if len(in.Ports) > 0 {
		p := &in.Ports[at]
		if sliceProtocol(p) == protocolOf(port) {
			f.Fix = []string{jsonPatch(r, operation{"replace", fmt.Sprintf("/ports/%d/name", at), quoted(port.Name)})}
		} else {
			f.Fix = []string{jsonPatch(r, operation{"replace", fmt.Sprintf("/ports/%d/protocol", at), protocolOf(port)})}
		}
	}
	return f, true
}

// quoted keeps an empty text in a patch.
func quoted(text string) any {
	if text == "" {
		return &text
	}
	return text
}

func sliceName(p *discoveryv1.EndpointPort) string {
	if p.Name == nil {
		return ""
	}
	return *p.Name
}

func sliceProtocol(p *discoveryv1.EndpointPort) corev1.Protocol {
	if p.Protocol == nil {
		return corev1.ProtocolTCP
	}
	return *p.Protocol
}

// checkEndpointAddresses looks at where endpoints are: at cluster IPs, at Pods that don't exist, in the wrong family.
func checkEndpointAddresses(v *View) (out []Finding) {
	for _, s := range v.order {
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
		for _, text := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil && p.Contains(a) {
				return true
			}
		}
	}
	return false
}

func familyServed(s *Service, t discoveryv1.AddressType) bool {
	if len(s.Spec.IPFamilies) == 0 {
		return t != discoveryv1.AddressTypeFQDN
	}
	return slices.Contains(s.Spec.IPFamilies, corev1.IPFamily(t))
}
