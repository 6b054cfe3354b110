package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"portal/internal/nodereport"
	"portal/internal/proxy"
)

// now is when worlds are looked at.
var now = time.Date(2026, 1, 2, 15, 0, 0, 0, time.UTC)

// world makes clusters in which all is well, for tests to break.
type world struct {
	*Evidence
	pods int
	vips int
}

var nodeNames = []string{"node1", "node2", "node3"}

// newWorld is a cluster of three nodes with DNS, controllers and proxies.
func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{Evidence: &Evidence{Now: now, Zone: "cluster.local", Reports: map[string]*NodeReport{}, Unseen: map[string]string{}, Secrets: map[Ref]bool{}}}
	for _, name := range []string{"default", "kube-system", "shop"} {
		w.Namespaces = append(w.Namespaces, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	for i, name := range nodeNames {
		w.Nodes = append(w.Nodes, corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"portal.dev/dns": fmt.Sprintf("10.244.%d.1", i)}, CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))},
			Spec:       corev1.NodeSpec{PodCIDRs: []string{fmt.Sprintf("10.244.%d.0/24", i)}},
			Status: corev1.NodeStatus{
				Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("192.0.2.%d", i+1)}},
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now.Add(-time.Hour))}},
			},
		})
		w.Reports[name] = &NodeReport{Asked: true, Report: &nodereport.Report{
			Node: name, Time: now, Proxy: &proxy.State{Complete: true, Mode: "nftables", Node: name, LastSync: now}, Listening: map[string][]nodereport.Socket{},
			Conntrack: &nodereport.Usage{Count: 10, Max: 1000},
		}}
	}
	w.Leases = []coordinationv1.Lease{{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "portal-controllers"},
		Spec: coordinationv1.LeaseSpec{
			HolderIdentity: ptr.To("server"), LeaseDurationSeconds: ptr.To[int32](6), RenewTime: ptr.To(metav1.NewMicroTime(now.Add(-time.Second))),
		},
	}}
	w.ServiceCIDRs = []networkingv1.ServiceCIDR{{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}}}
	dns := w.service("kube-system", "kube-dns", nil, 53)
	w.slice(dns, "10.244.0.1", "10.244.1.1", "10.244.2.1")
	return w
}

// service adds a Service with a cluster IP, its claim, and a frontend on each node.
func (w *world) service(namespace, name string, selector map[string]string, port int32) *corev1.Service {
	w.vips++
	ip := netip.AddrFrom4([4]byte{10, 96, byte(w.vips / 250), byte(w.vips%250 + 1)}).String()
	s := corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, Selector: selector,
			Ports: []corev1.ServicePort{{Port: port, TargetPort: intstr.FromInt32(9376), Protocol: corev1.ProtocolTCP}},
		},
	}
	w.Services = append(w.Services, s)
	w.IPAddresses = append(w.IPAddresses, networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: ip}, Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services", Namespace: namespace, Name: name}},
	})
	addr := netip.MustParseAddr(ip)
	for _, r := range w.Reports {
		r.Proxy.Frontends = append(r.Proxy.Frontends, proxy.FrontendState{Address: &addr, Port: uint16(port), Namespace: namespace, Service: name, Kind: "ClusterIP", Acknowledged: now})
	}
	return &w.Services[len(w.Services)-1]
}

// pod adds a ready Pod that listens at 9376.
func (w *world) pod(namespace, name string, labels map[string]string) *corev1.Pod {
	w.pods++
	on := w.pods % len(nodeNames)
	ip := netip.AddrFrom4([4]byte{10, 244, byte(on), byte(w.pods/len(nodeNames)%250 + 2)}).String()
	uid := types.UID(fmt.Sprintf("uid-%d", w.pods))
	w.Pods = append(w.Pods, corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uid, Labels: maps.Clone(labels), CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))},
		Spec:       corev1.PodSpec{NodeName: nodeNames[on], DNSPolicy: corev1.DNSClusterFirst, Containers: []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 9376}}}}},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now.Add(-time.Hour))}},
		},
	})
	w.Reports[nodeNames[on]].Listening[string(uid)] = []nodereport.Socket{{Protocol: "TCP", Address: netip.IPv6Unspecified(), Port: 9376}}
	return &w.Pods[len(w.Pods)-1]
}

// slice adds a slice that somebody wrote.
func (w *world) slice(s *corev1.Service, addrs ...string) *discoveryv1.EndpointSlice {
	slice := discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: "somebody"}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for i := range s.Spec.Ports {
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &s.Spec.Ports[i].Name, Port: ptr.To(s.Spec.Ports[i].TargetPort.IntVal), Protocol: &s.Spec.Ports[i].Protocol})
	}
	for _, a := range addrs {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, NodeName: ptr.To("node1")})
	}
	w.Slices = append(w.Slices, slice)
	return &w.Slices[len(w.Slices)-1]
}

// behind is the slice that the controller would write for Pods.
func (w *world) behind(s *corev1.Service, pods ...*corev1.Pod) *discoveryv1.EndpointSlice {
	slice := w.slice(s)
	slice.Labels[discoveryv1.LabelManagedBy] = sliceController
	for _, p := range pods {
		ready, _, _ := podReady(p)
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{p.Status.PodIP}, NodeName: &p.Spec.NodeName, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready)},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
		})
	}
	return slice
}

// web adds the Service shop/web with two Pods; tests break it.
func (w *world) web() (*corev1.Service, *corev1.Pod, *corev1.Pod) {
	w.pod("shop", "web-1", map[string]string{"app": "web"})
	w.pod("shop", "web-2", map[string]string{"app": "web"})
	s := w.service("shop", "web", map[string]string{"app": "web"}, 80)
	n := len(w.Pods)
	w.behind(s, &w.Pods[n-2], &w.Pods[n-1])
	return s, &w.Pods[n-2], &w.Pods[n-1]
}
