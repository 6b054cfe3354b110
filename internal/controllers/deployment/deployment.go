// Package deployment rolls out Deployments: it makes a ReplicaSet for each template and moves Pods from the old ones to the
// newest, as the strategy says. What to do is decided by Decide, from what there is; the rest here reads and writes.
package deployment

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
)

// Name is this controller's.
const Name = "deployment"

// Kind is what owns the ReplicaSets.
var Kind = appsv1.SchemeGroupVersion.WithKind("Deployment")

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Sets and Pods are indexed by controller.
	Deployments, Sets, Pods cache.SharedIndexInformer
	Clock                   clock.PassiveClock
	Workers                 int
}

// Controller writes ReplicaSets.
type Controller struct {
	workload.Reconciler[*appsv1.Deployment, *appsv1.ReplicaSet]
	deps Deps
	sets appslisters.ReplicaSetLister
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{deps: deps, sets: appslisters.NewReplicaSetLister(deps.Sets.GetIndexer())}
	c.Owners = workload.Owners[*appsv1.Deployment]{
		Kind: Kind, Informer: deps.Deployments,
		Client: func(namespace string) workload.OwnerClient[*appsv1.Deployment] {
			return deps.Client.AppsV1().Deployments(namespace)
		},
		Selector: func(d *appsv1.Deployment) *metav1.LabelSelector { return d.Spec.Selector },
	}
	c.Dependents = workload.Dependents[*appsv1.Deployment, *appsv1.ReplicaSet]{
		Informer: deps.Sets,
		Client: func(namespace string) workload.DependentClient[*appsv1.ReplicaSet] {
			return deps.Client.AppsV1().ReplicaSets(namespace)
		},
		List: func(ctx context.Context, namespace string) (runtime.Object, error) {
			return deps.Client.AppsV1().ReplicaSets(namespace).List(ctx, metav1.ListOptions{})
		},
	}
	c.Workers, c.Sync = deps.Workers, c.sync
	if err := c.Attach(Name); err != nil {
		return nil, err
	}
	_, err := deps.Pods.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		if gone := membership.Deleted[*corev1.Pod](obj); gone != nil {
			c.podGone(gone)
		}
	}, UpdateFunc: func(old, obj any) {
		// A Pod that ends while it is being deleted is one less to wait for.
		if pod := obj.(*corev1.Pod); workload.Finished(pod) && !workload.Finished(old.(*corev1.Pod)) {
			c.podGone(pod)
		}
	}})
	return c, err
}

// podGone wakes a Deployment that waits for its last old Pod.
func (c *Controller) podGone(pod *corev1.Pod) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || owner.Kind != "ReplicaSet" {
		return
	}
	set, err := c.sets.ReplicaSets(pod.Namespace).Get(owner.Name)
	if err != nil {
		return
	}
	owner = metav1.GetControllerOfNoCopy(set)
	if owner == nil {
		return
	}
	if d, ok := c.Cached(queue.Key{Namespace: pod.Namespace, Name: owner.Name}); ok && d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType {
		c.Add(d)
	}
}

func (c *Controller) sync(ctx context.Context, w workload.Work[*appsv1.Deployment, *appsv1.ReplicaSet]) (queue.Result, error) {
	if w.Owner.Spec.Replicas == nil {
		return queue.Result{}, nil // the API takes none such
	}
	plan, err := Decide(State{Deployment: w.Owner, Sets: w.Own, Pods: c.running(w.Own), Now: c.deps.Clock.Now()})
	if err != nil {
		return queue.Result{}, err
	}
	return queue.Result{Again: plan.Again}, c.carryOut(ctx, w.Key, w.Owner, w.Own, plan)
}

// running counts the Pods of each set that have not ended, those that are being deleted included.
func (c *Controller) running(sets []*appsv1.ReplicaSet) map[types.UID]int {
	out := map[types.UID]int{}
	for _, set := range sets {
		pods, _ := workload.Owned[*corev1.Pod](c.deps.Pods.GetIndexer(), set.UID) // it fails without the index alone
		for _, pod := range pods {
			if !workload.Finished(pod) {
				out[set.UID]++
			}
		}
	}
	return out
}

