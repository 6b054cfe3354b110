package compile

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/lb/config"
	"portal/internal/lb/spec"
)

const aws = "service.beta.kubernetes.io/aws-load-balancer-"

// world is an input that tests change.
type world struct {
	Input
	slices  map[string][]*discoveryv1.EndpointSlice
	secrets map[string]Secret
}

func newWorld() *world {
	w := &world{slices: map[string][]*discoveryv1.EndpointSlice{}, secrets: map[string]Secret{}}
	w.Input = Input{
		Node: "node1", Zone: "zone-1", Balancers: []netip.Addr{netip.MustParseAddr("192.168.100.11")}, Entry: "kube-system/portal-ingress",
		Ours:   func(*corev1.Service) bool { return true },
		Slices: func(namespace, name string) []*discoveryv1.EndpointSlice { return w.slices[namespace+"/"+name] },
		Secret: func(namespace, name string) Secret { return w.secrets[namespace+"/"+name] },
		Policy: func(name string) (TLSPolicy, bool) {
			return TLSPolicy{Min: tls.VersionTLS12, NotOffered: []string{"DHE"}}, name == "strict"
		},
		Resolve: func(string) ([]netip.Addr, bool) { return nil, false },
	}
	return w
}

// service adds a Service of type LoadBalancer with the address 192.0.2.1 and ports 80 and 443.
func (w *world) service(name string, annotations map[string]string) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "12345678-1234-1234-1234-123456789012", Annotations: annotations},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIPs: []string{"10.96.0.7", "fd00:96::7"},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, NodePort: 30080, Protocol: corev1.ProtocolTCP}, {Name: "https", Port: 443, NodePort: 30443, Protocol: corev1.ProtocolTCP}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}},
		},
		Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}}},
	}
	w.Services = append(w.Services, svc)
	w.endpoint(name, discoveryv1.Endpoint{Addresses: []string{"10.244.1.2"}, NodeName: ptr.To("node1"), Zone: ptr.To("zone-1"), TargetRef: &corev1.ObjectReference{Name: "web-1"}})
	w.endpoint(name, discoveryv1.Endpoint{Addresses: []string{"10.244.2.2"}, NodeName: ptr.To("node2"), Zone: ptr.To("zone-2"), TargetRef: &corev1.ObjectReference{Name: "web-2"}})
	return svc
}

func (w *world) endpoint(service string, e discoveryv1.Endpoint) {
	var ports []discoveryv1.EndpointPort
	for i, name := range []string{"http", "https"} {
		ports = append(ports, discoveryv1.EndpointPort{Name: ptr.To(name), Port: ptr.To(int32(8080 + i)), Protocol: ptr.To(corev1.ProtocolTCP)})
	}
	kind := discoveryv1.AddressTypeIPv4
	if strings.Contains(e.Addresses[0], ":") {
		kind = discoveryv1.AddressTypeIPv6
	}
	w.slices["ns/"+service] = append(w.slices["ns/"+service], &discoveryv1.EndpointSlice{AddressType: kind, Ports: ports, Endpoints: []discoveryv1.Endpoint{e}})
}

// keyPair is a certificate that signs itself.
func keyPair(t *testing.T, hosts ...string) map[string][]byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: hosts, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	chain := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return map[string][]byte{"tls.crt": chain, "tls.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), "ca.crt": chain}
}

func (w *world) compile(t *testing.T) Output {
	t.Helper()
	out := Compile(w.Input)
	for _, l := range out.Config.Listeners {
		for _, r := range l.Routes {
			if r.Pool != "" && out.Config.Pools[r.Pool] == nil {
				t.Errorf("%s has no pool %s", l.Name, r.Pool)
			}
		}
		if l.Pool != "" && out.Config.Pools[l.Pool] == nil {
			t.Errorf("%s has no pool %s", l.Name, l.Pool)
		}
		if !slices.ContainsFunc(out.Capture.Ports, func(p capturePort) bool { return p.Address == l.Address }) {
			t.Errorf("%s is not captured", l.Address)
		}
	}
	return out
}

func addresses(out Output) (s string) {
	var list []string
	for _, l := range out.Config.Listeners {
		list = append(list, string(l.Protocol)+" "+l.Address.String())
	}
	return strings.Join(list, ", ")
}

