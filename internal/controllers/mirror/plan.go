package mirror

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	netutils "k8s.io/utils/net"

	"portal/internal/controllers/subsets"
)

// skips are the addresses of Endpoints that no slice shows.
type skips struct{ invalid, tooMany int }

// copyOf makes the slices that mirror Endpoints: one for each family of each subset, with at most limit addresses of
// a subset in all.
func copyOf(endpoints *corev1.Endpoints, limit int) ([]*discovery.EndpointSlice, skips) {
	var skipped skips
	byKey := map[string]*discovery.EndpointSlice{}
	for _, subset := range withoutTwins(subsets.Pack(endpoints.Subsets)) {
		ports := portsOf(subset.Ports)
		room := limit
		for _, list := range []struct {
			addresses []corev1.EndpointAddress
			ready     bool
		}{{subset.Addresses, true}, {subset.NotReadyAddresses, false}} {
			for i := range list.addresses {
				endpoint, family, ok := endpointOf(&list.addresses[i], list.ready)
				switch {
				case !ok:
					skipped.invalid++
					continue
				case room == 0:
					skipped.tooMany++
					continue
				}
				room--
				key := keyOfSlice(family, ports)
				if byKey[key] == nil {
					byKey[key] = newSlice(endpoints, family, ports)
				}
				byKey[key].Endpoints = append(byKey[key].Endpoints, endpoint)
			}
		}
	}
	out := make([]*discovery.EndpointSlice, 0, len(byKey))
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		byKey[key].Endpoints = distinct(byKey[key].Endpoints)
		out = append(out, byKey[key])
	}
	return out, skipped
}

// withoutTwins divides subsets in which several ports are of one name, as Endpoints may have them at one address: no slice may.
func withoutTwins(in []corev1.EndpointSubset) []corev1.EndpointSubset {
	var out []corev1.EndpointSubset
	for _, subset := range in {
		ports := subset.Ports
		subset.Ports = nil
		parts, seen := []corev1.EndpointSubset{subset}, map[string]int{}
		for _, port := range ports {
			n := seen[port.Name]
			seen[port.Name]++
			if n == len(parts) {
				parts = append(parts, subset)
			}
			parts[n].Ports = append(parts[n].Ports, port)
		}
		out = append(out, parts...)
	}
	return out
}

func endpointOf(address *corev1.EndpointAddress, ready bool) (discovery.Endpoint, discovery.AddressType, bool) {
	ip := netutils.ParseIPSloppy(address.IP)
	if ip == nil {
		return discovery.Endpoint{}, "", false
	}
	family := discovery.AddressTypeIPv4
	if netutils.IsIPv6(ip) {
		family = discovery.AddressTypeIPv6
	}
	endpoint := discovery.Endpoint{
		Addresses:  []string{ip.String()},
		Conditions: discovery.EndpointConditions{Ready: &ready},
		TargetRef:  address.TargetRef,
		NodeName:   address.NodeName,
	}
	if address.Hostname != "" {
		endpoint.Hostname = &address.Hostname
	}
	return endpoint, family, true
}

func portsOf(in []corev1.EndpointPort) []discovery.EndpointPort {
	out := make([]discovery.EndpointPort, 0, len(in))
	for _, port := range in {
		out = append(out, discovery.EndpointPort{
			Name: &port.Name, Port: &port.Port, Protocol: &port.Protocol, AppProtocol: port.AppProtocol,
		})
	}
	return out
}

func newSlice(endpoints *corev1.Endpoints, family discovery.AddressType, ports []discovery.EndpointPort) *discovery.EndpointSlice {
	slice := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:    endpoints.Namespace,
			GenerateName: prefix(endpoints.Name),
			Labels:       map[string]string{},
			Annotations:  map[string]string{},
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(endpoints, corev1.SchemeGroupVersion.WithKind("Endpoints")),
			},
		},
		AddressType: family,
		Ports:       ports,
	}
	maps.Copy(slice.Labels, endpoints.Labels)
	slice.Labels[discovery.LabelServiceName] = endpoints.Name
	slice.Labels[discovery.LabelManagedBy] = Name
	maps.Copy(slice.Annotations, endpoints.Annotations)
	// These two are about the writing of that object, not about its content.
	delete(slice.Annotations, corev1.EndpointsLastChangeTriggerTime)
	delete(slice.Annotations, corev1.LastAppliedConfigAnnotation)
	return slice
}

