package console

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// defaultNodePorts is Kubernetes' own range.
const defaultNodePorts = "30000-32767"

func newFeed(config *rest.Config, namespaces []string, nodePorts string) *feed {
	f := &feed{
		wanted: namespaces, nodePorts: nodePorts, id: rand.Text(), changed: make(chan struct{}), shown: map[key]chan struct{}{}, revision: 1,
		services: map[key]*entry{}, owners: map[key]key{}, nodes: map[string]*Node{}, nodeRevs: map[string]uint64{}, ranges: map[string][]string{},
		goneServices: map[key]uint64{}, goneNodes: map[string]uint64{}, waiting: map[string]bool{"scope": true},
		history: history{of: map[key][]Moment{}},
	}
	f.status.NodePorts, f.status.NodePortsKnown = nodePorts, nodePorts != ""
	if nodePorts == "" {
		f.status.NodePorts = defaultNodePorts
	}
	f.config = rest.CopyConfig(config)
	f.config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &observer{next: next, feed: f} })
	return f
}

// observer notes from each request whether the API server answers and accepts the credentials.
type observer struct {
	next http.RoundTripper
	feed *feed
}

// WrappedRoundTripper is how client-go finds what is inside.
func (o *observer) WrappedRoundTripper() http.RoundTripper { return o.next }

func (o *observer) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := o.next.RoundTrip(r)
	switch {
	case r.Context().Err() != nil:
	case err != nil:
		o.feed.away(err.Error())
	case response.StatusCode == http.StatusUnauthorized:
		o.feed.setStatus(func(s *Status) bool {
			was := s.SignedOut
			s.SignedOut = true
			return !was
		})
	case response.StatusCode == http.StatusForbidden:
		// Rights were taken away: what is here may not be shown any more. The page comes back, and it is found out anew what may.
		o.feed.stop()
	case response.StatusCode >= 500:
		o.feed.away(fmt.Sprintf("it answers %s", response.Status))
	default:
		o.feed.setStatus(func(s *Status) bool {
			was := s.AwaySince
			s.AwaySince, s.Away = nil, ""
			return was != nil
		})
	}
	return response, err
}

func (f *feed) away(why string) {
	f.setStatus(func(s *Status) bool {
		if s.AwaySince != nil {
			return false
		}
		now := time.Now()
		s.AwaySince, s.Away = &now, why
		return true
	})
}

