// Package clusterdns keeps the Service kube-dns and its endpoints: the nodes that say that they serve names and are ready. It knows
// nothing of DNS itself, and leaves a kube-dns that selects Pods to whoever made it.
package clusterdns

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"portal/internal/clusterdns"
	"portal/internal/clusterdns/publish"
	"portal/internal/controllers/queue"
	"portal/internal/ensure"
)

// Name is what --controllers calls it.
const Name = "cluster-dns"

const (
	managedBy = "cluster-dns.portal.dev"
	// most is how many endpoints a slice can have.
	most = 1000
)

// ownName is what the controller's slices are called. Those that are made for Pods have five letters and digits at the end.
var ownName = regexp.MustCompile(`^` + clusterdns.ServiceName + `-nodes-ipv[46]-[0-9]{1,4}$`)

// Deps are what the controller needs.
type Deps struct {
	Client                  kubernetes.Interface
	Nodes, Services, Slices cache.SharedIndexInformer
	// Ranges are the cluster's service ranges: kube-dns gets the tenth address of each.
	Ranges []netip.Prefix
	Clock  clock.WithTicker // the wall clock if nil
}

// Controller keeps kube-dns.
type Controller struct {
	Deps
	nodes    corelisters.NodeLister
	services corelisters.ServiceNamespaceLister
	slices   discoverylisters.EndpointSliceNamespaceLister
	queue    *queue.Queue
}

// New makes the controller.
func New(deps Deps) (*Controller, error) {
	c := &Controller{
		Deps: deps, nodes: corelisters.NewNodeLister(deps.Nodes.GetIndexer()),
		services: corelisters.NewServiceLister(deps.Services.GetIndexer()).Services(metav1.NamespaceSystem),
		slices:   discoverylisters.NewEndpointSliceLister(deps.Slices.GetIndexer()).EndpointSlices(metav1.NamespaceSystem),
	}
	c.queue = queue.New(queue.Options{Name: Name, Clock: deps.Clock}, func(ctx context.Context, _ queue.Key) (queue.Result, error) { return c.sync(ctx) })
	for informer, concerned := range map[cache.SharedIndexInformer]func(any) bool{
		deps.Nodes: func(obj any) bool {
			node, ok := obj.(*corev1.Node)
			return ok && node.Annotations[clusterdns.Annotation] != ""
		},
		deps.Services: func(obj any) bool {
			svc, ok := obj.(*corev1.Service)
			return ok && svc.Name == clusterdns.ServiceName && svc.Namespace == metav1.NamespaceSystem
		},
		deps.Slices: func(obj any) bool {
			slice, ok := obj.(*discoveryv1.EndpointSlice)
			return ok && slice.Namespace == metav1.NamespaceSystem && own(slice)
		},
	} {
		notice := func(objs ...any) {
			if slices.ContainsFunc(objs, concerned) {
				c.queue.Add(queue.Key{Name: clusterdns.ServiceName})
			}
		}
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(obj any) { notice(obj) },
			UpdateFunc: func(old, obj any) { notice(old, obj) },
			DeleteFunc: func(obj any) {
				if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
					obj = gone.Obj
				}
				notice(obj)
			},
		}); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.queue.Run(ctx, 1)
	return nil
}

func (c *Controller) sync(ctx context.Context) (queue.Result, error) {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return queue.Result{}, err
	}
	nodes = slices.DeleteFunc(nodes, func(n *corev1.Node) bool { return len(clusterdns.Announced(n)) == 0 })
	svc, err := c.services.Get(clusterdns.ServiceName)
	switch {
	case apierrors.IsNotFound(err) && len(nodes) == 0:
		return c.write(ctx, nil)
	case apierrors.IsNotFound(err):
		return queue.Result{}, c.ensureService(ctx, nil)
	case err != nil:
		return queue.Result{}, err
	case clusterdns.LostAddresses(svc) && len(nodes) > 0:
		// What informers keep of a Service is not enough to write it.
		svc, err := c.Client.CoreV1().Services(metav1.NamespaceSystem).Get(ctx, clusterdns.ServiceName, metav1.GetOptions{})
		if err != nil {
			return queue.Result{}, err
		}
		return queue.Result{}, c.ensureService(ctx, svc)
	case len(svc.Spec.Selector) > 0:
		return c.write(ctx, nil) // somebody's Pods serve names
	}
	return c.write(ctx, Endpoints(nodes, svc.Spec.IPFamilies))
}

