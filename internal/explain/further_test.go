package explain

import (
	"net/netip"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"portal/internal/nodereport"
)

// unscheduled makes both Pods of web wait for a node.
func unscheduled(w *world) (*corev1.Pod, *corev1.Pod) {
	a, b := bothUnready(w)
	for _, p := range []*corev1.Pod{a, b} {
		w.noEndpoints(&w.Services[len(w.Services)-1])
		p.Spec.NodeName, p.Status.Phase, p.Status.PodIP, p.Status.PodIPs = "", corev1.PodPending, "", nil
	}
	w.owned(a, b)
	return a, b
}

// crashed has a container wait to be started again.
func crashed(p *corev1.Pod, code int32, reason string) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{
		Name: "c", RestartCount: 5, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: reason}},
	}}
}

// killed has both Pods of web be restarted by a liveness probe that asks a port, with Events that say what it got, the newest last.
func killed(w *world, port int32, got ...string) (*corev1.Pod, *corev1.Pod) {
	a, b := bothUnready(w)
	for _, p := range []*corev1.Pod{a, b} {
		probe(p, port)
		p.Spec.Containers[0].LivenessProbe, p.Spec.Containers[0].ReadinessProbe = p.Spec.Containers[0].ReadinessProbe, nil
		crashed(p, 143, "Error")
		for i, message := range got {
			w.event("Pod", p.Name, "Unhealthy", message)
			w.Events[len(w.Events)-1].LastTimestamp = metav1.NewTime(now.Add(time.Duration(i) * time.Second))
		}
	}
	w.owned(a, b)
	return a, b
}

// alias adds the Service shop/db as another name, and what node1 got there.
func (w *world) alias(name string, a *nodereport.Alias) {
	s := w.service("shop", "db", nil, 80)
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: name, Ports: []corev1.ServicePort{{Port: 443}}}
	w.Reports["node1"].Alias = a
}

func (w *world) links(node string, uplink, pods int) {
	i := int(node[4] - '1')
	w.Reports[node].Links = []nodereport.Link{
		{Name: "eth0", MTU: uplink, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)})}},
		{Name: "bridge", MTU: pods, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 244, byte(i), 1})}},
	}
}

