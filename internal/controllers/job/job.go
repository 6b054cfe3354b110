// Package job runs the Pods of Jobs until enough of them have succeeded, or too many have failed. What to do is decided by
// Decide, how Pods are counted by Report and Settle, from what there is; the rest here reads and writes.
package job

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
	"portal/internal/jobs"
)

// Name is this controller's.
const Name = "job"

// Kind is what owns the Pods.
var Kind = batchv1.SchemeGroupVersion.WithKind("Job")

// Deps are what the controller needs.
type Deps struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Pods are indexed by controller.
	Jobs, Pods cache.SharedIndexInformer
	Clock      clock.PassiveClock
	Workers    int
}

// Controller creates, counts and deletes Pods.
type Controller struct {
	workload.Reconciler[*batchv1.Job, *corev1.Pod]
	deps    Deps
	control workload.Pods
	orphans *orphans

	mu     sync.Mutex
	memory map[queue.Key]*memory
}

// memory is what is known of a Job beyond what is stored.
type memory struct {
	job      types.UID
	failures Failures

	mu sync.Mutex
	// released are Pods that have been counted, though the informer may not have delivered it.
	released map[types.UID]bool
}

// New makes the controller; Run starts it once the informers it was given have synced.
func New(deps Deps) (*Controller, error) {
	c := &Controller{deps: deps, memory: map[queue.Key]*memory{}}
	c.Owners = workload.Owners[*batchv1.Job]{
		Kind: Kind, Informer: deps.Jobs,
		Client: func(namespace string) workload.OwnerClient[*batchv1.Job] {
			return deps.Client.BatchV1().Jobs(namespace)
		},
		Selector: func(job *batchv1.Job) *metav1.LabelSelector { return job.Spec.Selector },
		Ignore:   func(job *batchv1.Job) bool { return managedByOther(job) || jobs.Finished(&job.Status) != nil },
		Gone:     c.forget,
	}
	c.Dependents = workload.PodsOf[*batchv1.Job](deps.Client, deps.Pods)
	c.Dependents.Finalizer = batchv1.JobTrackingFinalizer
	c.Workers, c.Sync = deps.Workers, c.sync
	err := c.Attach(Name)
	if err != nil {
		return nil, err
	}
	c.control = workload.Pods{Client: deps.Client, Recorder: deps.Recorder, Writes: c.Writes}
	c.orphans, err = newOrphans(deps)
	return c, err
}

func managedByOther(job *batchv1.Job) bool {
	return job.Spec.ManagedBy != nil && *job.Spec.ManagedBy != batchv1.JobControllerName
}

func hasFinalizer(pod *corev1.Pod) bool {
	return slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer)
}

// Listed says that the informers have seen everything.
func (c *Controller) Listed() {
	c.Reconciler.Listed()
	c.orphans.queue.Listed()
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	var done sync.WaitGroup
	done.Go(func() { c.orphans.queue.Run(ctx, 1) })
	err := c.Reconciler.Run(ctx)
	done.Wait()
	return err
}

// remember gives what is known of a Job.
func (c *Controller) remember(key queue.Key, job types.UID) *memory {
	c.mu.Lock()
	defer c.mu.Unlock()
	if known := c.memory[key]; known != nil && known.job == job {
		return known
	}
	c.memory[key] = &memory{job: job, released: map[types.UID]bool{}}
	return c.memory[key]
}

func (c *Controller) forget(key queue.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.memory, key)
}

func (c *Controller) sync(ctx context.Context, w workload.Work[*batchv1.Job, *corev1.Pod]) (queue.Result, error) {
	key, job, pods := w.Key, w.Owner, w.Own
	if job.Spec.Parallelism == nil {
		return queue.Result{}, nil // the API takes none such
	}
	if c.Writes.Behind(key) {
		return queue.Result{}, nil // some were adopted or released: the next sync sees them as they are then
	}
	known := c.remember(key, job.UID) // a key is synced by one worker at a time
	if !w.Stale {
		known.keep(pods) // of these the next sync may see an older state
	}
	state := State{Job: job, Pods: pods, Counted: known.released, Failures: known.failures, Now: c.deps.Clock.Now()}
	plan := Decide(state)
	done, failed := c.carryOut(ctx, key, job, plan, known)
	if err := c.record(ctx, key, Report(state, plan, done), job, plan, known); err != nil {
		return queue.Result{}, err
	}
	return queue.Result{Again: plan.Again}, failed
}

