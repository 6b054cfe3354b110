package test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// TestJobs: Jobs complete, fail, are suspended and deleted with their Pods; CronJobs make them.
func TestJobs(t *testing.T) {
	t.Parallel()
	k, client := workloads(t)
	jobs := client.BatchV1().Jobs("default")
	create := func(name, image string, change func(*batchv1.JobSpec)) {
		t.Helper()
		job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name}}
		job.Spec.Template.Spec = corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: []corev1.Container{{Name: "c", Image: image}}}
		change(&job.Spec)
		if _, err := jobs.Create(t.Context(), job, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	ends := func(name, want string) {
		t.Helper()
		within(t, "Job "+name, func() error {
			job, err := jobs.Get(t.Context(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			got := fmt.Sprintf("%d %d", job.Status.Succeeded, job.Status.Failed)
			for _, c := range job.Status.Conditions {
				if c.Status == corev1.ConditionTrue && (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) {
					got += " " + string(c.Type) + " " + c.Reason
				}
			}
			if got != want {
				return fmt.Errorf("%s: %+v", got, job.Status)
			}
			return nil
		})
	}
	create("twelve", "done:1", func(s *batchv1.JobSpec) { s.Parallelism, s.Completions = ptr.To[int32](4), ptr.To[int32](12) })
	create("indexed", "done:1", func(s *batchv1.JobSpec) {
		s.Parallelism, s.Completions, s.CompletionMode = ptr.To[int32](2), ptr.To[int32](5), ptr.To(batchv1.IndexedCompletion)
	})
	create("fails", "fails:1", func(s *batchv1.JobSpec) { s.BackoffLimit = ptr.To[int32](0) })
	create("brief", "done:1", func(s *batchv1.JobSpec) { s.TTLSecondsAfterFinished = ptr.To[int32](0) })
	ends("twelve", "12 0 Complete CompletionsReached")
	ends("indexed", "5 0 Complete CompletionsReached")
	ends("fails", "0 1 Failed BackoffLimitExceeded")
	k.is("0-4", "get", "job", "indexed", "-o", "jsonpath={.status.completedIndexes}")
	within(t, "the brief Job goes", func() error {
		if out, err := k.try("get", "job", "brief"); err == nil {
			return errors.New(out)
		}
		return nil
	})
	for _, pod := range podsOf(t, client, "job-name=twelve") {
		if len(pod.Finalizers) > 0 {
			t.Errorf("Pod %s has finalizers %q", pod.Name, pod.Finalizers)
		}
	}

	create("long", "sleep:1", func(s *batchv1.JobSpec) { s.Parallelism, s.Completions = ptr.To[int32](2), ptr.To[int32](2) })
	running := func(n int) {
		t.Helper()
		within(t, fmt.Sprintf("%d Pods run", n), func() error {
			if got := len(podsOf(t, client, "job-name=long")); got != n {
				return fmt.Errorf("%d do", got)
			}
			return nil
		})
	}
	running(2)
	k.run("patch", "job", "long", "-p", `{"spec":{"suspend":true}}`)
	running(0)
	k.run("wait", "--for=condition=Suspended", "job/long", "--timeout=20s")
	k.run("patch", "job", "long", "-p", `{"spec":{"suspend":false}}`)
	running(2)
	if out, err := k.try("patch", "job", "long", "-p", `{"spec":{"completions":3}}`); err == nil || !strings.Contains(out, "spec.completions") {
		t.Errorf("other completions: %v\n%s", err, out)
	}
	k.run("delete", "job", "long", "--wait=true", "--timeout=30s")
	running(0)

	k.run("create", "cronjob", "tick", "--image=done:1", "--schedule=* * * * *")
	k.run("create", "job", "now", "--from=cronjob/tick")
	ends("now", "1 0 Complete CompletionsReached")
	if out := k.run("get", "cronjobs,jobs"); !strings.Contains(out, "* * * * *") || !strings.Contains(out, "Complete") {
		t.Errorf("kubectl get:\n%s", out)
	}
	if out, err := k.try("create", "cronjob", "bad", "--image=done:1", "--schedule=* * * *"); err == nil || !strings.Contains(out, "spec.schedule") {
		t.Errorf("no schedule: %v\n%s", err, out)
	}
}