var further = []fault{
	{"two applications behind a selector", func(w *world) {
		s, a, _ := w.web()
		db := w.pod("shop", "db-1", map[string]string{"app": "web", "part": "db"})
		w.Pods[len(w.Pods)-3].Labels["part"], w.Pods[len(w.Pods)-2].Labels["part"] = "web", "web"
		w.listening(db, nodereport.Socket{Protocol: "TCP", Address: netip.IPv6Unspecified(), Port: 5432})
		w.owned(&w.Pods[len(w.Pods)-3], &w.Pods[len(w.Pods)-2])
		w.Slices = w.Slices[:1]
		w.behind(s, a, &w.Pods[len(w.Pods)-2], db)
	}, web, "selector-too-wide", "two applications", `{"part":"web"}`},
	{"IPv4 only behind IPv6", func(w *world) {
		s, a, b := w.web()
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
		w.Slices[len(w.Slices)-1].AddressType = discoveryv1.AddressTypeIPv6
		for i, p := range []*corev1.Pod{a, b} {
			p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: []string{"fd00::5", "fd00::6"}[i]})
			w.Slices[len(w.Slices)-1].Endpoints[i].Addresses = []string{[]string{"fd00::5", "fd00::6"}[i]}
			w.listening(p, nodereport.Socket{Protocol: "TCP", Address: netip.IPv4Unspecified(), Port: 9376})
			p.Spec.Containers[0].Args = []string{"--listen=0.0.0.0:9376"}
		}
		w.owned(a, b)
	}, web, "listens-other-family", "0.0.0.0:9376", `--listen=[::]:9376`},
	{"Pods without an address of the Service's family", func(w *world) {
		s, _, _ := w.web()
		s.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv6Protocol}
		w.noEndpoints(s)
	}, web, "pods-family", "it is for IPv6", "replace --force"},
	{"too little memory", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}
			crashed(p, 137, "OOMKilled")
		}
		w.owned(a, b)
	}, web, "pods-memory", "64Mi", `"limits":{"memory":"256Mi"}`},
	{"a liveness probe that kills", func(w *world) {
		killed(w, 9376, "Liveness probe failed: HTTP probe failed with statuscode: 404")
	}, web, "liveness-path", "liveness probe", `livenessProbe/httpGet/path","value":"/"`},
	{"a readiness probe that waits, in Portal's words", func(w *world) {
		a, b := bothUnready(w)
		for _, p := range []*corev1.Pod{a, b} {
			probe(p, 9376)
			w.event("Pod", p.Name, "Unhealthy", "Readiness probe of container c failed: no answer in time from http://10.244.1.2:9376/")
		}
		w.owned(a, b)
	}, web, "readiness-timeout", "in time", "timeoutSeconds"},
	{"a quota", func(w *world) {
		s := w.service("shop", "api", map[string]string{"app": "api"}, 80)
		w.behind(s)
		w.deployment("api", map[string]string{"app": "api"}, 2)
		w.event("Deployment", "api", "FailedCreate", `pods "api-1" is forbidden: exceeded quota: few, requested: pods=1, used: pods=3, limited: pods=3`)
	}, Question{"service", "shop", "api"}, "workload-empty", "exceeded quota", `{"spec":{"hard":{"pods":"5"}}}`},
	{"a paused Deployment", func(w *world) {
		s := w.service("shop", "api", map[string]string{"app": "api"}, 80)
		w.behind(s)
		w.deployment("api", map[string]string{"app": "api"}, 2).Spec.Paused = true
	}, Question{"service", "shop", "api"}, "workload-empty", "paused", "rollout resume"},
	{"a node selector with a typo", func(w *world) {
		a, b := unscheduled(w)
		for _, p := range []*corev1.Pod{a, b} {
			p.Spec.NodeSelector = map[string]string{"disk": "sdd"}
		}
		w.Nodes[1].Labels = map[string]string{"disk": "ssd"}
	}, web, "pods-pending", "disk=sdd", `{"disk":"ssd"}`},
	{"cordoned nodes", func(w *world) {
		unscheduled(w)
		for i := range w.Nodes {
			w.Nodes[i].Spec.Unschedulable = true
		}
	}, web, "pods-pending", "cordoned", "uncordon node1"},
	{"a namespace that is being deleted", func(w *world) {
		s, _, _ := w.web()
		w.noEndpoints(s)
		w.Pods = nil
		w.Namespaces[2].DeletionTimestamp = ptr.To(metav1.NewTime(now.Add(-time.Minute)))
	}, web, "namespace-terminating", "being deleted", ""},
	{"two nodes with one address", func(w *world) {
		w.web()
		w.Nodes[1].Status.Addresses = w.Nodes[0].Status.Addresses
	}, web, "node-address-conflict", "192.0.2.1", ""},
	{"two nodes with one range", func(w *world) {
		w.web()
		w.Nodes[1].Spec.PodCIDRs = []string{"10.244.0.0/23"}
	}, web, "range-overlap", "overlap", ""},
	{"two Pods with one address", func(w *world) {
		_, a, b := w.web()
		b.Status.PodIP, b.Status.PodIPs = a.Status.PodIP, a.Status.PodIPs
		w.Slices[len(w.Slices)-1].Endpoints[1].Addresses = w.Slices[len(w.Slices)-1].Endpoints[0].Addresses
	}, web, "pod-address-conflict", "same address", ""},
	{"a small MTU", func(w *world) {
		w.web()
		for _, n := range nodeNames {
			w.links(n, 1500, 1500)
		}
		w.links("node2", 1400, 1400)
	}, web, "mtu", "1400", "ip link set eth0 mtu 1500"},
	{"Pods with a larger MTU than their node", func(w *world) {
		w.web()
		for _, n := range nodeNames {
			w.links(n, 1450, 1450)
		}
		w.links("node3", 1450, 1500)
	}, web, "mtu", "Pods of node node3", "ip link set bridge mtu 1450"},
	{"a node port behind a firewall", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Type, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 30080
		w.Reports["node2"].Tries = []nodereport.Dial{{To: netip.MustParseAddrPort("192.0.2.1:30080"), Error: nodereport.TimedOut}}
	}, web, "node-port-unreachable", "node port 30080 at 192.0.2.1", "nft list ruleset"},
	{"an alias of a server that wants its own name", func(w *world) {
		w.alias("db.example.com", &nodereport.Alias{Name: "db.example.com", As: "db.shop", Answers: []nodereport.AliasAnswer{{Port: 443, Status: 421, TargetStatus: 200}}})
	}, Question{"service", "shop", "db"}, "externalname-host", "421", "db.example.com"},
	{"an alias of a server with another certificate", func(w *world) {
		w.alias("db.example.com", &nodereport.Alias{Name: "db.example.com", As: "db.shop", Answers: []nodereport.AliasAnswer{{Port: 443, Certified: []string{"db.example.com"}}}})
	}, Question{"service", "shop", "db"}, "externalname-tls", "certificate", ""},
	{"an alias without its zone", func(w *world) {
		w.web()
		w.alias("web.shop", nil)
	}, Question{"service", "shop", "db"}, "externalname-unknown", "there is Service shop/web", "web.shop.svc.cluster.local"},
	{"a load balancer that is gone", func(w *world) {
		s, _, _ := w.web()
		s.Spec.Type, s.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: "203.0.113.7"}}
		w.Leases = append(w.Leases, coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "portal-lb"},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: ptr.To("node1"), LeaseDurationSeconds: ptr.To[int32](5), RenewTime: ptr.To(metav1.NewMicroTime(now.Add(-time.Hour)))},
		})
	}, web, "balancer-stopped", "60m", ""},
	{"a leader who left with a long Lease", func(w *world) {
		w.web()
		w.Leases[0].Spec.LeaseDurationSeconds, w.Leases[0].Spec.RenewTime = ptr.To[int32](3600), ptr.To(metav1.NewMicroTime(now.Add(-time.Minute)))
	}, web, "controllers-stopped", "60s", "delete lease portal-controllers"},
	{"a name with a dot at its end", func(w *world) { w.web() }, Question{"name", "shop", "web."}, "name-unknown", "dot at its end", "web.shop.svc.cluster.local"},
	{"the parts of a name the other way round", func(w *world) { w.web() }, Question{"name", "default", "shop.web.svc.cluster.local"}, "name-unknown", "there is Service shop/web", ""},
	{"hosts of a Pod's own", func(w *world) {
		_, a, _ := w.web()
		a.Spec.HostAliases = []corev1.HostAlias{{IP: "192.0.2.77", Hostnames: []string{"web.shop"}}}
	}, Question{"pod", "shop", "web-1"}, "pod-hosts", "192.0.2.77", ""},
	{"ndots", func(w *world) {
		_, a, _ := w.web()
		a.Spec.DNSConfig = &corev1.PodDNSConfig{Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr.To("1")}}}
	}, Question{"pod", "shop", "web-1"}, "pod-dns-ndots", "ndots:1", ""},
}
