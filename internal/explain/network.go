package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// checkNetwork looks at addresses and ranges that two have, and at links whose packets don't fit each other.
func checkNetwork(v *View) (out []Finding) {
	out = append(out, v.sameAddress()...)
	out = append(out, v.overlaps()...)
	out = append(out, v.samePodAddress()...)
	out = append(out, v.takenAddresses()...)
	return append(out, v.packetSizes()...)
}

// sameAddress: two nodes with one address.
func (v *View) sameAddress() (out []Finding) {
	first := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		for _, x := range v.nodes[name].Status.Addresses {
			if x.Type != corev1.NodeInternalIP && x.Type != corev1.NodeExternalIP {
				continue
			}
			other := first[x.Address]
			if first[x.Address] = name; other == "" || other == name {
				continue
			}
			out = append(out, Finding{
				Code: "node-address-conflict", Severity: Broken, Sure: Certain, Object: Ref{"Node", "", name}, Field: "status.addresses", Affects: append(v.using(name), Ref{"Node", "", other}),
				Verdict: fmt.Sprintf("the nodes %s and %s have the same address %s: packets for one of them reach the other", other, name, x.Address),
				Fix:     []string{kubectl("", "get nodes -o wide")},
			})
		}
	}
	return out
}

// overlaps: ranges of Pods that share addresses with each other, or with those of Services.
func (v *View) overlaps() (out []Finding) {
	type owned struct {
		netip.Prefix
		node string
	}
	var all []owned
	services := v.ranges()
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		for _, text := range v.nodes[name].Spec.PodCIDRs {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				continue
			}
			f := Finding{Code: "range-overlap", Severity: Broken, Sure: Certain, Object: Ref{"Node", "", name}, Field: "spec.podCIDRs", Node: name}
			for _, other := range all {
				if other.Overlaps(p) {
					one := f
					one.Affects = v.using(name)
					one.Verdict = fmt.Sprintf("the Pods of the nodes %s and %s have the same addresses: spec.podCIDRs %s and %s overlap", other.node, name, other.Prefix, p)
					one.Fix = []string{kubectl("", "get nodes -o custom-columns=NAME:.metadata.name,PODS:.spec.podCIDRs")}
					out = append(out, one)
				}
			}
			for _, r := range services {
				if r.Overlaps(p) {
					one := f
					one.Affects = v.using(name)
					one.Verdict = fmt.Sprintf("the addresses of Services and of the Pods of node %s overlap: the ServiceCIDR %s and spec.podCIDRs %s", name, r, p)
					one.Fix = []string{kubectl("", "get servicecidrs")}
					out = append(out, one)
				}
			}
			all = append(all, owned{p, name})
		}
	}
	return out
}

// samePodAddress: two Pods that run, with one address.
func (v *View) samePodAddress() (out []Finding) {
	first := map[string]*corev1.Pod{}
	for i := range v.Evidence.Pods {
		p := &v.Evidence.Pods[i]
		if ended(p) || p.Spec.HostNetwork || p.DeletionTimestamp != nil {
			continue
		}
		for _, ip := range p.Status.PodIPs {
			other := first[ip.IP]
			if first[ip.IP] = p; other == nil || other == p {
				continue
			}
			// A Pod that is to be replaced may still have the address.
			if ready, _, _ := podReady(other); !ready {
				continue
			}
			out = append(out, Finding{
				Code: "pod-address-conflict", Severity: Broken, Sure: Likely, Object: podRef(p), Field: "status.podIPs", Affects: append(v.behind(p), append(v.behind(other), podRef(other))...),
				Verdict: fmt.Sprintf("%s on node %s and %s on node %s have the same address %s: what is sent to one reaches the other", podRef(other), other.Spec.NodeName, podRef(p), p.Spec.NodeName, ip.IP),
				Fix:     []string{kubectl(p.Namespace, "delete pod %s", p.Name)},
			})
		}
	}
	return out
}

