package workload

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"portal/internal/controllers/queue"
	"portal/internal/controllers/writes"
)

// NewPod is a Pod from a template. It has no name yet, but one begins like its owner's.
func NewPod(template *corev1.PodTemplateSpec, owner metav1.Object, ref *metav1.OwnerReference) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: owner.GetNamespace(), GenerateName: owner.GetName() + "-",
			Labels: maps.Clone(template.Labels), Annotations: maps.Clone(template.Annotations),
			Finalizers: slices.Clone(template.Finalizers), OwnerReferences: []metav1.OwnerReference{*ref},
		},
		Spec: *template.Spec.DeepCopy(),
	}
}

// Pods creates and deletes Pods, and tells people with Events.
type Pods struct {
	Client   kubernetes.Interface
	Recorder record.EventRecorder
	// Writes tracks what was written.
	Writes *writes.Tracker
}

// Create creates a Pod for an owner. In a namespace that is being deleted it does nothing and gives none.
func (p Pods) Create(ctx context.Context, key queue.Key, owner runtime.Object, pod *corev1.Pod) (*corev1.Pod, error) {
	made, err := p.Client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
	switch {
	case err == nil:
		p.Writes.Wrote(key, made)
		p.Recorder.Eventf(owner, corev1.EventTypeNormal, "SuccessfulCreate", "Created Pod %s", made.Name)
		return made, nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil, nil
	case ctx.Err() == nil && !apierrors.IsAlreadyExists(err):
		p.Recorder.Eventf(owner, corev1.EventTypeWarning, "FailedCreate", "A Pod could not be created: %v", err)
	}
	return nil, fmt.Errorf("creating a Pod: %w", err)
}

// Delete deletes one Pod of an owner, if it is still the same one.
func (p Pods) Delete(ctx context.Context, key queue.Key, owner runtime.Object, pod *corev1.Pod) error {
	uid := pod.UID
	err := p.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // it is gone
		p.Writes.Deleted(key, pod)
		return nil
	case err == nil:
		p.Writes.Deleted(key, pod)
		p.Recorder.Eventf(owner, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted Pod %s", pod.Name)
		return nil
	case ctx.Err() == nil:
		p.Recorder.Eventf(owner, corev1.EventTypeWarning, "FailedDelete", "Pod %s could not be deleted: %v", pod.Name, err)
	}
	return fmt.Errorf("deleting Pod %s: %w", pod.Name, err)
}

// MaxBatch is how many Pods are created at a time.
const MaxBatch = 500

// SlowStart does something n times: once, then twice at a time, then four times, as long as nothing fails. What fails because
// of a quota then fails once, and not a thousand times. It gives how often it succeeded. No more than MaxBatch are under way
// at a time.
func SlowStart(n int, do func(i int) error) (int, error) {
	done := 0
	for size := 1; done < n; size *= 2 {
		size = min(size, n-done, MaxBatch)
		errs := parallel(size, func(i int) error { return do(done + i) })
		for _, err := range errs {
			if err == nil {
				done++
			}
		}
		if err := errors.Join(errs...); err != nil {
			return done, err
		}
	}
	return done, nil
}

// Together does something for each, all at a time.
func Together[T any](each []T, do func(T) error) error {
	return errors.Join(parallel(len(each), func(i int) error { return do(each[i]) })...)
}

// parallel does something n times at a time. If one panics it does so as well, when all have ended: in the goroutine of the
// caller somebody can recover from it.
func parallel(n int, do func(i int) error) []error {
	errs, panics := make([]error, n), make(chan any, n)
	var wait sync.WaitGroup
	for i := range n {
		wait.Go(func() {
			defer func() {
				if p := recover(); p != nil {
					panics <- fmt.Sprintf("%v\n%s", p, debug.Stack())
				}
			}()
			errs[i] = do(i)
		})
	}
	wait.Wait()
	select {
	case p := <-panics:
		panic(p)
	default:
	}
	return errs
}
