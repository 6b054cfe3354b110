package job

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"portal/internal/jobs"
)

var now = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// world plays the API server and the nodes for one Job: it carries out what is decided.
type world struct {
	t        *testing.T
	job      *batchv1.Job
	pods     []*corev1.Pod
	failures Failures
	now      time.Time
	made     int
}

func newWorld(t *testing.T, change func(*batchv1.JobSpec)) *world {
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "j", UID: "u"}, Spec: batchv1.JobSpec{
		Parallelism: ptr.To[int32](1), Completions: ptr.To[int32](1), BackoffLimit: ptr.To[int32](6), PodReplacementPolicy: ptr.To(batchv1.TerminatingOrFailed),
	}}
	job.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	change(&job.Spec)
	return &world{t: t, job: job, now: now}
}

// sync decides once and carries it out.
func (w *world) sync() Plan {
	s := State{Job: w.job, Pods: w.pods, Failures: w.failures, Now: w.now}
	p := Decide(s)
	d := Done{Created: int32(len(p.Create)), Deleted: int32(len(p.Delete))}
	r := Report(s, p, d)
	for _, pod := range p.Delete {
		pod.DeletionTimestamp = &metav1.Time{Time: w.now}
		if !p.Counted {
			pod.Finalizers = nil
		}
	}
	w.job.Status, w.failures = *r.Status.DeepCopy(), p.Failures
	released := map[types.UID]bool{}
	for _, pod := range r.Release {
		pod.Finalizers = nil
		released[pod.UID] = true
	}
	r.Settle(released)
	w.job.Status = r.Status
	// A Pod that is deleted and has no finalizer is gone once it has stopped, which it has at the next sync.
	w.pods = slices.DeleteFunc(w.pods, func(pod *corev1.Pod) bool { return pod.DeletionTimestamp != nil && len(pod.Finalizers) == 0 })
	for _, next := range p.Create {
		pod := newPod(w.job, next)
		pod.Name = fmt.Sprintf("p%d", w.made)
		pod.UID = types.UID(pod.Name)
		pod.Status.Phase = corev1.PodRunning
		w.made++
		w.pods = append(w.pods, pod)
	}
	return p
}

// until syncs until nothing happens any more.
func (w *world) until() {
	for range 20 {
		before := w.job.Status.DeepCopy()
		p := w.sync()
		if len(p.Create)+len(p.Delete) == 0 && fmt.Sprint(before) == fmt.Sprint(w.job.Status.DeepCopy()) {
			return
		}
	}
	w.t.Fatalf("there is no end: %+v", w.job.Status)
}

func (w *world) running() (out []*corev1.Pod) {
	for _, pod := range w.pods {
		if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			out = append(out, pod)
		}
	}
	return out
}

// end ends a Pod with an exit code.
func (w *world) end(pod *corev1.Pod, code int32) {
	pod.Status.Phase = corev1.PodSucceeded
	if code != 0 {
		pod.Status.Phase = corev1.PodFailed
	}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{
		Terminated: &corev1.ContainerStateTerminated{ExitCode: code, FinishedAt: metav1.NewTime(w.now)},
	}}}
}

// want compares what the status says: active, succeeded, failed, and how the Job ended.
func (w *world) want(what string, active, succeeded, failed int32, end string) {
	w.t.Helper()
	s := &w.job.Status
	got := ""
	if c := jobs.Finished(s); c != nil {
		got = string(c.Type) + " " + c.Reason
	}
	if s.Active != active || s.Succeeded != succeeded || s.Failed != failed || got != end {
		w.t.Errorf("%s: active %d, succeeded %d, failed %d, %q; want %d, %d, %d, %q", what, s.Active, s.Succeeded, s.Failed, got, active, succeeded, failed, end)
	}
}