func (c *Controller) carryOut(ctx context.Context, key queue.Key, d *appsv1.Deployment, sets []*appsv1.ReplicaSet, plan Plan) error {
	if plan.Create != nil {
		if err := c.create(ctx, key, d, plan); err != nil {
			return err
		}
	}
	for _, next := range plan.Update {
		if err := c.update(ctx, key, d, sets, next); err != nil {
			return err
		}
	}
	client := c.deps.Client.AppsV1().ReplicaSets(d.Namespace)
	for _, set := range plan.Delete {
		uid := set.UID
		err := client.Delete(ctx, set.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("deleting the old ReplicaSet %s: %w", set.Name, err)
		}
		c.Writes.Deleted(key, set)
	}
	return c.report(ctx, key, d, plan.Status, plan.Revision)
}

func (c *Controller) create(ctx context.Context, key queue.Key, d *appsv1.Deployment, plan Plan) error {
	client := c.deps.Client.AppsV1().ReplicaSets(d.Namespace)
	made, err := client.Create(ctx, plan.Create, metav1.CreateOptions{})
	switch {
	case err == nil:
		c.Writes.Wrote(key, made)
		if *made.Spec.Replicas > 0 {
			c.deps.Recorder.Eventf(d, corev1.EventTypeNormal, "ScalingReplicaSet", "Scaled up ReplicaSet %s from 0 to %d", made.Name, *made.Spec.Replicas)
		}
		return nil
	case apierrors.IsAlreadyExists(err):
		return c.collided(ctx, key, d, plan.Create.Name, err)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	}
	message := fmt.Sprintf("ReplicaSet %s could not be created: %v", plan.Create.Name, err)
	if ctx.Err() == nil {
		c.deps.Recorder.Event(d, corev1.EventTypeWarning, reasonFailed, message)
	}
	if hasDeadline(d) {
		status := d.Status.DeepCopy()
		setCondition(status, progressing(corev1.ConditionFalse, reasonFailed, message), c.deps.Clock.Now())
		if reported := c.report(ctx, key, d, *status, ""); reported != nil {
			return reported
		}
	}
	return err
}

// collided is for a name that is taken. If the set is another one than it should be, the next name is tried.
func (c *Controller) collided(ctx context.Context, key queue.Key, d *appsv1.Deployment, name string, err error) error {
	taken, live := c.deps.Client.AppsV1().ReplicaSets(d.Namespace).Get(ctx, name, metav1.GetOptions{})
	if live != nil {
		return live
	}
	if workload.ControllerUID(taken) == d.UID && sameTemplate(d, taken) {
		c.Writes.Wrote(key, taken) // the informer is behind
		return err
	}
	status := d.Status.DeepCopy()
	if status.CollisionCount == nil {
		status.CollisionCount = new(int32)
	}
	*status.CollisionCount++
	if reported := c.report(ctx, key, d, *status, ""); reported != nil {
		return reported
	}
	return err
}

func (c *Controller) update(ctx context.Context, key queue.Key, d *appsv1.Deployment, sets []*appsv1.ReplicaSet, next *appsv1.ReplicaSet) error {
	written, err := c.deps.Client.AppsV1().ReplicaSets(d.Namespace).Update(ctx, next, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("scaling ReplicaSet %s: %w", next.Name, err)
	}
	c.Writes.Wrote(key, written)
	for _, set := range sets {
		if set.UID != next.UID || set.Spec.Replicas == nil || *set.Spec.Replicas == *next.Spec.Replicas {
			continue
		}
		way := "up"
		if *next.Spec.Replicas < *set.Spec.Replicas {
			way = "down"
		}
		c.deps.Recorder.Eventf(d, corev1.EventTypeNormal, "ScalingReplicaSet", "Scaled %s ReplicaSet %s from %d to %d", way, set.Name,
			*set.Spec.Replicas, *next.Spec.Replicas)
	}
	return nil
}

// report writes status and revision, if they are new.
func (c *Controller) report(ctx context.Context, key queue.Key, d *appsv1.Deployment, status appsv1.DeploymentStatus, revision string) error {
	next := d.DeepCopy()
	next.Status = status
	if revision != "" {
		if next.Annotations == nil {
			next.Annotations = map[string]string{}
		}
		next.Annotations[RevisionAnnotation] = revision
	}
	if equality.Semantic.DeepEqual(d.Status, next.Status) && equality.Semantic.DeepEqual(d.Annotations, next.Annotations) {
		return nil
	}
	_, err := c.UpdateStatus(ctx, key, next)
	return err
}
