package lb

import (
	"maps"
	"net/netip"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
)

// reserved are addresses that no Service gets, whatever pools say, because a machine has them: the Nodes', this machine's, and its gateways'; or because
// they are cluster IPs. A Service that has one keeps it: what Nodes say of themselves takes nothing away.
func (b *Balancer) reserved() map[netip.Addr]string {
	out := machineAddresses()
	for _, object := range b.nodes.List() {
		node, ok := object.(*corev1.Node)
		if !ok {
			continue
		}
		for _, a := range node.Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil {
				out[addr.Unmap()] = "an address of Node " + node.Name
			}
		}
	}
	for _, object := range b.services.List() {
		svc, ok := object.(*corev1.Service)
		if !ok {
			continue
		}
		for _, text := range svc.Spec.ClusterIPs {
			if addr, err := netip.ParseAddr(text); err == nil { // not None
				out[addr] = "the cluster IP of Service " + svc.Namespace + "/" + svc.Name
			}
		}
	}
	pools, _ := b.allPools()
	maps.DeleteFunc(out, func(a netip.Addr, _ string) bool { return pools.Of(a) == nil })
	b.mu.Lock()
	defer b.mu.Unlock()
	for a, why := range out {
		if b.warned[a] != why {
			b.Log.Warn("an address of a pool is not given to Services", "address", a, "pool", pools.Of(a).Name, "why", "it is "+why)
		}
	}
	b.warned = out
	return out
}

// machineAddresses are those of this machine's interfaces and of its default gateways. Addresses that stand alone are left out: proxies give
// those of Services to interfaces.
func machineAddresses() map[netip.Addr]string {
	out := map[netip.Addr]string{}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return out // what is not known is not reserved
	}
	for _, a := range addrs {
		addr, ok := netip.AddrFromSlice(a.IP)
		if bits, size := a.Mask.Size(); ok && bits < size {
			out[addr.Unmap()] = "an address of this machine"
		}
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return out
	}
	for _, r := range routes {
		if ones := 0; r.Dst != nil {
			if ones, _ = r.Dst.Mask.Size(); ones > 0 {
				continue
			}
		}
		if gateway, ok := netip.AddrFromSlice(r.Gw); ok {
			out[gateway.Unmap()] = "the default gateway of this machine"
		}
	}
	return out
}
