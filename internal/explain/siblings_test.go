package explain

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/hostnet"
	"portal/internal/nodereport"
)

// balancers has Portal's load balancers run.
func (w *world) balancers() {
	w.Leases = append(w.Leases, coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "portal-lb"},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("node1"), LeaseDurationSeconds: ptr.To[int32](5), RenewTime: ptr.To(metav1.NewMicroTime(now))},
	})
}

// balanced makes web one with a load balancer.
func (w *world) balanced(annotations map[string]string) (*corev1.Service, *corev1.Pod, *corev1.Pod) {
	s, a, b := w.web()
	s.Spec.Type, s.Status.LoadBalancer.Ingress, s.Annotations = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}, annotations
	w.balancers()
	return s, a, b
}

// byHand gives web a slice that somebody wrote in place of a selector.
func (w *world) byHand() (*corev1.Service, *discoveryv1.EndpointSlice) {
	s, _, _ := w.web()
	s.Spec.Selector = nil
	w.Slices = w.Slices[:len(w.Slices)-1]
	return s, w.slice(s, "203.0.113.8")
}

func udpAt(port uint16) nodereport.Socket {
	return nodereport.Socket{Protocol: "UDP", Address: netip.IPv4Unspecified(), Port: port}
}

// waiting has both Pods of web wait for something.
func waiting(w *world, reason, message string) (*corev1.Pod, *corev1.Pod) {
	a, b := bothUnready(w)
	for _, p := range []*corev1.Pod{a, b} {
		p.Status.Phase = corev1.PodPending
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
	}
	w.owned(a, b)
	return a, b
}

