package life

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestRunsUntilDeleted(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a", "b")}, map[string]script{"b": {termTime: 3 * time.Second}}).until(minute)
	w.wantState("Running ready=True a:running b:running")
	if s := w.pod.Status; s.PodIP != "10.244.0.2" || s.HostIP != "192.0.2.1" || s.StartTime == nil || !s.StartTime.Time.Equal(epoch) || s.ObservedGeneration != 1 {
		t.Errorf("status %+v", s)
	}
	for _, kind := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.ContainersReady, corev1.PodScheduled} {
		if c := w.condition(kind); c.Status != corev1.ConditionTrue || !c.LastTransitionTime.Time.Equal(epoch) {
			t.Errorf("%s: %+v", kind, c)
		}
	}
	w.delete(30)
	w.until(10 * minute)
	w.wantState("Succeeded ready=False a:Completed(0) b:Completed(0)")
	w.want("0s sandbox", "0s a started", "0s b started", "1m0s event Killing", "1m0s event Killing", "1m0s a SIGTERM", "1m0s a ended", "1m0s b SIGTERM",
		"1m3s b ended", "1m3s sandbox stopped", "1m3s forgotten")
}

// TestBackoff: the first restart is immediate, later ones wait twice as long each, up to five minutes.
func TestBackoff(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, map[string]script{"a": {runs: []time.Duration{time.Second}, codes: []int32{1}}}).until(20 * minute)
	var starts []string
	for _, line := range w.log {
		if at, ok := strings.CutSuffix(line, " a started"); ok {
			starts = append(starts, at)
		}
	}
	want := "0s 1s 12s 33s 1m14s 2m35s 5m16s 10m17s 15m18s"
	if got := strings.Join(starts, " "); got != want {
		t.Errorf("starts at %s, want %s", got, want)
	}
	w.wantState("Running ready=False a:CrashLoopBackOff")
	c := w.pod.Status.ContainerStatuses[0]
	if c.RestartCount != 8 || c.LastTerminationState.Terminated == nil || c.LastTerminationState.Terminated.ExitCode != 1 {
		t.Errorf("%+v", c)
	}
	if n := strings.Count(strings.Join(w.log, "\n"), "event BackOff"); n != 8 {
		t.Errorf("%d events of back-off, want one for each of 8 waits", n)
	}
}

// TestBackoffReset: what ran for more than ten minutes is restarted immediately.
func TestBackoffReset(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, map[string]script{"a": {runs: []time.Duration{time.Second, time.Second, 11 * minute, time.Second}, codes: []int32{1}}}).until(12 * minute)
	w.want("0s sandbox", "0s a started", "1s a ended", "1s a started", "2s a ended", "2s event BackOff", "12s a started", "11m12s a ended", "11m12s a started",
		"11m13s a ended", "11m13s event BackOff", "11m23s a started", "11m24s a ended", "11m24s event BackOff", "11m44s a started", "11m45s a ended", "11m45s event BackOff")
}

func TestRestartPolicies(t *testing.T) {
	rule := corev1.ContainerRestartRule{Action: corev1.ContainerRestartRuleActionRestart, ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{Operator: corev1.ContainerRestartRuleOnExitCodesOpIn, Values: []int32{42}}}
	for _, c := range []struct {
		name   string
		policy corev1.RestartPolicy
		codes  []int32
		mend   func(*corev1.Container)
		want   string
	}{
		{"never, succeeds", corev1.RestartPolicyNever, []int32{0}, nil, "Succeeded ready=False a:Completed(0)"},
		{"never, fails", corev1.RestartPolicyNever, []int32{3}, nil, "Failed ready=False a:Error(3)"},
		{"on failure, succeeds", corev1.RestartPolicyOnFailure, []int32{0}, nil, "Succeeded ready=False a:Completed(0)"},
		{"on failure, succeeds at last", corev1.RestartPolicyOnFailure, []int32{1, 0}, nil, "Succeeded ready=False a:Completed(0)"},
		{"on failure, fails", corev1.RestartPolicyOnFailure, []int32{1}, nil, "Running ready=False a:CrashLoopBackOff"},
		{"always, succeeds", corev1.RestartPolicyAlways, []int32{0}, nil, "Running ready=False a:CrashLoopBackOff"},
		{"a container's own policy", corev1.RestartPolicyAlways, []int32{1}, func(c *corev1.Container) { c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyNever) }, "Failed ready=False a:Error(1)"},
		{"a rule for an exit code", corev1.RestartPolicyNever, []int32{42, 1}, func(c *corev1.Container) {
			c.RestartPolicy, c.RestartPolicyRules = ptr.To(corev1.ContainerRestartPolicyNever), []corev1.ContainerRestartRule{rule}
		}, "Failed ready=False a:Error(1)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := corev1.PodSpec{RestartPolicy: c.policy, Containers: named("a")}
			if c.mend != nil {
				c.mend(&spec.Containers[0])
			}
			w := newWorld(t, spec, map[string]script{"a": {runs: []time.Duration{time.Second}, codes: c.codes}}).until(5 * time.Second)
			w.wantState(c.want)
			if terminal(w.pod.Status.Phase) {
				w.until(time.Hour).wantState(c.want)
				if w.seen.Sandbox != SandboxStopped {
					t.Error("a Pod that is over keeps its sandbox")
				}
				if w.gone {
					t.Error("it was forgotten without being deleted")
				}
			}
		})
	}
}

