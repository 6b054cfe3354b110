package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// settle is how long controllers, nodes and proxies may take to follow a change before that is a finding.
const settle = 10 * time.Second

// checkPods looks at Services that select Pods of which none is ready, or some have not been for long.
func checkPods(v *View) (out []Finding) {
	for _, s := range v.subjects {
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
	if w, ok := v.maker(s.Namespace, s.Spec.Selector); ok && w.Replicas == 0 && (worst.code == "pods-terminating" || worst.code == "pods-ended") {
		return []Finding{v.emptyWorkload(Finding{Severity: Broken, Sure: Certain, Object: s.ref()}, s, w)}
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
	if t.detail != "" && !strings.HasSuffix(t.code, "-port") {
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
	if t.fix != nil {
		return t.fix
	}
	w, _ := v.workload(p)
	if kind, what, ok := strings.Cut(t.code, "-"); ok && slices.Contains([]string{"readiness", "startup", "liveness"}, kind) {
		if fix := v.probeFix(p, kind, what); fix != nil {
			return fix
		}
	}
	switch t.code {
	case "pods-crashing":
		out = []string{kubectl(p.Namespace, "logs %s --previous", p.Name)}
	case "pods-unready":
		out = []string{kubectl(p.Namespace, "logs %s", p.Name)}
	default:
		out = []string{kubectl(p.Namespace, "describe pod %s", p.Name)}
	}
	switch {
	case slices.Contains([]string{"pods-ended", "pods-terminating", "pod-lost", "readiness-gate"}, t.code):
	case v.hasOlder(w):
		out = append(out, kubectl(p.Namespace, "rollout undo %s %s", strings.ToLower(w.Kind), w.Name))
	case t.probe != "":
		out = append(out, v.withoutProbe(p, t.probe)...)
	case t.otherwise != nil:
		out = append(out, t.otherwise...)
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
