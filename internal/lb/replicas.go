package lb

import (
	"reflect"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
	onlyLabels := func(object any) {
		if n, ok := object.(*corev1.Node); ok {
			n.Annotations, n.Spec, n.Status = nil, corev1.NodeSpec{}, corev1.NodeStatus{}
		}
	}
	b.services = follow(core.Services(""), &corev1.Service{}, everything, whole, nil)
	b.namespaces = follow(core.Namespaces(), &corev1.Namespace{}, everything, whole, nil)
	b.nodes = follow(core.Nodes(), &corev1.Node{}, everything, onlyLabels, nil)
	b.claims = follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(controller.ClaimsName), whole, nil)
	b.config = follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(PoolsName), whole, nil)
	b.leases = follow(b.client.CoordinationV1().Leases(Namespace), &coordinationv1.Lease{}, func(o *metav1.ListOptions) { o.LabelSelector = announce.MemberLabel + "=true" }, whole, nil)
	b.slices = follow(b.client.DiscoveryV1().EndpointSlices(""), &discoveryv1.EndpointSlice{}, func(o *metav1.ListOptions) { o.LabelSelector = "!" + corev1.IsHeadlessService }, trimSlice, cache.Indexers{
		byService: func(object any) ([]string, error) {
			if slice, ok := object.(*discoveryv1.EndpointSlice); ok && slice.Labels[discoveryv1.LabelServiceName] != "" {
				return []string{slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName]}, nil
			}
			return nil, nil
		},
	})
	both := func() { b.controller.Changed(); b.announced() }
	balancer := func(object any) bool {
		svc, ok := object.(*corev1.Service)
		return !ok && object != nil || ok && (svc.Spec.Type == corev1.ServiceTypeLoadBalancer || len(svc.Status.LoadBalancer.Ingress)+len(svc.Finalizers) > 0)
	}
	for r, changed := range map[*replica]func(now any){
		b.services:   func(any) { both() },
		b.namespaces: func(any) { b.controller.Changed() },
		b.nodes:      func(any) { b.announced() },
		b.slices:     func(any) { b.announced() },
		b.claims:     func(now any) { m, _ := now.(*corev1.ConfigMap); b.readClaims(m) },
		b.config:     func(now any) { m, _ := now.(*corev1.ConfigMap); b.readPools(m) },
		b.leases: func(any) {
			if b.announcer != nil {
				b.announcer.Renewed()
			}
		},
	} {
		r.changed = func(old, now any) {
			if !same(old, now) && (balancer(old) || balancer(now)) {
				changed(now)
			}
		}
	}
}

// same says whether two states differ in nothing that is looked at: Nodes say often that they live.
func same(old, object any) bool {
	a, ok := old.(*corev1.Node)
	b, isNode := object.(*corev1.Node)
	return ok && isNode && reflect.DeepEqual(a.Labels, b.Labels)
}

// trimSlice keeps which nodes have ready endpoints.
func trimSlice(object any) {
	slice, ok := object.(*discoveryv1.EndpointSlice)
	if !ok {
		return
	}
	slice.Annotations, slice.Ports, slice.OwnerReferences = nil, nil, nil
	for i := range slice.Endpoints {
		e := &slice.Endpoints[i]
		*e = discoveryv1.Endpoint{NodeName: e.NodeName, Conditions: discoveryv1.EndpointConditions{Ready: e.Conditions.Ready}}
	}
}