func TestInitContainers(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{InitContainers: named("i", "j"), Containers: named("a")},
		map[string]script{"i": {runs: []time.Duration{time.Second}, codes: []int32{1, 0}}, "j": {runs: []time.Duration{time.Second}}})
	// Before anything runs, the first of them waits for the same as the others.
	for _, c := range New().Next(Input{Pod: w.pod, Now: w.now}).Status.InitContainerStatuses {
		if c.State.Waiting == nil || c.State.Waiting.Reason != "PodInitializing" {
			t.Errorf("before the start: %+v", c)
		}
	}
	w.until(0)
	w.wantState("Pending ready=False i:running j:PodInitializing a:PodInitializing")
	if w.pod.Status.InitContainerStatuses[0].Ready {
		t.Error("an init container that runs is ready")
	}
	if c := w.condition(corev1.PodInitialized); c.Status != corev1.ConditionFalse || c.Reason != "ContainersNotInitialized" || c.Message != "containers with incomplete status: [i j]" {
		t.Errorf("%+v", c)
	}
	w.until(minute)
	w.wantState("Running ready=True i:Completed(0) j:Completed(0) a:running")
	w.want("0s sandbox", "0s i started", "1s i ended", "1s i started", "2s i ended", "2s j started", "3s j ended", "3s a started")
}

func TestInitContainerFailsForGood(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: append(sidecars("s"), named("i")...), Containers: named("a")},
		map[string]script{"i": {runs: []time.Duration{time.Second}, codes: []int32{7}}}).until(minute)
	w.wantState("Failed ready=False s:Completed(0) i:Error(7) a:PodInitializing")
	w.want("0s sandbox", "0s s started", "0s i started", "1s i ended", "1s event Killing", "1s s SIGTERM", "1s s ended", "1s sandbox stopped")
}

// TestSidecars: they start in order, each when the one before has started; they end after the others, last first; and how they
// end does not count.
func TestSidecars(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: append(sidecars("s", "t"), named("i")...), Containers: named("a")}
	spec.InitContainers[0].StartupProbe = &corev1.Probe{}
	w := newWorld(t, spec, map[string]script{"i": {runs: []time.Duration{time.Second}}, "a": {runs: []time.Duration{10 * time.Second}}, "t": {termTime: time.Second, codes: []int32{143}}}).until(5 * time.Second)
	w.wantState("Pending ready=False s:running t:PodInitializing i:PodInitializing a:PodInitializing")
	if !slices.Contains(w.last.Probes, Probe{"s", "s-0", Startup}) {
		t.Error("the startup probe does not run")
	}
	w.seen.Probes[Probe{"s", "s-0", Startup}] = ProbeResult{Success: true}
	w.until(minute)
	w.wantState("Succeeded ready=False s:Completed(0) t:Error(143) i:Completed(0) a:Completed(0)")
	w.want("0s sandbox", "0s s started", "5s t started", "5s i started", "6s i ended", "6s a started", "16s a ended", "16s event Killing", "16s t SIGTERM", "17s t ended",
		"17s event Killing", "17s s SIGTERM", "17s s ended", "17s sandbox stopped")
}

