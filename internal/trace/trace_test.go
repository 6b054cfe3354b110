package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// objects are a cluster of two nodes with a Pod on each, that another program than Portal runs.
func objects() *Objects {
	o := &Objects{
		Ranges:     []networkingv1.ServiceCIDR{{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}}},
		Namespaces: []corev1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, {ObjectMeta: metav1.ObjectMeta{Name: "shop"}}},
	}
	for i := 1; i <= 2; i++ {
		node := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}, Spec: corev1.NodeSpec{PodCIDRs: []string{fmt.Sprintf("10.244.%d.0/24", i)}}}
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("192.0.2.%d", i)}}
		o.Nodes = append(o.Nodes, node)
		o.Pods = append(o.Pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%d", i), Namespace: "default"}, Spec: corev1.PodSpec{
				NodeName:   node.Name,
				Containers: []corev1.Container{{Ports: []corev1.ContainerPort{{ContainerPort: 8080, HostPort: 8081}}}},
			},
			Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: fmt.Sprintf("10.244.%d.9", i)}}},
		})
	}
	service := func(name, ip string, change func(*corev1.ServiceSpec)) {
		s := corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"}}
		s.Spec = corev1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, Selector: map[string]string{"app": name}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			Ports: []corev1.ServicePort{{Name: "web", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
		}
		change(&s.Spec)
		o.Services = append(o.Services, s)
	}
	slice := func(service string, ready bool, port string, addrs ...string) {
		s := discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: service + "-1", Namespace: "default", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &port, Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP)}},
		}
		for _, a := range addrs {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: ptr.To("n" + a[7:8]), Conditions: discoveryv1.EndpointConditions{Ready: &ready}})
		}
		o.Slices = append(o.Slices, s)
	}
	service("web", "10.96.0.1", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort })
	slice("web", true, "web", "10.244.1.9", "10.244.2.9")
	service("near", "10.96.0.2", func(s *corev1.ServiceSpec) {
		s.Type, s.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal
		s.Ports[0].NodePort = 30081
		s.ExternalIPs = []string{"198.51.100.1"}
	})
	slice("near", true, "web", "10.244.2.9")
	service("unready", "10.96.0.3", func(s *corev1.ServiceSpec) { s.Ports[0].NodePort = 0 })
	slice("unready", false, "web", "10.244.1.9", "10.244.2.9")
	service("misnamed", "10.96.0.4", func(s *corev1.ServiceSpec) { s.Ports[0].NodePort = 0 })
	slice("misnamed", true, "http", "10.244.1.9")
	service("bare", "10.96.0.5", func(s *corev1.ServiceSpec) { s.Ports[0].NodePort, s.Selector = 0, nil })
	return o
}

