// Package aggregation makes API servers behind Services part of this API. APIService objects say which group versions they serve: it
// passes requests on to them, checks whether they answer, and adds what they serve to discovery and OpenAPI. It also keeps the APIService
// objects of what the server serves itself. Who may ask is decided before a request comes here.
package aggregation

import (
	"context"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/discovery"
	"k8s.io/apiserver/pkg/endpoints/discovery/aggregated"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	registration "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset/typed/apiregistration/v1"
)

type apiService = apiregistrationv1.APIService

// Options are what an Aggregator needs of the server that it is part of.
type Options struct {
	Client registration.APIServiceInterface
	// Resolve is where a port of a Service is reached; Service and Slices read the Service and its endpoints.
	Resolve func(namespace, name string, port int32) (*url.URL, error)
	Service func(namespace, name string) (*corev1.Service, error)
	Slices  func(namespace, name string) ([]*discoveryv1.EndpointSlice, error)
	// Certificate is what the server shows to those that it passes requests on to.
	Certificate func() (cert, key []byte)
	Serializer  runtime.NegotiatedSerializer
}

// Own is what the server serves itself. It is known when the server has been put together.
type Own struct {
	// BuiltIn are the group versions of the server's own resources: nobody else can serve them.
	BuiltIn []schema.GroupVersion
	// Custom are those of custom resources; false if they are not known yet.
	Custom func() ([]schema.GroupVersion, bool)
	// Handler answers for all of them.
	Handler http.Handler
	// Discovery is the list of all groups in its aggregated form.
	Discovery aggregated.ResourceManager
	Addresses discovery.Addresses
}

// Aggregator is the part of the API that others serve.
type Aggregator struct {
	Options
	own      Own
	informer cache.SharedIndexInformer
	builtIn  map[schema.GroupVersion]bool
	view     atomic.Pointer[view]
	// root answers for /apis, in both forms.
	root    http.Handler
	changed chan struct{}
	// registering lets one pass over the server's own APIServices run at a time.
	registering sync.Mutex
	started     bool
	failing     atomic.Bool

	// ctx ends with Run, and with it all that was started.
	ctx  context.Context
	stop context.CancelFunc

	mu      sync.Mutex
	remotes map[string]*remote // by the name of the APIService
	running sync.WaitGroup
	v2      *mergedV2
}

// New makes an Aggregator, which does nothing before it is attached and run.
func New(options Options) *Aggregator {
	a := &Aggregator{Options: options, remotes: map[string]*remote{}, changed: make(chan struct{}, 1)}
	a.ctx, a.stop = context.WithCancel(context.Background())
	a.informer = cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return options.Client.List(ctx, opts)
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			return options.Client.Watch(ctx, opts)
		},
	}, &apiService{}, 0, cache.Indexers{})
	return a
}

// Attach says what the server serves itself. It comes before Run.
func (a *Aggregator) Attach(own Own) error {
	a.own = own
	a.builtIn = map[schema.GroupVersion]bool{}
	for _, version := range own.BuiltIn {
		a.builtIn[version] = true
		group, within := priorities(version)
		own.Discovery.SetGroupVersionPriority(metav1.GroupVersion(version), int(group), int(within))
	}
	a.v2 = newMergedV2(own.Handler)
	a.Rebuild()
	older := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.view.Load().root.ServeHTTP(w, r) })
	a.root = aggregated.WrapAggregatedDiscoveryToHandler(older, own.Discovery, nil)
	_, err := a.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { a.Check() },
		UpdateFunc: func(_, _ any) { a.Check() },
		DeleteFunc: func(any) { a.Check() },
	})
	return err
}

// Check has the objects compared with what is served, soon: something changed.
func (a *Aggregator) Check() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

const (
	// coalesceDelay bounds how often a burst of changes makes everything be compared.
	coalesceDelay  = 50 * time.Millisecond
	resyncInterval = 30 * time.Second
	retryInterval  = 2 * time.Second
)

// Start reads the APIServices and begins to follow them, so that the server can be ready. It returns when that is done or ctx ends. What it
// started ends with Run, or with Stop.
func (a *Aggregator) Start(ctx context.Context) {
	a.running.Go(func() { a.informer.RunWithContext(a.ctx) })
	if cache.WaitForCacheSync(ctx.Done(), a.informer.HasSynced) {
		a.follow()
	}
	if !a.registered(ctx) {
		a.Check()
	}
}

// registered registers the server's own group versions, and logs when that begins to fail.
func (a *Aggregator) registered(ctx context.Context) bool {
	err := a.register(ctx)
	if err != nil && ctx.Err() == nil && !a.failing.Swap(true) {
		klog.ErrorS(err, "own group versions could not be registered, retrying")
	}
	if err == nil && a.failing.Swap(false) {
		klog.InfoS("own group versions are registered again")
	}
	return err == nil
}

// Run compares until ctx ends, and returns when all that it started has ended.
func (a *Aggregator) Run(ctx context.Context) {
	defer a.Stop()
	for ctx.Err() == nil {
		wait := resyncInterval
		if a.informer.HasSynced() {
			a.follow()
			if !a.registered(ctx) {
				wait = retryInterval
			}
		} else {
			wait = coalesceDelay
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-a.changed:
			select {
			case <-ctx.Done():
			case <-time.After(coalesceDelay):
			}
		}
		timer.Stop()
	}
}

// Stop ends what was started. Requests are still passed on.
func (a *Aggregator) Stop() {
	a.mu.Lock()
	a.stop() // from now on follow begins nothing
	a.mu.Unlock()
	a.running.Wait()
}

// follow begins and ends what is done for each group version that others serve.
func (a *Aggregator) follow() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ctx.Err() != nil {
		return
	}
	wanted := map[string]*apiService{}
	for _, obj := range a.informer.GetStore().List() {
		if s, ok := obj.(*apiService); ok && s.Spec.Service != nil && s.DeletionTimestamp == nil && !a.builtIn[versionOf(s)] {
			wanted[s.Name] = s
		}
	}
	for name, r := range a.remotes {
		if s := wanted[name]; s == nil || !equality.Semantic.DeepEqual(s.Spec, r.spec) || s.UID != r.uid {
			r.stop()
			delete(a.remotes, name)
			a.v2.set(name, nil)
			if s == nil {
				unavailable.DeleteLabelValues(name)
				a.discovery().RemoveGroupVersion(metav1.GroupVersion(r.version))
			}
		}
	}
	for name, s := range wanted {
		if a.remotes[name] == nil {
			a.begin(s)
		}
	}
	a.rebuildLocked()
}

// begin starts following one. The caller holds mu.
func (a *Aggregator) begin(s *apiService) {
	ctx, stop := context.WithCancel(a.ctx)
	r := newRemote(a, s, stop)
	a.remotes[s.Name] = r
	a.discovery().SetGroupVersionPriority(metav1.GroupVersion(r.version), int(s.Spec.GroupPriorityMinimum), int(s.Spec.VersionPriority))
	r.publish(nil)
	a.running.Go(func() { r.run(ctx) })
}

// discovery is the aggregated list of groups, as the source of what others serve.
func (a *Aggregator) discovery() aggregated.ResourceManager {
	return a.own.Discovery.WithSource(aggregated.AggregatorSource)
}

// object is an APIService as it was last seen, or nil.
func (a *Aggregator) object(name string) *apiService {
	obj, found, err := a.informer.GetStore().GetByKey(name)
	if err != nil || !found {
		return nil
	}
	return obj.(*apiService)
}

func versionOf(s *apiService) schema.GroupVersion {
	return schema.GroupVersion{Group: s.Spec.Group, Version: s.Spec.Version}
}
