// Package resourcequota keeps the status of ResourceQuotas: how much of each is used. The API server adds what is created; this
// controller subtracts what went, and puts right what was lost in between. It refuses nothing.
package resourcequota

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	quota "k8s.io/apiserver/pkg/quota/v1"
	"k8s.io/apiserver/pkg/quota/v1/generic"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/pager"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	own "portal/internal/quota"
)

// Name is what --controllers calls it.
const Name = "resourcequota"

const (
	// resync is how often usage is summed up though nothing happened: an object may have been admitted and not stored.
	resync  = 5 * time.Minute
	workers = 4
	// settle is how long a quota must have been left alone before less is written down, and settleLimit how long that is waited for: what
	// was admitted a moment ago is counted in the quota and may not be stored yet.
	settle      = 250 * time.Millisecond
	settleLimit = 5 * time.Second
	// recountDelay is how long after an admission usage is summed up: what was admitted may have failed later.
	recountDelay = 2 * time.Second
	// coalesceDelay is how long changes of an object are collected: Pods change often, and few of their changes matter.
	coalesceDelay = time.Second
	// rediscover is how often the API is asked anew for a resource that a quota counts and that was not served.
	rediscover = 10 * time.Second
)

// Controller watches quotas and, in the namespaces that have one, what their quotas count.
type Controller struct {
	client   kubernetes.Interface
	metadata metadata.Interface
	kinds    *restmapper.DeferredDiscoveryRESTMapper
	quotas   listers.ResourceQuotaLister
	synced   cache.InformerSynced
	queue    *queue.Queue
	clock    clock.WithTicker

	// watching is held from reading a namespace's quotas until what they count is watched.
	watching sync.Mutex

	mu         sync.Mutex
	watches    map[watched]context.CancelFunc
	waiting    map[queue.Key]wait
	discovered time.Time // when the API was last asked for a resource that was not served
	running    sync.WaitGroup
}

// wait is since when a quota is in a version, and since when it has been too high.
type wait struct {
	version      string
	since, first time.Time
}

// watched is a resource in a namespace.
type watched struct {
	namespace string
	resource  schema.GroupVersionResource
}

// New makes the controller; factory is started by the caller.
func New(client kubernetes.Interface, meta metadata.Interface, discovery discovery.DiscoveryInterface, factory informers.SharedInformerFactory, clock clock.WithTicker) (*Controller, error) {
	informer := factory.Core().V1().ResourceQuotas()
	c := &Controller{
		client: client, metadata: meta, quotas: informer.Lister(), synced: informer.Informer().HasSynced, clock: clock,
		kinds:   restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(discovery)),
		watches: map[watched]context.CancelFunc{}, waiting: map[queue.Key]wait{},
	}
	c.queue = queue.New(queue.Options{Name: Name, Clock: clock}, c.sync)
	_, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { c.enqueue(obj) },
		// What the API server added to the usage is no reason to sum up at once: the object is not stored yet.
		UpdateFunc: func(old, obj any) {
			was, is := old.(*corev1.ResourceQuota), obj.(*corev1.ResourceQuota)
			if !equality.Semantic.DeepEqual(was.Spec, is.Spec) || !equality.Semantic.DeepEqual(is.Spec.Hard, is.Status.Hard) {
				c.enqueue(obj)
			} else if less(was.Status.Used, is.Status.Used) {
				c.queue.AddAfter(queue.Key{Namespace: is.Namespace, Name: is.Name}, recountDelay)
			}
		},
		DeleteFunc: c.enqueue,
	})
	return c, err
}

func (c *Controller) enqueue(obj any) {
	key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj)
	if err != nil {
		return
	}
	namespace, name, _ := cache.SplitMetaNamespaceKey(key)
	c.queue.Add(queue.Key{Namespace: namespace, Name: name})
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	defer c.running.Wait()
	defer c.stopWatches()
	if !cache.WaitForCacheSync(ctx.Done(), c.synced) {
		return nil
	}
	c.queue.Listed()
	c.running.Go(func() {
		ticker := c.clock.NewTicker(resync)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C():
				c.kinds.Reset()
				c.enqueueAll("", 0)
			}
		}
	})
	c.queue.Run(ctx, workers)
	return nil
}

