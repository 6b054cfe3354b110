// Package daemonset keeps a Pod of each DaemonSet on every node that fits. What to do is decided by Decide, from what there
// is; the rest here reads and writes. Pods are made for a node and given to it by the scheduler.
package daemonset

import (
	"context"
	"fmt"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
	"portal/internal/controllers/writes"
	"portal/internal/scheduler"
)

// Name is this controller's.
const Name = "daemonset"

const (
	// A Pod that failed on a node is replaced after this time; the time doubles while it keeps failing there.
	firstBackoff, lastBackoff = time.Second, 15 * time.Minute
	burst                     = 250
)

// Kind is what owns the Pods.
var Kind = appsv1.SchemeGroupVersion.WithKind("DaemonSet")

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Pods and Revisions are indexed by controller.
	Sets, Pods, Nodes, Revisions cache.SharedIndexInformer
	Clock                        clock.PassiveClock
	Workers                      int
}

// Controller creates and deletes Pods.
type Controller struct {
	workload.Reconciler[*appsv1.DaemonSet, *corev1.Pod]
	deps      Deps
	control   workload.Pods
	revisions *writes.Tracker

	mu       sync.Mutex
	failures map[failure]backoff
}

// failure is where a set's Pods fail.
type failure struct {
	set  types.UID
	node string
}

type backoff struct {
	delay time.Duration
	last  time.Time // when a Pod was deleted for it
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{deps: deps, failures: map[failure]backoff{}}
	c.Owners = workload.Owners[*appsv1.DaemonSet]{
		Kind: Kind, Informer: deps.Sets,
		Client: func(namespace string) workload.OwnerClient[*appsv1.DaemonSet] {
			return deps.Client.AppsV1().DaemonSets(namespace)
		},
		Selector: func(set *appsv1.DaemonSet) *metav1.LabelSelector { return set.Spec.Selector },
		// What is its own, the garbage collector deletes.
		Ignore: func(set *appsv1.DaemonSet) bool { return set.DeletionTimestamp != nil },
	}
	c.Dependents = workload.PodsOf[*appsv1.DaemonSet](deps.Client, deps.Pods)
	c.Workers, c.Sync = deps.Workers, c.sync
	err := c.Attach(Name)
	if err != nil {
		return nil, err
	}
	c.control = workload.Pods{Client: deps.Client, Recorder: deps.Recorder, Writes: c.Writes}
	if c.revisions, err = c.Track(deps.Revisions, nil); err != nil {
		return nil, err
	}
	if _, err := deps.Sets.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if gone := membership.Deleted[*appsv1.DaemonSet](obj); gone != nil {
			c.forget(gone.UID)
		}
	}}); err != nil {
		return nil, err
	}
	_, err = deps.Nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { c.addAll() },
		UpdateFunc: func(old, obj any) {
			if before, node := old.(*corev1.Node), obj.(*corev1.Node); !equality.Semantic.DeepEqual(before.Labels, node.Labels) ||
				!equality.Semantic.DeepEqual(scheduler.Taints(before), scheduler.Taints(node)) {
				c.addAll()
			}
		},
		DeleteFunc: func(any) { c.addAll() },
	})
	return c, err
}

type work = workload.Work[*appsv1.DaemonSet, *corev1.Pod]

// addAll queues every DaemonSet.
func (c *Controller) addAll() {
	for _, set := range c.InNamespace(metav1.NamespaceAll) {
		c.Add(set)
	}
}

func (c *Controller) sync(ctx context.Context, w work) (queue.Result, error) {
	set, pods := w.Owner, w.Own
	history := &workload.History{
		Client: c.deps.Client, Revisions: c.deps.Revisions, Kind: Kind, Owner: set, Selector: w.Selector, Template: &set.Spec.Template, Live: w.Live,
		Mark: appsv1.DefaultDaemonSetUniqueLabelKey, Writes: c.revisions,
	}
	revisions, err := history.List(ctx)
	if err != nil {
		return queue.Result{}, err
	}
	current, collisions, err := history.Current(ctx, revisions, set.Status.CollisionCount)
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	hash := current.Labels[appsv1.DefaultDaemonSetUniqueLabelKey]
	var nodes []*corev1.Node
	for _, obj := range c.deps.Nodes.GetStore().List() {
		nodes = append(nodes, obj.(*corev1.Node))
	}
	plan := Decide(State{Set: set, Nodes: nodes, Pods: pods, Hash: hash, Collisions: collisions, Now: c.deps.Clock.Now()})
	again, failed := c.carryOut(ctx, w.Key, set, plan, hash)
	if err := c.report(ctx, w.Key, set, plan.Status); err != nil {
		return queue.Result{}, err
	}
	if failed != nil {
		return queue.Result{}, failed
	}
	used := map[string]bool{current.Name: true}
	for _, r := range revisions {
		for _, pod := range pods {
			if pod.Labels[appsv1.DefaultDaemonSetUniqueLabelKey] == r.Labels[appsv1.DefaultDaemonSetUniqueLabelKey] {
				used[r.Name] = true
			}
		}
	}
	return queue.Result{Again: workload.Sooner(plan.Again, again)}, history.Trim(ctx, revisions, set.Spec.RevisionHistoryLimit, used)
}

