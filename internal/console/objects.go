package console

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
)

// objects are what findings and traces are made from, kept up to date by watches: reading the whole cluster anew for each question would
// cost a large one too much. A resource that may not be watched everywhere is watched in the namespaces that are asked about; one that may
// not be watched at all is not covered.
type objects struct {
	client *kubernetes.Clientset
	config *rest.Config
	ended  context.Context
	stop   func()
	group  sync.WaitGroup
	// kept are how many there are here, all of all accounts.
	kept atomic.Int64
	all  *atomic.Int64

	mu       sync.Mutex
	closed   bool // nothing is started any more
	stores   map[storeKey]store
	refused  map[string]bool // resources that may not be watched everywhere
	prepared map[string]chan struct{}
	// touched is when something changed, by namespace; that of what has none is "".
	touched  map[string]uint64
	revision uint64
	surveys  map[string]*survey // by scope
}

// storeKey is where a resource is watched; no namespace: everywhere.
type storeKey struct{ resource, namespace string }

// store has the objects of one resource, everywhere or in a namespace.
type store interface {
	fill(*explain.Evidence)
	listed() <-chan struct{}
	// exists says whether the server has the resource; one that it does not have is as good as empty.
	exists(ctx context.Context, namespace string) bool
	follow(ctx context.Context, namespace string)
}

// watchable is a resource that evidence consists of.
type watchable struct {
	name, group string
	// in is the only namespace that matters.
	in string
	// namespaced resources can be watched in one namespace.
	namespaced bool
	make       func(o *objects) store
}

// evidenceResources are those that are watched. Events are too many: a page has those that are about its Service.
var evidenceResources = []watchable{
	{name: "namespaces", make: newStore("namespaces", core, func(e *explain.Evidence, l []corev1.Namespace) { e.Namespaces = l })},
	{name: "services", namespaced: true, make: newStore("services", core, func(e *explain.Evidence, l []corev1.Service) { e.Services = l })},
	{name: "endpointslices", group: "discovery.k8s.io", namespaced: true, make: newStore("endpointslices", discovery, func(e *explain.Evidence, l []discoveryv1.EndpointSlice) { e.Slices = l })},
	{name: "endpoints", namespaced: true, make: newStore("endpoints", core, func(e *explain.Evidence, l []corev1.Endpoints) { e.Endpoints = l })}, //nolint:staticcheck // people still make them
	{name: "pods", namespaced: true, make: newStore("pods", core, func(e *explain.Evidence, l []corev1.Pod) { e.Pods = l })},
	{name: "nodes", make: newStore("nodes", core, func(e *explain.Evidence, l []corev1.Node) { e.Nodes = l })},
	{name: "leases", group: "coordination.k8s.io", in: metav1.NamespaceSystem, make: newStore("leases", coordination, func(e *explain.Evidence, l []coordinationv1.Lease) { e.Leases = l })},
	{name: "deployments", group: "apps", namespaced: true, make: newStore("deployments", apps, func(e *explain.Evidence, l []appsv1.Deployment) { e.Deployments = l })},
	{name: "replicasets", group: "apps", namespaced: true, make: newStore("replicasets", apps, func(e *explain.Evidence, l []appsv1.ReplicaSet) { e.ReplicaSets = l })},
	{name: "statefulsets", group: "apps", namespaced: true, make: newStore("statefulsets", apps, func(e *explain.Evidence, l []appsv1.StatefulSet) { e.StatefulSets = l })},
	{name: "daemonsets", group: "apps", namespaced: true, make: newStore("daemonsets", apps, func(e *explain.Evidence, l []appsv1.DaemonSet) { e.DaemonSets = l })},
	{name: "ingresses", group: "networking.k8s.io", namespaced: true, make: newStore("ingresses", networking, func(e *explain.Evidence, l []networkingv1.Ingress) { e.Ingresses = l })},
	{name: "ingressclasses", group: "networking.k8s.io", make: newStore("ingressclasses", networking, func(e *explain.Evidence, l []networkingv1.IngressClass) { e.IngressClasses = l })},
	{name: "ipaddresses", group: "networking.k8s.io", make: newStore("ipaddresses", networking, func(e *explain.Evidence, l []networkingv1.IPAddress) { e.IPAddresses = l })},
	{name: "servicecidrs", group: "networking.k8s.io", make: newStore("servicecidrs", networking, func(e *explain.Evidence, l []networkingv1.ServiceCIDR) { e.ServiceCIDRs = l })},
}

func core(c *kubernetes.Clientset) rest.Interface         { return c.CoreV1().RESTClient() }
func discovery(c *kubernetes.Clientset) rest.Interface    { return c.DiscoveryV1().RESTClient() }
func coordination(c *kubernetes.Clientset) rest.Interface { return c.CoordinationV1().RESTClient() }
func apps(c *kubernetes.Clientset) rest.Interface         { return c.AppsV1().RESTClient() }
func networking(c *kubernetes.Clientset) rest.Interface   { return c.NetworkingV1().RESTClient() }

