package life

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// status is the Pod's status now. What others write in it (conditions of readiness gates, for example) stays.
func (s *step) status() corev1.PodStatus {
	pod := s.Input.Pod
	out := *pod.Status.DeepCopy()
	out.ObservedGeneration = pod.Generation
	if out.StartTime == nil {
		out.StartTime = ptr.To(stamp(s.Now))
	}
	out.HostIP, out.HostIPs = first(s.HostIPs), nil
	for _, a := range s.HostIPs {
		out.HostIPs = append(out.HostIPs, corev1.HostIP{IP: a.String()})
	}
	if ips := s.Observed.PodIPs; len(ips) > 0 {
		out.PodIP, out.PodIPs = first(ips), nil
		for _, a := range ips {
			out.PodIPs = append(out.PodIPs, corev1.PodIP{IP: a.String()})
		}
	}
	if !s.neverRan() {
		out.InitContainerStatuses = s.containers(pod.Spec.InitContainers, true)
		out.ContainerStatuses = s.containers(pod.Spec.Containers, false)
	}
	out.Phase = s.phase()
	out.Reason, out.Message = "", ""
	if s.ending != nil {
		out.Reason, out.Message = s.ending.reason, s.ending.message
	}
	s.conditions(&out)
	return out
}

// neverRan says that the Pod was rejected: its containers wait for nothing, and what kubectl shows of it is why.
func (s *step) neverRan() bool {
	was := &s.Input.Pod.Status
	return (s.Reject != nil || terminal(was.Phase)) && len(was.ContainerStatuses) == 0 && len(s.Observed.Runs) == 0
}

func first(list []netip.Addr) string {
	if len(list) == 0 {
		return ""
	}
	return list[0].String()
}

// phase sums the containers up.
func (s *step) phase() corev1.PodPhase {
	if s.Reject != nil {
		return corev1.PodFailed
	}
	if was := s.Input.Pod.Status.Phase; terminal(was) {
		return was
	}
	spec := s.spec()
	if s.over() {
		return s.outcome()
	}
	for i := range spec.Containers {
		// One that has run once counts, even while it waits to be started again.
		if s.last[spec.Containers[i].Name] == nil {
			return corev1.PodPending
		}
	}
	return corev1.PodRunning
}

// outcome is the phase of a Pod that is over. Sidecars don't count.
func (s *step) outcome() corev1.PodPhase {
	if s.ending != nil && s.ending.reason != "" {
		return corev1.PodFailed
	}
	for i := range s.spec().Containers {
		r := s.last[s.spec().Containers[i].Name]
		if r == nil || s.outdated(r) || !r.succeeded() {
			return corev1.PodFailed
		}
	}
	return corev1.PodSucceeded
}

func (s *step) containers(list []corev1.Container, init bool) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for i := range list {
		out = append(out, s.container(&list[i], init))
	}
	return out
}

func (s *step) container(c *corev1.Container, init bool) corev1.ContainerStatus {
	out := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Started: ptr.To(false)}
	runs := s.Observed.Runs[c.Name]
	if len(runs) == 0 {
		if before := s.reported(c.Name); before != nil {
			// A Pod from before a restart of the machine, or one that is only forgotten: what was known is still true.
			out = *before.DeepCopy()
			out.Started, out.Ready = ptr.To(false), false
			if s.over() && out.State.Running == nil {
				return out
			}
			if out.State.Terminated != nil {
				out.LastTerminationState = out.State
			}
		}
		out.State = corev1.ContainerState{Waiting: s.waiting(c)}
		return out
	}
	r := &runs[len(runs)-1]
	out.RestartCount, out.ContainerID, out.ImageID = r.Attempt, containerID(r), r.ImageID
	if r.Image != "" {
		out.Image = r.Image
	}
	if len(runs) > 1 {
		out.LastTerminationState.Terminated = terminated(&runs[len(runs)-2])
	} else if before := s.reported(c.Name); before != nil && before.RestartCount == r.Attempt {
		out.LastTerminationState = before.LastTerminationState
	}
	if !r.ended() {
		started := s.started(c, r)
		out.Started = &started
		out.Ready = started && s.ready(c, r) && (!init || sidecar(c)) // an init container is ready when it is done
		out.State.Running = &corev1.ContainerStateRunning{StartedAt: stamp(r.StartedAt)}
		return out
	}
	out.Ready = init && !sidecar(c) && r.succeeded() && !s.outdated(r)
	if w := s.waitsAgain(c, init, r); w != nil {
		out.LastTerminationState.Terminated = terminated(r)
		out.State.Waiting = w
		return out
	}
	out.State.Terminated = terminated(r)
	return out
}

// stamp is a time as the API keeps it, so that what was written compares equal to what is decided.
func stamp(t time.Time) metav1.Time { return metav1.NewTime(t.Truncate(time.Second)) }

func containerID(r *Run) string { return "portal://" + r.ID }

// ready says whether a run that has started may get traffic.
func (s *step) ready(c *corev1.Container, r *Run) bool {
	return c.ReadinessProbe == nil || s.Observed.Probes[Probe{c.Name, r.ID, Readiness}].Success
}

// waitsAgain is why a container that ended is not running again yet; nil: it is not to be, or is about to.
func (s *step) waitsAgain(c *corev1.Container, init bool, r *Run) *corev1.ContainerStateWaiting {
	if s.ending != nil || s.finished() || !s.outdated(r) && (!s.again(c, init, r) || init && !sidecar(c) && s.initialized()) {
		return nil
	}
	if f := s.Observed.Failures[c.Name]; f != nil {
		return s.failed(f)
	}
	if s.backoffEnd(r).After(s.Now) {
		return &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: backoffMessage(r)}
	}
	if s.outdated(r) {
		return s.waiting(c)
	}
	return nil
}