func reasons(out Output) string {
	var list []string
	for _, p := range out.Problems {
		list = append(list, p.Reason)
	}
	return strings.Join(list, ", ")
}

// TestListeners: what is listened to, and what is captured, for what a Service asks.
func TestListeners(t *testing.T) {
	for _, c := range []struct {
		name        string
		annotations map[string]string
		want        string
		reasons     string
	}{
		{"nothing", nil, "", ""},
		{"nlb", map[string]string{aws + "type": "nlb"}, "", ""},
		{"cross zone", map[string]string{aws + "cross-zone-load-balancing-enabled": "true"}, "", ""},
		{"http", map[string]string{aws + "backend-protocol": "http"}, "http 192.0.2.1:80, http 192.0.2.1:443", ""},
		{"TLS ends at one port", map[string]string{aws + "ssl-cert": "web", aws + "ssl-ports": "https"}, "tcp 192.0.2.1:80, ssl 192.0.2.1:443", ""},
		{"an ARN", map[string]string{aws + "ssl-cert": "arn:aws:acm:us-east-1:123456789012:certificate/web", aws + "ssl-ports": "443"}, "tcp 192.0.2.1:80, ssl 192.0.2.1:443", ""},
		{"an ARN of the ConfigMap", map[string]string{aws + "ssl-cert": "arn:aws:iam::1:server-certificate/mapped", aws + "ssl-ports": "443"}, "tcp 192.0.2.1:80, ssl 192.0.2.1:443", ""},
		{"no Secret", map[string]string{aws + "ssl-cert": "none", aws + "ssl-ports": "443"}, "tcp 192.0.2.1:80", CertificateUnavailable},
		{"a broken Secret", map[string]string{aws + "ssl-cert": "broken", aws + "ssl-ports": "443"}, "tcp 192.0.2.1:80", CertificateUnavailable},
		{"a Secret that is not known yet", map[string]string{aws + "ssl-cert": "later", aws + "ssl-ports": "443"}, "tcp 192.0.2.1:80", ""},
		{"a Secret that may not be read", map[string]string{aws + "ssl-cert": "forbidden", aws + "ssl-ports": "443"}, "tcp 192.0.2.1:80", CertificateUnavailable},
		{"TLS to endpoints", map[string]string{aws + "backend-protocol": "ssl"}, "tcp 192.0.2.1:80, tcp 192.0.2.1:443", EndpointNotVerified},
		{"verified TLS to endpoints", map[string]string{aws + "backend-protocol": "https", spec.EndpointCAAnnotation: "web"}, "http 192.0.2.1:80, http 192.0.2.1:443", ""},
		{"TLS to endpoints without the CA", map[string]string{aws + "backend-protocol": "https", spec.EndpointCAAnnotation: "none"}, "", CertificateUnavailable},
		{"a policy", map[string]string{spec.PolicyAnnotation: "leader"}, "tcp 192.0.2.1:80, tcp 10.96.0.7:80, tcp [fd00:96::7]:80, tcp 192.0.2.1:443, tcp 10.96.0.7:443, tcp [fd00:96::7]:443", ""},
		{"an unknown TLS policy", map[string]string{aws + "ssl-cert": "web", aws + "ssl-negotiation-policy": "x"}, "ssl 192.0.2.1:80, ssl 192.0.2.1:443", UnknownPolicy},
		{"a limited TLS policy", map[string]string{aws + "ssl-cert": "web", aws + "ssl-negotiation-policy": "strict"}, "ssl 192.0.2.1:80, ssl 192.0.2.1:443", PolicyLimited},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.Certificates = map[string]string{"mapped": "certs/one"}
			for _, name := range []string{"ns/web", "certs/one"} {
				w.secrets[name] = Secret{Known: true, Data: keyPair(t, "web")}
			}
			w.secrets["ns/none"] = Secret{Known: true}
			w.secrets["ns/broken"] = Secret{Known: true, Data: map[string][]byte{"tls.crt": []byte("x"), "tls.key": []byte("secret words")}}
			w.secrets["ns/forbidden"] = Secret{Err: errors.New("forbidden")}
			w.service("web", c.annotations)
			out := w.compile(t)
			if got := addresses(out); got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if got := reasons(out); got != c.reasons {
				t.Errorf("problems: %+v, want %s", out.Problems, c.reasons)
			}
			for _, p := range out.Problems {
				if strings.Contains(p.Message, "secret words") {
					t.Errorf("a key is shown: %s", p.Message)
				}
			}
			// A port that should speak TLS and can't is closed, and not the proxy's.
			if closed := strings.Contains(c.annotations[aws+"ssl-ports"], "443"); closed && (len(out.Capture.Ports) != 2 || !out.Capture.Ports[1].Strict || out.Capture.Ports[0].Strict) {
				t.Errorf("captured: %+v", out.Capture.Ports)
			}
		})
	}
}

