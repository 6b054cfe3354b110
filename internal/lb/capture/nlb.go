package capture

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"portal/internal/proxy/nf"
)

// The comments of a network load balancer's rules, before the balancer's name.
const (
	commentHealth = "kubernetes.io/rule/nlb/health="
	commentClient = "kubernetes.io/rule/nlb/client="
	commentMTU    = "kubernetes.io/rule/nlb/mtu="
)

// nodePorts are the rules for the node ports of network load balancers: they come before the proxy rewrites a packet's destination. If
// clients are limited, others are dropped.
func (t *table) nodePorts(s *State) (out []nf.Rule) {
	for _, n := range s.NLB {
		out = append(out, t.nodePortsOf(n)...)
	}
	return out
}

func (t *table) nodePortsOf(n NodePorts) (out []nf.Rule) {
	at := func(p NodePort) nf.Rule {
		port := nf.AppendPort(nil, p.Port)[:2]
		return nf.Concat(nf.IsLocal(false, false), nf.IsProto(p.Protocol), nf.Rule{nf.DestinationPort(nf.Reg0), nf.Cmp{Reg: nf.Reg0, Data: port}})
	}
	accept := func(comment string) nf.Rule { return nf.Rule{nf.Counter{}, nf.Accept, nf.Comment(comment + n.Name)} }
	health := n.Ports
	if n.HealthPort != 0 {
		health = []NodePort{{unix.IPPROTO_TCP, n.HealthPort}}
	}
	for _, a := range n.Balancers {
		for _, p := range health {
			if t.mine(a) {
				out = append(out, nf.Concat(t.fromPrefix(netip.PrefixFrom(a, a.BitLen())), at(p), accept(commentHealth)))
			}
		}
	}
	clients, limited := []netip.Prefix{}, len(n.Clients) > 0
	for _, c := range n.Clients {
		if t.mine(c.Addr()) {
			clients = append(clients, c)
			limited = limited && c.Bits() > 0
		}
	}
	if !limited && len(clients) == 0 {
		clients = []netip.Prefix{netip.PrefixFrom(t.zero(), 0)}
	}
	for _, c := range clients {
		for _, p := range n.Ports {
			out = append(out, nf.Concat(t.fromPrefix(c), at(p), accept(commentClient)))
		}
		if !t.Is6() {
			out = append(out, nf.Concat(t.fromPrefix(c), t.tooBig(), accept(commentMTU)))
		}
	}
	if limited {
		for _, p := range n.Ports {
			out = append(out, append(at(p), nf.Drop))
		}
	}
	return out
}

func (t *table) zero() netip.Addr {
	if t.Is6() {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

func (t *table) fromPrefix(p netip.Prefix) nf.Rule {
	if p.Bits() == 0 {
		return nil
	}
	return append(nf.Rule{t.Source(nf.Reg0)}, t.Within(p, false)...)
}

// tooBig matches ICMP messages, type 3 and code 4, by which senders learn the size of packets. (IPv6 does not work without its own.)
func (t *table) tooBig() nf.Rule {
	return nf.Concat(nf.IsProto(unix.IPPROTO_ICMP), nf.Rule{
		nf.Payload{Dst: nf.Reg0, Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Offset: 0, Len: 2}, nf.Cmp{Reg: nf.Reg0, Data: []byte{3, 4}},
	})
}
