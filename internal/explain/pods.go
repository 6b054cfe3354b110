package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// settle is how long controllers, nodes and proxies may take to follow a change before that is a finding.
const settle = 10 * time.Second

// trouble is why a Pod is no endpoint.
type trouble struct {
	code   string
	reason string // what the Pod's status says
	detail string
	since  time.Time
	rank   int // of several Pods' troubles the one with the highest is the verdict
}

// checkPods looks at Services that select Pods of which none is ready, or some have not been for long.
func checkPods(v *View) (out []Finding) {
	for _, s := range v.order {
		if !s.selects() || len(s.Pods) == 0 {
			continue
		}
		out = append(out, v.unready(s)...)
	}
	return out
}

func (v *View) unready(s *Service) []Finding {
	var ready []*corev1.Pod
	troubled := map[string][]*corev1.Pod{}
	reasons := map[string]trouble{}
	for _, p := range s.Pods {
		t, ok := v.trouble(p)
		if !ok {
			ready = append(ready, p)
			continue
		}
		troubled[t.code] = append(troubled[t.code], p)
		if old, ok := reasons[t.code]; !ok || t.rank > old.rank {
			reasons[t.code] = t
		}
	}
	if len(ready) > 0 {
		return v.partly(s, ready, troubled, reasons)
	}
	if s.Spec.PublishNotReadyAddresses && s.served() {
		return v.published(s, troubled, reasons)
	}
	var worst trouble
	for _, t := range reasons {
		if t.rank > worst.rank {
			worst = t
		}
	}
	if worst.code == "pods-terminating" && s.served() {
		return nil // they serve until they end
	}
	f := v.podFinding(s, worst, troubled[worst.code])
	f.Severity = Broken
	f.Verdict = fmt.Sprintf("%s has no ready endpoint: %s", s.ref(), f.Verdict)
	return []Finding{f}
}

// partly: some Pods serve. Those that don't matter only if they have not for long: Pods come and go.
func (v *View) partly(s *Service, ready []*corev1.Pod, troubled map[string][]*corev1.Pod, reasons map[string]trouble) (out []Finding) {
	for code, t := range reasons {
		if code == "pods-terminating" || code == "pods-ended" || v.Now.Sub(t.since) < time.Minute {
			continue
		}
		f := v.podFinding(s, t, troubled[code])
		f.Severity = Degraded
		if s.Spec.PublishNotReadyAddresses {
			f.Evidence = append(f.Evidence, "spec.publishNotReadyAddresses is true: they get traffic all the same")
		}
		f.Verdict = fmt.Sprintf("%s has %d of %d Pods as endpoints: %s", s.ref(), len(ready), len(s.Pods), f.Verdict)
		out = append(out, f)
	}
	return out
}

// published: Pods get traffic though they are not ready, because the Service asks for it.
func (v *View) published(s *Service, troubled map[string][]*corev1.Pod, reasons map[string]trouble) []Finding {
	if s.headless() {
		return nil // peers of one application find each other so
	}
	for code, t := range reasons {
		if code == "pods-terminating" || code == "pods-ended" {
			continue
		}
		f := v.podFinding(s, t, troubled[code])
		f.Code, f.Severity, f.Field = "publish-not-ready", Broken, "spec.publishNotReadyAddresses"
		f.Verdict = fmt.Sprintf("%s sends traffic to Pods that are not ready, as spec.publishNotReadyAddresses says: %s", s.ref(), f.Verdict)
		return []Finding{f}
	}
	return nil
}

// trouble is why a Pod gets no traffic; ok is false if it is ready.
func (v *View) trouble(p *corev1.Pod) (t trouble, ok bool) {
	ready, at, message := podReady(p)
	switch {
	case p.Status.Phase == corev1.PodFailed && p.Status.Reason == "Evicted":
		return trouble{"pods-ended", "Evicted", p.Status.Message, at, 2}, true
	case ended(p):
		return trouble{"pods-ended", string(p.Status.Phase), p.Status.Message, at, 2}, true
	case p.DeletionTimestamp != nil:
		return trouble{"pods-terminating", "Terminating", "", p.DeletionTimestamp.Time, 1}, true
	case p.Spec.NodeName == "":
		return v.unscheduled(p), true
	}
	if n := v.nodes[p.Spec.NodeName]; n == nil && v.sees("nodes") && !ready {
		return trouble{"pod-lost", "its node " + p.Spec.NodeName + " does not exist", "", at, 6}, true
	}
	if t, ok := waiting(p); ok {
		return t, true
	}
	if ready {
		if len(p.Status.PodIPs) == 0 && p.Status.PodIP == "" {
			return trouble{"pods-unready", "no address", "", at, 5}, true
		}
		return trouble{}, false
	}
	return v.notReady(p, at, message), true
}

