package compile

import (
	"math"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"portal/internal/lb/config"
	"portal/internal/lb/spec"
)

// endpoints are those of a Service's port: the ready ones, or the terminating ones that still serve while none is ready. Those of the other
// family are used if there are none of the listener's.
func (c *compiler) endpoints(svc *corev1.Service, b *spec.Balancer, port string, six bool, near locality) []config.Endpoint {
	families := []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}
	if six {
		slices.Reverse(families)
	}
	list := c.Slices(svc.Namespace, svc.Name)
	for _, family := range families {
		if out := c.endpointsOf(list, family, port, b, near); len(out) > 0 {
			return out
		}
	}
	return nil
}

func (c *compiler) endpointsOf(list []*discoveryv1.EndpointSlice, family discoveryv1.AddressType, port string, b *spec.Balancer, near locality) []config.Endpoint {
	var ready, ending []config.Endpoint
	// A new Pod may have the address of one that is terminating, so an address can be in both.
	seenReady, seenEnding := map[netip.AddrPort]bool{}, map[netip.AddrPort]bool{}
	for _, slice := range list {
		number := portOf(slice, port)
		if slice.AddressType != family || number == 0 {
			continue
		}
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			one, ok := endpoint(e, number, b.Policy.Weights)
			if !ok {
				continue
			}
			to, seen := &ready, seenReady
			if e.Conditions.Ready != nil && !*e.Conditions.Ready {
				if e.Conditions.Serving == nil || !*e.Conditions.Serving || e.Conditions.Terminating == nil || !*e.Conditions.Terminating {
					continue
				}
				to, seen = &ending, seenEnding
			}
			if !seen[one.Address] {
				seen[one.Address] = true
				*to = append(*to, one)
			}
		}
	}
	if near == onlyHere {
		ready, ending = c.here(ready), c.here(ending)
	}
	if len(ready) == 0 {
		ready = ending
	}
	if near == hereFirst {
		if here := c.here(ready); len(here) > 0 {
			ready = here
		}
	}
	slices.SortFunc(ready, func(a, b config.Endpoint) int { return a.Address.Compare(b.Address) })
	return ready
}

// locality is which endpoints a traffic policy wants.
type locality int

const (
	everywhere locality = iota
	// hereFirst: externalTrafficPolicy Local. Nobody outside sends packets to a node that has no endpoint; its own Pods are served by the others, as
	// the proxy does it.
	hereFirst
	// onlyHere: internalTrafficPolicy Local.
	onlyHere
)

// here are those of this node.
func (c *compiler) here(list []config.Endpoint) []config.Endpoint {
	return slices.DeleteFunc(slices.Clone(list), func(e config.Endpoint) bool { return e.Node != c.Node })
}

// portOf is the number of a slice's TCP port of that name, or 0. The API takes slices with any number.
func portOf(slice *discoveryv1.EndpointSlice, name string) uint16 {
	for _, p := range slice.Ports {
		tcp := p.Protocol == nil || *p.Protocol == corev1.ProtocolTCP
		has := p.Name != nil && *p.Name == name || p.Name == nil && name == ""
		if tcp && has && p.Port != nil && *p.Port > 0 && *p.Port <= math.MaxUint16 {
			return uint16(*p.Port)
		}
	}
	return 0
}

func endpoint(e *discoveryv1.Endpoint, port uint16, weights map[string]int) (out config.Endpoint, ok bool) {
	if len(e.Addresses) == 0 {
		return out, false
	}
	a, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return out, false
	}
	out.Address = netip.AddrPortFrom(a.Unmap(), port)
	if e.TargetRef != nil {
		out.Name = e.TargetRef.Name
	}
	if e.NodeName != nil {
		out.Node = *e.NodeName
	}
	if e.Zone != nil {
		out.Zone = *e.Zone
	}
	for _, name := range []string{out.Zone, out.Node, out.Name} { // the last that has one
		if n, found := weights[name]; found {
			if out.Weight = n; n == 0 {
				out.Weight = -1
			}
		}
	}
	return out, true
}