// TestEndpoints: who is in the pool.
func TestEndpoints(t *testing.T) {
	no, yes := ptr.To(false), ptr.To(true)
	ending := discoveryv1.EndpointConditions{Ready: no, Serving: yes, Terminating: yes}
	for _, c := range []struct {
		name   string
		change func(*world, *corev1.Service)
		want   string
	}{
		{"all", func(*world, *corev1.Service) {}, "10.244.1.2:8080 10.244.2.2:8080"},
		{"only ready ones", func(w *world, _ *corev1.Service) { w.slices["ns/web"][0].Endpoints[0].Conditions = ending }, "10.244.2.2:8080"},
		{"none is ready", func(w *world, _ *corev1.Service) {
			w.slices["ns/web"][0].Endpoints[0].Conditions = ending
			w.slices["ns/web"][1].Endpoints[0].Conditions = discoveryv1.EndpointConditions{Ready: no, Serving: no, Terminating: yes}
		}, "10.244.1.2:8080"},
		{"a new one has the address of one that ends", func(w *world, _ *corev1.Service) {
			w.slices["ns/web"][0].Endpoints[0].Conditions = ending
			w.endpoint("web", discoveryv1.Endpoint{Addresses: []string{"10.244.1.2"}})
		}, "10.244.1.2:8080 10.244.2.2:8080"},
		{"local", func(_ *world, svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy = "Local" }, "10.244.1.2:8080"},
		{"local, and none is here", func(w *world, svc *corev1.Service) { svc.Spec.ExternalTrafficPolicy, w.Node = "Local", "node3" }, "10.244.1.2:8080 10.244.2.2:8080"},
		{"the other family", func(w *world, _ *corev1.Service) {
			w.slices["ns/web"] = nil
			w.endpoint("web", discoveryv1.Endpoint{Addresses: []string{"fd00:244::2"}})
		}, "[fd00:244::2]:8080"},
		{"both families", func(w *world, _ *corev1.Service) {
			w.endpoint("web", discoveryv1.Endpoint{Addresses: []string{"fd00:244::2"}})
		}, "10.244.1.2:8080 10.244.2.2:8080"},
		{"ports that are none", func(w *world, _ *corev1.Service) {
			w.slices["ns/web"][0].Ports[0].Port, w.slices["ns/web"][1].Ports[0].Port = ptr.To[int32](70000), ptr.To[int32](-1)
		}, ""},
		{"nobody", func(w *world, _ *corev1.Service) { w.slices["ns/web"] = nil }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			c.change(w, w.service("web", map[string]string{aws + "backend-protocol": "http"}))
			var got []string
			for _, e := range w.compile(t).Config.Pools["ns/web/80/IPv4"].Endpoints {
				got = append(got, e.Address.String())
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("got %v, want %s", got, c.want)
			}
		})
	}
}