// run finds out what may be seen, and watches it until ctx ends.
func (f *feed) run(ctx context.Context) {
	client, err := kubernetes.NewForConfig(f.config)
	if err != nil {
		f.away(err.Error())
		return
	}
	defer closeConnections(client)
	var found scope
	for {
		if found, err = findScope(ctx, client, f.wanted); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
	f.mu.Lock()
	f.status.All, f.status.Namespaces, f.status.Limits = found.all, found.namespaces, found.limits
	watched := found.namespaces
	if found.all {
		watched = []string{""}
	}
	for _, namespace := range watched {
		f.waiting["services/"+namespace], f.waiting[sliceList(namespace)] = true, true
	}
	if found.nodes {
		f.waiting["nodes/"] = true
	}
	if found.ranges {
		f.waiting["servicecidrs/"] = true
	}
	f.listed("scope")
	f.mu.Unlock()

	var group sync.WaitGroup
	defer group.Wait()
	core, discovery, networking := client.CoreV1().RESTClient(), client.DiscoveryV1().RESTClient(), client.NetworkingV1().RESTClient()
	for _, namespace := range watched {
		group.Go(func() {
			follow(ctx, core, "services", namespace, &corev1.Service{}, sink[*corev1.Service]{f.putService, f.dropService, f.replaceServices})
		})
		group.Go(func() {
			follow(ctx, discovery, "endpointslices", namespace, &discoveryv1.EndpointSlice{}, sink[*discoveryv1.EndpointSlice]{f.putSlice, f.dropSlice, f.replaceSlices})
		})
	}
	if found.nodes {
		group.Go(func() {
			follow(ctx, core, "nodes", "", &corev1.Node{}, sink[*corev1.Node]{f.putNode, f.dropNode, f.replaceNodes})
		})
	}
	if found.ranges {
		group.Go(func() {
			follow(ctx, networking, "servicecidrs", "", &networkingv1.ServiceCIDR{}, sink[*networkingv1.ServiceCIDR]{f.putRange, f.dropRange, f.replaceRanges})
		})
	}
	<-ctx.Done()
}

// closeConnections closes those that a client does not use any more: an API server that stops would wait for them.
func closeConnections(client *kubernetes.Clientset) {
	if own, ok := client.CoreV1().RESTClient().(*rest.RESTClient); ok && own.Client != nil {
		utilnet.CloseIdleConnectionsFor(own.Client.Transport)
	}
}

// scope is what a user may list and watch.
type scope struct {
	all           bool
	namespaces    []string
	nodes, ranges bool
	limits        []string
}

// findScope asks the API server what the user may see: all namespaces, or those of a list that they may.
func findScope(ctx context.Context, client kubernetes.Interface, wanted []string) (found scope, err error) {
	may := func(group, resource, namespace string) bool {
		allowed, failed := mayWatch(ctx, client, group, resource, namespace)
		if failed != nil {
			err = failed
		}
		return allowed
	}
	found.all = may("", "services", "") && may("discovery.k8s.io", "endpointslices", "")
	if !found.all {
		candidates := slices.Clone(wanted)
		if may("", "namespaces", "") {
			list, failed := client.CoreV1().Namespaces().List(ctx, metav1.ListOptions{Limit: 500})
			if failed != nil {
				return found, failed
			}
			for i := range list.Items {
				candidates = append(candidates, list.Items[i].Name)
			}
			slices.Sort(candidates)
			candidates = slices.Compact(candidates)
		}
		for _, namespace := range candidates {
			switch {
			case len(found.namespaces) >= maxNamespaces:
				found.limits = append(found.limits, fmt.Sprintf("Services of more than %d namespaces", maxNamespaces))
				candidates = nil
			case !may("", "services", namespace):
				if slices.Contains(wanted, namespace) {
					found.limits = append(found.limits, "Services of the namespace "+namespace)
				}
			case !may("discovery.k8s.io", "endpointslices", namespace):
				found.limits = append(found.limits, "EndpointSlices of the namespace "+namespace)
			default:
				found.namespaces = append(found.namespaces, namespace)
			}
			if candidates == nil {
				break
			}
		}
		if len(found.namespaces) == 0 || len(wanted) > 0 {
			found.limits = append(found.limits, "Services of other namespaces")
		}
	}
	if found.nodes = may("", "nodes", ""); !found.nodes {
		found.limits = append(found.limits, "Nodes")
	}
	if found.ranges = may("networking.k8s.io", "servicecidrs", ""); !found.ranges {
		found.limits = append(found.limits, "ServiceCIDRs")
	}
	return found, err
}

// mayWatch asks whether the user may list and watch a resource.
func mayWatch(ctx context.Context, client kubernetes.Interface, group, resource, namespace string) (bool, error) {
	for _, verb := range []string{"list", "watch"} {
		review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Group: group, Resource: resource, Namespace: namespace, Verb: verb},
		}}
		answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		if err != nil || !answer.Status.Allowed {
			return false, err
		}
	}
	return true, nil
}

// sink takes what a watch brings.
type sink[T runtime.Object] struct {
	put, drop func(T)
	replace   func(namespace string, list []T)
}

// sinkStore is a sink as client-go's reflectors know it.
type sinkStore[T runtime.Object] struct {
	sink[T]
	namespace string
}

func (s sinkStore[T]) Add(obj any) error    { return s.Update(obj) }
func (s sinkStore[T]) Update(obj any) error { s.put(stripped(obj.(T))); return nil }
func (s sinkStore[T]) Delete(obj any) error { s.drop(obj.(T)); return nil }
func (s sinkStore[T]) Resync() error        { return nil }
func (s sinkStore[T]) Replace(objs []any, _ string) error {
	list := make([]T, 0, len(objs))
	for _, obj := range objs {
		list = append(list, stripped(obj.(T)))
	}
	s.replace(s.namespace, list)
	return nil
}

// stripped leaves out what is large and never shown.
func stripped[T runtime.Object](obj T) T {
	if meta, ok := any(obj).(metav1.Object); ok {
		meta.SetManagedFields(nil)
		annotations := meta.GetAnnotations()
		delete(annotations, corev1.LastAppliedConfigAnnotation)
	}
	return obj
}

// follow watches a resource until ctx ends. After a failure it tries again every few seconds: somebody is looking.
func follow[T runtime.Object](ctx context.Context, client rest.Interface, resource, namespace string, kind T, into sink[T], options ...func(*metav1.ListOptions)) {
	var lw *cache.ListWatch
	if len(options) == 0 {
		lw = cache.NewListWatchFromClient(client, resource, namespace, fields.Everything())
	} else {
		lw = cache.NewFilteredListWatchFromClient(client, resource, namespace, func(o *metav1.ListOptions) {
			for _, option := range options {
				option(o)
			}
		})
	}
	reflector := cache.NewReflectorWithOptions(lw, kind, sinkStore[T]{into, namespace}, cache.ReflectorOptions{
		Name: "console", Backoff: &wait.Backoff{Duration: 500 * time.Millisecond, Cap: 3 * time.Second, Factor: 1.5, Jitter: 0.3, Steps: 100},
	})
	reflector.RunWithContext(ctx)
}
