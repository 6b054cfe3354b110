// Package scheduling gives Pods their nodes: it keeps the scheduler's view of the cluster up to date, asks it for the Pods
// that have none, the most important first, and binds them. Which node it is, internal/scheduler decides.
package scheduling

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/scheduler"
)

// Name is this controller's.
const Name = "scheduler"

const (
	// A Pod that fits nowhere is tried again when something changes, at these intervals at most, and now and then anyway.
	minBackoff, maxBackoff = time.Second, 10 * time.Second
	retryInterval          = time.Minute
)

// Deps are what the controller needs.
type Deps struct {
	Client                  kubernetes.Interface
	Recorder                record.EventRecorder
	Pods, Nodes, Namespaces cache.SharedIndexInformer
	Clock                   clock.WithTicker
	// Workers is how many Pods are bound at a time.
	Workers int
}

// Controller binds Pods.
type Controller struct {
	Deps
	pods corelisters.PodLister

	mu      sync.Mutex
	cluster *scheduler.Cluster
	waiting *waiting
	// binding are Pods whose node was chosen, and whose binding the informer has not shown yet.
	binding map[types.NamespacedName]underway
	wake    chan struct{}
	chance  *rand.Rand
}

// underway is a Pod whose node was chosen.
type underway struct {
	uid      types.UID
	failures int // how often it could not be scheduled before
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	names := corelisters.NewNamespaceLister(deps.Namespaces.GetIndexer())
	c := &Controller{
		Deps: deps, pods: corelisters.NewPodLister(deps.Pods.GetIndexer()), waiting: newWaiting(), wake: make(chan struct{}, 1),
		binding: map[types.NamespacedName]underway{}, chance: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
		cluster: scheduler.NewCluster(func(name string) labels.Set {
			namespace, err := names.Get(name)
			if err != nil {
				return nil
			}
			return namespace.Labels
		}),
	}
	if _, err := deps.Pods.AddEventHandler(membership.Handlers(c.podChanged, c.podGone)); err != nil {
		return nil, err
	}
	_, err := deps.Nodes.AddEventHandler(membership.Handlers(c.nodeChanged, func(gone *corev1.Node) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.cluster.DropNode(gone.Name)
	}))
	return c, err
}

// wanted says whether a Pod waits for a node from here.
func wanted(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 &&
		pod.Spec.SchedulerName == corev1.DefaultSchedulerName &&
		// One that something runs already, without a node of this cluster, has its place.
		(pod.Status.Phase == corev1.PodPending || pod.Status.Phase == "") && pod.Status.PodIP == ""
}

func (c *Controller) podChanged(old, pod *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := queue.KeyOf(pod)
	switch {
	case pod.Spec.NodeName != "":
		delete(c.binding, key)
		c.waiting.drop(key)
		before := c.cluster.On(key)
		c.cluster.SetPod(pod)
		if before != c.cluster.On(key) || pod.DeletionTimestamp != nil {
			c.retryAll()
		}
	case wanted(pod):
		if binding, ok := c.binding[key]; ok && binding.uid == pod.UID {
			return
		}
		if c.cluster.On(key) != "" { // that was another one of the same name
			delete(c.binding, key)
			c.cluster.DropPod(key)
			c.retryAll()
		}
		if c.waiting.add(key, priority(pod), pod.CreationTimestamp.Time) || old != nil && !samePlace(old, pod) && c.waiting.unpark(key) {
			c.signal()
		}
	default:
		c.waiting.drop(key)
	}
}

// samePlace says that a change of a Pod does not change where it may go.
func samePlace(a, b *corev1.Pod) bool {
	return equality.Semantic.DeepEqual(a.Labels, b.Labels) && equality.Semantic.DeepEqual(a.Spec, b.Spec)
}

func priority(pod *corev1.Pod) int32 {
	if pod.Spec.Priority == nil {
		return 0
	}
	return *pod.Spec.Priority
}

func (c *Controller) podGone(pod *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := queue.KeyOf(pod)
	c.waiting.drop(key)
	delete(c.binding, key)
	c.cluster.DropPod(key)
	c.retryAll()
}

func (c *Controller) nodeChanged(old, node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cluster.SetNode(node)
	if old == nil || !sameForPods(old, node) {
		c.retryAll()
	}
}

// retryAll has Pods tried again that fitted nowhere: something has changed.
func (c *Controller) retryAll() {
	if c.waiting.retryAll() {
		c.signal()
	}
}

