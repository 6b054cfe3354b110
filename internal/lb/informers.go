package lb

import (
	"context"
	"reflect"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"portal/internal/lb/announce"
	"portal/internal/lb/controller"
)

// byService finds the slices of a Service.
const byService = "service"

// typed is the API of one kind of object.
type typed[L runtime.Object] interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// follow makes an informer of some objects; what trim takes away is not kept.
func follow[L runtime.Object](api typed[L], example runtime.Object, narrow func(*metav1.ListOptions), trim func(any), indexers cache.Indexers) (cache.SharedIndexInformer, error) {
	i := cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			narrow(&o)
			return api.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			narrow(&o)
			return api.Watch(ctx, o)
		},
	}, example, 0, indexers)
	return i, i.SetTransform(func(object any) (any, error) {
		if m, ok := object.(metav1.Object); ok {
			m.SetManagedFields(nil)
			trim(object)
		}
		return object, nil
	})
}

func everything(*metav1.ListOptions) {}

func whole(any) {}

func named(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.FieldSelector = "metadata.name=" + name }
}

// makeInformers makes all informers, which say what has changed.
func (b *Balancer) makeInformers() (err error) {
	core := b.client.CoreV1()
	make := func(i cache.SharedIndexInformer, e error) cache.SharedIndexInformer {
		if err == nil {
			err = e
		}
		return i
	}
	onlyLabels := func(object any) {
		if n, ok := object.(*corev1.Node); ok {
			n.Annotations, n.Spec, n.Status = nil, corev1.NodeSpec{}, corev1.NodeStatus{}
		}
	}
	b.services = make(follow(core.Services(""), &corev1.Service{}, everything, whole, nil))
	b.namespaces = make(follow(core.Namespaces(), &corev1.Namespace{}, everything, whole, nil))
	b.nodes = make(follow(core.Nodes(), &corev1.Node{}, everything, onlyLabels, nil))
	b.claims = make(follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(controller.ClaimsName), whole, nil))
	b.config = make(follow(core.ConfigMaps(Namespace), &corev1.ConfigMap{}, named(PoolsName), whole, nil))
	b.leases = make(follow(b.client.CoordinationV1().Leases(Namespace), &coordinationv1.Lease{}, func(o *metav1.ListOptions) { o.LabelSelector = announce.MemberLabel + "=true" }, whole, nil))
	b.slices = make(follow(b.client.DiscoveryV1().EndpointSlices(""), &discoveryv1.EndpointSlice{}, func(o *metav1.ListOptions) { o.LabelSelector = "!" + corev1.IsHeadlessService }, trimSlice, cache.Indexers{
		byService: func(object any) ([]string, error) {
			if slice, ok := object.(*discoveryv1.EndpointSlice); ok && slice.Labels[discoveryv1.LabelServiceName] != "" {
				return []string{slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName]}, nil
			}
			return nil, nil
		},
	}))
	if err != nil {
		return err
	}
	both := func() { b.controller.Changed(); b.announced() }
	balancer := func(object any) bool {
		svc, ok := object.(*corev1.Service)
		return !ok || svc.Spec.Type == corev1.ServiceTypeLoadBalancer || len(svc.Status.LoadBalancer.Ingress)+len(svc.Finalizers) > 0
	}
	for _, h := range []struct {
		informer cache.SharedIndexInformer
		changed  func(object any)
	}{
		{b.services, func(any) { both() }},
		{b.namespaces, func(any) { b.controller.Changed() }},
		{b.nodes, func(any) { b.announced() }},
		{b.leases, func(any) {
			if b.announcer != nil {
				b.announcer.Renewed()
			}
		}},
		{b.slices, func(any) { b.announced() }},
		{b.claims, func(object any) { m, _ := object.(*corev1.ConfigMap); b.readClaims(m) }},
		{b.config, func(object any) { m, _ := object.(*corev1.ConfigMap); b.readPools(m) }},
	} {
		_, e := h.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(object any) {
				if balancer(object) {
					h.changed(object)
				}
			},
			UpdateFunc: func(old, object any) {
				if !same(old, object) && (balancer(old) || balancer(object)) {
					h.changed(object)
				}
			},
			DeleteFunc: func(object any) {
				if balancer(object) {
					h.changed(nil)
				}
			},
		})
		if err == nil {
			err = e
		}
	}
	return err
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
