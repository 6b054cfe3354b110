// Package mirror copies hand-made Endpoints, those of Services without a selector, into EndpointSlices, so that
// readers of slices alone see them too. It writes no other slices and no Endpoints.
package mirror

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/sliceview"
	"portal/internal/controllers/writes"
)

// Name is this controller's as the value of the managed-by label.
const Name = "endpointslicemirroring-controller.k8s.io"

// Deps are what the controller needs.
type Deps struct {
	Client    kubernetes.Interface
	Recorder  record.EventRecorder
	Services  cache.SharedIndexInformer
	Endpoints cache.SharedIndexInformer
	Slices    cache.SharedIndexInformer // with the index sliceview.ByService

	MaxEndpointsPerSubset int
	Workers               int
}

// Controller writes the slices of hand-made Endpoints.
type Controller struct {
	Deps
	services  corelisters.ServiceLister
	endpoints corelisters.EndpointsLister
	queue     *queue.Queue
	view      *sliceview.View
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	registerMetrics()
	c := &Controller{
		Deps:      deps,
		services:  corelisters.NewServiceLister(deps.Services.GetIndexer()),
		endpoints: corelisters.NewEndpointsLister(deps.Endpoints.GetIndexer()),
	}
	c.queue = queue.New(queue.Options{
		Name:       "endpoint_slice_mirroring",
		WritePause: 100 * time.Millisecond, MaxWritePause: time.Second,
	}, c.sync)
	c.view = &sliceview.View{
		Client: deps.Client, Slices: deps.Slices, ManagedBy: Name, Writes: writes.New(deps.Slices, c.queue.Add),
	}
	return c, c.watch()
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() { c.queue.Listed() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	var done sync.WaitGroup
	done.Go(func() { c.view.Writes.Run(ctx) })
	done.Go(func() { c.queue.Run(ctx, max(c.Workers, 1)) })
	done.Wait()
	return nil
}

func (c *Controller) watch() error {
	add := func(endpoints *corev1.Endpoints) { c.queue.Add(queue.KeyOf(endpoints)) }
	_, err := c.Endpoints.AddEventHandler(membership.Handlers(func(_, endpoints *corev1.Endpoints) { add(endpoints) }, add))
	if err != nil {
		return err
	}
	_, err = c.Services.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { c.serviceChanged(obj.(*corev1.Service)) },
		UpdateFunc: func(old, obj any) {
			was, svc := old.(*corev1.Service), obj.(*corev1.Service)
			if (was.Spec.Selector == nil) != (svc.Spec.Selector == nil) {
				c.queue.Add(queue.KeyOf(svc))
			}
		},
		DeleteFunc: func(obj any) {
			if gone := membership.Deleted[*corev1.Service](obj); gone != nil {
				c.serviceChanged(gone)
			}
		},
	})
	if err != nil {
		return err
	}
	_, err = c.Slices.AddEventHandler(membership.Handlers(c.sliceChanged, c.sliceGone))
	return err
}

func (c *Controller) serviceChanged(svc *corev1.Service) {
	if svc.Spec.Selector == nil {
		c.queue.Add(queue.KeyOf(svc))
	}
}

// sliceChanged has Endpoints copied again if somebody else changed the copy.
func (c *Controller) sliceChanged(old, slice *discovery.EndpointSlice) {
	origin := c.view.Writes.Saw(slice)
	if old != nil && old.ResourceVersion == slice.ResourceVersion {
		return // listed again
	}
	if old != nil && c.view.Mine(old) && sliceview.ServiceOf(old) != sliceview.ServiceOf(slice) {
		c.queue.Add(sliceview.ServiceOf(old))
	}
	if origin == writes.Foreign && (c.view.Mine(slice) || old != nil && c.view.Mine(old)) {
		c.queue.Add(sliceview.ServiceOf(slice))
	}
}