// ensureService creates or repairs kube-dns, at the tenth addresses or, if another Service has them, elsewhere. The watch brings it, and
// with it the families of its slices.
func (c *Controller) ensureService(ctx context.Context, svc *corev1.Service) error {
	_, err := publish.Service(ctx, c.Client.CoreV1().Services(metav1.NamespaceSystem), svc, clusterdns.TenthAddresses(c.Ranges), nil)
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) { // the watch brings that one
		return nil
	}
	return err
}

// Endpoints are the slices of kube-dns, of its families, for nodes that serve names. Each node prefers its own server; one that has none
// uses all of them.
func Endpoints(nodes []*corev1.Node, families []corev1.IPFamily) []*discoveryv1.EndpointSlice {
	nodes = slices.Clone(nodes)
	slices.SortFunc(nodes, func(a, b *corev1.Node) int { return strings.Compare(a.Name, b.Name) })
	var out []*discoveryv1.EndpointSlice
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		if len(families) > 0 && !slices.Contains(families, corev1.IPFamily(family)) {
			continue
		}
		var endpoints []discoveryv1.Endpoint
		for _, node := range nodes {
			if !ready(node) {
				continue
			}
			for _, a := range clusterdns.Announced(node) {
				if a.Is4() == (family == discoveryv1.AddressTypeIPv4) {
					endpoints = append(endpoints, endpoint(node, a))
					break
				}
			}
		}
		for i := 0; i*most < len(endpoints); i++ {
			out = append(out, &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name: fmt.Sprintf("%s-nodes-%s-%d", clusterdns.ServiceName, strings.ToLower(string(family)), i), Namespace: metav1.NamespaceSystem,
					Labels: map[string]string{discoveryv1.LabelServiceName: clusterdns.ServiceName, discoveryv1.LabelManagedBy: managedBy},
				},
				AddressType: family, Endpoints: endpoints[i*most : min(len(endpoints), (i+1)*most)],
				Ports: []discoveryv1.EndpointPort{
					{Name: ptr.To("dns"), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To[int32](clusterdns.Port)},
					{Name: ptr.To("dns-tcp"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](clusterdns.Port)},
				},
			})
		}
	}
	return out
}

func endpoint(node *corev1.Node, a netip.Addr) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{
		Addresses: []string{a.String()}, NodeName: ptr.To(node.Name),
		Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
		Hints:      &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: node.Name}}},
	}
	if zone := node.Labels[corev1.LabelTopologyZone]; zone != "" {
		e.Zone = &zone
	}
	return e
}

func ready(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// write makes the controller's slices those that are wanted.
func (c *Controller) write(ctx context.Context, want []*discoveryv1.EndpointSlice) (out queue.Result, err error) {
	all, err := c.slices.List(labels.Everything())
	if err != nil {
		return out, err
	}
	client := c.Client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem)
	old := map[string]*discoveryv1.EndpointSlice{}
	for _, slice := range all {
		if own(slice) {
			old[slice.Name] = slice
		}
	}
	for _, slice := range want {
		before := old[slice.Name]
		delete(old, slice.Name)
		wrote, err := ensure.Slice(ctx, client, before, slice)
		if err != nil {
			return out, err
		}
		if wrote {
			out.Writes++
		}
	}
	for name := range old {
		if err := client.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return out, err
		}
		out.Writes++
	}
	return out, nil
}

// own says that a slice is the controller's, by its label or, if somebody took that away, by its name.
func own(slice *discoveryv1.EndpointSlice) bool {
	return slice.Labels[discoveryv1.LabelManagedBy] == managedBy || ownName.MatchString(slice.Name)
}
