// Package endpoints keeps the Endpoints object of every Service that has a selector. It reads Services and Pods, and
// writes Endpoints; it knows nothing of EndpointSlices.
package endpoints

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"
	endpointsliceutil "k8s.io/endpointslice/util"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/subsets"
	"portal/internal/controllers/writes"
)

const (
	// LabelManagedBy says who writes an Endpoints object.
	LabelManagedBy = "endpoints.kubernetes.io/managed-by"
	// Name is this controller's as LabelManagedBy's value.
	Name = "endpoint-controller"

	truncated = "truncated"

	// A change to Endpoints that wasn't made here is reverted after this time: doing it immediately would fight people who
	// are trying something out, and a process that still believes to be the leader.
	foreignChangeDelay = time.Minute
)

// Deps are what the controller needs.
type Deps struct {
	Client    kubernetes.Interface
	Recorder  record.EventRecorder
	Members   *membership.Watch
	Services  corelisters.ServiceLister
	Endpoints cache.SharedIndexInformer
	Workers   int
}

// Controller writes Endpoints.
type Controller struct {
	Deps
	lister  corelisters.EndpointsLister
	queue   *queue.Queue
	trigger *endpointsliceutil.TriggerTimeTracker
	writes  *writes.Tracker
	working atomic.Bool // until then another process may be the writer
}

// New makes the controller and subscribes it; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{
		Deps:    deps,
		lister:  corelisters.NewEndpointsLister(deps.Endpoints.GetIndexer()),
		trigger: endpointsliceutil.NewTriggerTimeTracker(),
	}
	c.queue = queue.New(queue.Options{
		Name:       "endpoint",
		WritePause: 100 * time.Millisecond, MaxWritePause: time.Second,
	}, c.sync)
	c.writes = writes.New(deps.Endpoints, c.queue.Add)
	deps.Members.Subscribe(c.queue.Add)
	_, err := deps.Endpoints.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { c.writes.Saw(obj.(*corev1.Endpoints)) },
		UpdateFunc: func(old, obj any) { c.changed(old.(*corev1.Endpoints), obj.(*corev1.Endpoints)) },
		DeleteFunc: func(obj any) {
			if gone := membership.Deleted[*corev1.Endpoints](obj); gone != nil {
				c.writes.Gone(gone)
				c.queue.Add(queue.KeyOf(gone))
			}
		},
	})
	return c, err
}

func (c *Controller) changed(old, now *corev1.Endpoints) {
	origin := c.writes.Saw(now)
	switch {
	case origin != writes.Foreign || now.Labels[LabelManagedBy] != Name || old.ResourceVersion == now.ResourceVersion:
	case c.working.Load():
		c.queue.AddAfter(queue.KeyOf(now), foreignChangeDelay)
	case maps.Equal(shown(now), membership.Shown(c.Members.Pods(queue.KeyOf(now)))):
		// The leader's work. Every Service is in the queue already, this one may come later.
		c.queue.Deprioritize(queue.KeyOf(now))
	}
}