func TestCompletions(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { *s.Parallelism, *s.Completions = 2, 3 })
	w.until()
	w.want("start", 2, 0, 0, "")
	w.end(w.running()[0], 0)
	w.until()
	w.want("one has succeeded", 2, 1, 0, "")
	w.end(w.running()[0], 0)
	w.until()
	w.want("two have succeeded", 1, 2, 0, "")
	w.end(w.running()[0], 0)
	w.until()
	w.want("all have succeeded", 0, 3, 0, "Complete CompletionsReached")
	if w.job.Status.CompletionTime == nil || len(w.pods) != 3 || slices.ContainsFunc(w.pods, hasFinalizer) {
		t.Errorf("%+v with %d Pods", w.job.Status, len(w.pods))
	}
}

// Without completions, one success is enough and the others end by themselves.
func TestWorkQueue(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { *s.Parallelism, s.Completions = 3, nil })
	w.until()
	w.end(w.running()[0], 0)
	w.until()
	w.want("one has succeeded", 2, 1, 0, "")
	w.end(w.running()[0], 1)
	w.until()
	w.want("one has failed after that", 1, 1, 1, "")
	w.end(w.running()[0], 0)
	w.until()
	w.want("end", 0, 2, 1, "Complete CompletionsReached")
}

func TestBackOff(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { *s.BackoffLimit = 2 })
	w.until()
	for i, pause := range []time.Duration{10 * time.Second, 20 * time.Second} {
		w.end(w.running()[0], 1)
		w.until()
		if p := w.sync(); p.Again != pause || len(w.running()) != 0 {
			t.Errorf("failure %d: again in %v with %d Pods, want %v", i, p.Again, len(w.running()), pause)
		}
		w.now = w.now.Add(pause)
		w.until()
	}
	w.want("after two failures", 1, 0, 2, "")
	w.end(w.running()[0], 1)
	w.until()
	w.want("after three", 0, 0, 3, "Failed BackoffLimitExceeded")
}

func TestRestartsAreFailures(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) {
		*s.BackoffLimit = 3
		s.Template.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	})
	w.until()
	w.running()[0].Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 2}}
	w.until()
	w.want("two restarts", 1, 0, 0, "")
	w.running()[0].Status.ContainerStatuses[0].RestartCount = 3
	w.until()
	w.want("three", 0, 0, 1, "Failed BackoffLimitExceeded")
}

func TestDeadline(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { s.ActiveDeadlineSeconds = ptr.To[int64](60) })
	w.until()
	w.now = w.now.Add(59 * time.Second)
	if p := w.sync(); p.Again != time.Second {
		t.Errorf("again in %v", p.Again)
	}
	w.now = w.now.Add(time.Second)
	w.until()
	w.want("too late", 0, 0, 1, "Failed DeadlineExceeded")
}

func TestSuspend(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) {
		*s.Parallelism, *s.Completions, s.ActiveDeadlineSeconds = 2, 2, ptr.To[int64](60)
	})
	w.until()
	w.job.Spec.Suspend = ptr.To(true)
	w.until()
	w.want("suspended", 0, 0, 0, "")
	if jobs.Condition(&w.job.Status, batchv1.JobSuspended) == nil || w.job.Status.StartTime != nil || len(w.pods) != 0 {
		t.Errorf("%+v", w.job.Status)
	}
	w.now = w.now.Add(time.Hour)
	w.job.Spec.Suspend = ptr.To(false)
	w.until()
	w.want("resumed", 2, 0, 0, "")
	if jobs.Condition(&w.job.Status, batchv1.JobSuspended) != nil || !w.job.Status.StartTime.Time.Equal(w.now) {
		t.Errorf("%+v", w.job.Status)
	}
}

func indexed(s *batchv1.JobSpec, parallel, completions int32) {
	*s.Parallelism, *s.Completions, s.CompletionMode = parallel, completions, ptr.To(batchv1.IndexedCompletion)
}

func (w *world) at(index int) *corev1.Pod {
	w.t.Helper()
	for _, pod := range w.running() {
		if anyIndex(pod) == index {
			return pod
		}
	}
	w.t.Fatalf("index %d has no Pod", index)
	return nil
}