func (c *Controller) sliceGone(slice *discovery.EndpointSlice) {
	if !c.view.Writes.Gone(slice) && c.view.Mine(slice) {
		c.queue.Add(sliceview.ServiceOf(slice))
	}
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	started := time.Now()
	defer func() { syncDuration.WithLabelValues().Observe(time.Since(started).Seconds()) }()
	endpoints, err := c.original(key)
	if err != nil {
		return queue.Result{}, err
	}
	existing, fresh, err := c.view.Of(ctx, key)
	if err != nil || !fresh {
		return queue.Result{}, err
	}
	if endpoints == nil {
		return queue.Result{Writes: len(existing)}, c.deleteAll(ctx, key, existing)
	}
	wanted, skipped := copyOf(endpoints, c.MaxEndpointsPerSubset)
	c.report(endpoints, skipped)
	changes := plan(wanted, existing)
	if endpoints.DeletionTimestamp != nil {
		changes.create = nil // a new one would outlive what it is a copy of
	}
	return queue.Result{Writes: changes.len()}, c.apply(ctx, key, changes)
}

// original is what has to be mirrored under a key: Endpoints with a Service that has no selector, unless a label or a
// leader election's annotation says not to. Nil if there is no such thing.
func (c *Controller) original(key queue.Key) (*corev1.Endpoints, error) {
	endpoints, err := c.endpoints.Endpoints(key.Namespace).Get(key.Name)
	if err != nil {
		return nil, ignoreNotFound(err)
	}
	if _, lock := endpoints.Annotations[resourcelock.LeaderElectionRecordAnnotationKey]; lock || endpoints.Labels[discovery.LabelSkipMirror] == "true" {
		return nil, nil
	}
	svc, err := c.services.Services(key.Namespace).Get(key.Name)
	if err != nil {
		return nil, ignoreNotFound(err)
	}
	if svc.Spec.Selector != nil {
		return nil, nil
	}
	return endpoints, nil
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (c *Controller) report(endpoints *corev1.Endpoints, skipped skips) {
	addressesSkipped.WithLabelValues().Observe(float64(skipped.invalid + skipped.tooMany))
	if skipped.invalid > 0 {
		c.Recorder.Eventf(endpoints, corev1.EventTypeWarning, "InvalidIPAddress",
			"%d addresses are no IP addresses and were not mirrored to EndpointSlices", skipped.invalid)
	}
	if skipped.tooMany > 0 {
		c.Recorder.Eventf(endpoints, corev1.EventTypeWarning, "TooManyAddressesToMirror",
			"%d addresses were not mirrored to EndpointSlices: a subset may have %d", skipped.tooMany, c.MaxEndpointsPerSubset)
	}
}

// apply writes what it can: a slice that is refused, by a quota for example, does not hold back the others.
func (c *Controller) apply(ctx context.Context, key queue.Key, changes changes) error {
	client := c.Client.DiscoveryV1().EndpointSlices(key.Namespace)
	var errs []error
	for _, slice := range changes.create {
		made, err := client.Create(ctx, slice, metav1.CreateOptions{})
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			continue // no try will ever succeed
		} else if err != nil {
			errs = append(errs, fmt.Errorf("creating an EndpointSlice for Endpoints %s: %w", key, err))
			continue
		}
		c.view.Writes.Wrote(key, made)
		sliceChanges.WithLabelValues("create").Inc()
	}
	for _, slice := range changes.update {
		made, err := client.Update(ctx, slice, metav1.UpdateOptions{})
		if err != nil {
			errs = append(errs, fmt.Errorf("updating EndpointSlice %s of Endpoints %s: %w", slice.Name, key, err))
			continue
		}
		c.view.Writes.Wrote(key, made)
		sliceChanges.WithLabelValues("update").Inc()
	}
	return errors.Join(append(errs, c.deleteAll(ctx, key, changes.delete))...)
}

func (c *Controller) deleteAll(ctx context.Context, key queue.Key, slices []*discovery.EndpointSlice) error {
	var errs []error
	for _, slice := range slices {
		err := c.Client.DiscoveryV1().EndpointSlices(slice.Namespace).Delete(ctx, slice.Name, metav1.DeleteOptions{})
		if ignoreNotFound(err) != nil {
			errs = append(errs, fmt.Errorf("deleting EndpointSlice %s/%s: %w", slice.Namespace, slice.Name, err))
			continue
		}
		c.view.Writes.Deleted(key, slice)
		sliceChanges.WithLabelValues("delete").Inc()
	}
	return errors.Join(errs...)
}