// waiting is why a container has never run, or not since all were started again.
func (s *step) waiting(c *corev1.Container) *corev1.ContainerStateWaiting {
	if f := s.Observed.Failures[c.Name]; f != nil && s.Observed.Sandbox == SandboxReady {
		return s.failed(f)
	}
	reason := "ContainerCreating"
	if len(s.spec().InitContainers) > 0 && !s.allInitialized() {
		reason = "PodInitializing"
	}
	w := &corev1.ContainerStateWaiting{Reason: reason}
	if f := s.Observed.SandboxFailure; f != nil && s.Observed.Sandbox != SandboxReady {
		w.Message = f.Message
	}
	return w
}

func (s *step) failed(f *Failure) *corev1.ContainerStateWaiting {
	if pullFailure(f.Reason) && !s.Now.Before(f.At.Add(errorShown)) {
		return &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: f.Message}
	}
	return &corev1.ContainerStateWaiting{Reason: f.Reason, Message: f.Message}
}

func terminated(r *Run) *corev1.ContainerStateTerminated {
	reason := r.Reason
	if reason == "" {
		reason = "Completed"
		if r.ExitCode != 0 {
			reason = "Error"
		}
	}
	return &corev1.ContainerStateTerminated{
		ExitCode: r.ExitCode, Signal: r.Signal, Reason: reason, Message: r.Message, ContainerID: containerID(r),
		StartedAt: stamp(r.StartedAt), FinishedAt: stamp(r.FinishedAt),
	}
}

// allInitialized says whether regular init containers have succeeded and sidecars have started.
func (s *step) allInitialized() bool {
	if s.initialized() || s.outcomeKnown() {
		return true
	}
	return len(s.incomplete()) == 0
}

// outcomeKnown says whether the main containers have ended for good.
func (s *step) outcomeKnown() bool {
	return s.over() && s.outcome() == corev1.PodSucceeded
}

func (s *step) conditions(out *corev1.PodStatus) {
	set := func(kind corev1.PodConditionType, ok bool, reason, message string) {
		condition := corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue, ObservedGeneration: s.Input.Pod.Generation, LastTransitionTime: stamp(s.Now)}
		if !ok {
			condition.Status, condition.Reason, condition.Message = corev1.ConditionFalse, reason, message
		}
		i := slices.IndexFunc(out.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
		if i < 0 {
			out.Conditions = append(out.Conditions, condition)
			return
		}
		if old := &out.Conditions[i]; old.Status == condition.Status && !old.LastTransitionTime.IsZero() {
			condition.LastTransitionTime = old.LastTransitionTime
		}
		out.Conditions[i] = condition
	}
	completed := out.Phase == corev1.PodSucceeded
	set(corev1.PodReadyToStartContainers, s.Observed.Sandbox == SandboxReady, "", "")
	initialized := s.allInitialized()
	set(corev1.PodInitialized, initialized, "ContainersNotInitialized", fmt.Sprintf("containers with incomplete status: %v", s.incomplete()))
	var unready []string
	for i := range out.ContainerStatuses {
		if !out.ContainerStatuses[i].Ready {
			unready = append(unready, out.ContainerStatuses[i].Name)
		}
	}
	for i := range out.InitContainerStatuses {
		c := &out.InitContainerStatuses[i]
		// By name, because a Pod that was rejected has no statuses of its containers.
		if !c.Ready && slices.ContainsFunc(s.spec().InitContainers, func(in corev1.Container) bool { return in.Name == c.Name && sidecar(&in) }) {
			unready = append(unready, c.Name)
		}
	}
	reason, message := "ContainersNotReady", fmt.Sprintf("containers with unready status: %v", unready)
	if completed {
		reason, message = "PodCompleted", ""
	}
	ready := len(unready) == 0 && !terminal(out.Phase)
	set(corev1.ContainersReady, ready, reason, message)
	if ready {
		if missing := s.gates(out); len(missing) > 0 {
			ready, reason, message = false, "ReadinessGatesNotReady", "conditions of readiness gates that are not true: "+strings.Join(missing, ", ")
		}
	}
	set(corev1.PodReady, ready, reason, message)
	set(corev1.PodScheduled, true, "", "")
	if s.mayRestartAll() {
		set(corev1.AllContainersRestarting, s.restarting && s.ending == nil, "", "")
	}
	if s.ending != nil && s.ending.evicted {
		set(corev1.DisruptionTarget, true, "", "")
		i := slices.IndexFunc(out.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.DisruptionTarget })
		out.Conditions[i].Reason, out.Conditions[i].Message = corev1.PodReasonTerminationByKubelet, s.ending.message
	}
}

// gates are the readiness gates whose conditions are not true.
func (s *step) gates(out *corev1.PodStatus) (missing []string) {
	for _, gate := range s.spec().ReadinessGates {
		if !slices.ContainsFunc(out.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == gate.ConditionType && c.Status == corev1.ConditionTrue
		}) {
			missing = append(missing, string(gate.ConditionType))
		}
	}
	return missing
}

// incomplete are the init containers that keep the others from starting.
func (s *step) incomplete() (out []string) {
	for i := range s.spec().InitContainers {
		c := &s.spec().InitContainers[i]
		if r := s.current(c.Name); r == nil || sidecar(c) && !s.started(c, r) || !sidecar(c) && !r.succeeded() {
			out = append(out, c.Name)
		}
	}
	return out
}
