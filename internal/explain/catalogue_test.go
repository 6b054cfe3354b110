package explain

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/hostnet"
	"portal/internal/nodereport"
	"portal/internal/proxy"
	"portal/internal/proxy/foreign"
)

// fault is a world in which something is wrong, and what must be said about it first.
type fault struct {
	name  string
	wrong func(w *world)
	ask   Question
	code  string
	says  string // part of the verdict
	fix   string // part of what to type
}

var web = Question{Kind: "service", Namespace: "shop", Name: "web"}

var faults = []fault{
	{"a typo in the selector's value", func(w *world) { w.selecting(map[string]string{"app": "wbe"}) }, web, "selector-typo", "asks for app=wbe, and 2 Pods have app=web", `'{"spec":{"selector":{"app":"web"}}}'`},
	{"a typo in the selector's key", func(w *world) { w.selecting(map[string]string{"apps": "web"}) }, web, "selector-typo", "app=web", `{"app":"web","apps":null}`},
	{"a value in capitals", func(w *world) { w.selecting(map[string]string{"app": "Web"}) }, web, "selector-typo", "app=Web", `{"app":"web"}`},
	{"a value that is all different", func(w *world) { w.selecting(map[string]string{"app": "frontend"}) }, web, "selector-typo", "app=frontend", `{"app":"web"}`},
	{"one label too many", func(w *world) { w.selecting(map[string]string{"app": "web", "tier": "front"}) }, web, "selector-typo", "tier=front", `{"tier":null}`},
	{"labels that nobody has", func(w *world) {
		w.selecting(map[string]string{"component": "x"})
	}, web, "selector-no-pods", "component=x", "get pods --show-labels"},
	{"Pods in another namespace", func(w *world) {
		s := w.service("shop", "api", map[string]string{"app": "api"}, 80)
		w.behind(s)
		w.pod("default", "api-1", map[string]string{"app": "api"})
	}, Question{"service", "shop", "api"}, "selector-namespace", "namespace default", `"namespace":"default"`},
	{"scaled to 0", func(w *world) {
		s := w.service("shop", "api", map[string]string{"app": "api"}, 80)
		w.behind(s)
		w.deployment("api", map[string]string{"app": "api"}, 0)
	}, Question{"service", "shop", "api"}, "workload-empty", "Deployment shop/api is scaled to 0", "scale deployment api --replicas=1"},
	{"a quota keeps Pods from being made", func(w *world) {
		s := w.service("shop", "api", map[string]string{"app": "api"}, 80)
		w.behind(s)
		d := w.deployment("api", map[string]string{"app": "api"}, 2)
		d.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue, Message: "exceeded quota"}}
	}, Question{"service", "shop", "api"}, "workload-empty", "exceeded quota", "describe deployment api"},

	{"readiness answers 500", func(w *world) {
		a, b := bothUnready(w)
		probe(a, 9376)
		probe(b, 9376)
		w.event("Pod", "web-1", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 500")
	}, web, "pods-unready", "statuscode: 500", "logs web-1"},
	{"the readiness probe asks for a page that is not there", func(w *world) {
		a, b := bothUnready(w)
		probe(a, 9376)
		probe(b, 9376)
		w.owned(a, b)
		w.event("Pod", "web-1", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 404")
		w.event("Pod", "web-2", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 404")
	}, web, "readiness-path", "statuscode: 404", `httpGet/path","value":"/"`},
	{"the readiness probe is asked for too short a time", func(w *world) {
		a, b := bothUnready(w)
		probe(a, 9376)
		probe(b, 9376)
		w.owned(a, b)
		w.event("Pod", "web-1", "Unhealthy", "Readiness probe failed: context deadline exceeded")
		w.event("Pod", "web-2", "Unhealthy", "Readiness probe failed: context deadline exceeded")
	}, web, "readiness-timeout", "deadline exceeded", `timeoutSeconds","value":5`},
	{"the readiness probe asks the wrong port", func(w *world) {
		a, b := bothUnready(w)
		probe(a, 8081)
		probe(b, 8081)
		w.owned(a, b)
	}, web, "readiness-port", "asks port 8081, and its processes listen at 9376", `readinessProbe/httpGet/port","value":9376`},
	{"a readiness gate", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/ready"}}
		}
	}, web, "readiness-gate", "example.com/ready", "describe pod"},
	{"all Pods are terminating", func(w *world) {
		a, b := bothUnready(w)
		a.DeletionTimestamp, b.DeletionTimestamp = ptr.To(metav1.NewTime(now)), ptr.To(metav1.NewTime(now))
	}, web, "pods-terminating", "Terminating", ""},
	{"Pods without a node", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.Spec.NodeName, p.Status.Phase = "", corev1.PodPending
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "0/3 nodes are available: insufficient memory"})
		}
	}, web, "pods-pending", "insufficient memory", "describe pod"},
	{"an image that does not exist", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", Image: "web:2", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}}}
		}
		w.owned(a, b)
		older := w.ReplicaSets[0]
		older.Name = "web-4f"
		w.ReplicaSets = append(w.ReplicaSets, older)
	}, web, "pods-image", "web:2", "rollout undo deployment web"},
	{"containers crash", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}, LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3}}}}
		}
	}, web, "pods-crashing", "exit code 3", "logs web-1 --previous"},
	{"Pods that have ended", func(w *world) {
		a, b := bothUnready(w)
		a.Status.Phase, b.Status.Phase = corev1.PodSucceeded, corev1.PodSucceeded
	}, web, "pods-ended", "Succeeded", ""},
	{"one Pod of two is not ready", func(w *world) {
		_, a, _ := w.web()
		unready(w, a)
	}, web, "pods-unready", "1 of 2 Pods", ""},
	{"publishNotReadyAddresses", func(w *world) {
		bothUnready(w)
		w.Services[len(w.Services)-1].Spec.PublishNotReadyAddresses = true
		for i := range w.Slices {
			for j := range w.Slices[i].Endpoints {
				w.Slices[i].Endpoints[j].Conditions.Ready = ptr.To(true)
			}
		}
	}, web, "publish-not-ready", "publishNotReadyAddresses", ""},

	{"a named port that no Pod has", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Ports[0].TargetPort = intstr.FromString("htpp")
	}, web, "target-port-name", `there is "http"`, `"path":"/spec/ports/0/targetPort","value":"http"`},
	{"a named port that some Pods lack", func(w *world) {
		s, a, _ := w.web()
		s.Spec.Ports[0].TargetPort = intstr.FromString("http")
		a.Spec.Containers[0].Ports = nil
	}, web, "target-port-name", "1 of 2 have no container port of that name", `"value":9376`},
	{"a named port of another protocol", func(w *world) {
		s, a, b := w.web()
		s.Spec.Ports[0].TargetPort, s.Spec.Ports[0].Protocol = intstr.FromString("http"), corev1.ProtocolUDP
		_, _ = a, b
	}, web, "target-port-name", "is of protocol TCP", `/protocol","value":"TCP"`},
	{"the wrong targetPort", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Ports[0].TargetPort = intstr.FromInt32(8080)
	}, web, "port-not-listening", "leads to port 8080, at which nothing listens", `"value":9376`},
	{"UDP instead of TCP", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Ports[0].Protocol = corev1.ProtocolUDP
	}, web, "port-protocol", "for UDP", `"value":"TCP"`},
	{"a process that listens at loopback", func(w *world) {
		_, a, b := w.web()
		for _, p := range []*corev1.Pod{a, b} {
			p.Spec.Containers[0].Args = []string{"echo", "--listen", "127.0.0.1:9376"}
			w.listening(p, nodereport.Socket{Protocol: "TCP", Address: netip.MustParseAddr("127.0.0.1"), Port: 9376})
		}
		w.owned(a, b)
	}, web, "listens-on-loopback", "loopback address only", `containers/0/args/2","value":"0.0.0.0:9376"`},
	{"nothing listens at all", func(w *world) {
		_, a, b := w.web()
		w.listening(a)
		w.listening(b)
	}, web, "port-not-listening", "nothing listens", "logs web-1"},
	{"declared ports only", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Ports[0].TargetPort = intstr.FromInt32(8080)
		clear(w.Reports)
	}, web, "target-port-undeclared", "9376", `"value":9376`},

	{"controllers have stopped", func(w *world) {
		s, _, _ := w.web()
		w.noEndpoints(s)
		w.Leases[0].Spec.RenewTime = ptr.To(metav1.NewMicroTime(now.Add(-time.Minute)))
	}, web, "controllers-stopped", "has not been renewed for 60s", "portal controllers"},
	{"the endpointslice controller is off", func(w *world) {
		w.web()
		w.Slices = w.Slices[:1]
	}, web, "controllers-stopped", "no controller writes endpoints", ""},
	{"a slice by hand beside the selector", func(w *world) {
		s, _, _ := w.web()
		w.slice(s, "203.0.113.9").Name = "extra"
	}, web, "slice-by-hand", "203.0.113.9", "delete endpointslice extra"},
	{"neither selector nor slices", func(w *world) { w.service("shop", "db", nil, 80) }, Question{"service", "shop", "db"}, "no-endpoints", "no selector", "set selector service db app=db"},
	{"no selector, but Pods of that name", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Selector = nil
		w.Slices = w.Slices[:1]
	}, web, "no-endpoints", "no selector", `{"selector":{"app":"web"}}`},
	{"a slice without its label", func(w *world) {
		s := w.service("shop", "db", nil, 80)
		delete(w.slice(s, "203.0.113.9").Labels, discoveryv1.LabelServiceName)
	}, Question{"service", "shop", "db"}, "slice-label", "lacks the label", "label endpointslice db-1 kubernetes.io/service-name=db"},
	{"a slice with the wrong port name", func(w *world) {
		s := w.service("shop", "db", nil, 80)
		s.Spec.Ports[0].Name = "sql"
		w.slice(s, "203.0.113.9").Ports[0].Name = ptr.To("")
	}, Question{"service", "shop", "db"}, "slice-port", `named "sql"`, `/ports/0/name","value":"sql"`},
	{"a slice without ports", func(w *world) {
		w.slice(w.service("shop", "db", nil, 80), "203.0.113.9").Ports = nil
	}, Question{"service", "shop", "db"}, "slice-port", "has no ports", `"path":"/ports"`},
	{"a slice of the wrong family", func(w *world) {
		slice := w.slice(w.service("shop", "db", nil, 80), "2001:db8::9")
		slice.AddressType = discoveryv1.AddressTypeIPv6
	}, Question{"service", "shop", "db"}, "slice-family", "IPv6", "PreferDualStack"},
	{"endpoints that are said not to be ready", func(w *world) {
		w.slice(w.service("shop", "db", nil, 80), "203.0.113.9").Endpoints[0].Conditions.Ready = ptr.To(false)
	}, Question{"service", "shop", "db"}, "endpoints-not-ready", "ready: false", `/endpoints/0/conditions/ready","value":true`},
	{"Endpoints that are not mirrored", func(w *world) {
		s := w.service("shop", "db", nil, 80)
		w.Endpoints = append(w.Endpoints, corev1.Endpoints{
			ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Labels: map[string]string{"endpointslice.kubernetes.io/skip-mirror": "true"}},
			Subsets:    []corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{{IP: "203.0.113.9"}}}},
		})
	}, Question{"service", "shop", "db"}, "endpoints-unmirrored", "skip-mirror", "skip-mirror-"},
	{"an endpoint that is a cluster IP", func(w *world) {
		s, _, _ := w.web()
		w.slice(w.service("shop", "db", nil, 80), s.Spec.ClusterIP)
	}, Question{"service", "shop", "db"}, "endpoint-is-cluster-ip", "is the cluster IP of Service shop/web", "delete endpointslice db-1"},
	{"an endpoint that was a Pod", func(w *world) {
		w.slice(w.service("shop", "db", nil, 80), "10.244.1.200")
	}, Question{"service", "shop", "db"}, "endpoint-no-pod", "no Pod has it", ""},

	{"internalTrafficPolicy Local", func(w *world) {
		s, _, _ := w.web()
		s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	}, web, "policy-local", "can't be reached from node node1", `"internalTrafficPolicy":"Cluster"`},
	{"externalTrafficPolicy Local", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Type, s.Spec.ExternalTrafficPolicy, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal, 30080
	}, Question{Kind: "address", Name: "192.0.2.1:30080"}, "policy-local", "drops what comes from outside to node node1", `"externalTrafficPolicy":"Cluster"`},
	{"a label that leaves it to another proxy", func(w *world) {
		s, _, _ := w.web()
		s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"}
	}, web, "service-proxy-name", `"other"`, "label service web service.kubernetes.io/service-proxy-name-"},
	{"source ranges", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Type, s.Spec.LoadBalancerSourceRanges = corev1.ServiceTypeLoadBalancer, []string{"198.51.100.0/24"}
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.1"}}
	}, web, "source-ranges", "198.51.100.0/24", "loadBalancerSourceRanges"},
	{"no load balancer", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
	}, web, "balancer-pending", "nothing in this cluster gives addresses", "portal lb"},
	{"an empty pool", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		w.event("Service", "web", "AllocationFailed", "no address is free in the pool main")
	}, web, "balancer-pending", "no address is free", "describe service web"},
	{"an external IP that is another's cluster IP", func(w *world) {
		s, _, _ := w.web()
		w.behind(w.service("shop", "thief", map[string]string{"app": "web"}, 80), &w.Pods[0], &w.Pods[1])
		w.Services[len(w.Services)-1].Spec.ExternalIPs = []string{s.Spec.ClusterIP}
	}, web, "external-ip-theft", "takes traffic of Service shop/web", `"externalIPs":null`},
	{"two Services with an external IP", func(w *world) {
		w.web()
		w.Services[len(w.Services)-1].Spec.ExternalIPs = []string{"203.0.113.5"}
		w.behind(w.service("shop", "twin", map[string]string{"app": "web"}, 80), &w.Pods[0], &w.Pods[1])
		w.Services[len(w.Services)-1].Spec.ExternalIPs = []string{"203.0.113.5"}
	}, web, "external-ip-conflict", "both ask for 203.0.113.5", "patch service twin"},

	{"an ExternalName that is an address", func(w *world) {
		s := w.service("shop", "ext", nil, 80)
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "203.0.113.9"}
	}, Question{"service", "shop", "ext"}, "externalname-ip", "203.0.113.9", `"type":"ClusterIP"`},
	{"an ExternalName to nowhere", func(w *world) {
		w.web()
		w.service("shop", "ext", nil, 80).Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "wbe.shop.svc.cluster.local"}
	}, Question{"service", "shop", "ext"}, "externalname-unknown", "there is Service shop/web", "web.shop.svc.cluster.local"},
	{"an ExternalName without a domain", func(w *world) {
		w.web()
		w.service("shop", "ext", nil, 80).Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "web"}
	}, Question{"service", "shop", "ext"}, "externalname-unknown", "no full name", "web.shop.svc.cluster.local"},
	{"an ExternalName outside", func(w *world) {
		w.service("shop", "ext", nil, 80).Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "www.example.com"}
	}, Question{"service", "shop", "ext"}, "externalname-host", "Host header", "curl"},
	{"headless, and used by its port", func(w *world) {
		s, _, _ := w.web()
		s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	}, web, "headless-port", "is headless", "kubectl replace --force"},
	{"a StatefulSet whose Service is missing", func(w *world) {
		w.StatefulSets = append(w.StatefulSets, appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db"}, Spec: appsv1.StatefulSetSpec{ServiceName: "db"}})
	}, Question{}, "statefulset-service", "does not exist", "--clusterip=None"},

	{"a lost node", func(w *world) {
		bothUnready(w)
		for i := range w.Pods {
			w.Pods[i].Spec.NodeName = "node2"
		}
		w.Nodes[1].Status.Conditions[0].Status = corev1.ConditionUnknown
	}, web, "node-not-ready", "node node2 is not ready", "describe node node2"},
	{"a wrong clock", func(w *world) {
		w.web()
		w.Reports["node2"].Skew = 2 * time.Hour
	}, web, "clock-skew", "ahead", "chronyc"},
	{"a proxy that does not run", func(w *world) {
		w.web()
		w.Reports["node2"].Proxy = nil
	}, web, "proxy-unreachable", "no proxy answers on node node2", "portal proxy"},
	{"a proxy that has not listed everything", func(w *world) {
		w.web()
		w.Reports["node2"].Proxy.Complete = false
	}, web, "proxy-not-synced", "node2", ""},
	{"a kernel that rejects rules", func(w *world) {
		w.web()
		p := w.Reports["node2"].Proxy
		p.Failures, p.LastError, p.LastErrorAt = 3, "no buffer space", now.Add(time.Second)
	}, web, "proxy-failing", "no buffer space", ""},
	{"a refused frontend", func(w *world) {
		w.web()
		p := w.Reports["node2"].Proxy
		p.Frontends[len(p.Frontends)-1].Refused = "too many elements"
	}, web, "frontend-refused", "too many elements", ""},
	{"a frontend that is missing", func(w *world) {
		w.web()
		p := w.Reports["node2"].Proxy
		p.Frontends = p.Frontends[:len(p.Frontends)-1]
	}, web, "frontend-missing", "node node2", ""},
	{"a proxy that is behind", func(w *world) {
		w.web()
		p := w.Reports["node2"].Proxy
		p.Pools = []proxy.PoolState{{Endpoints: []netip.AddrPort{netip.MustParseAddrPort("10.244.0.99:9376")}}}
		p.Frontends[len(p.Frontends)-1].Routes = []proxy.RouteState{{Pool: ptr.To(0)}}
	}, web, "proxy-stale", "still leads to 10.244.0.99", ""},
	{"another proxy's rules", func(w *world) {
		w.web()
		w.Reports["node2"].Proxy.Foreign = []foreign.Leftover{{What: "iptables chains", Where: "iptables-nft", Count: 40}}
	}, web, "proxy-foreign", "40 iptables chains", "portal proxy --cleanup-foreign"},
	{"rules that somebody changes", func(w *world) {
		w.web()
		p := w.Reports["node2"].Proxy
		p.Drifts, p.LastDrift, p.LastDriftAt = 2, "a chain is gone", now.Add(-time.Minute)
	}, web, "proxy-drift", "a chain is gone", ""},
	{"a full table of connections", func(w *world) {
		w.web()
		w.Reports["node2"].Conntrack = &nodereport.Usage{Count: 999, Max: 1000}
	}, web, "conntrack-full", "999 of 1000", "nf_conntrack_max=2000"},
	{"no forwarding", func(w *world) {
		w.web()
		w.Reports["node2"].Proxy.Problems = []hostnet.Problem{{Name: "net.ipv4.ip_forward", Message: "net.ipv4.ip_forward is 0", Fix: "sysctl -w net.ipv4.ip_forward=1", Lost: true}}
	}, web, "host-setting", "on node node2 net.ipv4.ip_forward is 0", "sysctl -w net.ipv4.ip_forward=1"},

	{"an endpoint that refuses", func(w *world) {
		s := w.service("shop", "db", nil, 80)
		w.slice(s, "203.0.113.9")
		w.dials(nodereport.Dial{To: netip.MustParseAddrPort(s.Spec.ClusterIP + ":80"), Frontend: true, Error: nodereport.Refused}, nodereport.Dial{To: netip.MustParseAddrPort("203.0.113.9:9376"), Error: nodereport.Refused})
	}, Question{"service", "shop", "db"}, "endpoint-unreachable", "203.0.113.9:9376 refuses connections", "get endpointslices"},
	{"an endpoint that one node does not reach", func(w *world) {
		_, a, b := w.web()
		to := netip.MustParseAddrPort(a.Status.PodIP + ":9376")
		w.dials(nodereport.Dial{To: to}, nodereport.Dial{To: netip.MustParseAddrPort(b.Status.PodIP + ":9376")})
		w.Reports["node3"].Dials[0].Error = nodereport.TimedOut
	}, web, "endpoint-unreachable", "can't be reached from node node3 (no answer), and can from others", "describe pod web-1"},
	{"a cluster IP that is blocked on a node", func(w *world) {
		s, a, _ := w.web()
		w.dials(nodereport.Dial{To: netip.MustParseAddrPort(s.Spec.ClusterIP + ":80"), Frontend: true}, nodereport.Dial{To: netip.MustParseAddrPort(a.Status.PodIP + ":9376")})
		w.Reports["node2"].Dials[0].Error = nodereport.TimedOut
	}, web, "service-unreachable", "from node node2 (no answer), though its endpoints do", "nft list ruleset"},
	{"DNS that is blocked on a node", func(w *world) {
		w.web()
		w.Reports["node2"].Lookup = &nodereport.Lookup{Server: netip.MustParseAddrPort("10.96.0.10:53"), Error: nodereport.TimedOut}
		w.Reports["node1"].Lookup = &nodereport.Lookup{Server: netip.MustParseAddrPort("10.96.0.10:53")}
	}, web, "dns-unreachable", "does not resolve names for node node2", "explain service kube-dns"},
	{"no DNS server", func(w *world) {
		w.web()
		w.Slices[0].Endpoints = nil
		for i := range w.Nodes {
			w.Nodes[i].Annotations = nil
		}
	}, Question{"name", "shop", "web"}, "dns-no-endpoints", "no name of the cluster is resolved", ""},
	{"a Pod with another DNS server", func(w *world) {
		_, a, _ := w.web()
		a.Spec.DNSPolicy, a.Spec.DNSConfig = corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"192.0.2.53"}}
	}, Question{"pod", "shop", "web-1"}, "pod-dns-server", "192.0.2.53", ""},
	{"a Pod of the node's network", func(w *world) {
		_, a, b := w.web()
		a.Spec.HostNetwork = true
		w.owned(a, b)
	}, Question{"pod", "shop", "web-1"}, "pod-dns-hostnetwork", "its node's network", "ClusterFirstWithHostNet"},
	{"a name in the wrong namespace", func(w *world) { w.web() }, Question{"name", "default", "web"}, "name-unknown", "there is Service shop/web", "web.shop.svc.cluster.local"},
	{"a typo in a name", func(w *world) { w.web() }, Question{"name", "shop", "wbe"}, "name-unknown", "there is Service shop/web", "web.shop"},
	{"a wrong zone", func(w *world) { w.web() }, Question{"name", "shop", "web.shop.svc.cluster.locl"}, "name-unknown", "svc.cluster.local", ""},
	{"a name without svc", func(w *world) { w.web() }, Question{"name", "shop", "web.shop.cluster.local"}, "name-unknown", "end with .svc.cluster.local", ""},
	{"a name below a Service for a Pod that has none", func(w *world) { w.web() }, Question{"name", "shop", "web-1.web.shop.svc.cluster.local"}, "name-unknown", "no spec.hostname", ""},
	{"a Service that does not exist", func(w *world) { w.web() }, Question{"service", "default", "web"}, "not-found", "there is Service shop/web", "portal explain service web -n shop"},
	{"an address that nobody has", func(*world) {}, Question{Kind: "address", Name: "10.96.77.7"}, "address-free", "no Service has the cluster IP", ""},
	{"a port that the Service does not have", func(w *world) { w.web() }, Question{Kind: "address", Name: "10.96.0.3:9376"}, "address-port", "9376 is the port of its Pods", ""},
	{"a node port that nobody has", func(*world) {}, Question{Kind: "address", Name: "192.0.2.1:30999"}, "no-node-port", "30999", ""},
	{"a Pod that no Service selects", func(w *world) {
		w.web()
		w.pod("shop", "web-3", map[string]string{"app": "wbe"})
	}, Question{"pod", "shop", "web-3"}, "pod-unselected", "app=wbe", "label pod web-3 app=web --overwrite"},

	{"a cluster IP outside of the ranges", func(w *world) {
		s, _, _ := w.web()
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.99.0.1", []string{"10.99.0.1"}
	}, web, "cluster-ip-outside", "10.99.0.1", "replace --force"},
	{"an address without a claim", func(w *world) {
		w.web()
		w.IPAddresses = w.IPAddresses[:1]
	}, web, "claim-missing", "no IPAddress claims it", "portal audit --repair"},
	{"an address of another Service", func(w *world) {
		w.web()
		w.IPAddresses[1].Spec.ParentRef.Name = "other"
	}, web, "address-conflict", "belongs to Service shop/other", ""},
	{"a full range", func(w *world) {
		w.ServiceCIDRs[0].Spec.CIDRs = []string{"10.96.0.0/30"}
		w.web()
	}, Question{}, "range-full", "2 of 2", "ServiceCIDR"},

	{"an Ingress without a class", func(w *world) { w.ingress("web", 80).Spec.IngressClassName = nil }, Question{"ingress", "shop", "in"}, "ingress-class", "no IngressClass", "ingressClassName"},
	{"an Ingress of a class that does not exist", func(w *world) { w.ingress("web", 80).Spec.IngressClassName = ptr.To("nginx") }, Question{"ingress", "shop", "in"}, "ingress-class", `"nginx"`, `"ingressClassName":"portal"`},
	{"an Ingress to no Service", func(w *world) { w.ingress("wbe", 80) }, Question{"ingress", "shop", "in"}, "ingress-no-service", "there is Service shop/web", `/name","value":"web"`},
	{"an Ingress to the wrong port", func(w *world) { w.ingress("web", 8080) }, Question{"ingress", "shop", "in"}, "ingress-port", "leads to port 8080", `"number":80`},
	{"an Ingress without its Secret", func(w *world) {
		w.ingress("web", 80).Spec.TLS = []networkingv1.IngressTLS{{SecretName: "cert"}}
		w.Secrets[Ref{"Secret", "shop", "cert"}] = false
	}, Question{"ingress", "shop", "in"}, "ingress-secret", "does not exist", "create secret tls cert"},
	{"an expired certificate", func(w *world) {
		w.ingress("web", 80).Spec.TLS = []networkingv1.IngressTLS{{SecretName: "cert"}}
		w.Certificates = []Certificate{{Object: Ref{"Secret", "shop", "cert"}, NotBefore: now.Add(-time.Hour * 1000), NotAfter: now.Add(-time.Hour * 3)}}
	}, Question{"ingress", "shop", "in"}, "certificate-expired", "expired 3h ago", "create secret tls cert"},
	{"a certificate for another host", func(w *world) {
		w.ingress("web", 80).Spec.TLS = []networkingv1.IngressTLS{{SecretName: "cert", Hosts: []string{"shop.example.com"}}}
		w.Certificates = []Certificate{{Object: Ref{"Secret", "shop", "cert"}, Names: []string{"*.example.org"}, NotAfter: now.Add(time.Hour * 9999)}}
	}, Question{"ingress", "shop", "in"}, "ingress-certificate", "*.example.org", ""},
}