func (c *Controller) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	var done sync.WaitGroup
	defer done.Wait()
	slots := make(chan struct{}, max(c.Workers, 1))
	for {
		pod, node, wait := c.next(ctx)
		if pod == nil {
			timer := c.Clock.NewTimer(wait)
			select {
			case <-ctx.Done():
				timer.Stop()
				return nil
			case <-c.wake:
			case <-timer.C():
			}
			timer.Stop()
			continue
		}
		select {
		case <-ctx.Done():
			return nil
		case slots <- struct{}{}:
		}
		done.Go(func() {
			defer func() { <-slots }()
			c.bind(ctx, pod, node)
		})
	}
}

// next takes the most important Pod that fits somewhere. If there is none it says how long to wait for one.
func (c *Controller) next(ctx context.Context) (*corev1.Pod, string, time.Duration) {
	for ctx.Err() == nil {
		pod, node, wait, unfit := c.choose()
		if pod == nil {
			return nil, "", wait
		}
		if unfit == nil {
			return pod, node, 0
		}
		c.refuse(ctx, pod, unfit)
	}
	return nil, "", retryInterval
}

// choose takes the next Pod and finds its node. The error is why there is none; without a Pod the time is how long to wait for one.
func (c *Controller) choose() (*corev1.Pod, string, time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		now := c.Clock.Now()
		key, wait := c.waiting.take(now)
		if wait > 0 {
			return nil, "", wait, nil
		}
		pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
		if err != nil || !wanted(pod) {
			c.waiting.drop(key)
			continue
		}
		node, err := c.cluster.Choose(pod, c.chance)
		if err != nil {
			c.waiting.park(key, now)
			return pod, "", 0, err
		}
		// From here on it takes its part of the node, whether the API knows already or not.
		assumed := pod.DeepCopy()
		assumed.Spec.NodeName = node
		c.cluster.SetPod(assumed)
		c.binding[key] = underway{pod.UID, c.waiting.failures(key)}
		c.waiting.drop(key)
		return pod, node, 0, nil
	}
}

func (c *Controller) bind(ctx context.Context, pod *corev1.Pod, node string) {
	err := c.Client.CoreV1().Pods(pod.Namespace).Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err == nil {
		c.Recorder.Eventf(pod, corev1.EventTypeNormal, "Scheduled", "Assigned %s/%s to node %s", pod.Namespace, pod.Name, node)
		c.done(pod, true)
		return
	}
	c.done(pod, false)
	if ctx.Err() != nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return // it is gone or has a node: the informer will say
	}
	klog.FromContext(ctx).Info("binding failed, retrying", "pod", queue.KeyOf(pod).String(), "node", node, "err", err)
	c.Recorder.Eventf(pod, corev1.EventTypeWarning, "FailedScheduling", "The Pod could not be bound to node %s: %v", node, err)
}

// done records how a binding ended.
func (c *Controller) done(pod *corev1.Pod, bound bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := queue.KeyOf(pod)
	binding := c.binding[key]
	if bound || binding.uid != pod.UID {
		return // what the informer shows comes, or has come
	}
	delete(c.binding, key)
	c.cluster.DropPod(key)
	c.waiting.back(key, priority(pod), pod.CreationTimestamp.Time, binding.failures, c.Clock.Now())
	c.retryAll()
}

// refuse tells people why a Pod has no node.
func (c *Controller) refuse(ctx context.Context, pod *corev1.Pod, unfit error) {
	var reasons *scheduler.Unfit
	if !errors.As(unfit, &reasons) {
		klog.FromContext(ctx).Error(unfit, "scheduling failed", "pod", queue.KeyOf(pod).String())
		return
	}
	for _, known := range pod.Status.Conditions {
		if known.Type == corev1.PodScheduled && known.Status == corev1.ConditionFalse && known.Message == unfit.Error() {
			return // it was reported already
		}
	}
	c.Recorder.Event(pod, corev1.EventTypeWarning, "FailedScheduling", unfit.Error())
	if err := c.report(ctx, pod, unfit.Error()); err != nil && ctx.Err() == nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		klog.FromContext(ctx).Info("status of an unschedulable pod could not be written", "pod", queue.KeyOf(pod).String(), "err", err)
	}
}

func (c *Controller) report(ctx context.Context, pod *corev1.Pod, message string) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{"conditions": []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message,
			LastTransitionTime: metav1.NewTime(c.Clock.Now()),
		}}},
	})
	if err != nil {
		return fmt.Errorf("status of pod %s: %w", pod.Name, err)
	}
	_, err = c.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}