// TestSidecarsEndLast on deletion too, and at the end of the grace period everything is killed.
func TestSidecarsEndLast(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{InitContainers: sidecars("s", "t"), Containers: named("a")}, map[string]script{"a": {termTime: 4 * time.Second}, "t": {ignoreTerm: true}}).until(time.Second)
	w.want("0s sandbox", "0s s started", "0s t started", "0s a started")
	w.delete(10)
	w.until(minute)
	w.want("1s event Killing", "1s a SIGTERM", "5s a ended", "5s event Killing", "5s t SIGTERM", "11s event Killing", "11s t SIGKILL", "11s t ended", "11s s SIGKILL", "11s s ended", "11s sandbox stopped", "11s forgotten")
}

func TestSidecarRestartsAlone(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: sidecars("s"), Containers: named("a")}, map[string]script{"s": {runs: []time.Duration{time.Second, time.Hour}}}).until(minute)
	w.wantState("Running ready=True s:running a:running")
	w.want("0s sandbox", "0s s started", "0s a started", "1s s ended", "1s s started")
}

func TestIgnoredSIGTERM(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, map[string]script{"a": {ignoreTerm: true}}).until(0)
	w.delete(30)
	w.until(5 * time.Second)
	w.delete(7) // sooner, from now
	w.until(minute)
	w.wantState("Failed ready=False a:Error(137)")
	w.want("0s sandbox", "0s a started", "0s event Killing", "0s a SIGTERM", "7s a SIGKILL", "7s a ended", "7s sandbox stopped", "7s forgotten")
}

// TestDeletionSeenLate: the grace period began when the API was asked, whenever that is seen.
func TestDeletionSeenLate(t *testing.T) {
	for _, c := range []struct {
		ago  time.Duration // that the API was asked
		want string        // when it is killed
	}{
		{0, "30s"}, {4 * time.Second, "30s"}, {10 * time.Second, "20s"}, {29 * time.Second, "2s"}, {time.Hour, "2s"},
	} {
		w := newWorld(t, corev1.PodSpec{Containers: named("a")}, map[string]script{"a": {ignoreTerm: true}}).until(0)
		w.delete(30)
		w.pod.DeletionTimestamp.Time = w.pod.DeletionTimestamp.Add(-c.ago)
		w.until(minute)
		w.want("0s sandbox", "0s a started", "0s event Killing", "0s a SIGTERM", c.want+" a SIGKILL", c.want+" a ended", c.want+" sandbox stopped", c.want+" forgotten")
	}
}

func TestForcedDeletion(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, map[string]script{"a": {ignoreTerm: true}}).until(0)
	w.delete(0)
	w.until(minute)
	w.want("0s sandbox", "0s a started", "0s event Killing", "0s a SIGKILL", "0s a ended", "0s sandbox stopped", "0s forgotten")
}

// TestLongGrace: a grace period that is longer than a time.Duration is a long one, also if the API server calculated with it wrongly.
func TestLongGrace(t *testing.T) {
	for _, grace := range []int64{9_223_372_036, 9_223_372_037, math.MaxInt64} {
		spec := corev1.PodSpec{Containers: named("a"), TerminationGracePeriodSeconds: &grace, ActiveDeadlineSeconds: ptr.To[int64](60)}
		w := newWorld(t, spec, map[string]script{"a": {ignoreTerm: true}}).until(2 * minute)
		w.want("0s sandbox", "0s a started", "1m0s event DeadlineExceeded", "1m0s event Killing", "1m0s a SIGTERM")

		spec.ActiveDeadlineSeconds = &grace
		w = newWorld(t, spec, map[string]script{"a": {ignoreTerm: true}}).until(minute)
		w.delete(grace)
		w.until(time.Hour)
		w.want("0s sandbox", "0s a started", "1m0s event Killing", "1m0s a SIGTERM")

		spec.Containers[0].LivenessProbe = &corev1.Probe{TerminationGracePeriodSeconds: &grace}
		w = newWorld(t, spec, map[string]script{"a": {ignoreTerm: true}}).until(minute)
		w.seen.Probes[Probe{"a", "a-0", Liveness}] = ProbeResult{}
		w.until(time.Hour)
		w.want("0s sandbox", "0s a started", "1m0s event Killing", "1m0s a SIGTERM")
	}
}

