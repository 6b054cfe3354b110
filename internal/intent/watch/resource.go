package watch

import (
	"cmp"
	"context"
	"fmt"
	"reflect"

	"golang.org/x/sync/singleflight"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"portal/internal/intent"
)

// resource is what differs between the kinds.
type resource struct {
	list   func(context.Context, metav1.ListOptions, func(runtime.Object)) (metav1.ListMeta, error)
	watch  func(context.Context, metav1.ListOptions) (apiwatch.Interface, error)
	apply  func(runtime.Object) intent.Key
	remove func(intent.Key)
	// optional: an API without it, or one that doesn't show it to us, is as one that has none of it.
	optional bool
}

// key names an object; cluster-wide ones have no namespace.
func (resource) key(obj runtime.Object) intent.Key {
	if m, ok := obj.(metav1.Object); ok {
		return intent.Key{Namespace: m.GetNamespace(), Name: m.GetName()}
	}
	return intent.Key{}
}

// clients talk to the API groups that intent comes from, and know no other.
type clients struct {
	core, discovery, networking *rest.RESTClient
	asking                      singleflight.Group
	dialing                     *dialGate
}

func newClients(config *rest.Config) (*clients, error) {
	client := func(gv schema.GroupVersion, path string) (*rest.RESTClient, error) {
		c := rest.CopyConfig(config)
		c.GroupVersion, c.APIPath = &gv, path
		c.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
		c.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
		c.QPS = -1 // a handful of watches needs no throttle
		// To compress a page costs both sides more time than to send it as it is.
		c.DisableCompression = true
		return rest.RESTClientFor(c)
	}
	core, err := client(corev1.SchemeGroupVersion, "/api")
	if err != nil {
		return nil, err
	}
	discovery, err := client(discoveryv1.SchemeGroupVersion, "/apis")
	if err != nil {
		return nil, err
	}
	networking, err := client(networkingv1.SchemeGroupVersion, "/apis")
	return &clients{core: core, discovery: discovery, networking: networking, dialing: newDialGate()}, err
}

// identity tells one cluster from another: the UID of a namespace that every cluster has. Empty where there is none or
// it may not be read.
func (c *clients) identity(ctx context.Context) (string, error) {
	// All sources ask at the same time.
	id, err, _ := c.asking.Do("", func() (any, error) { return c.askIdentity(ctx) })
	return id.(string), err
}

// beginIdentity asks for the identity beside other things, which may wait for the connection that this makes. The channel
// gets an answer in any case.
func (c *clients) beginIdentity(ctx context.Context) <-chan string {
	out := make(chan string, 1)
	done := c.dialing.take()
	go func() {
		id, _ := c.identity(ctx)
		done()
		out <- id
	}()
	return out
}

func (c *clients) askIdentity(ctx context.Context) (string, error) {
	var ns corev1.Namespace
	err := c.core.Get().MaxRetries(0).Resource("namespaces").Name(metav1.NamespaceSystem).Do(c.dialing.traced(ctx)).Into(&ns)
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return "", nil
	}
	return string(ns.UID), err
}

func (c *clients) resource(cluster *intent.Cluster, s intent.Source, o Options) resource {
	switch s {
	case intent.Services:
		return bind(c, c.core, "services", metav1.ListOptions{LabelSelector: o.ServiceSelector}, Service,
			func(k intent.Key) *intent.Service {
				if e := cluster.Entry(k); e != nil {
					return e.Service
				}
				return nil
			}, cluster.SetService, cluster.DeleteService)
	case intent.EndpointSlices:
		return bind(c, c.discovery, "endpointslices", metav1.ListOptions{LabelSelector: cmp.Or(o.SliceSelector, o.ServiceSelector)}, Slice,
			cluster.Slice, cluster.SetSlice, cluster.DeleteSlice)
	case intent.Nodes:
		only := metav1.ListOptions{}
		if o.Node != "" {
			only.FieldSelector = "metadata.name=" + o.Node
		}
		return bind(c, c.core, "nodes", only, Node,
			func(k intent.Key) *intent.Node { return cluster.Node(k.Name) },
			cluster.SetNode, func(k intent.Key) { cluster.DeleteNode(k.Name) })
	case intent.Namespaces:
		return bind(c, c.core, "namespaces", metav1.ListOptions{LabelSelector: o.NamespaceSelector}, Namespace,
			func(k intent.Key) *intent.Namespace { return cluster.Namespace(k.Name) },
			cluster.SetNamespace, func(k intent.Key) { cluster.DeleteNamespace(k.Name) })
	case intent.ServiceCIDRs:
		r := bind(c, c.networking, "servicecidrs", metav1.ListOptions{}, ServiceCIDR,
			func(k intent.Key) *intent.ServiceCIDR { return cluster.ServiceCIDR(k.Name) },
			cluster.SetServiceCIDR, func(k intent.Key) { cluster.DeleteServiceCIDR(k.Name) })
		r.optional = true
		return r
	default:
		return bind(c, c.core, "pods", metav1.ListOptions{}, Pod, cluster.Pod, cluster.SetPod, cluster.DeletePod)
	}
}

// object is a pointer to an API type.
type object[T any] interface {
	*T
	runtime.Object
	Unmarshal([]byte) error
}

// bind ties a kind of the API to the functions of the cluster that take it.
func bind[T any, P object[T], V any](all *clients, c *rest.RESTClient, plural string, only metav1.ListOptions,
	convert func(P) *V, current func(intent.Key) *V, set func(*V), remove func(intent.Key)) resource {
	request := func(o metav1.ListOptions) *rest.Request {
		o.LabelSelector, o.FieldSelector = cmp.Or(o.LabelSelector, only.LabelSelector), only.FieldSelector
		return c.Get().MaxRetries(0).Resource(plural).SpecificallyVersionedParams(&o, metav1.ParameterCodec, schema.GroupVersion{Version: "v1"})
	}
	r := resource{remove: remove}
	r.list = func(ctx context.Context, o metav1.ListOptions, do func(runtime.Object)) (metav1.ListMeta, error) {
		all.dialing.wait(ctx)
		body, err := request(o).Stream(ctx)
		if err != nil {
			return metav1.ListMeta{}, err
		}
		defer body.Close()
		about, err := readItems(body, func(obj P) { do(obj) })
		if err != nil {
			err = fmt.Errorf("read the list: %w", err)
		}
		return about, err
	}
	r.watch = func(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
		o.Watch = true
		return request(o).Watch(ctx)
	}
	r.apply = func(obj runtime.Object) intent.Key {
		k := r.key(obj)
		next := convert(obj.(P))
		switch {
		case next == nil:
			remove(k)
		case !reflect.DeepEqual(current(k), next): // a relist brings mostly what is known
			set(next)
		}
		return k
	}
	return r
}
