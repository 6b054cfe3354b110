package controllers_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"portal/internal/controllers/job"
	"portal/internal/controllers/workload"
)

// lists counts the requests that list Pods.
type lists struct {
	next  http.RoundTripper
	count *atomic.Int32
}

func (l lists) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/pods") {
		l.count.Add(1)
	}
	return l.next.RoundTrip(r)
}

func (w *world) addJob(name string) *batchv1.Job {
	w.Helper()
	spec := template(name)
	spec.Spec.RestartPolicy = corev1.RestartPolicyNever
	made, err := w.client.BatchV1().Jobs(w.namespace).Create(w.ctx(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       batchv1.JobSpec{Completions: ptr.To[int32](5), Template: spec},
	}, metav1.CreateOptions{})
	w.must(err)
	return made
}

// TestPodsAreCountedOnce: the informer of Pods stays where it was before a Pod was counted and released. The write to it counts
// as lost after a while, so that the Pods are read from the API server once; then the old state is there again.
func TestPodsAreCountedOnce(t *testing.T) {
	w := newWorld(t)
	var listed atomic.Int32
	config := rest.CopyConfig(w.config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return lists{next, &listed} })
	client, err := kubernetes.NewForConfig(config)
	w.must(err)
	// These informers never run: they have what the test puts there.
	factory := informers.NewSharedInformerFactory(client, 0)
	jobs, pods := factory.Batch().V1().Jobs().Informer(), factory.Core().V1().Pods().Informer()
	w.must(pods.AddIndexers(cache.Indexers{workload.ByController: workload.IndexByController}))
	c, err := job.New(job.Deps{Client: client, Recorder: &record.FakeRecorder{}, Jobs: jobs, Pods: pods, Clock: clock.RealClock{}, Workers: 1})
	w.must(err)
	ctx, cancel := context.WithCancel(w.ctx())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	deliver := func(name string) *batchv1.Job {
		now, err := w.client.BatchV1().Jobs(w.namespace).Get(w.ctx(), name, metav1.GetOptions{})
		w.must(err)
		w.must(jobs.GetStore().Update(now))
		c.OwnerWrites.Saw(now)
		c.Add(now)
		return now
	}
	podOf := func(name string) *corev1.Pod {
		var first *corev1.Pod
		w.eventually(10*time.Second, func() string {
			list := w.podsWith("job-name=" + name)
			if len(list) == 0 {
				return "no Pod of " + name
			}
			first = &list[0]
			return ""
		})
		return first
	}
	w.addJob("counted")
	deliver("counted")
	pod := podOf("counted")
	pod.Status.Phase = corev1.PodSucceeded
	pod, err = w.client.CoreV1().Pods(w.namespace).UpdateStatus(w.ctx(), pod, metav1.UpdateOptions{})
	w.must(err)
	w.must(pods.GetStore().Update(pod))
	c.Writes.Saw(pod)
	counted := func() string {
		now := deliver("counted")
		if u := now.Status.UncountedTerminatedPods; now.Status.Succeeded != 1 || u == nil || len(u.Succeeded) > 0 {
			return fmt.Sprintf("%d succeeded, uncounted %v", now.Status.Succeeded, u)
		}
		return ""
	}
	w.eventually(10*time.Second, counted)
	w.eventually(10*time.Second, func() string {
		if listed.Load() == 0 {
			return "the Pods were not read from the API server"
		}
		return ""
	})
	for round := range 2 {
		deliver("counted")
		// There is one worker: when it has made the Pod of the next Job it is done with this one.
		next := fmt.Sprintf("next-%d", round)
		w.addJob(next)
		deliver(next)
		podOf(next)
		if wrong := counted(); wrong != "" {
			t.Fatalf("with an informer that is behind: %s", wrong)
		}
	}
}
