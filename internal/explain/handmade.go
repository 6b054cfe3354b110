package explain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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
	if f, ok := v.abandoned(s); ok {
		return []Finding{f}
	}
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
	if slice := v.elsewhereSlice(s); slice != nil {
		f.Code = "slice-namespace"
		f.Affects = []Ref{{"EndpointSlice", slice.Namespace, slice.Name}}
		f.Verdict = fmt.Sprintf("%s has no endpoints: EndpointSlice %s, which has its label, is in the namespace %s, and a slice belongs to Services of its own", s.ref(), slice.Name, slice.Namespace)
		f.Fix = []string{fmt.Sprintf("kubectl get endpointslice %s -n %s -o json | sed 's/\"namespace\": *\"%s\"/\"namespace\": \"%s\"/; /resourceVersion/d; /\"uid\"/d' | kubectl create -f -", slice.Name, slice.Namespace, slice.Namespace, s.Namespace)}
		return []Finding{f}
	}
	f.Fix = v.selectorFix(s, &f)
	return []Finding{f}
}

// selectorFix is a selector that a Service without one probably should have.
func (v *View) selectorFix(s *Service, f *Finding) []string {
	for _, set := range v.labelsOf(s.Namespace).sets {
		for _, k := range []string{"app", "app.kubernetes.io/name", "k8s-app", "run", "name"} {
			if set.labels[k] == s.Name {
				f.Evidence = append(f.Evidence, fmt.Sprintf("%s has the label %s=%s", set.example, k, s.Name))
				return []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": map[string]string{k: s.Name}}})}
			}
		}
	}
	return []string{kubectl(s.Namespace, "set selector service %s app=%s", s.Name, s.Name)}
}

// elsewhereSlice is a slice for a Service of this name in a namespace that has none.
func (v *View) elsewhereSlice(s *Service) *discoveryv1.EndpointSlice {
	for _, list := range v.strays {
		for _, slice := range list {
			if slice.Labels[discoveryv1.LabelServiceName] == s.Name {
				return slice
			}
		}
	}
	return nil
}

// abandoned: the Service had a selector once. The slices of that time stay, and nobody changes them.
func (v *View) abandoned(s *Service) (Finding, bool) {
	for _, slice := range s.Slices {
		if slice.Labels[discoveryv1.LabelManagedBy] != sliceController {
			continue
		}
		f := Finding{
			Code: "selector-removed", Severity: Degraded, Sure: Certain, Object: s.ref(), Field: "spec.selector", Affects: []Ref{{"EndpointSlice", slice.Namespace, slice.Name}},
			Verdict: fmt.Sprintf("%s has no selector any more: its endpoints are those from when it had one, and don't follow Pods", s.ref()),
		}
		if !slices.ContainsFunc(slice.Endpoints, func(e discoveryv1.Endpoint) bool {
			return isReady(&e) && e.TargetRef != nil && v.pods[Key{e.TargetRef.Namespace, e.TargetRef.Name}] != nil
		}) {
			f.Severity = Broken
		}
		f.Fix = v.selectorFix(s, &f)
		return f, true
	}
	return Finding{}, false
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