// TestPools: what annotations and fields make of a pool and its listener.
func TestPools(t *testing.T) {
	w := newWorld()
	svc := w.service("web", map[string]string{
		aws + "backend-protocol": "http", aws + "connection-draining-enabled": "true", aws + "connection-draining-timeout": "60", aws + "connection-idle-timeout": "90",
		aws + "healthcheck-path": "/ok", aws + "healthcheck-port": "8888", aws + "additional-resource-tags": "a=b", aws + "proxy-protocol": "*",
		aws + "access-log-enabled": "true", aws + "access-log-s3-bucket-name": "my-bucket", aws + "access-log-s3-bucket-prefix": "my-bucket-prefix/prod",
		spec.PolicyAnnotation: "least-request", spec.WeightsAnnotation: "web-1=3,zone-2=0",
	})
	svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	svc.Spec.Ports[0].AppProtocol = ptr.To("kubernetes.io/h2c")
	w.Buckets = map[string]string{"my-bucket": "file:///logs"}
	out := w.compile(t)
	l, p := out.Config.Listeners[0], out.Config.Pools["ns/web/80/IPv4"]
	if l.IdleTimeout != 90*time.Second || l.Tags["a"] != "b" || *l.AccessLog != (config.AccessLog{URL: "file:///logs", Prefix: "my-bucket-prefix/prod", Interval: time.Hour, Format: "elb", Balancer: "a1234567812341234123412345678901"}) {
		t.Errorf("listener: %+v", l)
	}
	if p.Draining != time.Minute || p.ProxyProtocol != 1 || p.Protocol != config.H2C || p.Policy.Kind != config.LeastRequest || p.Affinity != 3*time.Hour || p.PreferZone {
		t.Errorf("pool: %+v", p)
	}
	if h := p.HealthCheck; h == nil || h.Protocol != config.HTTP || h.Path != "/ok" || h.Port != 8888 || h.Healthy != 2 {
		t.Errorf("health check: %+v", p.HealthCheck)
	}
	if p.Endpoints[0].Weight != 3 || p.Endpoints[1].Weight != -1 {
		t.Errorf("weights: %+v", p.Endpoints)
	}
}

// TestFilters: who may use an address, by ranges and groups.
func TestFilters(t *testing.T) {
	for _, c := range []struct {
		name        string
		annotations map[string]string
		ranges      []string
		want        string // of port 80, and of the UDP port
		reasons     string
	}{
		{"nothing", nil, nil, "all all", ""},
		{"ranges, which the proxy enforces", nil, []string{"10.0.0.0/8"}, "all all", ""},
		{"ranges, and a balancer", map[string]string{aws + "backend-protocol": "http"}, []string{"10.0.0.0/8"}, "[10.0.0.0/8] all", ""},
		{"ranges of the other family", map[string]string{aws + "backend-protocol": "http"}, []string{"fd00::/8"}, "all all", ""},
		{"ranges by annotation", map[string]string{corev1.AnnotationLoadBalancerSourceRangesKey: "10.0.0.0/8"}, nil, "[10.0.0.0/8] [10.0.0.0/8]", ""},
		{"groups", map[string]string{aws + "security-groups": "office"}, nil, "[192.0.2.0/24 192.0.2.9/32] [192.0.2.0/24 192.0.2.9/32]", ""},
		{"extra groups beside nothing", map[string]string{aws + "extra-security-groups": "office"}, nil, "all all", ""},
		{"extra groups beside ranges", map[string]string{aws + "extra-security-groups": "office"}, []string{"10.0.0.0/8"}, "[10.0.0.0/8 192.0.2.0/24 192.0.2.9/32] [10.0.0.0/8 192.0.2.0/24 192.0.2.9/32]", spec.IgnoredAnnotation},
		{"a group that is missing", map[string]string{aws + "security-groups": "sg-1"}, nil, "[] []", SecurityGroupNotFound},
		{"a group that is wrong", map[string]string{aws + "security-groups": "wrong"}, nil, "[] []", SecurityGroupNotFound},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.Groups = map[string]string{"office": "192.0.2.0/24,\n192.0.2.9", "wrong": "everybody"}
			w.service("web", c.annotations).Spec.LoadBalancerSourceRanges = c.ranges
			out := w.compile(t)
			of := func(port uint16) string {
				for _, f := range out.Capture.Filters {
					if f.Port == port {
						var list []string
						for _, p := range f.Allowed {
							list = append(list, p.String())
						}
						return "[" + strings.Join(list, " ") + "]"
					}
				}
				return "all"
			}
			if got := of(80) + " " + of(53); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			if got := reasons(out); got != c.reasons {
				t.Errorf("problems: %+v", out.Problems)
			}
		})
	}
}