// keep forgets the Pods whose state in the informer is up to date.
func (m *memory) keep(pods []*corev1.Pod) {
	stale := map[types.UID]bool{}
	for _, pod := range pods {
		if m.released[pod.UID] && hasFinalizer(pod) {
			stale[pod.UID] = true
		}
	}
	m.released = stale
}

func (c *Controller) carryOut(ctx context.Context, key queue.Key, job *batchv1.Job, plan Plan, known *memory) (Done, error) {
	var deleted, ready, created atomic.Int32
	err := workload.Together(plan.Delete, func(pod *corev1.Pod) error {
		if !plan.Counted {
			if err := c.release(ctx, key, pod, known); err != nil {
				return err
			}
		}
		if err := c.control.Delete(ctx, key, job, pod); err != nil {
			return err
		}
		deleted.Add(1)
		if workload.Ready(pod) {
			ready.Add(1)
		}
		return nil
	})
	_, creating := workload.SlowStart(len(plan.Create), func(i int) error {
		made, err := c.control.Create(ctx, key, job, newPod(job, plan.Create[i]))
		if made != nil {
			created.Add(1)
		}
		return err
	})
	return Done{Created: created.Load(), Deleted: deleted.Load(), DeletedReady: ready.Load()}, errors.Join(err, creating)
}

// release takes the finalizer from a Pod, and remembers it.
func (c *Controller) release(ctx context.Context, key queue.Key, pod *corev1.Pod, known *memory) error {
	if !hasFinalizer(pod) {
		return nil
	}
	written, err := release(ctx, c.deps.Client, pod)
	if err != nil {
		return err
	}
	if written != nil {
		c.Writes.Wrote(key, written)
	}
	known.mu.Lock()
	defer known.mu.Unlock()
	known.released[pod.UID] = true
	return nil
}

// record writes the status, and counts the Pods that have ended.
func (c *Controller) record(ctx context.Context, key queue.Key, r Record, job *batchv1.Job, plan Plan, known *memory) error {
	job, err := c.report(ctx, key, job, r.Status)
	if err != nil {
		return err
	}
	known.failures = plan.Failures
	if r.Suspended {
		c.deps.Recorder.Event(job, corev1.EventTypeNormal, "Suspended", "Job suspended")
	} else if r.Resumed {
		c.deps.Recorder.Event(job, corev1.EventTypeNormal, "Resumed", "Job resumed")
	}
	released := map[types.UID]bool{}
	var mu sync.Mutex
	failed := workload.Together(r.Release, func(pod *corev1.Pod) error {
		if err := c.release(ctx, key, pod, known); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		released[pod.UID] = true
		return nil
	})
	end := r.Settle(released)
	if _, err := c.report(ctx, key, job, r.Status); err != nil {
		return errors.Join(err, failed)
	}
	switch {
	case end == nil:
	case end.Type == batchv1.JobComplete:
		c.deps.Recorder.Event(job, corev1.EventTypeNormal, "Completed", "Job completed")
	default:
		c.deps.Recorder.Event(job, corev1.EventTypeWarning, end.Reason, end.Message)
	}
	return failed
}

// report writes a status if it is another one, and gives the Job that has it.
func (c *Controller) report(ctx context.Context, key queue.Key, job *batchv1.Job, status batchv1.JobStatus) (*batchv1.Job, error) {
	if equality.Semantic.DeepEqual(job.Status, status) {
		return job, nil
	}
	next := job.DeepCopy()
	next.Status = *status.DeepCopy()
	written, err := c.UpdateStatus(ctx, key, next)
	if err != nil {
		return nil, fmt.Errorf("writing the status: %w", err)
	}
	return written, nil
}