func TestPreStop(t *testing.T) {
	for _, c := range []struct {
		name  string
		hook  time.Duration
		fails bool
		want  []string
	}{
		{"in time", 4 * time.Second, false, []string{"0s a hook preStop=true", "4s a SIGTERM", "10s a SIGKILL", "10s a ended"}},
		{"fails", 4 * time.Second, true, []string{"0s a hook preStop=true", "4s event FailedPreStopHook", "4s a SIGTERM", "10s a SIGKILL", "10s a ended"}},
		{"takes it all", time.Hour, false, []string{"0s a hook preStop=true", "10s a SIGTERM", "12s a SIGKILL", "12s a ended"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := corev1.PodSpec{Containers: named("a")}
			spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{}}
			w := newWorld(t, spec, map[string]script{"a": {ignoreTerm: true, hook: c.hook, hookFails: c.fails}}).until(0)
			w.delete(10)
			w.until(minute)
			end := strings.Fields(c.want[len(c.want)-1])[0]
			w.want(append(append([]string{"0s sandbox", "0s a started", "0s event Killing"}, c.want...), end+" sandbox stopped", end+" forgotten")...)
		})
	}
}

func TestPostStart(t *testing.T) {
	spec := corev1.PodSpec{Containers: named("a")}
	spec.Containers[0].Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{}}
	w := newWorld(t, spec, map[string]script{"a": {hook: 3 * time.Second}}).until(time.Second)
	w.wantState("Running ready=False a:running")
	w.until(minute).wantState("Running ready=True a:running")

	w = newWorld(t, spec, map[string]script{"a": {hook: 3 * time.Second, hookFails: true, codes: []int32{143}}}).until(4 * time.Second)
	w.want("0s sandbox", "0s a started", "0s a hook preStop=false", "3s event FailedPostStartHook", "3s a SIGTERM", "3s a ended", "3s a started", "3s a hook preStop=false")
}

func TestProbes(t *testing.T) {
	spec := corev1.PodSpec{Containers: named("a"), TerminationGracePeriodSeconds: ptr.To[int64](5)}
	a := &spec.Containers[0]
	a.StartupProbe, a.LivenessProbe, a.ReadinessProbe = &corev1.Probe{}, &corev1.Probe{}, &corev1.Probe{}
	w := newWorld(t, spec, map[string]script{"a": {ignoreTerm: true}}).until(0)
	of := func(kind ProbeKind, run string) Probe { return Probe{"a", run, kind} }
	probes := func(want ...Probe) {
		t.Helper()
		if !slices.Equal(w.last.Probes, want) {
			t.Errorf("probes %v, want %v", w.last.Probes, want)
		}
	}
	probes(of(Startup, "a-0"))
	w.wantState("Running ready=False a:running")
	w.seen.Probes[of(Startup, "a-0")] = ProbeResult{Success: true}
	w.until(time.Second)
	probes(of(Liveness, "a-0"), of(Readiness, "a-0"))
	w.wantState("Running ready=False a:running")
	w.seen.Probes[of(Readiness, "a-0")] = ProbeResult{Success: true}
	w.until(2 * time.Second).wantState("Running ready=True a:running")
	if at := w.condition(corev1.PodReady).LastTransitionTime; !at.Time.Equal(epoch.Add(time.Second)) {
		t.Errorf("ready since %s", at)
	}
	w.log = nil
	w.seen.Probes[of(Liveness, "a-0")] = ProbeResult{Message: "no answer"}
	w.until(3 * time.Second)
	w.want("2s event Killing", "2s a SIGTERM")
	w.until(9 * time.Second)
	w.want("7s a SIGKILL", "7s a ended", "7s a started")
	probes(of(Startup, "a-1"))
	w.wantState("Running ready=False a:running")
	if c := w.pod.Status.ContainerStatuses[0]; c.RestartCount != 1 || c.LastTerminationState.Terminated.ExitCode != 137 {
		t.Errorf("%+v", c)
	}
}