func TestWays(t *testing.T) {
	for _, c := range []struct {
		from, to, via string
		mode          string
		verdict       Verdict
		has           string // in the reason, or in what is assumed
		ends          int
	}{
		{from: "p1", to: "web:80", verdict: Arrives, has: "one of 2 endpoints", ends: 2},
		{from: "p1", to: "web.default.svc.cluster.local:80", verdict: Arrives, ends: 2},
		{from: "p1", to: "WEB.default:80/tcp", verdict: Arrives, ends: 2},
		{from: "p1", to: "web:81", verdict: Rejected, has: "no port 81/TCP, but 80/TCP"},
		{from: "p1", to: "web:81", mode: "iptables", verdict: Lost, has: "does not reject it"},
		{from: "p1", to: "web:80/UDP", verdict: Rejected, has: "no port 80/UDP"},
		{from: "p1", to: "10.96.7.7:80", verdict: Dropped, has: "no Service has it"},
		{from: "p1", to: "10.96.7.7:80", mode: "iptables", verdict: Lost, has: "no Service has it"},
		{from: "p1", to: "unready:80", verdict: Rejected, has: "none of the 2 endpoints"},
		{from: "p1", to: "misnamed:80", verdict: Rejected, has: `no port "web" of TCP`},
		{from: "p1", to: "bare:80", verdict: Rejected, has: "no selector"},
		{from: "p1", to: "web.shop:80", verdict: Unresolved, has: "web.default"},
		{from: "p1", to: "nothing:80", verdict: Unresolved, has: "no name of this cluster"},
		{from: "p1", to: "10.244.2.9:8080", verdict: Arrives, has: "Pod default/p2 on node n2", ends: 1},
		{from: "p1", to: "10.244.2.77:8080", verdict: Lost, has: "no Pod has it"},
		{from: "p1", to: "127.0.0.1:80", verdict: Arrives, has: "does not leave it"},
		{from: "p1", to: "192.0.2.2:8081", verdict: Arrives, has: "Pod default/p2", ends: 1},
		{from: "p1", to: "192.0.2.200:443", verdict: Leaves},
		{from: "p1", to: "[fd00::1]:443", verdict: Lost, has: "no address of IPv6"},
		{from: "n1", to: "192.0.2.2:22", verdict: Arrives, has: "if a process listens", ends: 1},
		{from: "n1", to: "127.0.0.1:30080", verdict: Rejected, has: "not served at 127.0.0.1"},
		{from: "n1", to: "127.0.0.1:30080", mode: "iptables", verdict: Arrives, ends: 2},
		// A Pod of any node is known by its prefix, and takes the short cut past the policy.
		{from: "p1", to: "192.0.2.2:30081", verdict: Arrives, ends: 1},
		{from: "client", to: "192.0.2.1:30080", verdict: Arrives, ends: 2},
		{from: "client", to: "192.0.2.1:30081", verdict: Dropped, has: "externalTrafficPolicy of Service default/near is Local, and node n1"},
		{from: "client", to: "198.51.100.1:80", verdict: Arrives, has: "comes in at node n2, which has endpoints of its own", ends: 1},
		{from: "client", to: "198.51.100.1:80", via: "n1", verdict: Dropped, has: "node n1 has no endpoint"},
		{from: "client", to: "10.96.0.1:80", verdict: Lost, has: "--via NODE"},
		{from: "client", to: "10.96.0.1:80", via: "n1", verdict: Arrives, ends: 2},
		{from: "203.0.113.77", to: "203.0.113.1:80", verdict: Leaves, has: "does not come here"},
		{from: "10.244.1.9", to: "web:80", verdict: Arrives, ends: 2},
	} {
		t.Run(c.from+" "+c.to+" "+c.via+c.mode, func(t *testing.T) {
			w, err := NewWorld(objects(), Settings{Mode: c.mode})
			if err != nil {
				t.Fatal(err)
			}
			r, err := w.Trace(Question{From: c.from, To: c.to, Via: c.via, Namespace: "default"})
			if err != nil {
				t.Fatal(err)
			}
			said := r.Reason + "; " + strings.Join(r.Assumptions, "; ")
			if r.Verdict != c.verdict || !strings.Contains(said, c.has) || len(r.Ends) != c.ends {
				t.Errorf("%s: %s (%d ends); want %s with %q (%d)\n%+v", r.Verdict, said, len(r.Ends), c.verdict, c.has, c.ends, r.Steps)
			}
			sum := 0.0
			for _, e := range r.Ends {
				sum += e.Odds
			}
			if c.ends > 0 && (sum < 0.999 || sum > 1.001) {
				t.Errorf("the odds add up to %v", sum)
			}
		})
	}
}

