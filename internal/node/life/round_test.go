package life

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// restartsAll has all containers start again when one ends with 42.
func restartsAll(c *corev1.Container) {
	if c.RestartPolicy == nil {
		c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyNever)
	}
	c.RestartPolicyRules = []corev1.ContainerRestartRule{{
		Action:    corev1.ContainerRestartRuleActionRestartAllContainers,
		ExitCodes: &corev1.ContainerRestartRuleOnExitCodes{Operator: corev1.ContainerRestartRuleOnExitCodesOpIn, Values: []int32{42}},
	}}
}

func (w *world) wantCounts(want map[string]int32) {
	w.t.Helper()
	for _, list := range [][]corev1.ContainerStatus{w.pod.Status.InitContainerStatuses, w.pod.Status.ContainerStatuses} {
		for _, c := range list {
			if c.RestartCount != want[c.Name] {
				w.t.Errorf("%s was restarted %d times, want %d", c.Name, c.RestartCount, want[c.Name])
			}
		}
	}
}

// TestRestartAll: when a main container ends so, the others are killed without grace and hooks, and the Pod begins again with its init
// containers, in its sandbox. Those that had ended for good run again, too.
func TestRestartAll(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: append(named("i"), sidecars("s")...), Containers: named("a", "b", "c")}
	restartsAll(&spec.Containers[0])
	spec.Containers[1].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{}}
	w := newWorld(t, spec, map[string]script{
		"i": {runs: []time.Duration{time.Second, 5 * time.Second}},
		"a": {runs: []time.Duration{10 * time.Second, time.Hour}, codes: []int32{42, 0}},
		"b": {ignoreTerm: true}, "c": {runs: []time.Duration{time.Second, time.Hour}},
	}).until(5 * time.Second)
	w.want("0s sandbox", "0s i started", "1s i ended", "1s s started", "1s a started", "1s b started", "1s c started", "2s c ended")
	if c := w.condition(corev1.AllContainersRestarting); c.Status != corev1.ConditionFalse {
		t.Errorf("before: %+v", c)
	}
	w.until(12 * time.Second)
	w.want("11s a ended", "11s event Killing", "11s event Killing", "11s s SIGKILL", "11s s ended", "11s b SIGKILL", "11s b ended", "11s i started")
	w.wantState("Running ready=False i:running s:PodInitializing a:PodInitializing b:PodInitializing c:PodInitializing")
	if c := w.condition(corev1.PodInitialized); c.Status != corev1.ConditionFalse {
		t.Errorf("while init containers run again: %+v", c)
	}
	if last := w.pod.Status.ContainerStatuses[0].LastTerminationState.Terminated; last == nil || last.ExitCode != 42 {
		t.Errorf("a ended with %+v", last)
	}
	w.life = New() // an agent that was restarted goes on
	w.until(minute)
	w.want("16s i ended", "16s s started", "16s a started", "16s b started", "16s c started")
	w.wantState("Running ready=True i:Completed(0) s:running a:running b:running c:running")
	w.wantCounts(map[string]int32{"i": 1, "s": 1, "a": 1, "b": 1, "c": 1})
	if c := w.condition(corev1.AllContainersRestarting); c.Status != corev1.ConditionFalse {
		t.Errorf("after: %+v", c)
	}
	// The next round ends by itself: nothing of the first one counts any more.
	w.until(2 * time.Hour)
	w.wantState("Running ready=False i:Completed(0) s:running a:Completed(0) b:running c:Completed(0)")
}

// TestRestartAllAgain: rounds that end soon follow each other more and more seldom.
func TestRestartAllAgain(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: named("i"), Containers: named("a", "b")}
	restartsAll(&spec.Containers[0])
	w := newWorld(t, spec, map[string]script{"i": {runs: []time.Duration{0}}, "a": {runs: []time.Duration{time.Second}, codes: []int32{42, 42, 0}}}).until(3 * time.Second)
	w.wantState("Running ready=False i:CrashLoopBackOff a:CrashLoopBackOff b:CrashLoopBackOff")
	w.wantCounts(map[string]int32{"i": 1, "a": 1, "b": 1})
	w.life = New()
	w.until(minute)
	w.wantState("Running ready=False i:Completed(0) a:Completed(0) b:running")
	w.wantCounts(map[string]int32{"i": 2, "a": 2, "b": 2})
}

// TestRestartAllByInit: init containers and sidecars may end a round as well.
func TestRestartAllByInit(t *testing.T) {
	spec := corev1.PodSpec{InitContainers: append(sidecars("s"), named("i")...), Containers: named("a")}
	restartsAll(&spec.InitContainers[0])
	restartsAll(&spec.InitContainers[1])
	w := newWorld(t, spec, map[string]script{
		"s": {runs: []time.Duration{time.Hour, 10 * time.Second, time.Hour}, codes: []int32{0, 42, 0}},
		"i": {runs: []time.Duration{time.Second}, codes: []int32{42, 0}},
	}).until(5 * time.Second)
	w.want("0s sandbox", "0s s started", "0s i started", "1s i ended", "1s event Killing", "1s s SIGKILL", "1s s ended", "1s s started", "1s i started", "2s i ended", "2s a started")
	w.until(minute)
	w.want("11s s ended", "11s event Killing", "11s a SIGKILL", "11s a ended", "11s event BackOff", "21s s started", "21s i started", "22s i ended", "22s a started")
	w.wantState("Running ready=True s:running i:Completed(0) a:running")
	w.wantCounts(map[string]int32{"s": 2, "i": 2, "a": 1})
}