func TestIndexed(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { indexed(s, 3, 5) })
	w.until()
	if pod := w.at(2); pod.Spec.Hostname != "j-2" || pod.GenerateName != "j-2-" || pod.Labels[batchv1.JobCompletionIndexAnnotation] != "2" {
		t.Errorf("%+v", pod)
	}
	w.end(w.at(1), 0)
	w.end(w.at(2), 0)
	w.until()
	w.want("two have succeeded", 3, 2, 0, "")
	if got := w.job.Status.CompletedIndexes; got != "1,2" {
		t.Errorf("completed: %s", got)
	}
	w.end(w.at(0), 1)
	w.until()
	w.now = w.now.Add(time.Minute)
	w.until()
	for _, i := range []int{0, 3, 4} { // 0 again, in another Pod
		w.end(w.at(i), 0)
	}
	w.until()
	w.want("end", 0, 5, 1, "Complete CompletionsReached")
	if got := w.job.Status.CompletedIndexes; got != "0-4" {
		t.Errorf("completed: %s", got)
	}
}

// Of two Pods with an index one is too many, and so is one with an index that the Job does not have.
func TestDuplicateIndexes(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { indexed(s, 2, 2) })
	w.until()
	for _, index := range []int{1, 7} {
		pod := newPod(w.job, NewPod{Index: index})
		pod.Name, pod.UID, pod.Status.Phase = fmt.Sprint("x", index), types.UID(fmt.Sprint("x", index)), corev1.PodPending
		w.pods = append(w.pods, pod)
	}
	p := w.sync()
	if len(p.Delete) != 2 || !slices.ContainsFunc(p.Delete, func(pod *corev1.Pod) bool { return pod.Name == "x7" }) {
		t.Errorf("deleted: %v", p.Delete)
	}
	w.until()
	w.want("after that", 2, 0, 0, "")
}

func TestLimitForEachIndex(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) {
		indexed(s, 3, 3)
		s.BackoffLimitPerIndex, *s.BackoffLimit = ptr.To[int32](1), 1<<30
	})
	w.until()
	w.end(w.at(0), 1)
	w.end(w.at(1), 0)
	w.until()
	w.now = w.now.Add(10 * time.Second)
	w.until()
	if got := annotation(w.at(0), batchv1.JobIndexFailureCountAnnotation); got != 1 {
		t.Errorf("the second try knows of %d failures", got)
	}
	w.end(w.at(0), 1)
	w.until()
	if got := *w.job.Status.FailedIndexes; got != "0" || jobs.Finished(&w.job.Status) != nil {
		t.Errorf("failed indexes %q, %+v", got, w.job.Status)
	}
	w.end(w.at(2), 0)
	w.until()
	w.want("end", 0, 2, 2, "Failed FailedIndexes")
	if w.job.Status.CompletedIndexes != "1,2" {
		t.Errorf("completed %s", w.job.Status.CompletedIndexes)
	}
}

func TestFailurePolicy(t *testing.T) {
	policy := &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{
		{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
			Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: []int32{42},
		}},
		{Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{
			{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue},
		}},
	}}
	w := newWorld(t, func(s *batchv1.JobSpec) {
		s.PodFailurePolicy, *s.BackoffLimit, s.PodReplacementPolicy = policy, 0, ptr.To(batchv1.Failed)
	})
	w.until()
	pod := w.running()[0]
	w.end(pod, 1)
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}
	w.until()
	w.now = w.now.Add(time.Minute)
	w.until()
	w.want("a disruption is ignored", 1, 0, 0, "")
	w.end(w.running()[0], 42)
	w.until()
	w.want("42", 0, 0, 1, "Failed PodFailurePolicy")
}

func TestSuccessPolicy(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) {
		indexed(s, 4, 4)
		s.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{
			{SucceededIndexes: ptr.To("0,2-3"), SucceededCount: ptr.To[int32](2)}, {SucceededIndexes: ptr.To("1")},
		}}
	})
	w.until()
	w.end(w.at(0), 0)
	w.until()
	w.want("one of two", 3, 1, 0, "")
	w.end(w.at(3), 0)
	w.until()
	w.want("two of two", 0, 2, 0, "Complete SuccessPolicy")
}

