package scheduler

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// conditionTaints are the conditions that keep Pods off a node while they are true, and the taints that say so. Unknown is not true: a node
// that does not report any more is unreachable, which is another taint.
var conditionTaints = map[corev1.NodeConditionType]string{
	corev1.NodeMemoryPressure:     corev1.TaintNodeMemoryPressure,
	corev1.NodeDiskPressure:       corev1.TaintNodeDiskPressure,
	corev1.NodePIDPressure:        corev1.TaintNodePIDPressure,
	corev1.NodeNetworkUnavailable: corev1.TaintNodeNetworkUnavailable,
}

// ConditionTaint is the key of the taint that a condition of a node amounts to, if it is one of these and true.
func ConditionTaint(c *corev1.NodeCondition) (key string, ok bool) {
	key, ok = conditionTaints[c.Type]
	return key, ok && c.Status == corev1.ConditionTrue
}

// StateTaints are the taints that a node's conditions and spec.unschedulable amount to. Its readiness is not among them: which taint goes with
// that depends on more than the node.
func StateTaints(n *corev1.Node) []corev1.Taint {
	var out []corev1.Taint
	for i := range n.Status.Conditions {
		if key, ok := ConditionTaint(&n.Status.Conditions[i]); ok {
			out = append(out, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
		}
	}
	if n.Spec.Unschedulable {
		out = append(out, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
	}
	return out
}

// IsStateTaint says whether a taint is of the kind that StateTaints gives. One with another effect is somebody's own.
func IsStateTaint(t corev1.Taint) bool {
	if t.Effect != corev1.TaintEffectNoSchedule {
		return false
	}
	for _, key := range conditionTaints {
		if t.Key == key {
			return true
		}
	}
	return t.Key == corev1.TaintNodeUnschedulable
}

// Taints are those of a node, and those that its state amounts to: nobody may have written them down yet.
func Taints(n *corev1.Node) []corev1.Taint {
	out := slices.Clone(n.Spec.Taints)
	for _, taint := range StateTaints(n) {
		if !slices.ContainsFunc(out, func(t corev1.Taint) bool { return t.MatchTaint(&taint) }) {
			out = append(out, taint)
		}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			out = append(out, corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule})
		}
	}
	return out
}