// siblings are faults of the kinds of the others, with other protocols, families, objects and fields.
var siblings = []fault{
	{"a liveness probe that kills, and refusals between restarts", func(w *world) {
		killed(w, 9376, "Liveness probe of container c failed: HTTP status 404", "Liveness probe of container c failed: dial tcp 10.244.1.2:9376: connect: connection refused")
	}, web, "liveness-path", "liveness probe", `livenessProbe/httpGet/path","value":"/"`},
	{"a liveness probe of a wrong port, while the container is down", func(w *world) {
		a, b := killed(w, 9377, "Liveness probe of container c failed: dial tcp 10.244.1.2:9377: connect: connection refused")
		w.listening(a)
		w.listening(b)
	}, web, "liveness-port", "asks port 9377", `livenessProbe/httpGet/port","value":9376`},
	{"a Service that is being deleted, without slices", func(w *world) {
		s, _, _ := w.web()
		s.DeletionTimestamp, s.Finalizers = ptr.To(metav1.NewTime(now.Add(-time.Minute))), []string{"example.com/hold"}
		w.Slices = slices.DeleteFunc(w.Slices, func(slice discoveryv1.EndpointSlice) bool {
			return slice.Labels[discoveryv1.LabelServiceName] == s.Name
		})
	}, web, "service-deleting", "example.com/hold", `"finalizers":null`},
	{"a slice for another protocol", func(w *world) {
		_, slice := w.byHand()
		slice.Ports[0].Protocol = ptr.To(corev1.ProtocolUDP)
	}, web, "slice-port", "its port 80/TCP (without a name) has no endpoints: the ports of EndpointSlice shop/web-1 are 9376/UDP (without a name)", `"/ports/0/protocol","value":"TCP"`},
	{"Endpoints with another port's name", func(w *world) {
		s, slice := w.byHand()
		s.Spec.Ports[0].Name = "http"
		slice.Labels[discoveryv1.LabelManagedBy], slice.Ports[0].Name = mirror, ptr.To("web")
	}, web, "slice-port", `80/TCP (named "http")`, `patch endpoints web --type=json -p '[{"op":"add","path":"/subsets/0/ports/0/name","value":"http"}]'`},
	{"a slice with one of two ports", func(w *world) {
		s, slice := w.byHand()
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "metrics", Port: 81, TargetPort: intstr.FromInt32(9377)})
		s.Spec.Ports[0].Name, slice.Ports[0].Name = "http", ptr.To("http")
	}, web, "slice-port", `81/TCP (named "metrics")`, `"/ports/-","value":{"name":"metrics","port":9377`},
	{"an alias of a Service that does not answer", func(w *world) {
		w.selecting(map[string]string{"app": "wbe"})
		w.alias("web.shop.svc.cluster.local", &nodereport.Alias{Name: "web.shop.svc.cluster.local", As: "db.shop", Answers: []nodereport.AliasAnswer{{Port: 443, Error: nodereport.Refused}}})
	}, Question{"service", "shop", "db"}, "selector-typo", "Service shop/web selects no Pod", ""},
	{"an alias of a headless Service without Pods", func(w *world) {
		w.selecting(map[string]string{"component": "x"})
		w.alias("web.shop.svc.cluster.local", &nodereport.Alias{Name: "web.shop.svc.cluster.local", As: "db.shop", Unresolved: "no such host"})
	}, Question{"service", "shop", "db"}, "selector-no-pods", "shop/web", ""},
	{"a port beside a name", func(w *world) { w.web() }, Question{"name", "shop", "web:9376"}, "address-port", "9376 is the port of its Pods", ""},
	{"HTTPS beside a name", func(w *world) { w.web() }, Question{"name", "shop", "https://web.shop/x"}, "address-port", "no port 443", ""},
	{"an Ingress's class with a typo", func(w *world) {
		w.ingress("web", 80).Spec.IngressClassName = ptr.To("protal")
		w.IngressClasses = []networkingv1.IngressClass{{ObjectMeta: metav1.ObjectMeta{Name: "another"}}}
		w.balancers()
	}, Question{"ingress", "shop", "in"}, "ingress-class", `"protal"`, `"ingressClassName":"portal"`},
	{"an Ingress's class of a controller that is not there", func(w *world) {
		w.ingress("web", 80).Spec.IngressClassName = ptr.To("nginx")
		w.IngressClasses = []networkingv1.IngressClass{{ObjectMeta: metav1.ObjectMeta{Name: "nginx"}, Spec: networkingv1.IngressClassSpec{Controller: "k8s.io/ingress-nginx"}}}
		w.balancers()
	}, Question{"ingress", "shop", "in"}, "ingress-class", "k8s.io/ingress-nginx", `"ingressClassName":"portal"`},
	{"health checks of a load balancer", func(w *world) {
		_, a, _ := w.balanced(map[string]string{"service.beta.kubernetes.io/aws-load-balancer-healthcheck-path": "/none"})
		w.Reports["node2"].Unhealthy = []nodereport.Unhealthy{{Namespace: "shop", Service: "web", Address: netip.MustParseAddrPort(a.Status.PodIP + ":9376"), Error: "answer 404 Not Found, want 200"}}
	}, web, "balancer-health", "(Pod web-1) for broken, though it is ready: its health check (http /none) says: answer 404", "healthcheck-path-"},
	{"the certificate of a load balancer", func(w *world) {
		w.balanced(map[string]string{"service.beta.kubernetes.io/aws-load-balancer-ssl-cert": "cert"})
		r := Ref{"Secret", "shop", "cert"}
		w.Secrets[r] = true
		w.Certificates = []Certificate{{Object: r, Names: []string{"shop.example.com"}, NotBefore: now.Add(-48 * time.Hour), NotAfter: now.Add(-24 * time.Hour)}}
	}, web, "certificate-expired", "Secret shop/cert", "subjectAltName=DNS:shop.example.com"},
	{"source ranges of the other family", func(w *world) {
		s, _, _ := w.balanced(nil)
		s.Spec.LoadBalancerSourceRanges = []string{"2001:db8::/32"}
	}, web, "source-ranges", "lets all clients of its load balancer's address 203.0.113.7 in", "edit service web"},
	{"UDP at another port", func(w *world) {
		s, a, b := w.web()
		s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
		w.listening(a, udpAt(5353))
		w.listening(b, udpAt(5353))
		a.Spec.Containers[0].Ports, b.Spec.Containers[0].Ports = nil, nil
	}, web, "port-not-listening", "port 5353 is open", `"value":5353`},
	{"another port of another protocol", func(w *world) {
		_, a, b := w.web()
		w.listening(a, udpAt(5353))
		w.listening(b, udpAt(5353))
	}, web, "port-not-listening", "UDP port 5353 is open", `"/spec/ports/0/protocol","value":"UDP"`},
	{"a server for IPv6 alone", func(w *world) {
		_, a, b := w.web()
		w.dials(nodereport.Dial{To: netip.MustParseAddrPort(a.Status.PodIP + ":9376"), Error: nodereport.Refused}, nodereport.Dial{To: netip.MustParseAddrPort(b.Status.PodIP + ":9376"), Error: nodereport.Refused})
	}, web, "listens-other-family", "IPV6_V6ONLY", ""},
	{"a probe of the second container", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			probe(p, 9376)
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side", ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt32(9376), Path: "/up"}}}})
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", Ready: true}, {Name: "side"}}
			w.event("Pod", p.Name, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 404")
		}
		w.owned(a, b)
	}, web, "readiness-path", "404", "/containers/1/readinessProbe/httpGet/path"},
	{"a probe that gets 500", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			probe(p, 9376)
			w.event("Pod", p.Name, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 500")
		}
		w.owned(a, b)
	}, web, "pods-unready", "500", `{"op":"remove","path":"/spec/template/spec/containers/0/readinessProbe"}`},
	{"a resource that no node has", func(w *world) {
		a, b := unscheduled(w)
		for _, p := range []*corev1.Pod{a, b} {
			list := corev1.ResourceList{"example.com/gpu": resource.MustParse("1")}
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: list, Limits: list}
		}
	}, web, "pods-pending", "1 example.com/gpu", `"requests":{"example.com/gpu":null}`},
	{"a Secret that a variable needs", func(w *world) {
		waiting(w, "CreateContainerConfigError", `Secret "keys" not found`)
	}, web, "pods-config", "keys", "create secret generic keys"},
	{"a key that a ConfigMap lacks", func(w *world) {
		waiting(w, "CreateContainerConfigError", "couldn't find key b in ConfigMap shop/conf")
	}, web, "pods-config", "conf", `patch configmap conf --type=merge -p '{"data":{"b":""}}'`},
	{"an external IP that is the API server's", func(w *world) {
		s := w.service("default", "kubernetes", nil, 443)
		w.slice(s, "203.0.113.1")
		w.Slices[len(w.Slices)-1].Ports[0].Port = ptr.To[int32](6443)
		thief, _, _ := w.web()
		thief.Spec.ExternalIPs, thief.Spec.Ports[0].Port = []string{"203.0.113.1"}, 6443
	}, web, "external-ip-theft", "an endpoint of Service default/kubernetes", "externalIPs"},
	{"a reverse path filter that drops", func(w *world) {
		_, a, b := w.web()
		w.dials(nodereport.Dial{To: netip.MustParseAddrPort(a.Status.PodIP + ":9376")}, nodereport.Dial{To: netip.MustParseAddrPort(b.Status.PodIP + ":9376")})
		w.Reports["node1"].Dials[0].Error = nodereport.TimedOut
		w.Reports[a.Spec.NodeName].Proxy.Problems = []hostnet.Problem{{Name: "net.ipv4.conf.all.rp_filter", Message: "rp_filter is strict (1) on eth0, eth1", Fix: "sysctl -w net.ipv4.conf.all.rp_filter=2"}}
	}, web, "host-setting", "rp_filter", "rp_filter=2"},
	{"a slice that is another Service's", func(w *world) {
		s, slice := w.byHand()
		other := w.service("shop", "other", nil, 80)
		slice.Labels[discoveryv1.LabelServiceName] = other.Name
		_ = s
	}, web, "slice-label", "service-name=other", "kubernetes.io/service-name=web --overwrite"},
	{"scaled to 0 while the last Pod goes", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.DeletionTimestamp = ptr.To(metav1.NewTime(now.Add(-time.Minute)))
		}
		w.owned(a, b)
		w.Deployments[0].Spec.Replicas = ptr.To[int32](0)
	}, web, "workload-empty", "scaled to 0", "--replicas=1"},
	{"a node's address at another node's interface", func(w *world) {
		w.web()
		w.links("node1", 1500, 1500)
		w.links("node2", 1500, 1500)
		w.Reports["node2"].Links[0].Addresses = append(w.Reports["node2"].Links[0].Addresses, netip.MustParseAddr("192.0.2.1"))
	}, web, "address-taken", "node node2 has the address 192.0.2.1 of node node1", "ip address del 192.0.2.1 dev eth0"},
	{"Pods of another name, and no selector", func(w *world) {
		s := w.service("shop", "web", nil, 80)
		w.pod("shop", "front-1", map[string]string{"app": "front"})
		_ = s
	}, web, "no-endpoints", "no selector", `"selector":{"app":"front"}`},
}

