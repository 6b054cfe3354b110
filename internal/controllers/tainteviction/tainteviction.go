// Package tainteviction deletes Pods from nodes with NoExecute taints that they don't tolerate, or no longer. It taints no nodes.
package tainteviction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
)

// Name is this controller's.
const Name = "taint-eviction"

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	Nodes    cache.SharedIndexInformer
	Pods     cache.SharedIndexInformer // with the index membership.ByNode
	Clock    clock.WithTicker
	Workers  int
}

// Controller evicts Pods, node by node.
type Controller struct {
	Deps
	nodes corelisters.NodeLister
	queue *queue.Queue

	mu sync.Mutex
	// waiting are the Pods of each tainted node, and since when their taints are known.
	waiting map[string]map[types.UID]wait
}

type wait struct {
	seen seen
	due  time.Time // zero: the Pod stays
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	registerMetrics()
	c := &Controller{Deps: deps, nodes: corelisters.NewNodeLister(deps.Nodes.GetIndexer()), waiting: map[string]map[types.UID]wait{}}
	c.queue = queue.New(queue.Options{Name: "taint_eviction", Clock: deps.Clock}, c.sync)
	if _, err := deps.Nodes.AddEventHandler(membership.Handlers(c.nodeChanged, c.nodeGone)); err != nil {
		return nil, err
	}
	_, err := deps.Pods.AddEventHandler(membership.Handlers(c.podChanged, func(*corev1.Pod) {}))
	return c, err
}

func (c *Controller) add(node string) { c.queue.Add(queue.Key{Name: node}) }

func (c *Controller) nodeChanged(old, node *corev1.Node) {
	var before []corev1.Taint
	if old != nil {
		before = NoExecute(old.Spec.Taints)
	}
	if !slices.EqualFunc(before, NoExecute(node.Spec.Taints), func(a, b corev1.Taint) bool { return a.Key == b.Key && a.Value == b.Value }) {
		c.add(node.Name)
	}
}

func (c *Controller) nodeGone(node *corev1.Node) { c.add(node.Name) }

// podChanged looks at Pods that come to a tainted node, or tolerate something else. A node that isn't known yet is synced when it is.
func (c *Controller) podChanged(old, pod *corev1.Pod) {
	if pod.Spec.NodeName == "" || old != nil && old.UID == pod.UID && old.Spec.NodeName == pod.Spec.NodeName &&
		equality.Semantic.DeepEqual(old.Spec.Tolerations, pod.Spec.Tolerations) {
		return
	}
	if node, err := c.nodes.Get(pod.Spec.NodeName); err == nil && len(NoExecute(node.Spec.Taints)) > 0 {
		c.add(node.Name)
	}
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() { c.queue.Listed() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.queue.Run(ctx, max(c.Workers, 1))
	return nil
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	var taints []corev1.Taint
	node, err := c.nodes.Get(key.Name)
	if err == nil {
		taints = NoExecute(node.Spec.Taints)
	} else if !apierrors.IsNotFound(err) {
		return queue.Result{}, err
	}
	leave, next, err := c.judge(key.Name, taints)
	if err != nil {
		return queue.Result{}, err
	}
	if len(leave) > 0 {
		if err := c.evict(ctx, key.Name, leave); err != nil {
			return queue.Result{}, err
		}
	}
	if next.IsZero() {
		return queue.Result{}, nil
	}
	return queue.Result{Again: max(next.Sub(c.Clock.Now()), time.Millisecond)}, nil
}

// judge decides about the Pods of a node: which have to leave now, and when the next has to.
func (c *Controller) judge(node string, taints []corev1.Taint) (leave []*corev1.Pod, next time.Time, err error) {
	pods, err := c.Pods.GetIndexer().ByIndex(membership.ByNode, node)
	if err != nil {
		return nil, time.Time{}, err
	}
	now := c.Clock.Now()
	before, after := c.waits(node), map[types.UID]wait{}
	for _, obj := range pods {
		pod := obj.(*corev1.Pod)
		if pod.DeletionTimestamp != nil {
			continue
		}
		was := before[pod.UID]
		due, seen := Due(taints, pod.Spec.Tolerations, was.seen, now)
		if len(seen) > 0 {
			after[pod.UID] = wait{seen: seen, due: due}
		}
		switch {
		case due.IsZero():
			if !was.due.IsZero() {
				c.Recorder.Eventf(pod, corev1.EventTypeNormal, "TaintManagerEviction", "eviction of Pod %s/%s from node %s cancelled", pod.Namespace, pod.Name, node)
			}
		case !due.After(now):
			leave = append(leave, pod)
		case next.IsZero() || due.Before(next):
			next = due
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(after) == 0 {
		delete(c.waiting, node)
	} else {
		c.waiting[node] = after
	}
	return leave, next, nil
}

func (c *Controller) waits(node string) map[types.UID]wait {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting[node]
}

// evict deletes Pods, if the API server itself says that the node still has a taint to delete Pods for: a watch that hangs must not
// empty a node that is well. Pods that can't be deleted are tried again, and hold up no others.
func (c *Controller) evict(ctx context.Context, name string, pods []*corev1.Pod) error {
	node, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil // its Pods are garbage
	} else if err != nil {
		return err
	}
	taints := NoExecute(node.Spec.Taints)
	var errs []error
	for _, pod := range pods {
		wait := c.waits(name)[pod.UID]
		if due, _ := Due(taints, pod.Spec.Tolerations, wait.seen, c.Clock.Now()); due.IsZero() || due.After(c.Clock.Now()) {
			continue // the informers follow, and the node is synced again
		}
		if err := c.delete(ctx, pod, name); err != nil {
			errs = append(errs, fmt.Errorf("evicting Pod %s/%s: %w", pod.Namespace, pod.Name, err))
			continue
		}
		deletions.Inc()
		latency.Observe(c.Clock.Since(wait.due).Seconds())
	}
	return errors.Join(errs...)
}

func (c *Controller) delete(ctx context.Context, pod *corev1.Pod, node string) error {
	client := c.Client.CoreV1().Pods(pod.Namespace)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{"conditions": []map[string]any{{
			"type": corev1.DisruptionTarget, "status": corev1.ConditionTrue, "observedGeneration": pod.Generation,
			"lastTransitionTime": metav1.NewTime(c.Clock.Now()),
			"reason":             "DeletionByTaintManager", "message": "node " + node + " has a NoExecute taint that the Pod does not tolerate, or no longer",
		}}},
	})
	if err != nil {
		return err
	}
	if _, err := client.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		return ignoreGone(err)
	}
	if err := client.Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}); err != nil {
		return ignoreGone(err)
	}
	klog.FromContext(ctx).Info("Pod evicted: its node has a NoExecute taint that it does not tolerate", "pod", klog.KObj(pod), "node", node)
	c.Recorder.Eventf(pod, corev1.EventTypeNormal, "TaintManagerEviction", "Pod %s/%s is evicted from node %s", pod.Namespace, pod.Name, node)
	return nil
}

// ignoreGone: the Pod is gone. A conflict does not say so: it may have been changed at that moment. If it is another Pod that has its
// name, the informer will say so before long.
func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
