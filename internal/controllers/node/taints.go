package node

import (
	"context"
	"encoding/json"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"portal/internal/scheduler"
)

var healthTaints = []string{corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady}

// setIsolated remembers whether no node is ready.
func (c *Controller) setIsolated(ctx context.Context, isolated bool) {
	if isolated == c.isolated {
		return
	}
	c.isolated = isolated
	if isolated {
		klog.FromContext(ctx).Info("no node is ready: no Pods are evicted until one is")
		return
	}
	klog.FromContext(ctx).Info("a node is ready again, evicting Pods of lost nodes", "after", c.GracePeriod)
	// The others get the time to come back too, before their Pods are evicted.
	for name, p := range c.health {
		p.at = c.Clock.Now()
		c.health[name] = p
	}
}

// taint puts the taints on a node that go with its readiness, conditions and spec.unschedulable, and takes off the others of the kind.
func (c *Controller) taint(ctx context.Context, v verdict, z zone) error {
	var key string
	switch v.status {
	case corev1.ConditionUnknown:
		key = corev1.TaintNodeUnreachable
	case corev1.ConditionFalse:
		key = corev1.TaintNodeNotReady
	}
	node := v.node
	effects := []corev1.TaintEffect{corev1.TaintEffectNoSchedule}
	first := false
	if key != "" && !c.isolated {
		first = !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
			return t.Effect == corev1.TaintEffectNoExecute && slices.Contains(healthTaints, t.Key)
		})
		if !first || c.mayEvict(v, z) {
			effects = append(effects, corev1.TaintEffectNoExecute)
		} else {
			first = false
		}
	}
	taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool {
		return slices.Contains(healthTaints, t.Key) && (t.Key != key || !slices.Contains(effects, t.Effect))
	})
	if key != "" {
		for _, effect := range effects {
			taints = with(taints, corev1.Taint{Key: key, Effect: effect})
		}
	}
	if err := c.write(ctx, node, withState(taints, node)); err != nil {
		return err
	}
	if first {
		c.evicted[zoneOf(node)] = c.Clock.Now()
	}
	return nil
}

// taintState puts the taints on a node that go with its conditions and spec.unschedulable, and leaves those of its readiness alone.
func (c *Controller) taintState(ctx context.Context, node *corev1.Node) error {
	return c.write(ctx, node, withState(node.Spec.Taints, node))
}

// withState are taints with those that a node's conditions and spec.unschedulable amount to, and without the others of the kind.
func withState(taints []corev1.Taint, node *corev1.Node) []corev1.Taint {
	state := scheduler.StateTaints(node)
	out := slices.DeleteFunc(slices.Clone(taints), func(t corev1.Taint) bool { return scheduler.IsStateTaint(t) && !contains(state, t) })
	for _, taint := range state {
		out = with(out, taint)
	}
	return out
}

// with are taints with another one, if it is not among them.
func with(taints []corev1.Taint, taint corev1.Taint) []corev1.Taint {
	if contains(taints, taint) {
		return taints
	}
	return append(taints, taint)
}

func contains(taints []corev1.Taint, taint corev1.Taint) bool {
	return slices.ContainsFunc(taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint) })
}

func sameTaints(a, b []corev1.Taint) bool {
	return slices.EqualFunc(a, b, func(a, b corev1.Taint) bool { return a.MatchTaint(&b) })
}

// write gives a node its taints, if they are others than it has.
func (c *Controller) write(ctx context.Context, node *corev1.Node, taints []corev1.Taint) error {
	if sameTaints(taints, node.Spec.Taints) {
		return nil
	}
	now := metav1.NewTime(c.Clock.Now())
	for i := range taints {
		if !contains(node.Spec.Taints, taints[i]) {
			taints[i].TimeAdded = &now
		}
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"taints": taints},
	})
	if err != nil {
		return err
	}
	// A merge patch replaces the list, and the resourceVersion sees to it that nobody else's taint is lost.
	_, err = c.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// mayEvict says whether Pods of a lost node are to be evicted now: not too many nodes at a time, and a silent one only if it has had the
// time to come back since this server could see any node.
func (c *Controller) mayEvict(v verdict, z zone) bool {
	now := c.Clock.Now()
	if v.status == corev1.ConditionUnknown && now.Sub(c.health[v.node.Name].at) <= c.GracePeriod {
		return false
	}
	pause, ever := z.pause()
	last, before := c.evicted[zoneOf(v.node)]
	return ever && (!before || now.Sub(last) >= pause)
}