// takenAddresses: an interface of a node has an address of another node or of a Pod, which then does not get its packets.
func (v *View) takenAddresses() (out []Finding) {
	owner := map[netip.Addr]string{}
	for name, n := range v.nodes {
		for _, x := range n.Status.Addresses {
			if a, err := netip.ParseAddr(x.Address); err == nil {
				owner[a.Unmap()] = name
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(v.Reports)) {
		r := v.Reports[name]
		if r.Report == nil {
			continue
		}
		for _, link := range r.Links {
			for _, a := range link.Addresses {
				f := Finding{Code: "address-taken", Severity: Broken, Sure: Certain, Object: Ref{"Node", "", name}, Node: name, On: name, Fix: []string{fmt.Sprintf("ip address del %s dev %s", a, link.Name)}}
				if other := owner[a.Unmap()]; other != "" && other != name {
					f.Affects = append(v.using(other), Ref{"Node", "", other})
					f.Verdict = fmt.Sprintf("node %s has the address %s of node %s at its interface %s: packets for one of them reach the other", name, a, other, link.Name)
				} else if p := v.podIPs[a.Unmap()]; p != nil {
					f.Affects = append(v.behind(p), podRef(p))
					f.Verdict = fmt.Sprintf("node %s has the address %s of %s at its interface %s, which takes its packets", name, a, podRef(p), link.Name)
				} else {
					continue
				}
				out = append(out, f)
			}
		}
	}
	return out
}

// behind are the Services that select a Pod.
func (v *View) behind(p *corev1.Pod) (out []Ref) {
	for _, s := range v.inNamespace[p.Namespace] {
		if s.selects() && matches(s.Spec.Selector, p.Labels) {
			out = append(out, s.ref())
		}
	}
	return out
}

// packetSizes compares the MTU of the nodes' links with each other and with that of the Pods on them.
func (v *View) packetSizes() (out []Finding) {
	uplinks := map[string]int{}
	names := map[string]string{}
	usual := map[int]int{}
	for name, r := range v.Reports {
		n := v.nodes[name]
		if r.Report == nil || n == nil {
			continue
		}
		for _, link := range r.Links {
			if slices.ContainsFunc(n.Status.Addresses, func(x corev1.NodeAddress) bool {
				a, err := netip.ParseAddr(x.Address)
				return err == nil && slices.Contains(link.Addresses, a)
			}) {
				uplinks[name], names[name] = link.MTU, link.Name
				usual[link.MTU]++
				break
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(uplinks)) {
		size := uplinks[name]
		f := Finding{Code: "mtu", Severity: Degraded, Sure: Likely, Object: Ref{"Node", "", name}, Node: name, On: name}
		most := mostUsual(usual)
		if size < most {
			f.Verdict = fmt.Sprintf("node %s takes packets of %d bytes (MTU of %s), and the other nodes send up to %d: what is larger is lost, so connections open and then hang", name, size, names[name], most)
			f.Affects, f.Fix = v.using(name), []string{fmt.Sprintf("ip link set %s mtu %d", names[name], most)}
			out = append(out, f)
			continue
		}
		for _, link := range v.Reports[name].Links {
			if slices.ContainsFunc(link.Addresses, func(a netip.Addr) bool { return v.ofPods(name, a) }) && link.MTU > size {
				f.Verdict = fmt.Sprintf("Pods of node %s send packets of %d bytes (MTU of %s), and the node's link %s takes %d: what is larger is lost where nobody says so, and connections hang", name, link.MTU, link.Name, names[name], size)
				f.Affects, f.Fix = v.using(name), []string{fmt.Sprintf("ip link set %s mtu %d", link.Name, size)}
				out = append(out, f)
				break
			}
		}
	}
	return out
}

// mostUsual is the size that most nodes have; of equals the larger.
func mostUsual(sizes map[int]int) (out int) {
	for size, n := range sizes {
		if n > sizes[out] || n == sizes[out] && size > out {
			out = size
		}
	}
	return out
}

// ofPods says whether an address is among those of a node's Pods.
func (v *View) ofPods(node string, a netip.Addr) bool {
	return slices.ContainsFunc(v.nodes[node].Spec.PodCIDRs, func(text string) bool {
		p, err := netip.ParsePrefix(text)
		return err == nil && p.Contains(a)
	})
}
