// Package endpointslice keeps the EndpointSlices of every Service that has a selector. What goes into which slice is
// decided by k8s.io/endpointslice; this package decides when, and knows nothing of Endpoints.
package endpointslice

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/endpointslice"
	"k8s.io/endpointslice/metrics"
	"k8s.io/endpointslice/topologycache"
	endpointsliceutil "k8s.io/endpointslice/util"
	"k8s.io/klog/v2"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/sliceview"
	"portal/internal/controllers/writes"
)

const (
	// Name is this controller's as the value of the managed-by label.
	Name = "endpointslice-controller.k8s.io"

	// A change to a slice that wasn't made here is reverted after this time, so that several slices changed in a row are
	// reverted together.
	foreignChangeDelay = time.Second
)

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	Members  *membership.Watch
	Services corelisters.ServiceLister
	Slices   cache.SharedIndexInformer // with the index sliceview.ByService
	Pods     cache.SharedIndexInformer // with the index membership.ByNode
	Nodes    cache.SharedIndexInformer

	MaxEndpointsPerSlice int
	Workers              int
}

// Controller writes EndpointSlices.
type Controller struct {
	Deps
	queue      *queue.Queue
	topology   *topologycache.TopologyCache
	nodes      *queue.Queue // one key: the nodes as a whole
	view       *sliceview.View
	tracker    *endpointsliceutil.EndpointSliceTracker // the reconciler's, which insists on one
	trigger    *endpointsliceutil.TriggerTimeTracker
	reconciler *endpointslice.Reconciler
	writes     *countingClient
	listed     atomic.Bool // the informers have seen everything
	working    atomic.Bool // until then another process may be the writer
}

// New makes the controller and subscribes it; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	metrics.RegisterMetrics()
	c := &Controller{
		Deps:     deps,
		topology: topologycache.NewTopologyCache(),
		trigger:  endpointsliceutil.NewTriggerTimeTracker(),
		tracker:  endpointsliceutil.NewEndpointSliceTracker(),
	}
	c.queue = queue.New(queue.Options{
		Name:       "endpoint_slice",
		WritePause: 100 * time.Millisecond, MaxWritePause: time.Second,
	}, c.sync)
	c.view = &sliceview.View{
		Client: deps.Client, Slices: deps.Slices, ManagedBy: Name, Writes: writes.New(deps.Slices, c.queue.Add),
	}
	c.writes = newCountingClient(deps.Client, c.view.Writes, deps.Slices.GetStore())
	c.reconciler = endpointslice.NewReconciler(c.writes, nodeLister{corelisters.NewNodeLister(deps.Nodes.GetIndexer())},
		int32(deps.MaxEndpointsPerSlice), c.tracker, c.topology, deps.Recorder, Name,
		endpointslice.WithPreferSameTrafficDistributionEnabled(true))
	c.nodes = queue.New(queue.Options{Name: "endpoint_slice_topology"}, c.syncNodes)
	deps.Members.Subscribe(c.membersChanged)
	return c, c.watch()
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() {
	c.listed.Store(true)
	c.queue.Listed()
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.working.Store(true)
	var done sync.WaitGroup
	done.Go(func() { c.nodes.Run(ctx, 1) })
	done.Go(func() { c.view.Writes.Run(ctx) })
	done.Go(func() { c.queue.Run(ctx, max(c.Workers, 1)) })
	done.Wait()
	return nil
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	svc, err := c.Services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		// Its slices go by their owner references.
		c.trigger.DeleteService(key.Namespace, key.Name)
		c.reconciler.DeleteService(key.Namespace, key.Name)
		c.tracker.DeleteService(key.Namespace, key.Name)
		c.view.Writes.Forget(key)
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName || svc.Spec.Selector == nil {
		return queue.Result{}, nil // whoever made the Service makes its slices
	}
	existing, fresh, err := c.view.Of(ctx, key)
	if err == nil && !fresh {
		metrics.EndpointSliceSyncs.WithLabelValues("stale").Inc()
		return queue.Result{}, nil
	}
	result := queue.Result{}
	outcome := "success"
	if err == nil {
		result, err = c.reconcile(ctx, svc, existing)
	}
	if err != nil {
		outcome = "error"
	}
	metrics.EndpointSliceSyncs.WithLabelValues(outcome).Inc()
	return result, err
}

// reconcile writes the slices of a Service.
func (c *Controller) reconcile(ctx context.Context, svc *corev1.Service, existing []*discovery.EndpointSlice) (queue.Result, error) {
	key := queue.Key{Namespace: svc.Namespace, Name: svc.Name}
	pods := c.onKnownNodes(svc, c.Members.Pods(key))
	// Called even if nothing is written: the tracker learns from each call which Pods have changed since.
	since := c.trigger.ComputeEndpointLastChangeTriggerTime(key.Namespace, svc, pods)
	err := c.reconciler.Reconcile(klog.FromContext(ctx), svc, pods, existing, since)
	result := queue.Result{Writes: c.writes.take(key)}
	if err != nil {
		if !apierrors.IsConflict(err) && ctx.Err() == nil {
			c.Recorder.Eventf(svc, corev1.EventTypeWarning, "FailedToUpdateEndpointSlices",
				"updating the EndpointSlices of Service %s failed: %v", key, err)
		}
		return result, fmt.Errorf("EndpointSlices of %s: %w", key, err)
	}
	return result, nil
}

// onKnownNodes leaves out the Pods that name a node which isn't there. They come back with their node, whose event adds
// their Services to the queue; to the reconciler they would be a failure that is retried again and again.
func (c *Controller) onKnownNodes(svc *corev1.Service, pods []*corev1.Pod) []*corev1.Pod {
	if svc.Spec.PublishNotReadyAddresses {
		return pods
	}
	return slices.DeleteFunc(pods, func(pod *corev1.Pod) bool {
		_, known, err := c.Nodes.GetStore().GetByKey(pod.Spec.NodeName)
		return pod.Spec.NodeName != "" && err == nil && !known
	})
}

// nodeLister knows a node without a name, of no zone: that of Pods without a node. They run on no machine of the
// cluster, and are endpoints without a nodeName all the same.
type nodeLister struct{ corelisters.NodeLister }

func (l nodeLister) Get(name string) (*corev1.Node, error) {
	if name == "" {
		return &corev1.Node{}, nil
	}
	return l.NodeLister.Get(name)
}

// syncNodes updates the topology cache, and queues the Services whose hints no longer fit.
func (c *Controller) syncNodes(ctx context.Context, _ queue.Key) (queue.Result, error) {
	var nodes []*corev1.Node
	for _, obj := range c.Nodes.GetStore().List() {
		nodes = append(nodes, obj.(*corev1.Node))
	}
	c.topology.SetNodes(klog.FromContext(ctx), nodes)
	for _, key := range c.topology.GetOverloadedServices() {
		namespace, name, err := cache.SplitMetaNamespaceKey(key)
		if err == nil {
			c.queue.Add(queue.Key{Namespace: namespace, Name: name})
		}
	}
	return queue.Result{}, nil
}
