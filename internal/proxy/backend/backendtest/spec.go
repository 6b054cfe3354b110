package backendtest

import (
	"fmt"
	"net/netip"
	"time"

	"portal/internal/intent"
)

// spec is a Service in few words. It has a TCP port 80 and a UDP port 53, both on the same endpoints.
type spec struct {
	// id gives it its addresses and node ports.
	id uint8
	// local and remote are the numbers of its endpoints: Pods on the node, Pods elsewhere.
	local, remote []int
	// leaving are local endpoints that are about to end.
	leaving []int

	external, balancer, nodePort bool
	internalLocal, externalLocal bool
	ranges                       []string
	affinity                     time.Duration
}

func (x spec) name() string { return fmt.Sprintf("svc-%d", x.id) }

func (x spec) addr(f intent.Family, prefix4, prefix6 string) netip.Addr {
	if f == intent.IPv4 {
		return addr(fmt.Sprintf("%s.%d", prefix4, x.id))
	}
	return addr(fmt.Sprintf("%s::%x", prefix6, x.id))
}

func (x spec) clusterIP(f intent.Family) netip.Addr  { return x.addr(f, "10.96.0", "fd00:96") }
func (x spec) externalIP(f intent.Family) netip.Addr { return x.addr(f, "198.51.100", "fd00:198") }
func (x spec) balancerIP(f intent.Family) netip.Addr { return x.addr(f, "203.0.113", "fd00:203") }

func (x spec) nodePorts() (tcp, udp uint16) { return 30000 + uint16(x.id), 31000 + uint16(x.id) }

// entry is the Service with its endpoints.
func (x spec) entry(s *suite) *intent.Entry {
	key := intent.Key{Namespace: "test", Name: x.name()}
	v := &intent.Service{
		Key: key, Families: s.families(), InternalLocal: x.internalLocal, ExternalLocal: x.externalLocal, Affinity: x.affinity,
		Ports: []intent.Port{{Name: "http", Protocol: intent.TCP, Port: 80}, {Name: "dns", Protocol: intent.UDP, Port: 53}},
	}
	if x.nodePort {
		v.Type = intent.NodePort
		v.Ports[0].NodePort, v.Ports[1].NodePort = x.nodePorts()
	}
	for _, r := range x.ranges {
		v.SourceRanges = append(v.SourceRanges, netip.MustParsePrefix(r))
	}
	e := &intent.Entry{Service: v}
	for i, f := range s.families() {
		v.ClusterIPs = append(v.ClusterIPs, x.clusterIP(f))
		if x.external {
			v.ExternalIPs = append(v.ExternalIPs, x.externalIP(f))
		}
		if x.balancer {
			v.Type = intent.LoadBalancer
			v.Ingress = append(v.Ingress, intent.Ingress{Addr: x.balancerIP(f)})
		}
		e.Slices = append(e.Slices, x.slice(s, key, f, i))
	}
	return e
}

func (x spec) slice(s *suite, key intent.Key, f intent.Family, i int) *intent.Slice {
	out := &intent.Slice{
		Key: intent.Key{Namespace: key.Namespace, Name: fmt.Sprintf("%s-%d", key.Name, i)}, Service: key.Name, Family: f,
		Ports: []intent.EndpointPort{{Name: "http", Protocol: intent.TCP, Port: serverPort}, {Name: "dns", Protocol: intent.UDP, Port: serverPort}},
	}
	add := func(a netip.Addr, node string, c intent.Condition) {
		out.Endpoints = append(out.Endpoints, intent.Endpoint{Addr: a, NodeName: node, Condition: c})
	}
	for _, n := range x.local {
		add(s.pods[n].addrs[i], "node", intent.Ready|intent.Serving)
	}
	for _, n := range x.leaving {
		add(s.pods[n].addrs[i], "node", intent.Serving|intent.Terminating)
	}
	for _, n := range x.remote {
		add(s.far.addrs[2*n+i], "elsewhere", intent.Ready|intent.Serving)
	}
	return out
}

// probes are all questions worth asking about a Service.
func (x spec) probes(s *suite, tries int) (out []probe) {
	for _, f := range s.families() {
		tcp, udp := x.nodePorts()
		node := s.node.addrs[0]
		if f == intent.IPv6 {
			node = s.node.addrs[1]
		}
		for _, from := range []*host{s.client, s.pods[0], s.node, s.outside} {
			ask := func(a netip.Addr, p intent.Protocol, port uint16) {
				out = append(out, probe{from: from, to: netip.AddrPortFrom(a, port), p: p, tries: tries})
			}
			for _, a := range []netip.Addr{x.clusterIP(f), x.externalIP(f), x.balancerIP(f)} {
				ask(a, intent.TCP, 80)
				ask(a, intent.UDP, 53)
			}
			ask(x.clusterIP(f), intent.TCP, 81)
			ask(x.clusterIP(f), intent.UDP, 80)
			ask(node, intent.TCP, tcp)
			ask(node, intent.UDP, udp)
			if f == intent.IPv4 {
				ask(s.node.addrs[2], intent.TCP, tcp)
			}
		}
	}
	// The node's address on the Pods' bridge counts as a Pod's.
	bridge := probe{from: s.node, src: addr("10.244.1.1"), to: netip.AddrPortFrom(x.clusterIP(intent.IPv4), 80), p: intent.TCP, tries: tries}
	return append(out, bridge)
}