// TestRestartAllNotAtTheEnd: how a sidecar ends when the Pod does is not asked.
func TestRestartAllNotAtTheEnd(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: sidecars("s"), Containers: named("a")}
	restartsAll(&spec.InitContainers[0])
	scripts := map[string]script{"s": {codes: []int32{42}}, "a": {runs: []time.Duration{time.Second}}}
	w := newWorld(t, spec, scripts).until(minute)
	w.wantState("Succeeded ready=False s:Error(42) a:Completed(0)")

	w = newWorld(t, spec, map[string]script{"s": {codes: []int32{42}}}).until(0)
	w.delete(30)
	w.until(minute)
	w.want("0s sandbox", "0s s started", "0s a started", "0s event Killing", "0s a SIGTERM", "0s a ended", "0s event Killing", "0s s SIGTERM", "0s s ended", "0s sandbox stopped", "0s forgotten")
}

// TestRestartAllDeleted: a Pod that is deleted between two rounds ends, and what ran before does not count as its success.
func TestRestartAllDeleted(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: sidecars("s"), Containers: named("a", "b")}
	restartsAll(&spec.InitContainers[0])
	spec.InitContainers[0].StartupProbe = &corev1.Probe{}
	w := newWorld(t, spec, map[string]script{
		"s": {runs: []time.Duration{5 * time.Second, time.Hour}, codes: []int32{42, 0}}, "a": {runs: []time.Duration{time.Second}},
	})
	w.seen.Probes[Probe{"s", "s-0", Startup}] = ProbeResult{Success: true}
	w.until(10 * time.Second)
	w.wantState("Running ready=False s:running a:PodInitializing b:PodInitializing")
	w.delete(30)
	w.until(minute)
	w.wantState("Failed ready=False s:Completed(0) a:Completed(0) b:Error(137)")
	if !w.gone {
		t.Error("it is not forgotten")
	}
}

// TestRestartAllAwaitsStarts: a container that is being started is waited for and killed, before anything runs again.
func TestRestartAllAwaitsStarts(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: named("i"), Containers: named("a", "b")}
	restartsAll(&spec.Containers[0])
	w := newWorld(t, spec, map[string]script{"i": {runs: []time.Duration{time.Second}}, "a": {runs: []time.Duration{time.Second, time.Hour}, codes: []int32{42, 0}}}).until(1500 * time.Millisecond)
	run := w.seen.Runs["b"]
	delete(w.seen.Runs, "b") // its image is still being pulled
	w.seen.Starting["b"] = true
	w.until(10 * time.Second)
	w.want("0s sandbox", "0s i started", "1s i ended", "1s a started", "1s b started", "2s a ended")
	if c := w.condition(corev1.AllContainersRestarting); c.Status != corev1.ConditionTrue {
		t.Errorf("while b is being started: %+v", c)
	}
	w.seen.Runs["b"] = run
	delete(w.seen.Starting, "b")
	w.until(minute)
	w.want("10s event Killing", "10s b SIGKILL", "10s b ended", "10s i started", "11s i ended", "11s a started", "11s b started")
	w.wantState("Running ready=True i:Completed(0) a:running b:running")
}

// TestRestartAllBySidecar: that main containers were killed for it does not end the Pod, also when another agent finds it so.
func TestRestartAllBySidecar(t *testing.T) {
	spec := corev1.PodSpec{RestartPolicy: corev1.RestartPolicyNever, InitContainers: sidecars("s"), Containers: named("a")}
	restartsAll(&spec.InitContainers[0])
	w := newWorld(t, spec, map[string]script{"s": {runs: []time.Duration{time.Second, time.Second, time.Hour}, codes: []int32{42, 42, 0}}}).until(5 * time.Second)
	w.want("0s sandbox", "0s s started", "0s a started", "1s s ended", "1s event Killing", "1s a SIGKILL", "1s a ended", "1s s started", "1s a started",
		"2s s ended", "2s event Killing", "2s a SIGKILL", "2s a ended", "2s event BackOff")
	w.wantState("Running ready=False s:CrashLoopBackOff a:CrashLoopBackOff")
	if c := w.condition(corev1.AllContainersRestarting); c.Status != corev1.ConditionTrue {
		t.Errorf("while it waits: %+v", c)
	}
	w.life = New()
	w.until(minute)
	w.want("5s event BackOff", "12s s started", "12s a started")
	w.wantState("Running ready=True s:running a:running")
}
