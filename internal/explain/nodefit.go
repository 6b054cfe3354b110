package explain

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"portal/internal/scheduler"
)

// unscheduled: a Pod that has no node.
func (v *View) unscheduled(p *corev1.Pod) trouble {
	t := trouble{code: "pods-pending", reason: "no node", since: p.CreationTimestamp.Time, rank: 7}
	if len(p.Spec.SchedulingGates) > 0 {
		t.reason = fmt.Sprintf("no node: it waits for its scheduling gate %s to be removed", p.Spec.SchedulingGates[0].Name)
		t.fix = []string{jsonPatch(podRef(p), operation{Op: "remove", Path: "/spec/schedulingGates"})}
		return t
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			t.detail, t.since = c.Message, c.LastTransitionTime.Time
		}
	}
	if t.detail == "" {
		t.detail = v.eventMessage(podRef(p), "FailedScheduling")
	}
	if name := p.Spec.SchedulerName; t.detail == "" && name != "" && name != corev1.DefaultSchedulerName {
		t.reason = fmt.Sprintf("no node: spec.schedulerName is %q, and nobody of that name has looked at it", name)
		t.fix = v.templatePatch(p, map[string]any{"schedulerName": corev1.DefaultSchedulerName})
		return t
	}
	why, fix := v.unfit(p)
	if why != "" {
		t.reason, t.fix = "no node fits: "+why, fix
	}
	return t
}

// unfit is what keeps a Pod from all nodes, if it is one thing, and what to do about it.
func (v *View) unfit(p *corev1.Pod) (string, []string) {
	if len(v.nodes) == 0 {
		return "", nil
	}
	names := slices.Sorted(maps.Keys(v.nodes))
	var suited []*corev1.Node // by the Pod's selector
	for _, name := range names {
		if matches(p.Spec.NodeSelector, v.nodes[name].Labels) {
			suited = append(suited, v.nodes[name])
		}
	}
	if len(suited) == 0 {
		return v.badNodeSelector(p, names)
	}
	open := slices.DeleteFunc(slices.Clone(suited), func(n *corev1.Node) bool { _, kept := untolerated(p, n); return kept })
	if len(open) == 0 {
		return v.keptOff(p, suited)
	}
	if why, fix := v.tooBig(p, open); why != "" {
		return why, fix
	}
	if a := p.Spec.Affinity; a != nil && (a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil || a.PodAffinity != nil || a.PodAntiAffinity != nil) {
		return "spec.affinity asks for what no node has", v.templatePatch(p, map[string]any{"affinity": nil})
	}
	if slices.ContainsFunc(p.Spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable == corev1.DoNotSchedule }) {
		return "spec.topologySpreadConstraints (DoNotSchedule) leave no node", v.templatePatch(p, map[string]any{"topologySpreadConstraints": nil})
	}
	for i := range p.Spec.Containers {
		for j, port := range p.Spec.Containers[i].Ports {
			if port.HostPort == 0 {
				continue
			}
			why := fmt.Sprintf("the host port %d of its container %s is taken on every node", port.HostPort, p.Spec.Containers[i].Name)
			if !p.Spec.HostNetwork {
				return why, v.changePod(p, operation{Op: "remove", Path: fmt.Sprintf("/containers/%d/ports/%d/hostPort", i, j)})
			}
			return why, nil
		}
	}
	return "", nil
}

// untolerated is the first taint of a node that keeps a Pod off.
func untolerated(p *corev1.Pod, n *corev1.Node) (corev1.Taint, bool) {
	for _, taint := range scheduler.Taints(n) {
		if taint.Effect != corev1.TaintEffectPreferNoSchedule && !scheduler.Tolerates(p.Spec.Tolerations, taint) {
			return taint, true
		}
	}
	return corev1.Taint{}, false
}

// keptOff says what the nodes that would be suited have against the Pod: the first for all.
func (v *View) keptOff(p *corev1.Pod, suited []*corev1.Node) (string, []string) {
	n := suited[0]
	for _, other := range suited {
		if taint, _ := untolerated(p, other); !strings.HasPrefix(taint.Key, "node.kubernetes.io/not-") {
			n = other // of a node that is not ready more is said elsewhere
			break
		}
	}
	taint, _ := untolerated(p, n)
	why, fix := fmt.Sprintf("node %s has the taint %s, which the Pod does not tolerate", n.Name, taint.ToString()), kubectl("", "taint nodes %s %s:%s-", n.Name, taint.Key, taint.Effect)
	switch {
	case taint.Key == corev1.TaintNodeUnschedulable:
		why, fix = fmt.Sprintf("node %s is cordoned", n.Name), kubectl("", "uncordon %s", n.Name)
	case strings.HasPrefix(taint.Key, "node.kubernetes.io/"):
		why, fix = fmt.Sprintf("node %s has the taint %s", n.Name, taint.Key), kubectl("", "describe node %s", n.Name)
	}
	if len(suited) < len(v.nodes) {
		why += ", and no other matches the Pod's node selector"
	}
	return why, []string{fix}
}