func (v *View) unscheduled(p *corev1.Pod) trouble {
	t := trouble{"pods-pending", "no node", "", p.CreationTimestamp.Time, 7}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			t.detail, t.since = c.Message, c.LastTransitionTime.Time
		}
	}
	if t.detail == "" {
		t.detail = v.eventMessage(podRef(p), "FailedScheduling")
	}
	return t
}

// waiting says what a container waits for that does not run.
func waiting(p *corev1.Pod) (trouble, bool) {
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
				return trouble{"pods-image", fmt.Sprintf("%s of the image %s", w.Reason, c.Image), w.Message, at, 9}, true
			case "CrashLoopBackOff":
				t := trouble{"pods-crashing", fmt.Sprintf("the container %s ends again and again", c.Name), "", at, 9}
				if last := c.LastTerminationState.Terminated; last != nil {
					t.detail = fmt.Sprintf("it ended with exit code %d %s", last.ExitCode, strings.TrimSpace(last.Reason+" "+last.Message))
				}
				return t, true
			case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
				return trouble{"pods-config", fmt.Sprintf("%s of the container %s", w.Reason, c.Name), w.Message, at, 9}, true
			}
		}
	}
	return trouble{}, false
}

func (v *View) notReady(p *corev1.Pod, at time.Time, message string) trouble {
	t := trouble{"pods-unready", "not ready", message, at, 5}
	if gate := closedGate(p); gate != "" {
		t.code, t.reason, t.rank = "readiness-gate", "the readiness gate "+gate+" is not met", 8
		return t
	}
	if p.Status.Phase == corev1.PodPending {
		t.code, t.reason = "pods-pending", "it has not started"
		if m := v.eventMessage(podRef(p), "FailedMount", "FailedCreatePodSandBox", "Failed"); m != "" {
			t.detail = m
		}
		return t
	}
	if m := v.eventMessage(podRef(p), "Unhealthy"); m != "" {
		t.detail = strings.TrimSpace(m)
		t.reason = "its readiness probe fails"
	}
	if why, ok := v.wrongProbePort(p); ok {
		t.code, t.reason, t.rank = "readiness-port", why, 8
		return t
	}
	switch {
	case strings.Contains(t.detail, "statuscode: 404") || strings.Contains(t.detail, "HTTP status 404"):
		t.code, t.rank = "readiness-path", 6
	case strings.Contains(t.detail, "deadline exceeded") || strings.Contains(t.detail, "Client.Timeout") || strings.Contains(t.detail, "timed out"):
		t.code, t.rank = "readiness-timeout", 6
	}
	return t
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

// probePort is the port that a container's readiness probe asks, as a number; 0: none.
func probePort(c *corev1.Container) (port int32, named string) {
	p := c.ReadinessProbe
	if p == nil {
		return 0, ""
	}
	var at intstr.IntOrString
	switch {
	case p.HTTPGet != nil:
		at = p.HTTPGet.Port
	case p.TCPSocket != nil:
		at = p.TCPSocket.Port
	case p.GRPC != nil:
		return p.GRPC.Port, ""
	default:
		return 0, ""
	}
	if at.Type == intstr.Int {
		return at.IntVal, ""
	}
	for _, cp := range c.Ports {
		if cp.Name == at.StrVal {
			return cp.ContainerPort, ""
		}
	}
	return 0, at.StrVal
}

// wrongProbePort: the readiness probe asks a port at which nobody listens.
func (v *View) wrongProbePort(p *corev1.Pod) (string, bool) {
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		port, missing := probePort(c)
		switch {
		case missing != "":
			return fmt.Sprintf("the readiness probe of the container %s asks the port %q, and the container has none of that name", c.Name, missing), true
		case port == 0:
		default:
			if open, known := v.listens(p, corev1.ProtocolTCP, port); known && open == nowhere && len(v.openPorts(p, corev1.ProtocolTCP)) > 0 {
				return fmt.Sprintf("the readiness probe of the container %s asks port %d, and its processes listen at %s", c.Name, port, v.portList(p)), true
			}
		}
	}
	return "", false
}

func (v *View) portList(p *corev1.Pod) string {
	var out []string
	for _, n := range v.openPorts(p, corev1.ProtocolTCP) {
		out = append(out, strconv.Itoa(int(n)))
	}
	return some(out)
}