// TestInternalPolicy: internalTrafficPolicy is about cluster IPs, externalTrafficPolicy about the balancer's address.
func TestInternalPolicy(t *testing.T) {
	w := newWorld()
	svc := w.service("web", map[string]string{spec.PolicyAnnotation: "random"})
	svc.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	endpoints := func(address string) int {
		out := w.compile(t)
		for _, l := range out.Config.Listeners {
			if l.Address.String() == address {
				return len(out.Config.Pools[l.Pool].Endpoints)
			}
		}
		return -1
	}
	if inside, outside := endpoints("10.96.0.7:80"), endpoints("192.0.2.1:80"); inside != 1 || outside != 2 {
		t.Errorf("internal Local: %d, %d", inside, outside)
	}
	// Elsewhere one is ready, but nobody is to go there while one here still serves.
	here := &w.slices["ns/web"][0].Endpoints[0].Conditions
	*here = discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)}
	if inside, outside := endpoints("10.96.0.7:80"), endpoints("192.0.2.1:80"); inside != 1 || outside != 1 {
		t.Errorf("internal Local, and the one that is here ends: %d, %d", inside, outside)
	}
	*here = discoveryv1.EndpointConditions{}
	w.Node = "node3"
	if inside := endpoints("10.96.0.7:80"); inside != 0 {
		t.Errorf("internal Local, and none is here: %d", inside)
	}
	w.Node, svc.Spec.InternalTrafficPolicy, svc.Spec.ExternalTrafficPolicy = "node1", nil, "Local"
	if inside, outside := endpoints("10.96.0.7:80"), endpoints("192.0.2.1:80"); inside != 2 || outside != 1 {
		t.Errorf("external Local: %d, %d", inside, outside)
	}
}

// TestClusterIPProblems: what is wrong with an annotation of Portal's own is said of Services of every type, since Ingresses lead to them.
func TestClusterIPProblems(t *testing.T) {
	for annotation, want := range map[string]string{
		spec.PolicyAnnotation: spec.InvalidAnnotation, spec.EndpointRequestsAnnotation: spec.InvalidAnnotation, spec.SlowStartAnnotation: spec.InvalidAnnotation,
		aws + "backend-protocol": "", // there is no balancer that it could be about
	} {
		w := newWorld()
		w.service("web", map[string]string{annotation: "many"}).Spec.Type = corev1.ServiceTypeClusterIP
		out := w.compile(t)
		if got := reasons(out); got != want || len(out.Config.Listeners) != 0 {
			t.Errorf("%s: problems %+v, %d listeners", annotation, out.Problems, len(out.Config.Listeners))
		}
	}
}

// TestNodePorts: a network load balancer has node firewall rules, by a name that a cloud would give it.
func TestNodePorts(t *testing.T) {
	w := newWorld()
	svc := w.service("web", map[string]string{aws + "type": "nlb"})
	svc.Spec.LoadBalancerSourceRanges, svc.Spec.HealthCheckNodePort = []string{"10.0.0.0/8"}, 32000
	out := w.compile(t)
	if len(out.Capture.NLB) != 1 || len(out.Capture.Ports)+len(out.Config.Listeners) > 0 {
		t.Fatalf("%+v", out)
	}
	if n := out.Capture.NLB[0]; n.Name != "a1234567812341234123412345678901" || len(n.Ports) != 2 || n.HealthPort != 32000 || len(n.Clients) != 1 || len(n.Balancers) != 1 {
		t.Errorf("%+v", n)
	}
}

// TestOrder: the same input in another order is the same configuration.
func TestOrder(t *testing.T) {
	w := newWorld()
	w.service("a", map[string]string{aws + "backend-protocol": "http"}).Status.LoadBalancer.Ingress[0].IP = "192.0.2.2"
	w.service("b", map[string]string{aws + "backend-protocol": "http"})
	first := w.compile(t)
	slices.Reverse(w.Services)
	slices.Reverse(w.slices["ns/a"])
	if second := w.compile(t); !bytes.Equal(first.Config.Digest(), second.Config.Digest()) {
		t.Errorf("%+v\n%+v", first.Config, second.Config)
	}
}