// shown are the Pods that Endpoints show, and whether as ready ones.
func shown(e *corev1.Endpoints) map[types.UID]bool {
	out := map[types.UID]bool{}
	for _, s := range e.Subsets {
		for ready, list := range map[bool][]corev1.EndpointAddress{true: s.Addresses, false: s.NotReadyAddresses} {
			for _, a := range list {
				if a.TargetRef != nil {
					out[a.TargetRef.UID] = ready
				}
			}
		}
	}
	return out
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() { c.queue.Listed() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.working.Store(true)
	// A Service may have been deleted while no controller ran; its Endpoints are deleted now. Those that old leader
	// elections used as their lock never had a Service.
	for _, obj := range c.Endpoints.GetStore().List() {
		e := obj.(*corev1.Endpoints)
		_, lock := e.Annotations[resourcelock.LeaderElectionRecordAnnotationKey]
		if _, err := c.Services.Services(e.Namespace).Get(e.Name); err != nil && !lock {
			c.queue.Add(queue.KeyOf(e))
		}
	}
	var done sync.WaitGroup
	done.Go(func() { c.writes.Run(ctx) })
	done.Go(func() { c.queue.Run(ctx, max(c.Workers, 1)) })
	done.Wait()
	return nil
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	svc, err := c.Services.Services(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return queue.Result{}, c.serviceGone(ctx, key)
	} else if err != nil {
		return queue.Result{}, err
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName || svc.Spec.Selector == nil {
		return queue.Result{}, nil // whoever made the Service makes its Endpoints
	}
	if c.writes.Behind(key) {
		return queue.Result{}, nil // requeued when the informer has caught up
	}
	pods := c.Members.Pods(key)
	// Called even if nothing is written: the tracker learns from each call which Pods have changed since.
	since := c.trigger.ComputeEndpointLastChangeTriggerTime(key.Namespace, svc, pods)
	current, err := c.current(ctx, key)
	if err != nil {
		return queue.Result{}, err
	}
	next := desired(svc, pods, current, since)
	if next == nil {
		return queue.Result{}, nil
	}
	return queue.Result{Writes: 1}, c.write(ctx, svc, current, next)
}

func (c *Controller) serviceGone(ctx context.Context, key queue.Key) error {
	err := c.Client.CoreV1().Endpoints(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting the Endpoints of the deleted Service %s: %w", key, err)
	}
	c.trigger.DeleteService(key.Namespace, key.Name)
	c.writes.Forget(key)
	return nil
}

// current is the state to start from: the informer's, or the API server's own if the informer has lost a write.
func (c *Controller) current(ctx context.Context, key queue.Key) (current *corev1.Endpoints, err error) {
	if c.writes.TakeLost(key) {
		current, err = c.Client.CoreV1().Endpoints(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			c.writes.Lost(key)
		}
	} else {
		current, err = c.lister.Endpoints(key.Namespace).Get(key.Name)
	}
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return current, err
}

func (c *Controller) write(ctx context.Context, svc *corev1.Service, current, next *corev1.Endpoints) error {
	client := c.Client.CoreV1().Endpoints(svc.Namespace)
	var written *corev1.Endpoints
	var err error
	doing, reason := "creating", "FailedToCreateEndpoint"
	if current == nil {
		written, err = client.Create(ctx, next, metav1.CreateOptions{})
		if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil // no try will ever succeed
		}
	} else {
		doing, reason = "updating", "FailedToUpdateEndpoint"
		written, err = client.Update(ctx, next, metav1.UpdateOptions{})
	}
	if err == nil {
		c.writes.Wrote(queue.KeyOf(svc), written)
		return nil
	}
	if !isStale(err) && ctx.Err() == nil {
		c.Recorder.Eventf(svc, corev1.EventTypeWarning, reason, "%s the Endpoints of Service %s/%s failed: %v", doing, svc.Namespace, svc.Name, err)
	}
	return fmt.Errorf("%s Endpoints %s/%s: %w", doing, svc.Namespace, svc.Name, err)
}

// isStale says that an error only means that the informer is behind: the next sync will know better.
func isStale(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
}

// desired is the Endpoints object that should be there, or nil if the current one is right.
func desired(svc *corev1.Service, pods []*corev1.Pod, current *corev1.Endpoints, since time.Time) *corev1.Endpoints {
	want := Subsets(svc, pods)
	over := subsets.Truncate(want)
	labels := wantedLabels(svc)
	if current != nil {
		_, marked := current.Annotations[corev1.EndpointsOverCapacity]
		if marked == over && maps.Equal(current.Labels, labels) && equal(subsets.Pack(current.Subsets), want) {
			return nil
		}
	}
	next := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: svc.Namespace, Name: svc.Name}}
	if current != nil {
		next = current.DeepCopy()
	}
	next.Subsets, next.Labels = want, labels
	if next.Annotations == nil {
		next.Annotations = map[string]string{}
	}
	set(next.Annotations, corev1.EndpointsOverCapacity, truncated, over)
	set(next.Annotations, corev1.EndpointsLastChangeTriggerTime, since.UTC().Format(time.RFC3339Nano), !since.IsZero())
	return next
}

func set(m map[string]string, key, value string, present bool) {
	if present {
		m[key] = value
	} else {
		delete(m, key)
	}
}

func wantedLabels(svc *corev1.Service) map[string]string {
	labels := make(map[string]string, len(svc.Labels)+2)
	maps.Copy(labels, svc.Labels)
	set(labels, corev1.IsHeadlessService, "", svc.Spec.ClusterIP == "" || svc.Spec.ClusterIP == corev1.ClusterIPNone)
	labels[LabelManagedBy] = Name
	return labels
}

func equal(a, b []corev1.EndpointSubset) bool { return apiequality.Semantic.DeepEqual(a, b) }