// podFinding is the finding about Pods in one sort of trouble; its verdict begins with the Pods.
func (v *View) podFinding(s *Service, t trouble, pods []*corev1.Pod) Finding {
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	p := pods[0]
	f := Finding{Code: t.code, Sure: Certain, Object: s.ref(), Since: since(t.since)}
	who := "Pod " + p.Name
	if len(pods) > 1 {
		who = fmt.Sprintf("%d Pods (such as %s)", len(pods), p.Name)
	}
	f.Verdict = fmt.Sprintf("%s: %s", who, t.reason)
	if t.detail != "" && t.code != "readiness-port" {
		f.Verdict += ": " + firstLine(t.detail)
	}
	if t.detail != "" {
		f.Evidence = append(f.Evidence, fmt.Sprintf("Pod %s: %s", p.Name, t.detail))
	}
	if !t.since.IsZero() {
		f.Evidence = append(f.Evidence, fmt.Sprintf("for %s", ago(v.Now.Sub(t.since))))
	}
	for _, p := range pods {
		f.Affects = append(f.Affects, podRef(p))
		if n := p.Spec.NodeName; n != "" && len(f.Evidence) < 6 {
			f.Evidence = append(f.Evidence, fmt.Sprintf("Pod %s is on node %s", p.Name, n))
		}
	}
	f.Fix = v.podFix(t, p)
	return f
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// podFix are the commands for a Pod's trouble: first to look, as the Pod may be gone after the rest.
func (v *View) podFix(t trouble, p *corev1.Pod) (out []string) {
	w, made := v.workload(p)
	switch t.code {
	case "readiness-port":
		return v.probeFix(p, w, made)
	case "readiness-path", "readiness-timeout":
		if fix := probeFieldFix(t.code, p, w, made); fix != "" {
			return []string{fix}
		}
	case "pods-crashing":
		out = []string{kubectl(p.Namespace, "logs %s --previous", p.Name)}
	case "pods-unready":
		out = []string{kubectl(p.Namespace, "logs %s", p.Name)}
	}
	if out == nil {
		out = []string{kubectl(p.Namespace, "describe pod %s", p.Name)}
	}
	if v.hasOlder(w) && slices.Contains([]string{"pods-crashing", "pods-image", "pods-config", "pods-unready", "pods-pending"}, t.code) {
		out = append(out, kubectl(p.Namespace, "rollout undo %s %s", strings.ToLower(w.Kind), w.Name))
	}
	return out
}

// hasOlder says whether there is a revision of a Deployment to go back to.
func (v *View) hasOlder(w Ref) bool {
	n := 0
	for _, r := range v.replicas {
		if owner := metav1.GetControllerOf(r); r.Namespace == w.Namespace && w.Kind == "Deployment" && owner != nil && owner.Name == w.Name {
			n++
		}
	}
	return n > 1
}

// probeFieldFix changes what a probe asks for, or how long it waits.
func probeFieldFix(code string, p *corev1.Pod, w Ref, made bool) string {
	for i := range p.Spec.Containers {
		probe := p.Spec.Containers[i].ReadinessProbe
		if probe == nil || !made {
			continue
		}
		at := fmt.Sprintf("/spec/template/spec/containers/%d/readinessProbe/", i)
		switch {
		case code == "readiness-timeout":
			return jsonPatch(w, operation{"add", at + "timeoutSeconds", max(5, 5*probe.TimeoutSeconds)})
		case probe.HTTPGet != nil:
			return jsonPatch(w, operation{"add", at + "httpGet/path", "/"})
		}
	}
	return ""
}

// probeFix has the probe ask the port that the Service leads to, or the only one that is open.
func (v *View) probeFix(p *corev1.Pod, w Ref, made bool) []string {
	if !made {
		return []string{kubectl(p.Namespace, "describe pod %s", p.Name)}
	}
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		port, missing := probePort(c)
		if port == 0 && missing == "" {
			continue
		}
		right := v.rightPort(p, c)
		if right == 0 || right == port {
			continue
		}
		how := "httpGet"
		if c.ReadinessProbe.TCPSocket != nil {
			how = "tcpSocket"
		} else if c.ReadinessProbe.GRPC != nil {
			how = "grpc"
		}
		return []string{jsonPatch(w, operation{"replace", fmt.Sprintf("/spec/template/spec/containers/%d/readinessProbe/%s/port", i, how), right})}
	}
	return []string{kubectl(p.Namespace, "describe pod %s", p.Name)}
}

// rightPort is where a container serves: the only port that it declares, or the lowest that is open.
func (v *View) rightPort(p *corev1.Pod, c *corev1.Container) int32 {
	open := v.openPorts(p, corev1.ProtocolTCP)
	for _, cp := range c.Ports {
		if slices.Contains(open, cp.ContainerPort) || len(open) == 0 {
			return cp.ContainerPort
		}
	}
	if len(open) > 0 {
		return open[0]
	}
	return 0
}
