package job

import (
	"context"
	"encoding/json"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/queue"
	"portal/internal/controllers/workload"
	"portal/internal/jobs"
)

// orphans are Pods that wait to be counted by a Job that does not count any more, or is gone.
type orphans struct {
	client     kubernetes.Interface
	jobs, pods cache.SharedIndexInformer
	queue      *queue.Queue
}

func newOrphans(deps Deps) (*orphans, error) {
	o := &orphans{client: deps.Client, jobs: deps.Jobs, pods: deps.Pods}
	o.queue = queue.New(queue.Options{Name: "job-orphans"}, o.sync)
	if _, err := deps.Jobs.AddEventHandler(membership.Handlers(o.jobChanged, o.abandon)); err != nil {
		return nil, err
	}
	_, err := deps.Pods.AddEventHandler(membership.Handlers(o.podChanged, func(*corev1.Pod) {}))
	return o, err
}

func (o *orphans) jobChanged(_, job *batchv1.Job) {
	if jobs.Finished(&job.Status) != nil {
		o.abandon(job)
	}
}

// abandon queues the Pods of a Job that does not count them any more.
func (o *orphans) abandon(job *batchv1.Job) {
	owned, _ := workload.Owned[*corev1.Pod](o.pods.GetIndexer(), job.UID) // the index exists
	for _, pod := range owned {
		if hasFinalizer(pod) {
			o.queue.Add(queue.KeyOf(pod))
		}
	}
}

func (o *orphans) podChanged(_, pod *corev1.Pod) {
	if hasFinalizer(pod) && !o.counted(pod) {
		o.queue.Add(queue.KeyOf(pod))
	}
}

// counted says that a Pod has a Job which will count it, as far as is known.
func (o *orphans) counted(pod *corev1.Pod) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil || owner.Kind != Kind.Kind {
		return false
	}
	obj, ok, err := o.jobs.GetIndexer().GetByKey(cache.NewObjectName(pod.Namespace, owner.Name).String())
	if !ok || err != nil {
		return false
	}
	job := obj.(*batchv1.Job)
	return job.UID == owner.UID && jobs.Finished(&job.Status) == nil
}

// sync releases a Pod that nobody will count.
func (o *orphans) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	obj, ok, err := o.pods.GetIndexer().GetByKey(key.String())
	if !ok || err != nil {
		return queue.Result{}, err
	}
	pod := obj.(*corev1.Pod)
	if !hasFinalizer(pod) {
		return queue.Result{}, nil
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		if owner.Kind != Kind.Kind {
			return queue.Result{}, nil
		}
		// The cache may not have it yet, or still have it.
		job, err := o.client.BatchV1().Jobs(pod.Namespace).Get(ctx, owner.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return queue.Result{}, err
		case job.UID != owner.UID:
		case managedByOther(job) || jobs.Finished(&job.Status) == nil:
			return queue.Result{}, nil
		}
	}
	_, err = release(ctx, o.client, pod)
	return queue.Result{}, err
}

// release takes the finalizer from a Pod that was counted, or need not be. It gives the Pod as it is then, or nil if it is gone.
func release(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) (*corev1.Pod, error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "$deleteFromPrimitiveList/finalizers": []string{batchv1.JobTrackingFinalizer},
	}})
	if err != nil {
		return nil, err
	}
	written, err := client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil, nil // another one may have its name
	}
	if err != nil {
		return nil, fmt.Errorf("releasing Pod %s: %w", pod.Name, err)
	}
	return written, nil
}