// TestCatalogue: of each fault, the first line names the cause, and what to type has the fix.
func TestCatalogue(t *testing.T) {
	for _, f := range slices.Concat(faults, further, siblings) {
		t.Run(f.name, func(t *testing.T) {
			w := newWorld(t)
			f.wrong(w)
			a, err := Ask(Look(w.Evidence), f.ask)
			if err != nil {
				t.Fatal(err)
			}
			if len(a.Findings) == 0 {
				t.Fatalf("nothing found: %s", a.Verdict)
			}
			first := a.Findings[0]
			if first.Code != f.code || !strings.Contains(a.Verdict, f.says) {
				t.Errorf("[%s] %s\nwant [%s] with %q", first.Code, a.Verdict, f.code, f.says)
			}
			if f.fix != "" && !strings.Contains(strings.Join(first.Fix, "\n"), f.fix) {
				t.Errorf("fix %q, want %q", first.Fix, f.fix)
			}
			for _, other := range a.Findings[1:] {
				if other.Severity >= first.Severity && first.Severity == Broken {
					t.Errorf("beside it as bad: [%s] %s", other.Code, other.Verdict)
				}
			}
			if possible := first.Sure == Possible && first.Severity == Notice; a.Healthy != possible {
				t.Errorf("healthy: %t", a.Healthy)
			}
		})
	}
}
