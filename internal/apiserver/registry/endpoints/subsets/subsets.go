// Package subsets brings the subsets of Endpoints into one canonical form, so that two writers with the same
// knowledge write the same bytes. It knows the API's types and nothing else.
package subsets

import (
	"bytes"
	"cmp"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/dump"
)

// identity tells addresses apart: two Pods may share an address, that of their node.
type identity struct {
	ip  string
	uid types.UID
}

// portKey is a port by value.
type portKey struct {
	name, protocol, app string
	number              int32
	hasApp              bool
}

// offer is a port and the addresses that offer it, by their index, with whether they are ready.
type offer struct {
	port  *corev1.EndpointPort
	hosts map[int]bool
}

// Repack merges subsets: each address is listed once for a port, ports offered by the same addresses in the same
// state share a subset, and everything is in a fixed order. An address that is ready in one place and not in another
// counts as not ready.
func Repack(in []corev1.EndpointSubset) []corev1.EndpointSubset {
	addresses, offers := spread(in)
	groups := map[string]*corev1.EndpointSubset{}
	for _, o := range offers {
		key := groupKey(o.hosts)
		group := groups[key]
		if group == nil {
			group = gather(addresses, o.hosts)
			groups[key] = group
		}
		if o.port != nil {
			group.Ports = append(group.Ports, *o.port)
		}
	}
	out := make([]corev1.EndpointSubset, 0, len(groups))
	for _, group := range groups {
		slices.SortFunc(group.Addresses, compareAddresses)
		slices.SortFunc(group.NotReadyAddresses, compareAddresses)
		sortByDigest(group.Ports)
		out = append(out, *group)
	}
	sortByDigest(out)
	return out
}

// spread lists the distinct addresses and, for each distinct port, who offers it. Subsets without ports offer the nil
// port.
func spread(in []corev1.EndpointSubset) ([]corev1.EndpointAddress, map[portKey]*offer) {
	var addresses []corev1.EndpointAddress
	index := map[identity]int{}
	offers := map[portKey]*offer{}
	note := func(o *offer, list []corev1.EndpointAddress, ready bool) {
		for i := range list {
			id := identity{ip: list[i].IP}
			if list[i].TargetRef != nil {
				id.uid = list[i].TargetRef.UID
			}
			n, known := index[id]
			if !known {
				n = len(addresses)
				index[id] = n
				addresses = append(addresses, list[i])
			}
			if was, known := o.hosts[n]; !known || was {
				o.hosts[n] = ready
			}
		}
	}
	for i := range in {
		for _, port := range portsOf(&in[i]) {
			if len(in[i].Addresses)+len(in[i].NotReadyAddresses) == 0 {
				continue
			}
			key := keyOf(port)
			o := offers[key]
			if o == nil {
				o = &offer{port: port, hosts: map[int]bool{}}
				offers[key] = o
			}
			note(o, in[i].Addresses, true)
			note(o, in[i].NotReadyAddresses, false)
		}
	}
	return addresses, offers
}

func portsOf(subset *corev1.EndpointSubset) []*corev1.EndpointPort {
	if len(subset.Ports) == 0 {
		return []*corev1.EndpointPort{nil}
	}
	out := make([]*corev1.EndpointPort, len(subset.Ports))
	for i := range subset.Ports {
		out[i] = &subset.Ports[i]
	}
	return out
}

func keyOf(port *corev1.EndpointPort) portKey {
	if port == nil {
		return portKey{number: -1}
	}
	key := portKey{name: port.Name, protocol: string(port.Protocol), number: port.Port}
	if port.AppProtocol != nil {
		key.app, key.hasApp = *port.AppProtocol, true
	}
	return key
}

// groupKey names a set of addresses and their state.
func groupKey(hosts map[int]bool) string {
	order := make([]int, 0, len(hosts))
	for n := range hosts {
		order = append(order, n)
	}
	slices.Sort(order)
	var key strings.Builder
	for _, n := range order {
		key.WriteString(strconv.Itoa(n))
		if hosts[n] {
			key.WriteByte('+')
		} else {
			key.WriteByte('-')
		}
	}
	return key.String()
}

func gather(addresses []corev1.EndpointAddress, hosts map[int]bool) *corev1.EndpointSubset {
	var out corev1.EndpointSubset
	for n, ready := range hosts {
		if ready {
			out.Addresses = append(out.Addresses, addresses[n])
		} else {
			out.NotReadyAddresses = append(out.NotReadyAddresses, addresses[n])
		}
	}
	return &out
}

// compareAddresses orders by address as text, then those without a target first, then by the target's UID.
func compareAddresses(a, b corev1.EndpointAddress) int {
	if c := cmp.Compare(a.IP, b.IP); c != 0 {
		return c
	}
	switch {
	case a.TargetRef == nil && b.TargetRef == nil:
		return 0
	case a.TargetRef == nil:
		return -1
	case b.TargetRef == nil:
		return 1
	}
	return cmp.Compare(a.TargetRef.UID, b.TargetRef.UID)
}

// sortByDigest orders by the digest that kube-controller-manager orders by, so that the two never rewrite each
// other's objects.
func sortByDigest[T any](list []T) {
	if len(list) < 2 {
		return
	}
	type entry struct {
		digest []byte
		value  T
	}
	entries := make([]entry, len(list))
	for i, value := range list {
		hash := fnv.New128a()
		_, _ = hash.Write([]byte(dump.ForHash(value)))
		entries[i] = entry{hash.Sum(nil), value}
	}
	slices.SortFunc(entries, func(a, b entry) int { return bytes.Compare(a.digest, b.digest) })
	for i := range entries {
		list[i] = entries[i].value
	}
}
