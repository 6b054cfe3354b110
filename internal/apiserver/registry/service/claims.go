package service

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Held is what a Service holds of the cluster's address and port ranges, as long as it is stored.
type Held struct {
	// Addresses are its cluster IPs in canonical form, in the order of spec.clusterIPs.
	Addresses []netip.Addr
	// NodePorts are the ports open on every node, each number once, in ascending order: TCP and UDP may share one.
	NodePorts []int32
	// HealthPort is where load balancers ask a node for its health; 0 where they don't. It comes from the same range
	// as NodePorts and is never among them.
	HealthPort int32
}

// Claims says what a stored Service holds. It depends on nothing but the object. A value left in a field that the
// Service's type has no use for (a node port in an ExternalName) holds nothing.
func Claims(svc *corev1.Service) Held {
	var held Held
	spec := &svc.Spec
	if addressed(spec) {
		ips := spec.ClusterIPs
		if len(ips) == 0 && spec.ClusterIP != "" {
			ips = []string{spec.ClusterIP} // written before clusterIPs existed
		}
		for _, ip := range ips {
			if addr, ok := parseAddress(ip); ok {
				held.Addresses = append(held.Addresses, addr)
			}
		}
	}
	if opensNodePorts(spec) {
		held.NodePorts = nodePorts(spec)
		slices.Sort(held.NodePorts)
	}
	if healthChecked(spec) {
		held.HealthPort = spec.HealthCheckNodePort
	}
	return held
}

// Ports are all ports of the node-port range that are held, each number once.
func (h Held) Ports() []int32 {
	ports := slices.Clone(h.NodePorts)
	if h.HealthPort != 0 && !slices.Contains(ports, h.HealthPort) {
		ports = append(ports, h.HealthPort)
	}
	return ports
}