// TestShellQuotes: a patch with apostrophes can be typed as it is printed.
func TestShellQuotes(t *testing.T) {
	if got, want := mergePatch(Ref{"Service", "shop", "web"}, map[string]string{"a": "it's <b> & c"}), `kubectl patch service web --type=merge -p '{"a":"it\u0027s <b> & c"}' -n shop`; got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// TestAboutToListen: nothing is said about the ports of Pods that have just become ready and listen nowhere yet: what would be typed then helps nobody.
func TestAboutToListen(t *testing.T) {
	for name, change := range map[string]func(*corev1.Service, *corev1.Pod){
		"number": func(s *corev1.Service, _ *corev1.Pod) { s.Spec.Ports[0].TargetPort = intstr.FromInt32(8080) },
		"name": func(s *corev1.Service, p *corev1.Pod) {
			s.Spec.Ports[0].TargetPort, p.Spec.Containers[0].Ports = intstr.FromString("web"), nil
		},
	} {
		for _, age := range []time.Duration{time.Second, time.Hour} {
			w := newWorld(t)
			s, a, b := w.web()
			for _, p := range []*corev1.Pod{a, b} {
				change(s, p)
				p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-age))
				w.listening(p)
			}
			found := slices.ContainsFunc(All(Look(w.Evidence)), func(f Finding) bool { return f.Code == "port-not-listening" || f.Code == "target-port-name" })
			if found != (age > settle) {
				t.Errorf("%s, ready for %s: found is %t", name, age, found)
			}
		}
	}
}