// enqueueAll queues the quotas of a namespace after a while; "": all.
func (c *Controller) enqueueAll(namespace string, after time.Duration) {
	all, err := c.quotas.ResourceQuotas(namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, q := range all {
		c.queue.AddAfter(queue.Key{Namespace: q.Namespace, Name: q.Name}, after)
	}
}

// sync writes down what is used of a quota.
func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	// The watches come first: what goes after the objects are listed must be noticed.
	if err := c.watch(ctx, key.Namespace); err != nil {
		return queue.Result{}, err
	}
	q, err := c.quotas.ResourceQuotas(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		delete(c.waiting, key)
		c.mu.Unlock()
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	status, unknown, failure := c.status(ctx, q)
	result := queue.Result{}
	if unknown {
		result.Again = rediscover
	}
	settled := c.settled(key, q.ResourceVersion, less(status.Used, q.Status.Used))
	if q.Status.Hard != nil && q.Status.Used != nil && equality.Semantic.DeepEqual(status.Hard, q.Status.Hard) && quota.Equals(status.Used, q.Status.Used) {
		return result, failure
	}
	if !settled {
		return queue.Result{Again: settle}, nil
	}
	next := q.DeepCopy()
	next.Status = status
	_, err = c.client.CoreV1().ResourceQuotas(key.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	}
	if err != nil {
		return queue.Result{}, err // on a conflict, the cache has a newer one soon
	}
	result.Writes = 1
	return result, failure
}

// less says whether there is less of something than before.
func less(now, before corev1.ResourceList) bool {
	for name, amount := range now {
		if was, ok := before[name]; ok && amount.Cmp(was) < 0 {
			return true
		}
	}
	return false
}

// settled says whether a quota may be written: not less than before, unless nothing was admitted for a while or that was waited for
// long enough.
func (c *Controller) settled(key queue.Key, version string, less bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !less {
		delete(c.waiting, key)
		return true
	}
	now := c.clock.Now()
	w, ok := c.waiting[key]
	if !ok {
		w.first = now
	}
	if w.version != version {
		w.version, w.since = version, now
	}
	if now.Sub(w.since) >= settle || now.Sub(w.first) >= settleLimit {
		delete(c.waiting, key)
		return true
	}
	c.waiting[key] = w
	return false
}

// status sums up what a quota counts. What cannot be summed up keeps its last value, beside the error. Unknown says
// that a resource to count is not served, which it may be later.
func (c *Controller) status(ctx context.Context, q *corev1.ResourceQuota) (status corev1.ResourceQuotaStatus, unknown bool, failure error) {
	registry := generic.NewRegistry(own.Evaluators(c.lister(ctx), c.clock))
	for name := range q.Spec.Hard {
		resource, ok, err := c.countedBy(name)
		failure = errors.Join(failure, err)
		unknown = unknown || err == nil && resource.Empty() && strings.HasPrefix(string(name), "count/")
		if ok && registry.Get(resource.GroupResource()) == nil {
			registry.Add(generic.NewObjectCountEvaluator(resource.GroupResource(), c.lister(ctx)(resource), ""))
		}
	}
	used := maps.Clone(q.Status.Used)
	if used == nil {
		used = corev1.ResourceList{}
	}
	hard := quota.Add(corev1.ResourceList{}, q.Spec.Hard)
	sums, err := quota.CalculateUsage(q.Namespace, q.Spec.Scopes, hard, registry, q.Spec.ScopeSelector)
	maps.Copy(used, sums)
	return corev1.ResourceQuotaStatus{Hard: hard, Used: quota.Mask(used, quota.ResourceNames(hard))}, unknown, errors.Join(failure, err)
}

// lister lists from the API: Pods and Services as they are, of others only that they are.
func (c *Controller) lister(ctx context.Context) own.Lister {
	return func(resource schema.GroupVersionResource) generic.ListFuncByNamespace {
		return func(namespace string) ([]runtime.Object, error) {
			var out []runtime.Object
			list := func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
				switch resource.GroupResource() {
				case corev1.Resource("pods"):
					return c.client.CoreV1().Pods(namespace).List(ctx, opts)
				case corev1.Resource("services"):
					return c.client.CoreV1().Services(namespace).List(ctx, opts)
				}
				return c.metadata.Resource(resource).Namespace(namespace).List(ctx, opts)
			}
			err := pager.New(list).EachListItem(ctx, metav1.ListOptions{}, func(obj runtime.Object) error {
				out = append(out, obj)
				return nil
			})
			if apierrors.IsNotFound(err) {
				// There are none if the resource is not served. It may be that only this version isn't any more.
				c.kinds.Reset()
				if found, _, failure := c.find(resource.GroupResource()); failure == nil && found.Empty() {
					return nil, nil
				}
			}
			return out, err
		}
	}
}

// aliases are the resources that quotas name without "count/".
var aliases = map[corev1.ResourceName]string{
	corev1.ResourceServices: "services", corev1.ResourceServicesNodePorts: "services", corev1.ResourceServicesLoadBalancers: "services",
	corev1.ResourceConfigMaps: "configmaps", corev1.ResourceSecrets: "secrets", corev1.ResourceQuotas: "resourcequotas",
	corev1.ResourceReplicationControllers: "replicationcontrollers", corev1.ResourcePersistentVolumeClaims: "persistentvolumeclaims",
	corev1.ResourceRequestsStorage: "persistentvolumeclaims",
}

