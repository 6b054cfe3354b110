// Package statefulset keeps the Pods of StatefulSets: each has a number and keeps its name, they come and go in order, and an
// update goes from the last to the first. What to do is decided by Decide, from what there is; the rest here reads and writes.
package statefulset

import (
	"context"
	"encoding/json"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
	"portal/internal/controllers/writes"
)

// Name is this controller's.
const Name = "statefulset"

// Kind is what owns the Pods.
var Kind = appsv1.SchemeGroupVersion.WithKind("StatefulSet")

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Pods and Revisions are indexed by controller.
	Sets, Pods, Revisions cache.SharedIndexInformer
	Clock                 clock.PassiveClock
	Workers               int
}

// Controller creates and deletes Pods.
type Controller struct {
	workload.Reconciler[*appsv1.StatefulSet, *corev1.Pod]
	deps      Deps
	control   workload.Pods
	failures  workload.Failures
	revisions *writes.Tracker
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{deps: deps}
	c.Owners = workload.Owners[*appsv1.StatefulSet]{
		Kind: Kind, Informer: deps.Sets,
		Client: func(namespace string) workload.OwnerClient[*appsv1.StatefulSet] {
			return deps.Client.AppsV1().StatefulSets(namespace)
		},
		Selector: func(set *appsv1.StatefulSet) *metav1.LabelSelector { return set.Spec.Selector },
		Gone:     c.failures.Forget,
	}
	c.Dependents = workload.PodsOf[*appsv1.StatefulSet](deps.Client, deps.Pods)
	named := func(set *appsv1.StatefulSet, pod *corev1.Pod) bool { return Ordinal(set.Name, pod.Name) >= 0 }
	c.Dependents.Fit, c.Dependents.Concerns = named, named // a Pod that only has the name of one keeps it from being created
	c.Workers, c.Sync = deps.Workers, c.sync
	err := c.Attach(Name)
	if err != nil {
		return nil, err
	}
	c.control = workload.Pods{Client: deps.Client, Recorder: deps.Recorder, Writes: c.Writes}
	c.revisions, err = c.Track(deps.Revisions, nil)
	return c, err
}

type work = workload.Work[*appsv1.StatefulSet, *corev1.Pod]

func (c *Controller) sync(ctx context.Context, w work) (queue.Result, error) {
	set := w.Owner
	if set.Spec.Replicas == nil {
		return queue.Result{}, nil // the API takes none such
	}
	history := &workload.History{
		Client: c.deps.Client, Revisions: c.deps.Revisions, Kind: Kind, Owner: set, Selector: w.Selector, Template: &set.Spec.Template, Live: w.Live,
		Writes: c.revisions,
	}
	revisions, err := history.List(ctx)
	if err != nil {
		return queue.Result{}, err
	}
	update, collisions, err := history.Current(ctx, revisions, set.Status.CollisionCount)
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	current := update
	for _, r := range revisions {
		if r.Name == set.Status.CurrentRevision {
			current = r
		}
	}
	now := c.deps.Clock.Now()
	wait := c.failures.Wait(w.Key, set, w.Own, now)
	if wait.Cause != nil {
		c.deps.Recorder.Event(set, corev1.EventTypeWarning, workload.Backoff, wait.Message())
	}
	plan := Decide(State{Set: set, Pods: w.Own, Current: current.Name, Update: update.Name, Collisions: collisions, Held: wait.Held, Now: now})
	failed := c.carryOut(ctx, w.Key, set, plan, map[string]*appsv1.ControllerRevision{current.Name: current, update.Name: update})
	if err := c.report(ctx, w.Key, set, plan.Status); err != nil {
		return queue.Result{}, err
	}
	if failed != nil {
		return queue.Result{}, failed
	}
	used := map[string]bool{current.Name: true, update.Name: true}
	for _, pod := range w.Own {
		used[revisionOf(pod)] = true
	}
	return queue.Result{Again: workload.Sooner(plan.Again, wait.Left)}, history.Trim(ctx, revisions, set.Spec.RevisionHistoryLimit, used)
}

func (c *Controller) carryOut(ctx context.Context, key queue.Key, set *appsv1.StatefulSet, plan Plan, revisions map[string]*appsv1.ControllerRevision) error {
	for _, pod := range plan.Delete {
		if err := c.control.Delete(ctx, key, set, pod); err != nil {
			return err
		}
	}
	for _, pod := range plan.Relabel {
		if err := c.relabel(ctx, key, set, pod); err != nil {
			return err
		}
	}
	_, err := workload.SlowStart(len(plan.Create), func(i int) error {
		next := plan.Create[i]
		template, err := workload.TemplateOf(revisions[next.Revision])
		if err != nil {
			return err
		}
		pod := newPod(set, template, next.Ordinal, next.Revision)
		if err := c.claims(ctx, set, pod.Name); err != nil {
			return err
		}
		_, err = c.control.Create(ctx, key, set, pod)
		return err
	})
	return err
}

// relabel gives a Pod the labels of its identity back.
func (c *Controller) relabel(ctx context.Context, key queue.Key, set *appsv1.StatefulSet, pod *corev1.Pod) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "labels": identity(pod.Name, Ordinal(set.Name, pod.Name)),
	}})
	if err != nil {
		return err
	}
	written, err := c.deps.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	switch {
	case err == nil:
		c.Writes.Wrote(key, written)
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // it is gone
	default:
		return fmt.Errorf("labelling Pod %s: %w", pod.Name, err)
	}
	return nil
}

// claims creates the claims of a Pod that don't exist yet.
func (c *Controller) claims(ctx context.Context, set *appsv1.StatefulSet, pod string) error {
	for _, claim := range newClaims(set, pod) {
		_, err := c.deps.Client.CoreV1().PersistentVolumeClaims(set.Namespace).Create(ctx, claim, metav1.CreateOptions{})
		if err == nil || apierrors.IsAlreadyExists(err) {
			continue
		}
		if ctx.Err() == nil {
			c.deps.Recorder.Eventf(set, corev1.EventTypeWarning, "FailedCreate", "PersistentVolumeClaim %s of Pod %s could not be created: %v", claim.Name, pod, err)
		}
		return fmt.Errorf("creating PersistentVolumeClaim %s: %w", claim.Name, err)
	}
	return nil
}

func (c *Controller) report(ctx context.Context, key queue.Key, set *appsv1.StatefulSet, status appsv1.StatefulSetStatus) error {
	if equality.Semantic.DeepEqual(set.Status, status) {
		return nil
	}
	next := set.DeepCopy()
	next.Status = status
	_, err := c.UpdateStatus(ctx, key, next)
	return err
}
