package oracle

import (
	"net/netip"
	"slices"
	"testing"

	"portal/internal/intent"
	"portal/internal/plan"
)

const (
	here, there, pod, podThere, client = "192.0.2.1", "192.0.2.2", "10.244.1.5", "10.244.2.5", "203.0.113.200"
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// snapshot has one Service of UDP and TCP with an endpoint here and one there, reached in every way, with the policy
// Local for what comes from outside, and one Service without endpoints.
func snapshot(nodePorts plan.NodePorts) *plan.Snapshot {
	f := &plan.Facts{
		Node: "n1", Families: []intent.Family{intent.IPv4}, Addrs: []netip.Addr{netip.MustParseAddr(here)},
		Pods: plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, Interface: "br0"}, NodePorts: nodePorts,
		ServicePrefixes: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/24")},
	}
	s := plan.NewSnapshot(f)
	port := []intent.Port{{Protocol: intent.TCP, Port: 80, NodePort: 30080}}
	web := &intent.Service{
		Key: intent.Key{Name: "web"}, Type: intent.LoadBalancer, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}, Ports: port,
		ExternalIPs: []netip.Addr{netip.MustParseAddr("198.51.100.1")}, Ingress: []intent.Ingress{{Addr: netip.MustParseAddr("203.0.113.1")}},
		ExternalLocal: true, SourceRanges: []netip.Prefix{netip.MustParsePrefix("203.0.113.128/25"), netip.MustParsePrefix("10.244.0.0/16")},
	}
	slice := &intent.Slice{Family: intent.IPv4, Ports: []intent.EndpointPort{{Protocol: intent.TCP, Port: 8080}}, Endpoints: []intent.Endpoint{
		{Addr: netip.MustParseAddr(pod), NodeName: "n1", Condition: intent.Ready}, {Addr: netip.MustParseAddr(podThere), NodeName: "n2", Condition: intent.Ready},
	}}
	s.Set(web.Key, plan.For(&intent.Entry{Service: web, Slices: []*intent.Slice{slice}}, f))
	empty := &intent.Service{Key: intent.Key{Name: "empty"}, Type: intent.NodePort, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.2")},
		Ports: []intent.Port{{Protocol: intent.TCP, Port: 80, NodePort: 30081}}}
	s.Set(empty.Key, plan.For(&intent.Entry{Service: empty}, f))
	return s
}

func TestJudge(t *testing.T) {
	all := plan.NodePorts{All: true}
	both, local := []string{pod, podThere}, []string{pod}
	type want struct {
		verdict   Verdict
		endpoints []string
		rewritten bool
	}
	for _, c := range []struct {
		name     string
		ports    plan.NodePorts
		src, dst string
		packet   Packet
		want     want
	}{
		{"a Pod to the cluster IP", all, "10.244.1.9", "10.96.0.1:80", Packet{In: "br0"}, want{Forward, both, false}},
		{"the node to the cluster IP", all, here, "10.96.0.1:80", Packet{SrcLocal: true}, want{Forward, both, true}},
		{"outside to the cluster IP", all, client, "10.96.0.1:80", Packet{In: "eth0"}, want{Forward, both, true}},
		{"an interface makes a Pod", all, client, "10.96.0.1:80", Packet{In: "br0"}, want{Forward, both, false}},
		{"a Pod's address on the node is a Pod's", all, "10.244.1.1", "10.96.0.1:80", Packet{SrcLocal: true}, want{Forward, both, false}},
		{"another port of a cluster IP", all, client, "10.96.0.1:81", Packet{In: "eth0"}, want{verdict: Reject}},
		{"another protocol of a cluster IP", all, client, "10.96.0.1:80", Packet{Protocol: intent.UDP}, want{verdict: Reject}},
		{"no endpoints", all, client, "10.96.0.2:80", Packet{In: "eth0"}, want{verdict: Reject}},
		{"nobody's address", all, client, "10.97.0.3:80", Packet{In: "eth0"}, want{verdict: Pass}},
		{"a service address that nobody has", all, client, "10.96.0.3:80", Packet{In: "eth0"}, want{verdict: Drop}},
		{"a service address that the node has", all, client, "10.96.0.3:80", Packet{In: "eth0", DstLocal: true}, want{verdict: Pass}},
		{"outside to the balancer", all, client, "203.0.113.1:80", Packet{In: "eth0"}, want{Forward, local, false}},
		{"outside to the balancer, not invited", all, "192.0.2.9", "203.0.113.1:80", Packet{In: "eth0"}, want{verdict: Drop}},
		{"a Pod's short cut", all, "10.244.1.9", "203.0.113.1:80", Packet{In: "br0"}, want{Forward, both, false}},
		{"outside to the external IP, no ranges there", all, "192.0.2.9", "198.51.100.1:80", Packet{In: "eth0"}, want{Forward, local, false}},
		{"the node's short cut", all, here, "198.51.100.1:80", Packet{SrcLocal: true}, want{Forward, both, true}},
		{"another port of the external IP", all, client, "198.51.100.1:81", Packet{In: "eth0"}, want{verdict: Pass}},
		{"node port", all, client, here + ":30080", Packet{In: "eth0", DstLocal: true}, want{Forward, local, false}},
		{"node port of another node", all, client, there + ":30080", Packet{In: "eth0"}, want{verdict: Pass}},
		{"node port without endpoints", all, client, here + ":30081", Packet{DstLocal: true}, want{verdict: Reject}},
		{"node port, listed", plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr(here)}}, client, here + ":30080", Packet{DstLocal: true}, want{Forward, local, false}},
		{"node port, not listed", plan.NodePorts{Addrs: []netip.Addr{netip.MustParseAddr(there)}}, client, here + ":30080", Packet{DstLocal: true}, want{verdict: Pass}},
		{"loopback without leave", all, "127.0.0.1", "127.0.0.1:30080", Packet{SrcLocal: true, DstLocal: true}, want{verdict: Pass}},
		{"loopback", plan.NodePorts{All: true, Loopback4: true}, "127.0.0.1", "127.0.0.1:30080", Packet{SrcLocal: true, DstLocal: true}, want{Forward, both, true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := c.packet
			p.Src, p.Dst = netip.AddrPortFrom(netip.MustParseAddr(c.src), 5000), ap(c.dst)
			if p.Protocol == 0 {
				p.Protocol = intent.TCP
			}
			got := Judge(snapshot(c.ports), p)
			var endpoints []string
			for _, e := range got.Endpoints {
				endpoints = append(endpoints, e.Addr().String())
				if !got.Allows(e) {
					t.Errorf("%v is not allowed", e)
				}
			}
			if got.Verdict != c.want.verdict || !slices.Equal(endpoints, c.want.endpoints) || got.Masquerade != c.want.rewritten {
				t.Errorf("got %v %v rewritten %v, want %+v", got.Verdict, endpoints, got.Masquerade, c.want)
			}
		})
	}
}

// TestHairpin: an endpoint that reaches itself sees the node, and sees other clients as they are.
func TestHairpin(t *testing.T) {
	got := Judge(snapshot(plan.NodePorts{}), Packet{Src: ap(pod + ":5000"), Dst: ap("10.96.0.1:80"), Protocol: intent.TCP, In: "br0"})
	if !got.Rewrites(ap(pod+":8080")) || got.Rewrites(ap(podThere+":8080")) {
		t.Errorf("rewritten to itself %v, to the other %v", got.Rewrites(ap(pod+":8080")), got.Rewrites(ap(podThere+":8080")))
	}
}
