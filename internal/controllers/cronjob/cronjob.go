// Package cronjob makes Jobs when their CronJob's schedule is due, and deletes old ones. What is due is decided by Decide; the
// rest here reads and writes.
package cronjob

import (
	"context"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
)

// Name is this controller's.
const Name = "cronjob"

// Kind is what owns the Jobs.
var Kind = batchv1.SchemeGroupVersion.WithKind("CronJob")

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Jobs are indexed by controller.
	CronJobs, Jobs cache.SharedIndexInformer
	Clock          clock.PassiveClock
	Workers        int
}

// Controller creates and deletes Jobs.
type Controller struct {
	workload.Reconciler[*batchv1.CronJob, *batchv1.Job]
	deps Deps
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{deps: deps}
	c.Owners = workload.Owners[*batchv1.CronJob]{
		Kind: Kind, Informer: deps.CronJobs,
		Client: func(namespace string) workload.OwnerClient[*batchv1.CronJob] {
			return deps.Client.BatchV1().CronJobs(namespace)
		},
	}
	c.Dependents = workload.Dependents[*batchv1.CronJob, *batchv1.Job]{
		Informer: deps.Jobs,
		Client: func(namespace string) workload.DependentClient[*batchv1.Job] {
			return deps.Client.BatchV1().Jobs(namespace)
		},
		List: func(ctx context.Context, namespace string) (runtime.Object, error) {
			return deps.Client.BatchV1().Jobs(namespace).List(ctx, metav1.ListOptions{})
		},
	}
	c.Workers, c.Sync = deps.Workers, c.sync
	return c, c.Attach(Name)
}

func (c *Controller) sync(ctx context.Context, w workload.Work[*batchv1.CronJob, *batchv1.Job]) (queue.Result, error) {
	key, cron := w.Key, w.Owner
	unseen, err := c.unseen(ctx, cron, w.Own)
	if err != nil {
		return queue.Result{}, err
	}
	plan := Decide(State{Cron: cron, Jobs: append(unseen, w.Own...), Now: c.deps.Clock.Now()})
	for _, e := range plan.Events {
		c.deps.Recorder.Event(cron, e.Type, e.Reason, e.Message)
	}
	failed := c.carryOut(ctx, key, cron, &plan)
	if err := c.report(ctx, key, cron, plan.Status); err != nil {
		return queue.Result{}, err
	}
	return queue.Result{Again: plan.Again}, failed
}

// unseen are the Jobs of a CronJob that exist though the informer does not have them: it may be behind, and a Job that seems to be
// gone makes room for another one.
func (c *Controller) unseen(ctx context.Context, cron *batchv1.CronJob, known []*batchv1.Job) (out []*batchv1.Job, err error) {
	for _, ref := range cron.Status.Active {
		if slices.ContainsFunc(known, func(job *batchv1.Job) bool { return job.UID == ref.UID }) {
			continue
		}
		job, err := c.deps.Client.BatchV1().Jobs(cron.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, fmt.Errorf("looking for Job %s: %w", ref.Name, err)
		case job.UID == ref.UID && metav1.IsControlledBy(job, cron):
			out = append(out, job)
		}
	}
	return out, nil
}

func (c *Controller) carryOut(ctx context.Context, key queue.Key, cron *batchv1.CronJob, plan *Plan) error {
	for _, job := range plan.Remove {
		if err := c.delete(ctx, key, cron, job); err != nil {
			return err
		}
	}
	if plan.Create == nil {
		return nil
	}
	for _, job := range plan.Replace {
		if err := c.delete(ctx, key, cron, job); err != nil {
			return err
		}
	}
	made, err := c.deps.Client.BatchV1().Jobs(cron.Namespace).Create(ctx, plan.Create, metav1.CreateOptions{})
	switch {
	case err == nil:
		c.Writes.Wrote(key, made)
		c.deps.Recorder.Eventf(cron, corev1.EventTypeNormal, "SuccessfulCreate", "Created Job %s", made.Name)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err):
		// It was made before, and the status could not be written then; or somebody else has made one of this name.
		if made, err = c.deps.Client.BatchV1().Jobs(cron.Namespace).Get(ctx, plan.Create.Name, metav1.GetOptions{}); err != nil {
			return err
		}
		if !metav1.IsControlledBy(made, cron) {
			return nil
		}
	default:
		if ctx.Err() == nil {
			c.deps.Recorder.Eventf(cron, corev1.EventTypeWarning, "FailedCreate", "A Job could not be created: %v", err)
		}
		return fmt.Errorf("creating Job %s: %w", plan.Create.Name, err)
	}
	plan.Started(made)
	return nil
}

func (c *Controller) delete(ctx context.Context, key queue.Key, cron *batchv1.CronJob, job *batchv1.Job) error {
	uid, background := job.UID, metav1.DeletePropagationBackground
	err := c.deps.Client.BatchV1().Jobs(job.Namespace).Delete(ctx, job.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &uid}, PropagationPolicy: &background,
	})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil // it is gone
	case err == nil:
		c.Writes.Deleted(key, job)
		c.deps.Recorder.Eventf(cron, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted Job %s", job.Name)
		return nil
	case ctx.Err() == nil:
		c.deps.Recorder.Eventf(cron, corev1.EventTypeWarning, "FailedDelete", "Job %s could not be deleted: %v", job.Name, err)
	}
	return fmt.Errorf("deleting Job %s: %w", job.Name, err)
}

func (c *Controller) report(ctx context.Context, key queue.Key, cron *batchv1.CronJob, status batchv1.CronJobStatus) error {
	if equality.Semantic.DeepEqual(cron.Status, status) {
		return nil
	}
	next := cron.DeepCopy()
	next.Status = status
	_, err := c.UpdateStatus(ctx, key, next)
	return err
}