// countedBy is the resource whose objects use what a quota limits. It is false without a resource if that is not served, and with one
// if that is in no namespace.
func (c *Controller) countedBy(name corev1.ResourceName) (schema.GroupVersionResource, bool, error) {
	counted, ok := strings.CutPrefix(string(name), "count/")
	if !ok {
		asked := schema.GroupResource{Resource: "pods"} // CPU, memory and the like
		if alias, ok := aliases[name]; ok {
			asked.Resource = alias
		}
		return c.find(asked)
	}
	asked := schema.ParseGroupResource(counted)
	found, ok, err := c.find(asked)
	if err == nil && found.Empty() && c.rediscover() {
		return c.find(asked)
	}
	return found, ok, err
}

// rediscover forgets which resources are served, unless it has just done so.
func (c *Controller) rediscover() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.clock.Now()
	if now.Sub(c.discovered) < rediscover {
		return false
	}
	c.discovered = now
	c.kinds.Reset()
	return true
}

// find is the resource in the version to ask for, as countedBy gives it.
func (c *Controller) find(asked schema.GroupResource) (schema.GroupVersionResource, bool, error) {
	none := schema.GroupVersionResource{}
	found, err := c.kinds.ResourceFor(asked.WithVersion(""))
	if meta.IsNoMatchError(err) || meta.IsAmbiguousError(err) || err == nil && found.GroupResource() != asked {
		return none, false, nil
	} else if err != nil {
		return none, false, err
	}
	kind, err := c.kinds.KindFor(found)
	if err != nil {
		return none, false, err
	}
	mapping, err := c.kinds.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return none, false, err
	}
	return found, mapping.Scope.Name() == meta.RESTScopeNameNamespace, nil
}

// watch has what a namespace's quotas count watched, and nothing else.
func (c *Controller) watch(ctx context.Context, namespace string) error {
	c.watching.Lock()
	defer c.watching.Unlock()
	all, err := c.quotas.ResourceQuotas(namespace).List(labels.Everything())
	if err != nil {
		return err
	}
	wanted := map[watched]bool{}
	for _, q := range all {
		for name := range q.Spec.Hard {
			resource, ok, err := c.countedBy(name)
			if err != nil {
				return fmt.Errorf("resource counted by %s: %w", name, err)
			}
			if ok {
				wanted[watched{namespace, resource}] = true
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for w, stop := range c.watches {
		if w.namespace == namespace && !wanted[w] {
			stop()
			delete(c.watches, w)
		}
	}
	for w := range wanted {
		if c.watches[w] != nil {
			continue
		}
		if err := c.start(ctx, w); err != nil {
			return fmt.Errorf("watch %s in %s: %w", w.resource.Resource, namespace, err)
		}
	}
	return nil
}

// start watches a resource in a namespace until it is stopped.
func (c *Controller) start(ctx context.Context, w watched) error {
	ctx, stop := context.WithCancel(ctx)
	informer := metadatainformer.NewFilteredMetadataInformer(c.metadata, w.resource, w.namespace, 0, cache.Indexers{}, nil).Informer()
	_ = informer.SetTransform(identity) // it fails only once the informer runs
	handler := cache.ResourceEventHandlerFuncs{DeleteFunc: func(any) { c.enqueueAll(w.namespace, 0) }}
	if slices.Contains([]string{"pods", "services", "persistentvolumeclaims"}, w.resource.Resource) && w.resource.Group == "" {
		handler.UpdateFunc = func(any, any) { c.enqueueAll(w.namespace, coalesceDelay) } // a Pod may have ended, a Service be of another type
	}
	if _, err := informer.AddEventHandler(handler); err != nil {
		stop()
		return err
	}
	c.watches[w] = stop
	c.running.Go(func() { informer.RunWithContext(ctx) })
	// What goes before the watch begins is noticed by nobody.
	c.running.Go(func() {
		if cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
			c.enqueueAll(w.namespace, 0)
		}
	})
	return nil
}

func (c *Controller) stopWatches() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, stop := range c.watches {
		stop()
	}
}

// identity keeps of an object only which it is.
func identity(obj any) (any, error) {
	m, ok := obj.(*metav1.PartialObjectMetadata)
	if !ok {
		return obj, nil
	}
	return &metav1.PartialObjectMetadata{TypeMeta: m.TypeMeta, ObjectMeta: metav1.ObjectMeta{
		Namespace: m.Namespace, Name: m.Name, UID: m.UID, ResourceVersion: m.ResourceVersion,
	}}, nil
}