// prefix is what a slice's name begins with: a dash makes it nicer, if the name may be that long.
func prefix(name string) string {
	if dashed := name + "-"; len(apivalidation.NameIsDNSSubdomain(dashed, true)) == 0 {
		return dashed
	}
	return name
}

// distinct sorts endpoints and keeps one of those that only differ in what a reader can't tell them apart by; the
// last one, so that not ready wins over ready.
func distinct(endpoints []discovery.Endpoint) []discovery.Endpoint {
	slices.SortStableFunc(endpoints, compareEndpoints)
	out := endpoints[:0]
	for i := range endpoints {
		if n := len(out); n > 0 && compareEndpoints(out[n-1], endpoints[i]) == 0 {
			out[n-1] = endpoints[i]
			continue
		}
		out = append(out, endpoints[i])
	}
	return out
}

func compareEndpoints(a, b discovery.Endpoint) int {
	return cmp.Or(slices.Compare(a.Addresses, b.Addresses), strings.Compare(deref(a.Hostname), deref(b.Hostname)), strings.Compare(target(a), target(b)))
}

func target(e discovery.Endpoint) string {
	if e.TargetRef == nil {
		return ""
	}
	return e.TargetRef.Namespace + "/" + e.TargetRef.Name
}

func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// keyOfSlice is what must be the same in all of a slice: its family and its ports.
func keyOfSlice(family discovery.AddressType, ports []discovery.EndpointPort) string {
	words := make([]string, 0, len(ports))
	for _, p := range ports {
		words = append(words, fmt.Sprintf("%q/%d/%s/%t%q", deref(p.Name), deref(p.Port), deref(p.Protocol), p.AppProtocol != nil, deref(p.AppProtocol)))
	}
	slices.Sort(words)
	return string(family) + " " + strings.Join(words, " ")
}

// changes are the writes that make what exists what is wanted.
type changes struct{ create, update, delete []*discovery.EndpointSlice }

func (c changes) len() int { return len(c.create) + len(c.update) + len(c.delete) }

// plan finds the fewest writes: a slice with the right family and ports is kept or updated, and one that is no longer
// needed is made into a new one of its family rather than deleted.
func plan(wanted, existing []*discovery.EndpointSlice) changes {
	byKey := map[string][]*discovery.EndpointSlice{}
	for _, slice := range existing {
		key := keyOfSlice(slice.AddressType, slice.Ports)
		byKey[key] = append(byKey[key], slice)
	}
	var out changes
	kept := map[*discovery.EndpointSlice]bool{}
	for _, want := range wanted {
		candidates := byKey[keyOfSlice(want.AddressType, want.Ports)]
		if len(candidates) == 0 {
			out.create = append(out.create, want)
			continue
		}
		have := candidates[0]
		kept[have] = true
		if !same(want, have) {
			out.update = append(out.update, replace(have, want))
		}
	}
	for _, slice := range existing {
		if !kept[slice] {
			out.delete = append(out.delete, slice)
		}
	}
	return out.recycle()
}

func (c changes) recycle() changes {
	create := c.create
	c.create = nil
	for _, want := range create {
		i := slices.IndexFunc(c.delete, func(s *discovery.EndpointSlice) bool { return s.AddressType == want.AddressType })
		if i < 0 {
			c.create = append(c.create, want)
			continue
		}
		c.update = append(c.update, replace(c.delete[i], want))
		c.delete = slices.Delete(c.delete, i, i+1)
	}
	return c
}

func replace(have, want *discovery.EndpointSlice) *discovery.EndpointSlice {
	next := want.DeepCopy()
	next.GenerateName = have.GenerateName
	next.Name, next.UID, next.ResourceVersion = have.Name, have.UID, have.ResourceVersion
	return next
}

func same(want, have *discovery.EndpointSlice) bool {
	if !maps.Equal(want.Labels, have.Labels) || !maps.Equal(want.Annotations, have.Annotations) ||
		!apiequality.Semantic.DeepEqual(want.OwnerReferences, have.OwnerReferences) || len(want.Endpoints) != len(have.Endpoints) {
		return false
	}
	sorted := slices.SortedFunc(slices.Values(have.Endpoints), compareEndpoints)
	return slices.EqualFunc(want.Endpoints, sorted, func(a, b discovery.Endpoint) bool {
		return apiequality.Semantic.DeepEqual(a, b)
	})
}
