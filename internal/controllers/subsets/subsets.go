// Package subsets brings the subsets of an Endpoints object into one canonical layout, so that two of them that mean
// the same are equal. It knows the type and no controller.
package subsets

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Capacity is how many addresses an Endpoints object holds at most.
const Capacity = 1000

// Pack collects the ports that the same addresses offer in the same state into one subset each, and sorts everything.
// An address offered as ready and as not ready on one port is not ready. The input stays as it is.
func Pack(in []corev1.EndpointSubset) []corev1.EndpointSubset {
	var p packer
	for i := range in {
		p.add(&in[i])
	}
	return p.pack()
}

// port is an EndpointPort by value: its pointer would tell apart what is the same.
type port struct {
	name, app string
	number    int32
	protocol  corev1.Protocol
	hasApp    bool
	none      bool // stands for a subset without ports, whose addresses count all the same
}

func portOf(p *corev1.EndpointPort) port {
	out := port{name: p.Name, number: p.Port, protocol: p.Protocol}
	if p.AppProtocol != nil {
		out.app, out.hasApp = *p.AppProtocol, true
	}
	return out
}

func (p port) endpointPort() corev1.EndpointPort {
	out := corev1.EndpointPort{Name: p.name, Port: p.number, Protocol: p.protocol}
	if p.hasApp {
		out.AppProtocol = &p.app
	}
	return out
}

func (p port) compare(q port) int {
	return cmp.Or(
		strings.Compare(p.name, q.name),
		cmp.Compare(p.number, q.number),
		strings.Compare(string(p.protocol), string(q.protocol)),
		strings.Compare(p.app, q.app),
	)
}

// who tells addresses apart: Pods in their node's network share an address and are still two.
type who struct {
	ip  string
	uid types.UID
}

type address struct {
	corev1.EndpointAddress
	who
	ready map[port]bool
}

type packer struct {
	addresses []*address
	known     map[who]*address
}

func (p *packer) add(subset *corev1.EndpointSubset) {
	ports := []port{{none: true}}
	if len(subset.Ports) > 0 {
		ports = ports[:0]
		for i := range subset.Ports {
			ports = append(ports, portOf(&subset.Ports[i]))
		}
	}
	for i := range subset.Addresses {
		p.offer(&subset.Addresses[i], ports, true)
	}
	for i := range subset.NotReadyAddresses {
		p.offer(&subset.NotReadyAddresses[i], ports, false)
	}
}

func (p *packer) offer(addr *corev1.EndpointAddress, ports []port, ready bool) {
	w := who{ip: addr.IP}
	if addr.TargetRef != nil {
		w.uid = addr.TargetRef.UID
	}
	a := p.known[w]
	if a == nil {
		a = &address{EndpointAddress: *addr, who: w, ready: map[port]bool{}}
		if p.known == nil {
			p.known = map[who]*address{}
		}
		p.known[w] = a
		p.addresses = append(p.addresses, a)
	}
	for _, port := range ports {
		was, offered := a.ready[port]
		a.ready[port] = ready && (was || !offered)
	}
}

func (p *packer) pack() []corev1.EndpointSubset {
	slices.SortFunc(p.addresses, func(a, b *address) int {
		return cmp.Or(strings.Compare(a.ip, b.ip), strings.Compare(string(a.uid), string(b.uid)))
	})
	// A port's crowd is the list of its addresses, each with its state; ports with equal crowds share a subset.
	crowds := map[port][]byte{}
	for i, a := range p.addresses {
		for port, ready := range a.ready {
			n := uint32(i) << 1
			if ready {
				n |= 1
			}
			crowds[port] = binary.BigEndian.AppendUint32(crowds[port], n)
		}
	}
	groups := map[string][]port{}
	for port, crowd := range crowds {
		groups[string(crowd)] = append(groups[string(crowd)], port)
	}
	type group struct {
		ports  []port
		subset corev1.EndpointSubset
	}
	packed := make([]group, 0, len(groups))
	for crowd, ports := range groups {
		ports = slices.DeleteFunc(ports, func(p port) bool { return p.none })
		slices.SortFunc(ports, port.compare)
		packed = append(packed, group{ports, p.subset([]byte(crowd), ports)})
	}
	slices.SortFunc(packed, func(a, b group) int { return slices.CompareFunc(a.ports, b.ports, port.compare) })
	out := make([]corev1.EndpointSubset, len(packed))
	for i := range packed {
		out[i] = packed[i].subset
	}
	return out
}

func (p *packer) subset(crowd []byte, ports []port) corev1.EndpointSubset {
	var s corev1.EndpointSubset
	for ; len(crowd) > 0; crowd = crowd[4:] {
		n := binary.BigEndian.Uint32(crowd)
		a := p.addresses[n>>1].EndpointAddress
		if n&1 == 1 {
			s.Addresses = append(s.Addresses, a)
		} else {
			s.NotReadyAddresses = append(s.NotReadyAddresses, a)
		}
	}
	for _, port := range ports {
		s.Ports = append(s.Ports, port.endpointPort())
	}
	return s
}

// Truncate cuts packed subsets down to Capacity addresses and tells whether it had to. Ready addresses stay before
// not ready ones, and every subset keeps its share of what there is room for.
func Truncate(in []corev1.EndpointSubset) bool {
	ready, notReady := 0, 0
	for i := range in {
		ready += len(in[i].Addresses)
		notReady += len(in[i].NotReadyAddresses)
	}
	if ready+notReady <= Capacity {
		return false
	}
	roomReady := min(ready, Capacity)
	share(in, ready, roomReady, func(s *corev1.EndpointSubset) *[]corev1.EndpointAddress { return &s.Addresses })
	share(in, notReady, Capacity-roomReady, func(s *corev1.EndpointSubset) *[]corev1.EndpointAddress { return &s.NotReadyAddresses })
	return true
}

// share leaves each list its part of room, rounded up: what is over, the last ones lack.
func share(in []corev1.EndpointSubset, total, room int, list func(*corev1.EndpointSubset) *[]corev1.EndpointAddress) {
	if total <= room {
		return
	}
	left := room
	for i := range in {
		addresses := list(&in[i])
		keep := min((len(*addresses)*room+total-1)/total, left)
		left -= keep
		if *addresses = (*addresses)[:keep]; keep == 0 {
			*addresses = nil
		}
	}
}