func (c *Controller) carryOut(ctx context.Context, key queue.Key, set *appsv1.DaemonSet, plan Plan, hash string) (time.Duration, error) {
	gone := plan.Delete
	var again time.Duration
	for _, pod := range plan.Failed {
		if pod.Status.Phase == corev1.PodSucceeded {
			c.deps.Recorder.Eventf(set, corev1.EventTypeNormal, "SucceededDaemonPod", "Pod %s ended on node %s and is replaced", pod.Name, pod.Spec.NodeName)
			gone = append(gone, pod)
			continue
		}
		if left := c.due(set, pod); left > 0 {
			again = workload.Sooner(again, left)
			continue
		}
		c.deps.Recorder.Eventf(set, corev1.EventTypeWarning, "FailedDaemonPod", "Pod %s failed on node %s and is replaced", pod.Name, pod.Spec.NodeName)
		gone = append(gone, pod)
	}
	if err := workload.Together(gone[:min(len(gone), burst)], func(pod *corev1.Pod) error {
		return c.control.Delete(ctx, key, set, pod)
	}); err != nil {
		return 0, err
	}
	if len(plan.Create) == 0 {
		return again, nil
	}
	template := Template(set)
	if err := selects(set, newPod(set, template, hash, plan.Create[0])); err != nil {
		c.deps.Recorder.Eventf(set, corev1.EventTypeWarning, "FailedCreate", "No Pod is created: %v", err)
		return again, err
	}
	_, err := workload.SlowStart(min(len(plan.Create), burst), func(i int) error {
		_, err := c.control.Create(ctx, key, set, newPod(set, template, hash, plan.Create[i]))
		return err
	})
	return again, err
}

// newPod is the Pod for a node.
func newPod(set *appsv1.DaemonSet, template *corev1.PodTemplateSpec, hash, node string) *corev1.Pod {
	pod := workload.NewPod(template, set, metav1.NewControllerRef(set, Kind))
	pin(pod, node)
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	pod.Labels[appsv1.DefaultDaemonSetUniqueLabelKey] = hash
	if generation := set.Annotations[appsv1.DeprecatedTemplateGeneration]; generation != "" {
		pod.Labels["pod-template-generation"] = generation
	}
	return pod
}

// selects checks that a set would know a Pod as its own. It would create another one in its place for ever if not.
func selects(set *appsv1.DaemonSet, pod *corev1.Pod) error {
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
	if err != nil {
		return err
	}
	if !selector.Matches(labels.Set(pod.Labels)) {
		return fmt.Errorf("spec.selector does not select a Pod with the labels %s", labels.Set(pod.Labels))
	}
	return nil
}

// due is how long a failed Pod is left where it is, so that one that fails at once does not keep a node busy.
func (c *Controller) due(set *appsv1.DaemonSet, pod *corev1.Pod) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	where, now := failure{set.UID, pod.Spec.NodeName}, c.deps.Clock.Now()
	b, known := c.failures[where]
	if known && now.Sub(b.last) > 2*lastBackoff {
		known = false
	}
	if !known {
		b = backoff{delay: firstBackoff / 2}
	} else if left := b.last.Add(b.delay).Sub(now); left > 0 {
		return left
	}
	c.failures[where] = backoff{delay: min(2*b.delay, lastBackoff), last: now}
	return 0
}

func (c *Controller) forget(set types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for where := range c.failures {
		if where.set == set {
			delete(c.failures, where)
		}
	}
}

func (c *Controller) report(ctx context.Context, key queue.Key, set *appsv1.DaemonSet, status appsv1.DaemonSetStatus) error {
	if equality.Semantic.DeepEqual(set.Status, status) {
		return nil
	}
	next := set.DeepCopy()
	next.Status = status
	_, err := c.UpdateStatus(ctx, key, next)
	return err
}