// With the policy Failed a Pod that is being deleted has to end before it is replaced.
func TestReplacement(t *testing.T) {
	for policy, replaced := range map[batchv1.PodReplacementPolicy]bool{batchv1.Failed: false, batchv1.TerminatingOrFailed: true} {
		w := newWorld(t, func(s *batchv1.JobSpec) { s.PodReplacementPolicy = &policy })
		w.until()
		w.running()[0].DeletionTimestamp = &metav1.Time{Time: w.now.Add(-time.Hour)}
		if p := w.sync(); (len(p.Create) == 1) != replaced {
			t.Errorf("%s: %d are created", policy, len(p.Create))
		}
	}
}

// A status that could not be written is not counted twice, nor a Pod whose old state is seen again.
func TestCountingTwice(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { *s.Parallelism, *s.Completions = 2, 4 })
	w.until()
	w.end(w.running()[0], 0)
	stale := w.pods[0].DeepCopy()
	s := State{Job: w.job, Pods: w.pods, Now: w.now}
	first := Report(s, Decide(s), Done{})
	if len(first.Status.UncountedTerminatedPods.Succeeded) != 1 || first.Status.Succeeded != 0 || len(first.Release) != 1 {
		t.Fatalf("%+v", first)
	}
	// The status is written, then the process ends: the next one finds the Pod in the list.
	w.job.Status = first.Status
	w.until()
	w.want("another process goes on", 2, 1, 0, "")
	s = State{Job: w.job, Pods: append(w.pods[1:], stale), Counted: map[types.UID]bool{stale.UID: true}, Now: w.now}
	if again := Report(s, Decide(s), Done{}); again.Status.Succeeded != 1 || len(again.Release) != 0 {
		t.Errorf("an old state of the Pod is counted: %+v", again.Status)
	}
}

func TestFailuresAfterSuccess(t *testing.T) {
	ended := func(second int) *corev1.Pod {
		w := world{now: now.Add(time.Duration(second) * time.Second)}
		pod := &corev1.Pod{}
		w.end(pod, 1)
		return pod
	}
	f := Failures{Count: 3, Last: now}.after([]*corev1.Pod{ended(10)}, []*corev1.Pod{ended(5), ended(12), ended(15)})
	if f.Count != 2 || !f.Last.Equal(now.Add(15*time.Second)) {
		t.Errorf("%+v", f)
	}
	if wait := (Failures{Count: 30, Last: now}).wait(now); wait != maxBackOff {
		t.Errorf("after many failures: %v", wait)
	}
}

// TestLargeNumbers: numbers that the API takes and that overflow when they are multiplied or added.
func TestLargeNumbers(t *testing.T) {
	w := newWorld(t, func(s *batchv1.JobSpec) { s.ActiveDeadlineSeconds = ptr.To[int64](math.MaxInt64) })
	w.job.Status.StartTime = &metav1.Time{Time: now.Add(-time.Hour)}
	if p := w.sync(); p.End != nil || p.Again <= 0 {
		t.Errorf("a deadline that is never: ends with %+v, again in %s", p.End, p.Again)
	}
	w = newWorld(t, func(s *batchv1.JobSpec) { s.Template.Spec.RestartPolicy = corev1.RestartPolicyOnFailure })
	w.sync()
	w.pods[0].Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: math.MaxInt32}, {RestartCount: math.MaxInt32}}
	if p := w.sync(); p.End == nil || p.End.Reason != batchv1.JobReasonBackoffLimitExceeded {
		t.Errorf("restarts without number: %+v", p.End)
	}
	failed := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		batchv1.JobIndexFailureCountAnnotation: "2147483647", batchv1.JobIndexIgnoredFailureCountAnnotation: "2147483647",
	}}}
	if wait := (Failures{Count: allFailures(failed) + 1, Last: now}).wait(now); wait != maxBackOff {
		t.Errorf("after failures without number: %s", wait)
	}
	if next := annotation(failed, batchv1.JobIndexFailureCountAnnotation) + 1; next < 0 {
		t.Errorf("the next Pod has had %d failures", next)
	}
	forever := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: now}, DeletionGracePeriodSeconds: ptr.To[int64](math.MaxInt64)}}
	if end := endOf(forever); end.After(now) {
		t.Errorf("a Pod ended at %s, after its deletion", end)
	}
}