// TestStarting: explain waits for the Pods that it is asked about, not for others.
func TestStarting(t *testing.T) {
	w := newWorld(t)
	_, a, _ := w.web()
	a.Status.Conditions[0].LastTransitionTime = metav1.NewTime(now.Add(-time.Second))
	w.listening(a)
	v := Look(w.Evidence)
	if got := v.Starting(web); !slices.Equal(got, []string{a.Name}) {
		t.Errorf("starting: %v", got)
	}
	if got := v.Starting(Question{Kind: "service", Namespace: "shop", Name: "other"}); len(got) > 0 {
		t.Errorf("starting behind another Service: %v", got)
	}
}

// TestTwoPorts: each of two ports that are wrong in their own way has its finding.
func TestTwoPorts(t *testing.T) {
	w := newWorld(t)
	s, _, _ := w.web()
	s.Spec.Ports = []corev1.ServicePort{{Name: "a", Port: 80, TargetPort: intstr.FromInt32(8080)}, {Name: "b", Port: 81, TargetPort: intstr.FromString("htpp")}}
	var fields []string
	for _, f := range All(Look(w.Evidence)) {
		fields = append(fields, f.Code+" "+f.Field)
	}
	for _, want := range []string{"port-not-listening spec.ports[0].targetPort", "target-port-name spec.ports[1].targetPort"} {
		if !slices.Contains(fields, want) {
			t.Errorf("%q is not among %q", want, fields)
		}
	}
}