func TestReadinessGates(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a"), ReadinessGates: []corev1.PodReadinessGate{{ConditionType: "example.com/ok"}}}, nil).until(0)
	if c := w.condition(corev1.PodReady); c.Status != corev1.ConditionFalse || c.Reason != "ReadinessGatesNotReady" {
		t.Errorf("%+v", c)
	}
	if c := w.condition(corev1.ContainersReady); c.Status != corev1.ConditionTrue {
		t.Errorf("%+v", c)
	}
	w.pod.Status.Conditions = append(w.pod.Status.Conditions, corev1.PodCondition{Type: "example.com/ok", Status: corev1.ConditionTrue})
	w.until(time.Second).wantState("Running ready=True a:running")
	if c := w.condition("example.com/ok"); c.Status != corev1.ConditionTrue {
		t.Error("somebody else's condition was removed")
	}
}

func TestStartFailures(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, map[string]script{"a": {startError: []string{"ErrImagePull", "ErrImagePull", "CreateContainerConfigError"}}}).until(0)
	w.wantState("Pending ready=False a:ErrImagePull")
	w.until(3 * time.Second).wantState("Pending ready=False a:ImagePullBackOff")
	w.until(10 * time.Second).wantState("Pending ready=False a:ErrImagePull")
	w.until(31 * time.Second).wantState("Pending ready=False a:CreateContainerConfigError")
	w.until(minute).wantState("Running ready=True a:running")
	w.want("0s sandbox", "0s a failed: ErrImagePull", "2s event BackOff", "10s a failed: ErrImagePull", "12s event BackOff", "30s a failed: CreateContainerConfigError", "34s a started")
}

func TestActiveDeadline(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a"), ActiveDeadlineSeconds: ptr.To[int64](20), TerminationGracePeriodSeconds: ptr.To[int64](5)}, map[string]script{"a": {ignoreTerm: true}}).until(minute)
	w.wantState("Failed ready=False a:Error(137)")
	if w.pod.Status.Reason != "DeadlineExceeded" {
		t.Errorf("reason %q", w.pod.Status.Reason)
	}
	w.want("0s sandbox", "0s a started", "20s event DeadlineExceeded", "20s event Killing", "20s a SIGTERM", "25s a SIGKILL", "25s a ended", "25s sandbox stopped")
}

// TestRejected: no container of the Pod is said to wait for anything, also when the node looks at it again.
func TestRejected(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a"), InitContainers: append(sidecars("s"), named("b")...)}, nil)
	for _, why := range []*Rejection{{"OutOfpods", "too many"}, nil} {
		d := w.life.Next(Input{Pod: w.pod, Observed: w.seen, Now: w.now, Reject: why})
		if len(d.Actions) != 0 || d.Status.Phase != corev1.PodFailed || len(d.Status.ContainerStatuses)+len(d.Status.InitContainerStatuses) != 0 {
			t.Errorf("%+v", d)
		}
		if d.Status.Reason != "OutOfpods" || d.Status.Message != "too many" {
			t.Errorf("reason %q: %q", d.Status.Reason, d.Status.Message)
		}
		w.pod = w.pod.DeepCopy()
		w.pod.Status = d.Status
	}
}

// TestEvicted: a Pod that takes too much has a moment to end, and has failed.
func TestEvicted(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a"), TerminationGracePeriodSeconds: ptr.To[int64](30)}, map[string]script{"a": {ignoreTerm: true}}).until(time.Second)
	w.evict = &Rejection{"Evicted", "it took all of the disk"}
	w.until(minute).wantState("Failed ready=False a:Error(137)")
	w.want("0s sandbox", "0s a started", "1s event Evicted", "1s event Killing", "1s a SIGTERM", "2s a SIGKILL", "2s a ended", "2s sandbox stopped")
	if s := w.pod.Status; s.Reason != "Evicted" || s.Message != "it took all of the disk" {
		t.Errorf("%s: %s", s.Reason, s.Message)
	}
	if c := w.condition(corev1.DisruptionTarget); c.Status != corev1.ConditionTrue || c.Reason != corev1.PodReasonTerminationByKubelet {
		t.Errorf("%+v", c)
	}
	// One that has ended by itself stays what it is.
	w = newWorld(t, corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, Containers: named("a")}, map[string]script{"a": {runs: []time.Duration{time.Second}}}).until(3 * time.Second)
	w.evict = &Rejection{"Evicted", "late"}
	w.until(minute).wantState("Succeeded ready=False a:Completed(0)")
}

