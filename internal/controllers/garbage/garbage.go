// Package garbage deletes what nobody needs any more: objects whose owners or whose namespace are gone, Pods that have
// finished when there are too many, Pods of nodes that are gone. It knows objects by their metadata and owner references alone.
package garbage

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
)

// Deps are what the controller needs.
type Deps struct {
	Client    kubernetes.Interface
	Metadata  metadata.Interface
	Discovery discovery.DiscoveryInterface
	// Namespaces, Pods and Nodes are synced before Run is called.
	Namespaces, Pods, Nodes cache.SharedIndexInformer
	Clock                   clock.WithTicker // the wall clock if nil

	// FinishedPods is how many finished Pods are kept; 0 keeps all.
	FinishedPods int
	Workers      int
	// DiscoveryPeriod is how often new kinds are looked for.
	DiscoveryPeriod time.Duration
	// SyncTimeout is how long a kind that can't be listed holds up what needs all dependents of an object.
	SyncTimeout time.Duration
}

// Controller is the collector.
type Controller struct {
	Deps
	graph *graph
	queue *queue.Queue
	pods  podCollector

	mu     sync.RWMutex
	mapper apimeta.RESTMapper
	kinds  map[schema.GroupVersionResource]*watched
	// listed is set when every kind that can be listed has been, for the first time.
	listed atomic.Bool
}

type watched struct {
	stop   context.CancelFunc
	synced cache.InformerSynced
	since  time.Time // when it began to be listed
	late   sync.Once // logs that it is left out
}

// Events come and go by themselves, and nothing owns them.
var ignored = map[schema.GroupResource]bool{
	{Resource: "events"}:                         true,
	{Group: "events.k8s.io", Resource: "events"}: true,
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	if deps.Clock == nil {
		deps.Clock = clock.RealClock{}
	}
	if deps.DiscoveryPeriod == 0 {
		deps.DiscoveryPeriod = 30 * time.Second
	}
	if deps.SyncTimeout == 0 {
		deps.SyncTimeout = 30 * time.Second
	}
	c := &Controller{Deps: deps, graph: newGraph(), kinds: map[schema.GroupVersionResource]*watched{}}
	c.pods = podCollector{client: deps.Client, pods: deps.Pods, nodes: deps.Nodes, clock: deps.Clock, keep: deps.FinishedPods}
	c.queue = queue.New(queue.Options{Name: "garbage_collector", FirstBackOff: 20 * time.Millisecond}, c.sync)
	_, err := deps.Namespaces.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if gone := membership.Deleted[*corev1.Namespace](obj); gone != nil {
			c.namespaceGone(gone.Name)
		}
	}})
	return c, err
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	var done sync.WaitGroup
	done.Go(func() { c.pods.run(ctx) })
	done.Go(func() { c.watchKinds(ctx, &done) })
	c.queue.Run(ctx, max(c.Workers, 1))
	done.Wait()
	return nil
}

// watchKinds watches every kind that can be deleted, and asks discovery for new kinds now and then.
func (c *Controller) watchKinds(ctx context.Context, done *sync.WaitGroup) {
	period := c.DiscoveryPeriod
	for ctx.Err() == nil {
		wait := period
		if err := c.discover(ctx, done); err != nil {
			klog.FromContext(ctx).Info("discovery is incomplete, retrying", "err", err)
			wait = min(period, time.Second)
		}
		select {
		case <-ctx.Done():
		case <-c.Clock.After(wait):
		}
	}
}