// TestAnnounced: a packet from outside comes to the node that announces the address, whether it has endpoints or not, unless the question
// names another.
func TestAnnounced(t *testing.T) {
	address := netip.MustParseAddr("198.51.100.1")
	for _, c := range []struct {
		announced, via, node string
		verdict              Verdict
		assumed              bool
	}{
		{"n1", "", "n1", Dropped, false},
		{"n2", "", "n2", Arrives, false},
		{"n2", "n1", "n1", Dropped, false},
		{"gone", "", "n2", Arrives, true},
		{"", "", "n2", Arrives, true},
	} {
		o := objects()
		o.Announced = map[netip.Addr]string{address: c.announced}
		w, err := NewWorld(o, Settings{})
		if err != nil {
			t.Fatal(err)
		}
		r, err := w.Trace(Question{From: "203.0.113.77", To: "198.51.100.1:80", Via: c.via, Namespace: "default"})
		if err != nil {
			t.Fatal(err)
		}
		if r.Node != c.node || r.Verdict != c.verdict || (len(r.Assumptions) > 0) != c.assumed {
			t.Errorf("announced by %q, via %q: %s on node %s, assumed %q; want %s on %s", c.announced, c.via, r.Verdict, r.Node, r.Assumptions, c.verdict, c.node)
		}
	}
}

// TestRewriting: who sees whose address.
func TestRewriting(t *testing.T) {
	for _, c := range []struct {
		from, to, mode string
		want           string // by endpoint: the node whose address it sees, or - for the sender's own
	}{
		{"p1", "web:80", "", "p1:n1 p2:-"}, // an endpoint that reaches itself sees the node
		{"client", "192.0.2.1:30080", "", "p1:n1 p2:n1"},
		{"client", "192.0.2.2:30081", "", "p2:-"},
		{"p1", "web:80", "userspace", "p1:n1 p2:n1"},
	} {
		w, err := NewWorld(objects(), Settings{Mode: c.mode})
		if err != nil {
			t.Fatal(err)
		}
		r, err := w.Trace(Question{From: c.from, To: c.to, Namespace: "default"})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range r.Ends {
			seen := "-"
			if e.Masqueraded {
				seen = e.SourceNode
			}
			got = append(got, strings.TrimPrefix(e.Pod, "default/")+":"+seen)
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s to %s %s: %s, want %s", c.from, c.to, c.mode, s, c.want)
		}
	}
}

func TestMistakes(t *testing.T) {
	w, err := NewWorld(objects(), Settings{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ from, to, via, part, has string }{
		{"", "web:80", "", "from", "required"},
		{"p9", "web:80", "", "from", `"p9"`},
		{"shop/p1", "web:80", "", "from", "neither"},
		{"0.0.0.0", "web:80", "", "from", "nobody's own"},
		{"p1", "web", "", "to", "must be ADDRESS:PORT or NAME:PORT"},
		{"p1", "10.96.0.1", "", "to", "the port is missing: 10.96.0.1:80"},
		{"p1", "fd00::1", "", "to", "the port is missing: [fd00::1]:80"},
		{"p1", "web:http", "", "to", "from 1 to 65535"},
		{"p1", "web:0", "", "to", "from 1 to 65535"},
		{"p1", "web:80/QUIC", "", "to", "TCP, UDP or SCTP"},
		{"p1", "we b:80", "", "to", "DNS name"},
		{"p1", "224.0.0.1:80", "", "to", "single"},
		{"client", "web:80", "n9", "via", "n1, n2"},
		{"p1", "web:80", "n1", "via", "from outside"},
	} {
		_, err := w.Trace(Question{From: c.from, To: c.to, Via: c.via, Namespace: "default"})
		var bad *MistakeError
		if !errors.As(err, &bad) || bad.Part != c.part || !strings.Contains(err.Error(), c.has) {
			t.Errorf("from %q to %q via %q: %v; want a mistake in %s with %q", c.from, c.to, c.via, err, c.part, c.has)
		}
	}
	if _, err := NewWorld(objects(), Settings{Mode: "magic"}); err == nil {
		t.Error("a mode that there is not is accepted")
	}
}

func FuzzTarget(f *testing.F) {
	for _, s := range []string{"web:80", "[fd00::1]:53/udp", "a.b.c.:1", "10.0.0.1:1/SCTP"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		to, err := parseTarget(text)
		if err == nil && (to.port == 0 || to.protocol == 0 || to.name == "" == !to.addr.IsValid()) {
			t.Errorf("%q became %+v", text, to)
		}
	})
}