// badNodeSelector: no node has the labels that the Pod asks for.
func (v *View) badNodeSelector(p *corev1.Pod, names []string) (string, []string) {
	for _, k := range slices.Sorted(maps.Keys(p.Spec.NodeSelector)) {
		value := p.Spec.NodeSelector[k]
		found := slices.ContainsFunc(names, func(n string) bool { return v.nodes[n].Labels[k] == value })
		if found {
			continue
		}
		patch := map[string]any{k: nil}
		why := fmt.Sprintf("spec.nodeSelector asks for %s=%s, which no node has", k, value)
		for _, n := range names {
			if got := v.nodes[n].Labels[k]; near(got, value) {
				why += fmt.Sprintf("; node %s has %s=%s", n, k, got)
				patch = map[string]any{k: got}
				break
			}
		}
		return why, v.templatePatch(p, map[string]any{"nodeSelector": patch})
	}
	return fmt.Sprintf("no node has all labels of spec.nodeSelector (%s)", pairs(p.Spec.NodeSelector)), v.templatePatch(p, map[string]any{"nodeSelector": nil})
}

// tooBig: the Pod asks for more than is free on any node that would be suited.
func (v *View) tooBig(p *corev1.Pod, suited []*corev1.Node) (string, []string) {
	for _, what := range resources(p) {
		asked := requested(p, what)
		if asked.IsZero() {
			continue
		}
		var most resource.Quantity
		where := ""
		for _, n := range suited {
			if free := v.free(n, what); where == "" || free.Cmp(most) > 0 {
				most, where = free, n.Name
			}
		}
		if asked.Cmp(most) <= 0 {
			continue
		}
		why := fmt.Sprintf("it asks for %s %s, and node %s, which has most of it, has %s free", asked.String(), what, where, most.String())
		return why, v.smaller(p, what)
	}
	return "", nil
}

// resources are what a Pod asks for, the usual ones first.
func resources(p *corev1.Pod) (out []corev1.ResourceName) {
	out = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}
	var more []corev1.ResourceName
	for _, c := range append(slices.Clone(p.Spec.Containers), p.Spec.InitContainers...) {
		for what := range c.Resources.Requests {
			if !slices.Contains(out, what) && !slices.Contains(more, what) {
				more = append(more, what)
			}
		}
	}
	slices.Sort(more)
	return append(out, more...)
}

// smaller has a Pod's containers ask for little of a resource; of one that is not cpu or memory, for none.
func (v *View) smaller(p *corev1.Pod, what corev1.ResourceName) []string {
	ask := map[string]any{"requests": map[corev1.ResourceName]any{what: "100m"}}
	switch what {
	case corev1.ResourceCPU:
	case corev1.ResourceMemory:
		ask = map[string]any{"requests": map[corev1.ResourceName]any{what: "64Mi"}}
	default:
		ask = map[string]any{"requests": map[corev1.ResourceName]any{what: nil}, "limits": map[corev1.ResourceName]any{what: nil}}
	}
	change := map[string]any{}
	for field, list := range map[string][]corev1.Container{"containers": p.Spec.Containers, "initContainers": p.Spec.InitContainers} {
		var out []map[string]any
		for i := range list {
			if _, ok := list[i].Resources.Requests[what]; ok {
				out = append(out, map[string]any{"name": list[i].Name, "resources": ask})
			}
		}
		if out != nil {
			change[field] = out
		}
	}
	return v.containersPatch(p, change)
}

// requested is what a Pod asks for: its containers together, or the one of its init containers that asks for most.
func requested(p *corev1.Pod, what corev1.ResourceName) (out resource.Quantity) {
	for i := range p.Spec.Containers {
		if q, ok := p.Spec.Containers[i].Resources.Requests[what]; ok {
			out.Add(q)
		}
	}
	for i := range p.Spec.InitContainers {
		if q, ok := p.Spec.InitContainers[i].Resources.Requests[what]; ok && q.Cmp(out) > 0 {
			out = q.DeepCopy()
		}
	}
	return out
}

// free is what the Pods of a node leave of what it has.
func (v *View) free(n *corev1.Node, what corev1.ResourceName) resource.Quantity {
	out := n.Status.Allocatable[what].DeepCopy()
	for i := range v.Evidence.Pods {
		if p := &v.Evidence.Pods[i]; p.Spec.NodeName == n.Name && !ended(p) {
			out.Sub(requested(p, what))
		}
	}
	return out
}

// anotherNode makes a bare Pod again without its node; that of a workload is replaced when it is deleted.
func (v *View) anotherNode(p *corev1.Pod) []string {
	if w, made := v.workload(p); made && v.pinned(w) == "" {
		return []string{kubectl(p.Namespace, "delete pod %s --force --grace-period=0", p.Name)}
	} else if made {
		return v.templatePatch(p, map[string]any{"nodeName": nil})
	}
	return []string{fmt.Sprintf("kubectl get pod %s -n %s -o json | grep -v '\"nodeName\":' | kubectl replace --force --grace-period=0 -f -", p.Name, p.Namespace)}
}

// pinned is the node that a workload's template names.
func (v *View) pinned(w Ref) string {
	for _, other := range v.workloads[w.Namespace] {
		if other.Ref == w {
			return other.Template.Spec.NodeName
		}
	}
	return ""
}