func (c *Controller) discover(ctx context.Context, done *sync.WaitGroup) error {
	mapper, err := c.newMapper()
	lists, preferredErr := c.Discovery.ServerPreferredResources()
	if err = errors.Join(err, preferredErr); len(lists) == 0 {
		return err
	}
	found := map[schema.GroupVersionResource]bool{}
	for _, list := range discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"delete", "list", "watch"}}, lists) {
		gv, parseErr := schema.ParseGroupVersion(list.GroupVersion)
		if parseErr != nil {
			continue
		}
		for _, r := range list.APIResources {
			if gvr := gv.WithResource(r.Name); !ignored[gvr.GroupResource()] {
				found[gvr] = true
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mapper == nil || err == nil {
		c.mapper = mapper // an incomplete one only until there is a better
	}
	for gvr := range found {
		if _, ok := c.kinds[gvr]; !ok {
			c.kinds[gvr] = c.watchKind(ctx, gvr, done)
		}
	}
	for gvr, w := range c.kinds {
		// With an incomplete answer a kind that isn't in it may still be there.
		if !found[gvr] && err == nil {
			w.stop()
			delete(c.kinds, gvr)
		}
	}
	return err
}

// newMapper maps the kinds that discovery lists. With an error it maps some of them.
func (c *Controller) newMapper() (apimeta.RESTMapper, error) {
	groups, lists, err := c.Discovery.ServerGroupsAndResources()
	byVersion := map[string][]metav1.APIResource{}
	for _, list := range lists {
		byVersion[list.GroupVersion] = list.APIResources
	}
	var known []*restmapper.APIGroupResources
	for _, group := range groups {
		g := &restmapper.APIGroupResources{Group: *group, VersionedResources: map[string][]metav1.APIResource{}}
		for _, version := range group.Versions {
			if resources, ok := byVersion[version.GroupVersion]; ok {
				g.VersionedResources[version.Version] = resources
			}
		}
		known = append(known, g)
	}
	return restmapper.NewDiscoveryRESTMapper(known), err
}

func (c *Controller) watchKind(ctx context.Context, gvr schema.GroupVersionResource, done *sync.WaitGroup) *watched {
	informer := metadatainformer.NewFilteredMetadataInformer(c.Metadata, gvr, metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	// Only what the graph needs is kept.
	_ = informer.SetTransform(func(obj any) (any, error) {
		if m, ok := obj.(*metav1.PartialObjectMetadata); ok {
			m.Labels, m.Annotations, m.ManagedFields = nil, nil, nil
		}
		return obj, nil
	})
	_ = informer.SetWatchErrorHandlerWithContext(membership.LogWatchError)
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { c.seen(objectOf(gvr, obj.(*metav1.PartialObjectMetadata))) },
		UpdateFunc: func(old, obj any) {
			c.changed(objectOf(gvr, old.(*metav1.PartialObjectMetadata)), objectOf(gvr, obj.(*metav1.PartialObjectMetadata)))
		},
		DeleteFunc: func(obj any) {
			if m := membership.Deleted[*metav1.PartialObjectMetadata](obj); m != nil {
				c.gone(objectOf(gvr, m))
			}
		},
	})
	ctx, stop := context.WithCancel(ctx)
	w := &watched{stop: stop, synced: func() bool { return false }, since: c.Clock.Now()}
	if err != nil { // an informer that was just made takes a handler
		return w
	}
	w.synced = handler.HasSynced
	done.Go(func() { informer.RunWithContext(ctx) })
	return w
}

func keyOf(uid types.UID) queue.Key { return queue.Key{Name: string(uid)} }

// seen stores an object, and queues it if something may have to be done: it has owners, or it is being deleted and
// waits for this collector.
func (c *Controller) seen(o *object) {
	old := c.graph.get(o.uid)
	c.graph.set(o)
	if len(o.owners) > 0 || o.deleting && (o.foreground || o.orphaning) {
		c.queue.Add(keyOf(o.uid))
	}
	if o.deleting && o.foreground {
		for _, dependent := range c.graph.dependentsOf(o.uid) {
			c.queue.Add(keyOf(dependent.uid))
		}
	}
	if old != nil {
		c.wakeForeground(old) // an owner that was dropped may have been waiting for this one
	} else if !c.namespaceKnown(o.namespace) {
		c.queue.AddAfter(keyOf(o.uid), namespaceDelay)
	}
}

// changed notes an object's new state. An object that was deleted and made again while no watch could see it comes as
// a change from one to the other.
func (c *Controller) changed(old, o *object) {
	if old.uid != o.uid {
		c.gone(old)
	}
	c.seen(o)
}

func (c *Controller) gone(o *object) {
	c.graph.remove(o.uid)
	for _, dependent := range c.graph.dependentsOf(o.uid) {
		c.queue.Add(keyOf(dependent.uid))
	}
	c.wakeForeground(o)
}

// wakeForeground queues the owners that may now have nothing left to wait for.
func (c *Controller) wakeForeground(o *object) {
	for _, ref := range o.owners {
		if owner := c.graph.get(ref.UID); owner != nil && owner.deleting && owner.foreground {
			c.queue.Add(keyOf(ref.UID))
		}
	}
}

// unsynced is how long to wait before it is known what depends on an object; zero if every kind has been listed. A kind
// that can't be listed is left out after the timeout: one that its server fails to convert would stop all collection.
func (c *Controller) unsynced(ctx context.Context, timeout time.Duration) time.Duration {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if len(c.kinds) == 0 {
		return unsyncedDelay
	}
	var wait time.Duration
	for gvr, w := range c.kinds {
		if w.synced() {
			continue
		}
		waited := c.Clock.Since(w.since)
		if waited < timeout {
			wait = max(wait, unsyncedDelay, min(waited/10, c.SyncTimeout)) // less and less often: everything that has owners may be waiting
		}
		if waited < c.SyncTimeout {
			continue
		}
		w.late.Do(func() {
			klog.FromContext(ctx).Error(nil, "a kind can't be listed, garbage is collected without it: its objects don't block the foreground deletion of their owners; owners that orphan their dependents wait until it can be listed or is gone",
				"resource", gvr.String(), "waited", waited)
		})
	}
	return wait
}

// resourceOf finds an owner's resource, and whether it is in namespaces.
func (c *Controller) resourceOf(ref metav1.OwnerReference) (schema.GroupVersionResource, bool, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return schema.GroupVersionResource{}, false, err
	}
	if c.mapper == nil {
		return schema.GroupVersionResource{}, false, &apimeta.NoKindMatchError{GroupKind: gv.WithKind(ref.Kind).GroupKind()}
	}
	mapping, err := c.mapper.RESTMapping(gv.WithKind(ref.Kind).GroupKind(), gv.Version)
	if err != nil {
		return schema.GroupVersionResource{}, false, err
	}
	return mapping.Resource, mapping.Scope.Name() == apimeta.RESTScopeNameNamespace, nil
}
