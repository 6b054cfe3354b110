package pod

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/apiserver/registry"
)

func columns() []registry.Column[corev1.Pod] {
	spec, status := corev1.PodSpec{}.SwaggerDoc(), corev1.PodStatus{}.SwaggerDoc()
	return []registry.Column[corev1.Pod]{
		{Name: "Ready", Description: "How many of the Pod's containers are ready to serve.",
			Cell: func(p *corev1.Pod) any { return summarize(p).readiness() }},
		{Name: "Status", Description: "What the Pod's containers are doing, taken together.", Cell: func(p *corev1.Pod) any { return summarize(p).reason }},
		{Name: "Restarts", Description: "How often containers of the Pod were started again, and when last.",
			Cell: func(p *corev1.Pod) any { return summarize(p).restarted() }},
		registry.Age[corev1.Pod](),
		{Name: "IP", Description: status["podIP"], Wide: true, Cell: func(p *corev1.Pod) any {
			if len(p.Status.PodIPs) == 0 {
				return orNone("")
			}
			return orNone(p.Status.PodIPs[0].IP)
		}},
		{Name: "Node", Description: spec["nodeName"], Wide: true, Cell: func(p *corev1.Pod) any { return orNone(p.Spec.NodeName) }},
		{Name: "Nominated Node", Description: status["nominatedNodeName"], Wide: true,
			Cell: func(p *corev1.Pod) any { return orNone(p.Status.NominatedNodeName) }},
		{Name: "Readiness Gates", Description: spec["readinessGates"], Wide: true, Cell: func(p *corev1.Pod) any { return gates(p) }},
	}
}

func orNone(text string) string {
	if text == "" {
		return "<none>"
	}
	return text
}

func gates(pod *corev1.Pod) string {
	if len(pod.Spec.ReadinessGates) == 0 {
		return orNone("")
	}
	open := 0
	for _, gate := range pod.Spec.ReadinessGates {
		if isTrue(&pod.Status, gate.ConditionType) {
			open++
		}
	}
	return fmt.Sprintf("%d/%d", open, len(pod.Spec.ReadinessGates))
}

func isTrue(status *corev1.PodStatus, kind corev1.PodConditionType) bool {
	for _, condition := range status.Conditions {
		if condition.Type == kind {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}

// summary is a Pod in a line.
type summary struct {
	reason       string
	ready, total int
	restarts     int
	last         metav1.Time
}

func (s summary) readiness() string { return fmt.Sprintf("%d/%d", s.ready, s.total) }

func (s summary) restarted() string {
	if s.restarts == 0 || s.last.IsZero() {
		return strconv.Itoa(s.restarts)
	}
	return fmt.Sprintf("%d (%s ago)", s.restarts, registry.Since(s.last))
}

// count adds a container's restarts.
func (s *summary) count(c *corev1.ContainerStatus) {
	s.restarts += int(c.RestartCount)
	if ended := c.LastTerminationState.Terminated; ended != nil && s.last.Before(&ended.FinishedAt) {
		s.last = ended.FinishedAt
	}
}

// summarize says what a person wants to know first: what the container that holds the Pod up is waiting for.
func summarize(pod *corev1.Pod) summary {
	s := summary{reason: string(pod.Status.Phase), total: len(pod.Spec.Containers)}
	if pod.Status.Reason != "" {
		s.reason = pod.Status.Reason
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Reason == corev1.PodReasonSchedulingGated {
			s.reason = corev1.PodReasonSchedulingGated
		}
	}
	sidecars := map[string]bool{}
	for i := range pod.Spec.InitContainers {
		if stays(&pod.Spec.InitContainers[i]) {
			sidecars[pod.Spec.InitContainers[i].Name] = true
			s.total++
		}
	}
	// Once the Pod is initialized only restarts of containers that stay are of interest.
	beside := s
	initializing := s.initialize(pod, sidecars, &beside)
	if !initializing || isTrue(&pod.Status, corev1.PodInitialized) {
		s.restarts, s.last = beside.restarts, beside.last
		s.run(pod)
	}
	if pod.DeletionTimestamp != nil {
		switch {
		case pod.Status.Reason == "NodeLost":
			s.reason = "Unknown"
		case pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed:
			s.reason = "Terminating"
		}
	}
	return s
}

// initialize goes through init containers up to the one that isn't through, and says whether there is one.
func (s *summary) initialize(pod *corev1.Pod, sidecars map[string]bool, beside *summary) bool {
	for i := range pod.Status.InitContainerStatuses {
		c := &pod.Status.InitContainerStatuses[i]
		s.count(c)
		if sidecars[c.Name] {
			beside.count(c)
		}
		switch ended, waiting := c.State.Terminated, c.State.Waiting; {
		case ended != nil && ended.ExitCode == 0:
			continue
		case sidecars[c.Name] && c.Started != nil && *c.Started:
			if c.Ready {
				s.ready++
			}
			continue
		case ended != nil:
			s.reason = "Init:" + end(ended)
		case waiting != nil && waiting.Reason != "" && waiting.Reason != "PodInitializing":
			s.reason = "Init:" + waiting.Reason
		default:
			s.reason = fmt.Sprintf("Init:%d/%d", i, len(pod.Spec.InitContainers))
		}
		return true
	}
	return false
}

// run goes through the containers, the first of which has the last word.
func (s *summary) run(pod *corev1.Pod) {
	running, failed := false, ""
	for i := len(pod.Status.ContainerStatuses) - 1; i >= 0; i-- {
		c := &pod.Status.ContainerStatuses[i]
		s.count(c)
		switch {
		case c.State.Waiting != nil && c.State.Waiting.Reason != "":
			s.reason = c.State.Waiting.Reason
		case c.State.Terminated != nil:
			s.reason = end(c.State.Terminated)
			if c.State.Terminated.ExitCode != 0 {
				failed = s.reason
			}
		case c.Ready && c.State.Running != nil:
			running = true
			s.ready++
		}
	}
	if s.reason != "Completed" {
		return
	}
	switch {
	case running && isTrue(&pod.Status, corev1.PodReady):
		s.reason = "Running"
	case failed != "":
		s.reason = failed
	case running:
		s.reason = "NotReady"
	}
}

// end says how a container ended.
func end(state *corev1.ContainerStateTerminated) string {
	switch {
	case state.Reason != "":
		return state.Reason
	case state.Signal != 0:
		return fmt.Sprintf("Signal:%d", state.Signal)
	}
	return fmt.Sprintf("ExitCode:%d", state.ExitCode)
}
