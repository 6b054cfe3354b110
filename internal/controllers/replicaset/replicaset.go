// Package replicaset keeps the number of Pods that a ReplicaSet or a ReplicationController asks for. Both are the same
// but for their names: the older kind is read as the younger one.
package replicaset

import (
	"context"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
)

// Names of the two controllers.
const (
	Name           = "replicaset"
	ControllerName = "replicationcontroller"
)

// burst is how many Pods one sync creates or deletes at most.
const burst = 500

// Deps are what the controllers need.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Sets are ReplicaSets or ReplicationControllers. Both informers are indexed by controller.
	Sets, Pods cache.SharedIndexInformer
	Clock      clock.PassiveClock
	Workers    int
}

// Controller creates and deletes Pods.
type Controller struct {
	workload.Reconciler[*appsv1.ReplicaSet, *corev1.Pod]
	deps     Deps
	control  workload.Pods
	failures workload.Failures
	// object is what Events about a set are about.
	object func(*appsv1.ReplicaSet) runtime.Object
}

// New makes the controller of ReplicaSets; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	return newController(deps, "replicaset", workload.Owners[*appsv1.ReplicaSet]{
		Kind: appsv1.SchemeGroupVersion.WithKind("ReplicaSet"),
		Client: func(namespace string) workload.OwnerClient[*appsv1.ReplicaSet] {
			return deps.Client.AppsV1().ReplicaSets(namespace)
		},
	}, func(set *appsv1.ReplicaSet) runtime.Object { return set })
}

// NewReplicationController makes the one of ReplicationControllers.
func NewReplicationController(deps Deps) (*Controller, error) {
	return newController(deps, "replicationmanager", workload.Owners[*appsv1.ReplicaSet]{
		Kind: corev1.SchemeGroupVersion.WithKind("ReplicationController"),
		Read: func(obj any) *appsv1.ReplicaSet { return asSet(obj.(*corev1.ReplicationController)) },
		Client: func(namespace string) workload.OwnerClient[*appsv1.ReplicaSet] {
			return replicationControllers{deps.Client.CoreV1().ReplicationControllers(namespace)}
		},
	}, func(set *appsv1.ReplicaSet) runtime.Object {
		return &corev1.ReplicationController{ObjectMeta: set.ObjectMeta}
	})
}

func newController(deps Deps, name string, owners workload.Owners[*appsv1.ReplicaSet], object func(*appsv1.ReplicaSet) runtime.Object) (*Controller, error) {
	c := &Controller{deps: deps, object: object}
	c.Owners, c.Dependents = owners, workload.PodsOf[*appsv1.ReplicaSet](deps.Client, deps.Pods)
	c.Owners.Informer, c.Owners.Gone = deps.Sets, c.failures.Forget
	c.Owners.Selector = func(set *appsv1.ReplicaSet) *metav1.LabelSelector { return set.Spec.Selector }
	c.Dependents.Fit = func(_ *appsv1.ReplicaSet, pod *corev1.Pod) bool { return workload.Active(pod) }
	c.Workers, c.Sync = deps.Workers, c.sync
	if err := c.Attach(name); err != nil {
		return nil, err
	}
	c.control = workload.Pods{Client: deps.Client, Recorder: deps.Recorder, Writes: c.Writes}
	return c, nil
}

func (c *Controller) sync(ctx context.Context, w workload.Work[*appsv1.ReplicaSet, *corev1.Pod]) (queue.Result, error) {
	set := w.Owner
	var active, ending []*corev1.Pod
	for _, pod := range w.Own {
		switch {
		case workload.Active(pod):
			active = append(active, pod)
		case workload.Terminating(pod):
			ending = append(ending, pod)
		}
	}
	var due time.Duration
	var managing error
	if set.DeletionTimestamp == nil {
		due, managing = c.manage(ctx, w, active)
	}
	status, again := Status(set, active, len(ending), managing, c.deps.Clock.Now())
	if err := c.report(ctx, set, status); err != nil {
		return queue.Result{}, err
	}
	return queue.Result{Again: workload.Sooner(again, due)}, managing
}

// report writes a status if it is another one.
func (c *Controller) report(ctx context.Context, set *appsv1.ReplicaSet, status appsv1.ReplicaSetStatus) error {
	if c.Owners.Read != nil {
		status.TerminatingReplicas = nil // ReplicationControllers have no field for it
	}
	if equality.Semantic.DeepEqual(set.Status, status) {
		return nil
	}
	next := set.DeepCopy()
	next.Status = status
	_, err := c.Owners.Client(set.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{})
	return err
}