// newObjects keeps nothing yet; what it will keep is added to a count of all accounts' objects.
func newObjects(config *rest.Config, all *atomic.Int64) (*objects, error) {
	o := &objects{all: all, config: config, surveys: map[string]*survey{}, stores: map[storeKey]store{}, refused: map[string]bool{}, prepared: map[string]chan struct{}{}, touched: map[string]uint64{}}
	config = rest.CopyConfig(config)
	config.WarningHandler = rest.NoWarnings{}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &revoked{next, o} })
	client, err := kubernetes.NewForConfig(config)
	o.client = client
	return o, err
}

// revoked notices that rights were taken away: what is here may not be used any more. Whoever asks next finds out anew what may be watched.
type revoked struct {
	next    http.RoundTripper
	objects *objects
}

// WrappedRoundTripper is how client-go finds what is inside.
func (r *revoked) WrappedRoundTripper() http.RoundTripper { return r.next }

func (r *revoked) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.next.RoundTrip(request)
	if err == nil && (response.StatusCode == http.StatusForbidden || response.StatusCode == http.StatusUnauthorized) {
		r.objects.stop()
	}
	return response, err
}

// run returns when it has ended, and with it all watches.
func (o *objects) run() {
	<-o.ended.Done()
	o.mu.Lock()
	o.closed = true
	o.mu.Unlock()
	o.group.Wait()
	o.count(-o.kept.Load())
	closeConnections(o.client)
}

func (o *objects) count(more int64) {
	o.kept.Add(more)
	o.all.Add(more)
}

// start runs something until the end; false: that has come.
func (o *objects) start(do func()) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || o.ended.Err() != nil {
		return false
	}
	o.group.Go(do)
	return true
}

// prepare has everything watched that a question about a namespace needs, and waits until it was listed.
func (o *objects) prepare(ctx context.Context, namespace string) error {
	o.mu.Lock()
	ready := o.prepared[namespace]
	if ready == nil && o.ended.Err() == nil {
		ready = make(chan struct{})
		o.prepared[namespace] = ready
		o.group.Go(func() {
			defer close(ready)
			var each sync.WaitGroup
			var failed atomic.Bool
			for _, r := range evidenceResources {
				each.Go(func() {
					if o.open(r, namespace) != nil {
						failed.Store(true)
					}
				})
			}
			each.Wait()
			if failed.Load() { // whoever comes next tries again
				o.mu.Lock()
				delete(o.prepared, namespace)
				o.mu.Unlock()
			}
		})
	}
	o.mu.Unlock()
	wait := []<-chan struct{}{ready}
	for i := 0; i < len(wait); i++ {
		select {
		case <-wait[i]:
		case <-ctx.Done():
			return ctx.Err()
		case <-o.ended.Done():
			return errSignedOut
		}
		if i == 0 {
			for _, r := range evidenceResources {
				if s, _ := o.find(r, namespace); s != nil {
					wait = append(wait, s.listed())
				}
			}
		}
	}
	return nil
}

// open watches a resource, everywhere if that is allowed, else in a namespace. An error says that this can't be found out now.
func (o *objects) open(r watchable, namespace string) (err error) {
	if s, _ := o.find(r, namespace); s != nil {
		return nil
	}
	try := func(at string) bool {
		allowed, failed := mayWatch(o.ended, o.client, r.group, r.name, at)
		if failed != nil {
			err = failed
		}
		if !allowed || failed != nil {
			return false
		}
		s := r.make(o)
		o.mu.Lock()
		if o.stores[storeKey{r.name, at}] != nil {
			o.mu.Unlock()
			return true
		}
		o.stores[storeKey{r.name, at}] = s
		o.mu.Unlock()
		return o.start(func() {
			if s.exists(o.ended, at) {
				s.follow(o.ended, at)
			}
		})
	}
	o.mu.Lock()
	refused := o.refused[r.name]
	o.mu.Unlock()
	if !refused && try(r.in) || err != nil {
		return err
	}
	o.mu.Lock()
	o.refused[r.name] = true
	o.mu.Unlock()
	if r.namespaced {
		try(namespace)
	}
	return err
}

// find returns where a resource is watched for questions about a namespace; everywhere says that it is not limited to it.
func (o *objects) find(r watchable, namespace string) (_ store, everywhere bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s := o.stores[storeKey{r.name, r.in}]; s != nil {
		return s, true
	}
	return o.stores[storeKey{r.name, namespace}], false
}

// evidence is what is known for questions about a namespace, and which resources that covers. Nobody may change it.
func (o *objects) evidence(namespace string) (known *explain.Evidence, covered map[string]bool) {
	known, covered = &explain.Evidence{}, map[string]bool{}
	for _, r := range evidenceResources {
		s, everywhere := o.find(r, namespace)
		if s == nil {
			continue
		}
		select {
		case <-s.listed():
			s.fill(known)
			covered[r.name] = true
			if r.name == "services" && !everywhere {
				known.Limited = namespace
			}
		default:
		}
	}
	return known, covered
}

func (o *objects) touch(resource, namespace string) {
	if resource == "leases" { // they change all the time
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.revision++
	o.touched[namespace] = o.revision
}

// touchedAt is the revision of the last change that matters to namespaces.
func (o *objects) touchedAt(namespaces ...string) uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	at := o.touched[""]
	for _, namespace := range namespaces {
		at = max(at, o.touched[namespace])
	}
	return at
}
