// Package jobttl deletes Jobs some time after they have ended, if they say so.
package jobttl

import (
	"context"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	"portal/internal/jobs"
)

// Name is this controller's.
const Name = "ttl-after-finished"

// Deps are what the controller needs.
type Deps struct {
	Client  kubernetes.Interface
	Jobs    cache.SharedIndexInformer
	Clock   clock.PassiveClock
	Workers int
}

// Controller deletes Jobs.
type Controller struct {
	Deps
	lister batchlisters.JobLister
	queue  *queue.Queue
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{Deps: deps, lister: batchlisters.NewJobLister(deps.Jobs.GetIndexer())}
	c.queue = queue.New(queue.Options{Name: "job-ttl"}, c.sync)
	changed := func(obj any) {
		if job := obj.(*batchv1.Job); ends(job) {
			c.queue.Add(queue.Key{Namespace: job.Namespace, Name: job.Name})
		}
	}
	_, err := deps.Jobs.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: changed, UpdateFunc: func(_, obj any) { changed(obj) }})
	return c, err
}

// ends says that a Job has ended and has a time to live after that.
func ends(job *batchv1.Job) bool {
	return job.DeletionTimestamp == nil && job.Spec.TTLSecondsAfterFinished != nil && jobs.Finished(&job.Status) != nil
}

// left is how long a Job that has ended still lives.
func left(job *batchv1.Job, now time.Time) time.Duration {
	return jobs.Finished(&job.Status).LastTransitionTime.Add(time.Duration(*job.Spec.TTLSecondsAfterFinished) * time.Second).Sub(now)
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() { c.queue.Listed() }

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.queue.Run(ctx, max(c.Workers, 1))
	return nil
}

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	job, err := c.lister.Jobs(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if !ends(job) {
		return queue.Result{}, nil
	}
	if wait := left(job, c.Clock.Now()); wait > 0 {
		return queue.Result{Again: wait}, nil
	}
	// The time may have been changed a moment ago.
	job, err = c.Client.BatchV1().Jobs(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if !ends(job) {
		return queue.Result{}, nil
	}
	if wait := left(job, c.Clock.Now()); wait > 0 {
		return queue.Result{Again: wait}, nil
	}
	foreground := metav1.DeletePropagationForeground
	err = c.Client.BatchV1().Jobs(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{
		PropagationPolicy: &foreground, Preconditions: &metav1.Preconditions{UID: &job.UID, ResourceVersion: &job.ResourceVersion},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		err = nil // it is gone, or comes again as it is now
	}
	return queue.Result{}, err
}
