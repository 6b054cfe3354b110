package explain

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// trouble is why a Pod is no endpoint.
type trouble struct {
	code   string
	reason string // what the Pod's status says
	detail string
	since  time.Time
	rank   int // of several Pods' troubles the one with the highest is the verdict
	// fix are the commands, if they follow from the trouble itself: see podFix for the others.
	fix []string
	// probe is the kind of probe that fails.
	probe string
	// otherwise is what to type if there is no older revision to go back to.
	otherwise []string
}

// trouble is why a Pod gets no traffic; ok is false if it is ready.
func (v *View) trouble(p *corev1.Pod) (t trouble, ok bool) {
	ready, at, message := podReady(p)
	switch {
	case ended(p) && (p.DeletionTimestamp == nil || len(p.Finalizers) == 0):
		return v.over(p, at), true
	case p.DeletionTimestamp != nil:
		return v.terminating(p), true
	case p.Spec.NodeName == "":
		return v.unscheduled(p), true
	}
	if n := v.nodes[p.Spec.NodeName]; n == nil && v.sees("nodes") && !ready {
		return trouble{code: "pod-lost", reason: "its node " + p.Spec.NodeName + " does not exist", since: at, rank: 6, fix: v.anotherNode(p)}, true
	}
	if t, ok := v.waiting(p); ok {
		return t, true
	}
	if ready {
		if len(p.Status.PodIPs) == 0 && p.Status.PodIP == "" {
			return trouble{code: "pods-unready", reason: "no address", since: at, rank: 5}, true
		}
		return trouble{}, false
	}
	return v.notReady(p, at, message), true
}

// over: a Pod that has ended stays, and never serves again.
func (v *View) over(p *corev1.Pod, at time.Time) trouble {
	t := trouble{code: "pods-ended", reason: fmt.Sprintf("it has ended (%s)", p.Status.Phase), detail: p.Status.Message, since: at, rank: 2}
	if p.Status.Reason != "" {
		t.reason = fmt.Sprintf("it has ended (%s)", p.Status.Reason)
	}
	for i := range p.Status.ContainerStatuses {
		if e := p.Status.ContainerStatuses[i].State.Terminated; e != nil && t.detail == "" {
			t.detail = fmt.Sprintf("the container %s ended with exit code %d %s, and restartPolicy is %s", p.Status.ContainerStatuses[i].Name, e.ExitCode, e.Reason, p.Spec.RestartPolicy)
		}
	}
	if _, made := v.workload(p); !made {
		t.fix = []string{fmt.Sprintf("kubectl get pod %s -n %s -o yaml | kubectl replace --force -f -", p.Name, p.Namespace)}
	}
	return t
}

// terminating: a Pod that is being deleted. Its end may wait for somebody.
func (v *View) terminating(p *corev1.Pod) trouble {
	t := trouble{code: "pods-terminating", reason: "it is being deleted (Terminating)", since: p.DeletionTimestamp.Time, rank: 1}
	if len(p.Finalizers) > 0 && v.Now.Sub(p.DeletionTimestamp.Time) > settle {
		t.detail = fmt.Sprintf("it waits for its finalizer %s to be removed", some(p.Finalizers))
		t.rank = 4
		t.fix = []string{mergePatch(podRef(p), map[string]any{"metadata": map[string]any{"finalizers": nil}})}
	}
	return t
}

// waiting says what a container waits for that does not run.
func (v *View) waiting(p *corev1.Pod) (trouble, bool) {
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range list {
			c := &list[i]
			w := c.State.Waiting
			if w == nil {
				continue
			}
			_, at, _ := podReady(p)
			switch w.Reason {
			case "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull":
				return trouble{code: "pods-image", reason: fmt.Sprintf("%s of the image %s", w.Reason, imageOf(p, c)), detail: w.Message, since: at, rank: 9}, true
			case "CrashLoopBackOff":
				return v.crashing(p, c, at), true
			case "CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError", "PostStartHookError":
				return trouble{code: "pods-config", reason: fmt.Sprintf("%s of the container %s", w.Reason, c.Name), detail: w.Message, since: at, rank: 9, otherwise: v.unstarted(p, c.Name, w.Message)}, true
			}
		}
	}
	return trouble{}, false
}

func imageOf(p *corev1.Pod, c *corev1.ContainerStatus) string {
	for _, container := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		if container.Name == c.Name && container.Image != "" {
			return container.Image
		}
	}
	return c.Image
}

// crashing says why a container ends again and again.
func (v *View) crashing(p *corev1.Pod, c *corev1.ContainerStatus, at time.Time) trouble {
	t := trouble{code: "pods-crashing", reason: fmt.Sprintf("the container %s ends again and again", c.Name), since: at, rank: 9}
	last := c.LastTerminationState.Terminated
	if last != nil {
		t.detail = fmt.Sprintf("it ended with exit code %d %s", last.ExitCode, strings.TrimSpace(last.Reason+" "+last.Message))
	}
	if last != nil && last.Reason == "OOMKilled" {
		t.code = "pods-memory"
		t.reason = fmt.Sprintf("the container %s needs more memory than its limit%s allows (OOMKilled)", c.Name, memoryLimit(p, c.Name))
		t.fix = v.memoryFix(p, c.Name)
		return t
	}
	if last != nil && (last.Reason == "StartError" || last.Reason == "ContainerCannotRun") {
		t.code = "pods-config"
		t.reason = fmt.Sprintf("the container %s can't be started", c.Name)
		t.detail = strings.TrimSpace(last.Message)
		return t
	}
	// Whoever is killed because of a probe usually ends with a signal, and the probe is the reason.
	for _, kind := range []string{"liveness", "startup"} {
		signal := last == nil || last.ExitCode != 0 && last.ExitCode != 1 && last.ExitCode != 2
		if m, ok := v.unhealthy(p, kind, c.Name); ok && (signal || v.killedBy(p, kind, c.Name)) {
			return v.probeTrouble(p, kind, m, at, 9)
		}
	}
	return t
}

