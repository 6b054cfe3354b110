package service

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	netutils "k8s.io/utils/net"
)

// The questions below are asked in defaulting, allocation and validation alike. Each is answered here only.

// headless says that the Service has asked for no cluster IP.
func headless(s *corev1.ServiceSpec) bool {
	return len(s.ClusterIPs) == 1 && s.ClusterIPs[0] == corev1.ClusterIPNone
}

// addressed says that clusterIPs must say something: an address, or "None".
func addressed(s *corev1.ServiceSpec) bool {
	return s.Type != corev1.ServiceTypeExternalName
}

// opensNodePorts says that ports of the Service may be open on every node.
func opensNodePorts(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeNodePort || s.Type == corev1.ServiceTypeLoadBalancer
}

// wantsNodePorts says that a port without a node port is to be given one.
func wantsNodePorts(s *corev1.ServiceSpec) bool {
	if s.Type == corev1.ServiceTypeLoadBalancer {
		return s.AllocateLoadBalancerNodePorts == nil || *s.AllocateLoadBalancerNodePorts
	}
	return s.Type == corev1.ServiceTypeNodePort
}

// facesOutside says that traffic from outside the cluster can reach the Service.
func facesOutside(s *corev1.ServiceSpec) bool {
	return opensNodePorts(s) || s.Type == corev1.ServiceTypeClusterIP && len(s.ExternalIPs) > 0
}

// healthChecked says that a load balancer asks each node whether it has endpoints.
func healthChecked(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeLoadBalancer && s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// selectorlessHeadless is the one shape whose endpoints nobody can foresee: any family may come.
func selectorlessHeadless(s *corev1.ServiceSpec) bool {
	return s.ClusterIP == corev1.ClusterIPNone && len(s.Selector) == 0
}

// policy is the family policy, or "" where none is set.
func policy(s *corev1.ServiceSpec) corev1.IPFamilyPolicy {
	if s.IPFamilyPolicy == nil {
		return ""
	}
	return *s.IPFamilyPolicy
}

// nodePorts are the node ports of the Service, each number once.
func nodePorts(s *corev1.ServiceSpec) []int32 {
	var out []int32
	for i := range s.Ports {
		if p := s.Ports[i].NodePort; p != 0 && !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// parseAddress reads an address as Kubernetes always has: zeros in front of a number count for nothing, and an IPv4
// address written in IPv6 is an IPv4 address. Objects stored long ago may hold such a one.
func parseAddress(s string) (netip.Addr, bool) {
	addr, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s))
	return addr.Unmap(), ok
}

// familyOf is the family of an address, or "" where it is none.
func familyOf(ip string) corev1.IPFamily {
	switch addr, ok := parseAddress(ip); {
	case !ok:
		return ""
	case addr.Is4():
		return corev1.IPv4Protocol
	default:
		return corev1.IPv6Protocol
	}
}

// otherFamily is the family that makes a Service of this one dual-stack.
func otherFamily(f corev1.IPFamily) corev1.IPFamily {
	if f == corev1.IPv4Protocol {
		return corev1.IPv6Protocol
	}
	return corev1.IPv4Protocol
}

// specOf is the spec of a Service that may not be there.
func specOf(svc *corev1.Service) *corev1.ServiceSpec {
	if svc == nil {
		return nil
	}
	return &svc.Spec
}

// at is the path of a field of the spec.
func at(name string, more ...string) *field.Path {
	return field.NewPath("spec", append([]string{name}, more...)...)
}