// manage creates or deletes what is missing or too much. The time is when more Pods may be created: those that failed at once are not replaced at
// once.
func (c *Controller) manage(ctx context.Context, w workload.Work[*appsv1.ReplicaSet, *corev1.Pod], active []*corev1.Pod) (time.Duration, error) {
	key, set, wanted := w.Key, w.Owner, 0
	if set.Spec.Replicas != nil {
		wanted = int(*set.Spec.Replicas)
	}
	object := c.object(set)
	if missing := wanted - len(active); missing > 0 {
		wait := c.failures.Wait(key, set, w.Own, c.deps.Clock.Now())
		if wait.Cause != nil {
			c.deps.Recorder.Event(object, corev1.EventTypeWarning, workload.Backoff, wait.Message())
		}
		ref := metav1.NewControllerRef(set, c.Owners.Kind)
		_, err := workload.SlowStart(min(missing-len(wait.Held), burst), func(int) error {
			_, err := c.control.Create(ctx, key, object, workload.NewPod(&set.Spec.Template, set, ref))
			return err
		})
		return wait.Left, err
	}
	extra := min(len(active)-wanted, burst)
	if extra <= 0 {
		return 0, nil
	}
	gone := workload.FirstToGo(active, c.related(set, active), c.deps.Clock.Now())[:extra]
	return 0, workload.Together(gone, func(pod *corev1.Pod) error {
		return c.control.Delete(ctx, key, object, pod)
	})
}

// related are the Pods of all sets with the same controller: the old and the new ones of a Deployment.
func (c *Controller) related(set *appsv1.ReplicaSet, own []*corev1.Pod) []*corev1.Pod {
	owner := workload.ControllerUID(set)
	if owner == "" {
		return own
	}
	var out []*corev1.Pod
	for _, other := range c.InNamespace(set.Namespace) {
		if workload.ControllerUID(other) != owner {
			continue
		}
		pods, err := workload.Owned[*corev1.Pod](c.deps.Pods.GetIndexer(), other.UID)
		if err != nil {
			return own
		}
		out = append(out, pods...)
	}
	return out
}

// Status is what to report of a set: it has active Pods, others are still ending, and managing them failed or not. The time
// is when another Pod will have been ready for long enough.
func Status(set *appsv1.ReplicaSet, active []*corev1.Pod, ending int, managing error, now time.Time) (appsv1.ReplicaSetStatus, time.Duration) {
	terminating := int32(ending)
	status := appsv1.ReplicaSetStatus{
		Replicas: int32(len(active)), TerminatingReplicas: &terminating, ObservedGeneration: set.Generation,
		Conditions: set.Status.Conditions,
	}
	template := labels.SelectorFromSet(set.Spec.Template.Labels)
	var again time.Duration
	for _, pod := range active {
		if template.Matches(labels.Set(pod.Labels)) {
			status.FullyLabeledReplicas++
		}
		if !workload.Ready(pod) {
			continue
		}
		status.ReadyReplicas++
		available, left := workload.Available(pod, set.Spec.MinReadySeconds, now)
		if available {
			status.AvailableReplicas++
		}
		again = workload.Sooner(again, left)
	}
	status.Conditions = failure(set, len(active), managing, now)
	return status, again
}

// failure are the conditions of a set after an attempt to manage its Pods.
func failure(set *appsv1.ReplicaSet, active int, managing error, now time.Time) []appsv1.ReplicaSetCondition {
	var out []appsv1.ReplicaSetCondition
	var known *appsv1.ReplicaSetCondition
	for i := range set.Status.Conditions {
		if set.Status.Conditions[i].Type == appsv1.ReplicaSetReplicaFailure {
			known = &set.Status.Conditions[i]
		} else {
			out = append(out, set.Status.Conditions[i])
		}
	}
	if managing == nil {
		return out
	}
	if known != nil {
		return append(out, *known)
	}
	reason := "FailedDelete"
	if set.Spec.Replicas != nil && active < int(*set.Spec.Replicas) {
		reason = "FailedCreate"
	}
	return append(out, appsv1.ReplicaSetCondition{
		Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue, Reason: reason, Message: managing.Error(),
		LastTransitionTime: metav1.NewTime(now),
	})
}
