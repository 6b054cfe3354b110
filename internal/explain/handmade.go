package explain

import (
	"fmt"
	"maps"
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
	for _, s := range v.subjects {
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
		if v.isEntry(s) {
			continue // load balancers answer there themselves
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
	if s.served() || s.Namespace+"/"+s.Name == BalancerEntry { // that of Ingresses needs none: the balancing process has their backends
		return nil
	}
	f := Finding{Severity: Broken, Sure: Certain, Object: s.ref()}
	if slice := v.stray(s); slice != nil {
		r := Ref{"EndpointSlice", slice.Namespace, slice.Name}
		f.Code, f.Affects, f.Field = "slice-label", []Ref{r}, "metadata.labels"
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s lacks the label %s=%s by which it would be the Service's", s.ref(), r, discoveryv1.LabelServiceName, s.Name)
		if name, ok := slice.Labels[discoveryv1.LabelServiceName]; ok {
			f.Verdict += fmt.Sprintf("; it has %s=%s", discoveryv1.LabelServiceName, name)
		}
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
			if slice.Labels[discoveryv1.LabelManagedBy] == mirror {
				f.Verdict = fmt.Sprintf("%s has no ready endpoint: all addresses of Endpoints %s/%s are among notReadyAddresses", s.ref(), s.Namespace, s.Name)
				f.Fix = []string{readyAddresses(s)}
				break
			}
			for i := range slice.Endpoints {
				f.Fix = append(f.Fix, jsonPatch(r, operation{"add", fmt.Sprintf("/endpoints/%d/conditions/ready", i), true}))
			}
		}
		return []Finding{f}
	}
	f.Code, f.Field = "no-endpoints", "spec.selector"
	f.Verdict = fmt.Sprintf("%s has no endpoints: it has no selector, and nobody wrote EndpointSlices for it", s.ref())
	fix, sure := v.selectorFix(s, &f)
	if slice := v.elsewhereSlice(s); slice != nil && !sure {
		f.Code = "slice-namespace"
		f.Affects = []Ref{{"EndpointSlice", slice.Namespace, slice.Name}}
		f.Verdict = fmt.Sprintf("%s has no endpoints: EndpointSlice %s, which has its label, is in the namespace %s, and a slice belongs to Services of its own", s.ref(), slice.Name, slice.Namespace)
		f.Fix = []string{fmt.Sprintf("kubectl get endpointslice %s -n %s -o json | sed 's/\"namespace\": *\"%s\"/\"namespace\": \"%s\"/; /resourceVersion/d; /\"uid\"/d' | kubectl create -f -", slice.Name, slice.Namespace, slice.Namespace, s.Namespace)}
		return []Finding{f}
	}
	f.Fix = fix
	return []Finding{f}
}

// selectorFix is a selector that a Service without one probably should have; sure: there are Pods with the Service's name.
func (v *View) selectorFix(s *Service, f *Finding) (fix []string, sure bool) {
	for _, set := range v.labelsOf(s.Namespace).sets {
		for _, k := range nameKeys {
			if set.labels[k] == s.Name {
				f.Evidence = append(f.Evidence, fmt.Sprintf("%s has the label %s=%s", set.example, k, s.Name))
				return []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": map[string]string{k: s.Name}}})}, true
			}
		}
	}
	if set, ok := v.orphan(s.Namespace); ok {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s has the labels %s, and no Service selects it", set.example, pairs(set.labels)))
		return []string{mergePatch(s.ref(), map[string]any{"spec": map[string]any{"selector": usualLabels(set.labels)}})}, false
	}
	return []string{kubectl(s.Namespace, "set selector service %s app=%s", s.Name, s.Name)}, false
}

// nameKeys are the labels that usually distinguish applications.
var nameKeys = []string{"app", "app.kubernetes.io/name", "k8s-app", "run", "name"}

// orphan are the labels of the only Pods in a namespace that no Service selects.
func (v *View) orphan(namespace string) (out labelSet, ok bool) {
	for _, set := range v.labelsOf(namespace).sets {
		if v.selected(namespace, set.labels) {
			continue
		}
		if ok {
			return labelSet{}, false
		}
		out, ok = set, true
	}
	return out, ok
}

// usualLabels are, of a Pod's labels, those that a selector usually asks for: one that names the application, or all.
func usualLabels(labels map[string]string) map[string]string {
	for _, k := range nameKeys {
		if value, ok := labels[k]; ok {
			return map[string]string{k: value}
		}
	}
	return labels
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
		f.Fix, _ = v.selectorFix(s, &f)
		return f, true
	}
	return Finding{}, false
}

// stray is a slice that was meant for a Service and is not its own.
func (v *View) stray(s *Service) *discoveryv1.EndpointSlice {
	for _, slice := range v.strays[s.Namespace] {
		name := slice.Labels[discoveryv1.LabelServiceName]
		owned := slices.ContainsFunc(slice.OwnerReferences, func(o metav1.OwnerReference) bool { return o.Kind == "Service" && o.Name == s.Name })
		named := slices.Contains(slices.Collect(maps.Values(slice.Labels)), s.Name) // by another key
		if near(name, s.Name) || owned || named || v.bearsName(slice, s) {
			return slice
		}
	}
	for i := range v.Evidence.Slices { // one that another Service has
		slice := &v.Evidence.Slices[i]
		if by := slice.Labels[discoveryv1.LabelManagedBy]; slice.Namespace == s.Namespace && slice.Labels[discoveryv1.LabelServiceName] != s.Name && by != sliceController && by != mirror && v.bearsName(slice, s) {
			return slice
		}
	}
	return nil
}

// bearsName says whether a slice has a Service's name, as those that controllers write, and no other Service's.
func (v *View) bearsName(slice *discoveryv1.EndpointSlice, s *Service) bool {
	if slice.Name != s.Name && !strings.HasPrefix(slice.Name, s.Name+"-") {
		return false
	}
	return !slices.ContainsFunc(v.inNamespace[s.Namespace], func(other *Service) bool {
		return len(other.Name) > len(s.Name) && (slice.Name == other.Name || strings.HasPrefix(slice.Name, other.Name+"-"))
	})
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
		f.Fix = []string{readyAddresses(s)}
		return f
	}
	f.Verdict = fmt.Sprintf("%s has no endpoints: %s has not been mirrored to an EndpointSlice, which is what proxies read", s.ref(), r)
	f.Fix = []string{kubectl("kube-system", "get leases")}
	return f
}

// readyAddresses has the addresses of an Endpoints object that are not ready be so.
func readyAddresses(s *Service) string {
	return kubectl(s.Namespace, "get endpoints %s -o json", s.Name) + " | sed 's/\"notReadyAddresses\"/\"addresses\"/' | kubectl replace -f -"
}
