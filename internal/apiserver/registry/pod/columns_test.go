package pod

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestColumns(t *testing.T) {
	type P = corev1.Pod
	waiting := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}
	}
	ended := func(code, signal int32, reason string) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Signal: signal, Reason: reason}}
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	status := func(states ...corev1.ContainerState) []corev1.ContainerStatus {
		var out []corev1.ContainerStatus
		for i, state := range states {
			out = append(out, corev1.ContainerStatus{Name: string(rune('c' + i)), State: state, Ready: state.Running != nil})
		}
		return out
	}
	is := func(kind corev1.PodConditionType) []corev1.PodCondition {
		return []corev1.PodCondition{{Type: kind, Status: corev1.ConditionTrue}}
	}
	two := func(p *P) { p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d", Image: "i"}) }
	inits := func(p *P) {
		p.Spec.InitContainers = []corev1.Container{{Name: "c"}, {Name: "d", RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)}}
	}
	for name, c := range map[string]struct {
		change        func(*P)
		ready, status string
	}{
		"pending":    {nil, "0/1", "Pending"},
		"evicted":    {func(p *P) { p.Status.Phase, p.Status.Reason = corev1.PodFailed, "Evicted" }, "0/1", "Evicted"},
		"running":    {func(p *P) { p.Status.Phase, p.Status.ContainerStatuses = corev1.PodRunning, status(running) }, "1/1", "Running"},
		"crash loop": {func(p *P) { p.Status.ContainerStatuses = status(waiting("CrashLoopBackOff")) }, "0/1", "CrashLoopBackOff"},
		"exit code":  {func(p *P) { p.Status.ContainerStatuses = status(ended(3, 0, "")) }, "0/1", "ExitCode:3"},
		"signal":     {func(p *P) { p.Status.ContainerStatuses = status(ended(3, 9, "")) }, "0/1", "Signal:9"},
		"half done":  {func(p *P) { two(p); p.Status.ContainerStatuses = status(ended(0, 0, "Completed"), running) }, "1/2", "NotReady"},
		"half ready": {func(p *P) {
			two(p)
			p.Status.ContainerStatuses, p.Status.Conditions = status(ended(0, 0, "Completed"), running), is("Ready")
		}, "1/2", "Running"},
		"half failed": {func(p *P) {
			two(p)
			p.Status.ContainerStatuses = status(ended(0, 0, "Completed"), ended(1, 0, "Error"))
		}, "0/2", "Error"},
		"terminating": {func(p *P) { p.DeletionTimestamp = &metav1.Time{} }, "0/1", "Terminating"},
		"lost":        {func(p *P) { p.DeletionTimestamp, p.Status.Reason = &metav1.Time{}, "NodeLost" }, "0/1", "Unknown"},
		"gone by":     {func(p *P) { p.DeletionTimestamp, p.Status.Phase = &metav1.Time{}, corev1.PodSucceeded }, "0/1", "Succeeded"},
		"init":        {func(p *P) { inits(p); p.Status.InitContainerStatuses = status(waiting("PodInitializing")) }, "0/2", "Init:0/2"},
		"init second": {func(p *P) { inits(p); p.Status.InitContainerStatuses = status(ended(0, 0, ""), running) }, "0/2", "Init:1/2"},
		"init waits":  {func(p *P) { inits(p); p.Status.InitContainerStatuses = status(waiting("ErrImagePull")) }, "0/2", "Init:ErrImagePull"},
		"init failed": {func(p *P) { inits(p); p.Status.InitContainerStatuses = status(ended(2, 0, "")) }, "0/2", "Init:ExitCode:2"},
		"init killed": {func(p *P) { inits(p); p.Status.InitContainerStatuses = status(ended(2, 9, "")) }, "0/2", "Init:Signal:9"},
		"initialized": {func(p *P) {
			inits(p)
			p.Status.InitContainerStatuses, p.Status.Conditions = status(ended(2, 9, "")), is(corev1.PodInitialized)
		}, "0/2", "Init:Signal:9"},
		"with sidecar": {func(p *P) {
			inits(p)
			p.Status.Phase, p.Status.InitContainerStatuses, p.Status.ContainerStatuses = corev1.PodRunning, status(ended(0, 0, ""), running), status(running)
			p.Status.InitContainerStatuses[1].Started = ptr.To(true)
		}, "2/2", "Running"},
	} {
		t.Run(name, func(t *testing.T) {
			p := stored(t, nil)
			if c.change != nil {
				c.change(p)
			}
			row := rulesOf(t).Row(t, p)
			if row["Ready"] != c.ready || row["Status"] != c.status {
				t.Errorf("shown as %s %s, want %s %s", row["Ready"], row["Status"], c.ready, c.status)
			}
		})
	}
}

func TestRestartsAndWideColumns(t *testing.T) {
	p := stored(t, func(p *corev1.Pod) {
		p.Spec.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "a/b"}, {ConditionType: "c/d"}}
	})
	row := rulesOf(t).Row(t, p)
	for _, column := range []string{"IP", "Node", "Nominated Node"} {
		if row[column] != "<none>" {
			t.Errorf("%s is %q at first", column, row[column])
		}
	}
	p.Spec.NodeName = "n"
	p.Status.PodIPs = []corev1.PodIP{{IP: "10.0.0.1"}}
	p.Status.Conditions = []corev1.PodCondition{{Type: "a/b", Status: corev1.ConditionTrue}}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 2}}
	for column, want := range map[string]string{"IP": "10.0.0.1", "Node": "n", "Readiness Gates": "1/2", "Restarts": "2"} {
		if got := rulesOf(t).Row(t, p)[column]; got != want {
			t.Errorf("%s is %q, want %q", column, got, want)
		}
	}
	p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{FinishedAt: metav1.NewTime(time.Now().Add(-150 * time.Minute))}
	if got := rulesOf(t).Row(t, p)["Restarts"]; got != "2 (150m ago)" {
		t.Errorf("restarts are %q", got)
	}
}
