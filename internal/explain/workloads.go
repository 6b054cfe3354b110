package explain

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// emptyWorkload: what would make the Service's Pods makes none.
func (v *View) emptyWorkload(f Finding, s *Service, w Workload) Finding {
	f.Code, f.Field = "workload-empty", ""
	f.Affects = []Ref{w.Ref}
	kind := strings.ToLower(w.Kind)
	switch {
	case w.Kind == "DaemonSet" && w.Replicas == 0:
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s runs on no node", s.ref(), w.Ref)
		f.Evidence = []string{"status.desiredNumberScheduled is 0: no node matches its node selector and tolerations"}
		f.Fix = []string{kubectl(w.Namespace, "get daemonset %s -o jsonpath='{.spec.template.spec.nodeSelector}'", w.Name)}
		owner := metav1.OwnerReference{Kind: w.Kind, Name: w.Name, Controller: new(bool)}
		*owner.Controller = true
		if why, fix := v.unfit(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, OwnerReferences: []metav1.OwnerReference{owner}}, Spec: w.Template.Spec}); why != "" {
			f.Verdict += ": " + why
			f.Fix = fix
		}
	case w.Replicas == 0:
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s is scaled to 0", s.ref(), w.Ref)
		f.Evidence = []string{"spec.replicas is 0, and no other workload makes Pods with " + pairs(s.Spec.Selector)}
		f.Fix = []string{kubectl(w.Namespace, "scale %s %s --replicas=1", kind, w.Name)}
	case w.Paused:
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s is paused (spec.paused), so it makes no Pods", s.ref(), w.Ref)
		f.Fix = []string{kubectl(w.Namespace, "rollout resume %s %s", kind, w.Name)}
	default:
		f.Verdict = fmt.Sprintf("%s has no endpoints: %s wants %s and has none", s.ref(), w.Ref, count(int(w.Replicas), "Pod", "Pods"))
		f.Fix = []string{kubectl(w.Namespace, "describe %s %s", kind, w.Name)}
		message := v.failedCreate(w)
		if message != "" {
			f.Verdict += ": " + firstLine(message)
			f.Evidence = []string{message}
		}
		if fix := v.refusedFix(w, message); fix != nil {
			f.Fix = fix
		}
	}
	return f
}

// failedCreate is why Pods of a workload are refused. A Deployment's are made by its ReplicaSets.
func (v *View) failedCreate(w Workload) string {
	if w.Message != "" {
		return w.Message
	}
	if m := v.eventMessage(w.Ref, "FailedCreate"); m != "" || w.Kind != "Deployment" {
		return m
	}
	for _, set := range v.replicas {
		if owner := metav1.GetControllerOf(set); set.Namespace != w.Namespace || owner == nil || owner.Name != w.Name {
			continue
		}
		for _, c := range set.Status.Conditions {
			if c.Type == appsv1.ReplicaSetReplicaFailure && c.Status == corev1.ConditionTrue {
				return c.Message
			}
		}
		if m := v.eventMessage(Ref{"ReplicaSet", set.Namespace, set.Name}, "FailedCreate"); m != "" {
			return m
		}
	}
	return ""
}

var (
	quotaMessage   = regexp.MustCompile(`exceeded quota: ([^,]+), requested: ([^ ,]+)=([^ ,]+).*limited: ([^ ,]+)=([^ ,]+)`)
	quotaNeeds     = regexp.MustCompile(`failed quota: ([^:]+): must specify ([a-z.]+)`)
	webhookMessage = regexp.MustCompile(`webhook "([^"]+)"`)
	webhookService = regexp.MustCompile(`//([a-z0-9-]+)\.([a-z0-9-]+)\.svc[:/]`)
	classMessage   = regexp.MustCompile(`PriorityClass(?: with name)? "?([a-z0-9.-]+)"?`)
)

// refusedFix are commands for what keeps Pods from being made.
func (v *View) refusedFix(w Workload, message string) []string {
	if m := quotaMessage.FindStringSubmatch(message); m != nil {
		return quotaFix(w, m[1], m[2], m[3], m[5])
	}
	if m := quotaNeeds.FindStringSubmatch(message); m != nil {
		kind, what, ok := strings.Cut(m[2], ".")
		value := map[string]string{"cpu": "100m", "memory": "64Mi"}[what]
		if ok && value != "" && slices.Contains([]string{"limits", "requests"}, kind) {
			return []string{kubectl(w.Namespace, "set resources %s %s --%s=%s=%s", strings.ToLower(w.Kind), w.Name, kind, what, value)}
		}
	}
	if name := w.Template.Spec.ServiceAccountName; name != "" && strings.Contains(strings.ReplaceAll(strings.ToLower(message), " ", ""), "serviceaccount") {
		return []string{kubectl(w.Namespace, "create serviceaccount %s", name)}
	}
	if m := webhookService.FindStringSubmatch(message); m != nil && webhookMessage.MatchString(message) {
		return []string{fmt.Sprintf("portal explain service %s -n %s", m[1], m[2])}
	}
	if m := webhookMessage.FindStringSubmatch(message); m != nil {
		return []string{fmt.Sprintf("kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations -o yaml | grep -n -B3 -A8 'name: %s'", m[1])}
	}
	if name := w.Template.Spec.PriorityClassName; name != "" && classMessage.MatchString(message) && strings.Contains(message, name) {
		return []string{mergePatch(w.Ref, map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"priorityClassName": nil}}}})}
	}
	return nil
}

