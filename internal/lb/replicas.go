package lb

import (
	"reflect"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"portal/internal/lb/announce"
	"portal/internal/lb/controller"
)

// byService finds the slices of a Service.
const byService = "service"

func everything(*metav1.ListOptions) {}

func whole(any) {}

func named(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.FieldSelector = "metadata.name=" + name }
}

// makeReplicas makes what this process knows of the API, which says what has changed.
func (b *Balancer) makeReplicas() {
	core := b.client.CoreV1()
	slim := func(object any) {
		if n, ok := object.(*corev1.Node); ok {
			n.Annotations, n.Spec, n.Status = nil, corev1.NodeSpec{Unschedulable: n.Spec.Unschedulable, PodCIDRs: podRanges(n)}, corev1.NodeStatus{Addresses: n.Status.Addresses}
		}
	}
	b.services = follow(core.Services(""), &corev1.Service{}, everything, whole, nil)
	b.namespaces = follow(core.Namespaces(), &corev1.Namespace{}, everything, whole, nil)
	b.nodes = follow(core.Nodes(), &corev1.Node{}, everything, slim, nil)
	b.claims = follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(controller.ClaimsName), whole, nil)
	b.config = follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(PoolsName), whole, nil)
	b.passwords = follow(core.Secrets(Namespace), &corev1.Secret{}, named(PasswordsName), whole, nil)
	b.leases = follow(b.client.CoordinationV1().Leases(b.Leases), &coordinationv1.Lease{}, func(o *metav1.ListOptions) { o.LabelSelector = announce.MemberLabel + "=true" }, whole, nil)
	narrow := everything
	if b.Balancing == nil { // no Ingress is served, which may lead to a headless Service
		narrow = func(o *metav1.ListOptions) { o.LabelSelector = "!" + corev1.IsHeadlessService }
	}
	b.slices = follow(b.client.DiscoveryV1().EndpointSlices(""), &discoveryv1.EndpointSlice{}, narrow, trimSlice, cache.Indexers{
		byService: func(object any) ([]string, error) {
			if slice, ok := object.(*discoveryv1.EndpointSlice); ok && slice.Labels[discoveryv1.LabelServiceName] != "" {
				return []string{slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName]}, nil
			}
			return nil, nil
		},
	})
	b.groups = follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(GroupsName), whole, nil)
	b.certificates = follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(CertificatesName), whole, nil)
	b.ingresses = follow(b.client.NetworkingV1().Ingresses(""), &networkingv1.Ingress{}, everything, whole, nil)
	b.classes = follow(b.client.NetworkingV1().IngressClasses(), &networkingv1.IngressClass{}, everything, whole, nil)
	b.ranges = follow(b.client.NetworkingV1().ServiceCIDRs(), &networkingv1.ServiceCIDR{}, everything, whole, nil)
	both := func() { b.controller.Changed(); b.announced() }
	balancer := func(object any) bool {
		svc, ok := object.(*corev1.Service)
		return !ok && object != nil || ok && (svc.Spec.Type == corev1.ServiceTypeLoadBalancer || len(svc.Status.LoadBalancer.Ingress)+len(svc.Finalizers) > 0)
	}
	for r, changed := range map[*replica]func(now any){
		b.services:   func(any) { both() },
		b.namespaces: func(any) { b.controller.Changed() },
		b.ranges:     func(any) { b.controller.Changed() },
		b.nodes:      func(any) { both() },
		b.slices:     func(any) { b.announced() },
		b.groups:     func(any) {}, b.certificates: func(any) {}, b.ingresses: func(any) {}, b.classes: func(any) {},
		b.claims:    func(now any) { m, _ := now.(*corev1.ConfigMap); b.readClaims(m) },
		b.config:    func(now any) { m, _ := now.(*corev1.ConfigMap); b.readConfig(m) },
		b.passwords: func(now any) { m, _ := now.(*corev1.Secret); b.readPasswords(m) },
		b.leases: func(any) {
			if b.announcer != nil {
				b.announcer.Renewed()
			}
		},
	} {
		r.changed = func(old, now any) {
			if same(old, now) {
				return
			}
			if balancer(old) || balancer(now) {
				changed(now)
			}
			if r != b.leases && r != b.claims && r != b.config && r != b.ranges {
				b.balancing.changed()
			}
		}
	}
}

// same says whether two states differ in nothing that is looked at: Nodes say often that they live.
func same(old, object any) bool {
	a, ok := old.(*corev1.Node)
	b, isNode := object.(*corev1.Node)
	return ok && isNode && reflect.DeepEqual(a.Labels, b.Labels) && reflect.DeepEqual(a.Status.Addresses, b.Status.Addresses) && slices.Equal(a.Spec.PodCIDRs, b.Spec.PodCIDRs)
}

// trimSlice keeps what decides where connections go.
func trimSlice(object any) {
	slice, ok := object.(*discoveryv1.EndpointSlice)
	if !ok {
		return
	}
	slice.Annotations, slice.OwnerReferences = nil, nil
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		kept := discoveryv1.Endpoint{Addresses: e.Addresses, NodeName: e.NodeName, Zone: e.Zone, Conditions: e.Conditions}
		if e.TargetRef != nil {
			kept.TargetRef = &corev1.ObjectReference{Name: e.TargetRef.Name}
		}
		*e = kept
	}
}