// TestNewMemory: who takes over from an earlier process decides the same.
func TestNewMemory(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a", "b")}, map[string]script{"b": {runs: []time.Duration{time.Second}, codes: []int32{1}}}).until(3 * time.Second)
	w.log, w.life = nil, New()
	before := w.pod.Status.DeepCopy()
	w.until(4 * time.Second)
	w.want("3s event BackOff")
	if before.ContainerStatuses[0].State.Running == nil || w.state() != "Running ready=False a:running b:CrashLoopBackOff" {
		t.Error(w.state())
	}
	w.delete(5)
	w.until(4 * time.Second)
	w.life = New()
	w.until(minute)
	if !w.gone {
		t.Error("it is not forgotten")
	}
}

// TestTerminalStays: a Pod that failed is not run again by a process that remembers nothing, nor after the machine was restarted.
func TestTerminalStays(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a"), RestartPolicy: corev1.RestartPolicyNever}, map[string]script{"a": {runs: []time.Duration{time.Second}, codes: []int32{1}}}).until(3 * time.Second)
	w.wantState("Failed ready=False a:Error(1)")
	w.log, w.life = nil, New()
	w.seen.Runs, w.seen.Sandbox = map[string][]Run{}, SandboxNone
	w.until(minute).wantState("Failed ready=False a:Error(1)")
	w.want()
}

// TestSandboxLost: if its namespaces are gone, a Pod begins again with its init containers, and counts on.
func TestSandboxLost(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{InitContainers: named("i"), Containers: named("a")}, map[string]script{"i": {runs: []time.Duration{time.Second}}}).until(5 * time.Second)
	w.log = nil
	w.seen.Sandbox = SandboxStopped
	runs := w.seen.Runs["a"]
	runs[0].FinishedAt, runs[0].ExitCode = w.now, 137
	w.until(minute)
	w.want("5s sandbox", "5s i started", "6s i ended", "6s a started")
	w.wantState("Running ready=True i:Completed(0) a:running")
	if c := w.pod.Status.ContainerStatuses[0]; c.RestartCount != 1 || c.LastTerminationState.Terminated == nil {
		t.Errorf("%+v", c)
	}
}

// TestDrain: a deleted Pod that is an endpoint is asked to end only when it is out of the endpoints, and a while later, for those who
// learn of that later; but not much later, and not after its grace period.
func TestDrain(t *testing.T) {
	for _, c := range []struct {
		name  string
		grace int64
		out   time.Duration // after the deletion; 0: never
		hook  time.Duration
		want  time.Duration // of SIGTERM, after the deletion
	}{
		{"soon out", 30, 40 * time.Millisecond, 0, 540 * time.Millisecond},
		{"out after a while", 30, time.Second, 0, 3 * time.Second},
		{"never out", 30, 0, 0, 10 * time.Second},
		{"out too late", 30, 9 * time.Second, 0, 10 * time.Second},
		{"never out, short grace period", 4, 0, 0, 2 * time.Second},
		{"during a preStop hook", 30, 40 * time.Millisecond, 3 * time.Second, 3 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			spec := corev1.PodSpec{Containers: named("a")}
			if c.hook > 0 {
				spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{}}}
			}
			w := newWorld(t, spec, map[string]script{"a": {hook: c.hook}}).until(minute)
			w.delete(c.grace)
			w.seen.Drain.Endpoint = true
			if c.out > 0 {
				w.until(minute + c.out)
				w.seen.Drain.Out = w.now
			}
			w.until(10 * minute)
			if want := fmt.Sprintf("%s a SIGTERM", minute+c.want); !slices.Contains(w.log, want) {
				t.Errorf("without %q: %q", want, w.log)
			}
			if want := fmt.Sprintf("%s a ended", minute+c.want); !slices.Contains(w.log, want) {
				t.Errorf("without %q: %q", want, w.log)
			}
		})
	}
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, nil).until(minute)
	w.delete(0)
	w.seen.Drain.Endpoint = true
	if w.until(minute); !w.gone {
		t.Errorf("a forced deletion waits: %q", w.log)
	}
}

// TestDeletedBeforeStart: a Pod that is deleted before anything ran leaves without having run.
func TestDeletedBeforeStart(t *testing.T) {
	w := newWorld(t, corev1.PodSpec{Containers: named("a")}, nil)
	w.delete(30)
	w.until(minute)
	w.want("0s forgotten")
}