// quotaFix raises a quota by what all Pods of the workload ask for.
func quotaFix(w Workload, name, what, asked, limit string) []string {
	more, err1 := resource.ParseQuantity(asked)
	sum, err2 := resource.ParseQuantity(limit)
	if err1 != nil || err2 != nil {
		return nil
	}
	for range max(w.Replicas, 1) {
		sum.Add(more)
	}
	return []string{mergePatch(Ref{"ResourceQuota", w.Namespace, name}, map[string]any{"spec": map[string]any{"hard": map[string]any{what: sum.String()}}})}
}

// checkWorkloads looks at workloads behind Services that have fewer Pods than they want, and can't make the rest.
func checkWorkloads(v *View) (out []Finding) {
	for _, s := range v.subjects {
		if !s.selects() || len(s.Pods) == 0 {
			continue
		}
		w, ok := v.maker(s.Namespace, s.Spec.Selector)
		if !ok || w.Replicas == 0 || len(s.Pods) >= int(w.Replicas) {
			continue
		}
		message := v.failedCreate(w)
		if message == "" {
			continue
		}
		f := Finding{Code: "workload-short", Severity: Degraded, Sure: Certain, Object: s.ref(), Affects: []Ref{w.Ref}, Evidence: []string{message}}
		f.Verdict = fmt.Sprintf("%s has %d of the %d Pods that %s wants: %s", s.ref(), len(s.Pods), w.Replicas, w.Ref, firstLine(message))
		f.Fix = v.refusedFix(w, message)
		if f.Fix == nil {
			f.Fix = []string{kubectl(w.Namespace, "describe %s %s", strings.ToLower(w.Kind), w.Name)}
		}
		if !slices.ContainsFunc(s.Pods, func(p *corev1.Pod) bool { ready, _, _ := podReady(p); return ready && !ended(p) }) {
			f.Severity = Broken
		}
		out = append(out, f)
	}
	return out
}

// stuck: what is being deleted should be gone by now.
func (v *View) stuck(at *metav1.Time) bool { return at != nil && v.Now.Sub(at.Time) > 2*settle }

// checkDeleting looks at namespaces whose deletion does not end.
func checkDeleting(v *View) (out []Finding) {
	for i := range v.Namespaces {
		n := &v.Namespaces[i]
		if !v.stuck(n.DeletionTimestamp) || len(v.inNamespace[n.Name]) == 0 {
			continue
		}
		f := Finding{
			Code: "namespace-terminating", Severity: Degraded, Sure: Certain, Object: Ref{"Namespace", "", n.Name}, Since: since(n.DeletionTimestamp.Time),
			Verdict: fmt.Sprintf("the namespace %s is being deleted, for %s: nothing new is made in it, and what is there goes", n.Name, ago(v.Now.Sub(n.DeletionTimestamp.Time))),
			Fix:     []string{kubectl("", "get namespace %s -o jsonpath='{.status.conditions}'", n.Name)},
		}
		for _, c := range n.Status.Conditions {
			if c.Status == corev1.ConditionTrue && c.Message != "" {
				f.Evidence = append(f.Evidence, c.Message)
			}
		}
		for _, s := range v.inNamespace[n.Name] {
			f.Affects = append(f.Affects, s.ref())
			if !s.served() {
				f.Severity = Broken
			}
		}
		out = append(out, f)
	}
	return out
}

// checkServiceDeleting looks at Services whose deletion does not end.
func checkServiceDeleting(v *View) (out []Finding) {
	for _, s := range v.subjects {
		if !v.stuck(s.DeletionTimestamp) {
			continue
		}
		out = append(out, Finding{
			Code: "service-deleting", Severity: Degraded, Sure: Certain, Object: s.ref(), Field: "metadata.finalizers", Since: since(s.DeletionTimestamp.Time),
			Verdict:  fmt.Sprintf("%s is being deleted, and waits for its finalizer %s to be removed: it can't be made again before", s.ref(), some(s.Finalizers)),
			Evidence: []string{fmt.Sprintf("for %s", ago(v.Now.Sub(s.DeletionTimestamp.Time)))},
			Fix:      []string{mergePatch(s.ref(), map[string]any{"metadata": map[string]any{"finalizers": nil}})},
		})
	}
	return out
}

// checkRestarts looks at Pods that are ready between one end and the next.
func checkRestarts(v *View) (out []Finding) {
	const often = 3
	for _, s := range v.subjects {
		if !s.selects() {
			continue
		}
		for _, p := range s.Pods {
			if _, ok := v.trouble(p); ok {
				continue
			}
			for i := range p.Status.ContainerStatuses {
				c := &p.Status.ContainerStatuses[i]
				last := c.LastTerminationState.Terminated
				if c.RestartCount < often || last == nil || v.Now.Sub(last.FinishedAt.Time) > 10*settle {
					continue
				}
				t := v.crashing(p, c, last.FinishedAt.Time)
				f := v.podFinding(s, t, []*corev1.Pod{p})
				f.Severity = Degraded
				f.Verdict = fmt.Sprintf("%s loses an endpoint again and again: %s", s.ref(), f.Verdict)
				f.Evidence = append(f.Evidence, fmt.Sprintf("restarted %d times", c.RestartCount))
				out = append(out, f)
			}
		}
	}
	return out
}