// killedBy says whether an Event has a container be stopped because of a probe.
func (v *View) killedBy(p *corev1.Pod, kind, container string) bool {
	return slices.ContainsFunc(v.events[podRef(p)], func(e *corev1.Event) bool {
		return e.Reason == "Killing" && strings.Contains(strings.ToLower(e.Message), kind+" probe") && strings.Contains(e.Message, container)
	})
}

func memoryLimit(p *corev1.Pod, name string) string {
	for _, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		if l, ok := c.Resources.Limits[corev1.ResourceMemory]; ok && c.Name == name {
			return " of " + l.String()
		}
	}
	return ""
}

// memoryFix gives the container four times the memory.
func (v *View) memoryFix(p *corev1.Pod, name string) []string {
	for field, list := range map[string][]corev1.Container{"containers": p.Spec.Containers, "initContainers": p.Spec.InitContainers} {
		for i := range list {
			l, ok := list[i].Resources.Limits[corev1.ResourceMemory]
			if !ok || list[i].Name != name {
				continue
			}
			const mebi = 1 << 20
			more := fmt.Sprintf("%dMi", max(4*l.Value()/mebi, 64))
			return v.containersPatch(p, map[string]any{field: []map[string]any{{"name": name, "resources": map[string]any{"limits": map[string]string{"memory": more}}}}})
		}
	}
	return nil
}

func (v *View) notReady(p *corev1.Pod, at time.Time, message string) trouble {
	t := trouble{code: "pods-unready", reason: "it is not ready", detail: message, since: at, rank: 5}
	if gate := closedGate(p); gate != "" {
		t.code, t.reason, t.rank = "readiness-gate", "the readiness gate "+gate+" is not met", 8
		return t
	}
	if p.Status.Phase == corev1.PodPending {
		return v.notStarted(p, t)
	}
	for i := range p.Status.ContainerStatuses {
		c := &p.Status.ContainerStatuses[i]
		if e := c.State.Terminated; e != nil {
			t.reason = fmt.Sprintf("the container %s has ended with exit code %d %s", c.Name, e.ExitCode, e.Reason)
			t.detail = strings.TrimSpace(e.Message)
			t.code, t.rank = "pods-crashing", 8
			return t
		}
	}
	for _, kind := range []string{"startup", "readiness"} {
		if why, ok := v.wrongProbePort(p, kind); ok {
			t.code, t.reason, t.rank = kind+"-port", why, 8
			return t
		}
	}
	for _, kind := range []string{"startup", "readiness"} {
		if kind == "startup" && started(p) {
			continue
		}
		if m, ok := v.unhealthy(p, kind, ""); ok {
			return v.probeTrouble(p, kind, m, at, 5)
		}
		if why, fix := v.delayed(p, kind); why != "" {
			t.code, t.reason, t.fix, t.rank = kind+"-delay", why, fix, 7
			return t
		}
	}
	return t
}

// notStarted: the Pod has a node, and its containers don't run yet.
func (v *View) notStarted(p *corev1.Pod, t trouble) trouble {
	t.code, t.reason = "pods-pending", "it has not started on node "+p.Spec.NodeName
	if m := v.eventMessage(podRef(p), "FailedMount", "FailedCreatePodSandBox", "Failed"); m != "" {
		t.detail, t.otherwise = m, absent(p, m)
		return t
	}
	for i := range p.Status.InitContainerStatuses {
		c := &p.Status.InitContainerStatuses[i]
		if run := c.State.Running; run != nil && !c.Ready && !(c.Started != nil && *c.Started && isSidecar(p, c.Name)) {
			t.code, t.rank = "pods-init", 8
			t.reason = fmt.Sprintf("its init container %s has not ended, and the others wait for it", c.Name)
			t.detail = fmt.Sprintf("it has been running for %s", ago(v.Now.Sub(run.StartedAt.Time)))
			t.fix = []string{kubectl(p.Namespace, "logs %s -c %s", p.Name, c.Name)}
			return t
		}
	}
	return t
}

func isSidecar(p *corev1.Pod, name string) bool {
	return slices.ContainsFunc(sidecars(p), func(c corev1.Container) bool { return c.Name == name })
}

// started says whether all containers have passed their startup probes.
func started(p *corev1.Pod) bool {
	return !slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Started == nil || !*c.Started })
}

func closedGate(p *corev1.Pod) string {
	for _, g := range p.Spec.ReadinessGates {
		met := slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == g.ConditionType && c.Status == corev1.ConditionTrue
		})
		if !met {
			return string(g.ConditionType)
		}
	}
	return ""
}
