package node

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// change edits a node as others do.
func (r *rig) change(name string, edit func(*corev1.Node)) *corev1.Node {
	r.t.Helper()
	node, err := r.client.CoreV1().Nodes().Get(context.Background(), name, metav1.GetOptions{})
	r.must(err)
	edit(node)
	node, err = r.client.CoreV1().Nodes().Update(context.Background(), node, metav1.UpdateOptions{})
	r.must(err)
	return node
}

// condition sets one of a node; status "" removes it.
func condition(kind corev1.NodeConditionType, status corev1.ConditionStatus) func(*corev1.Node) {
	return func(node *corev1.Node) {
		node.Status.Conditions = slices.DeleteFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == kind })
		if status != "" {
			node.Status.Conditions = append(node.Status.Conditions, corev1.NodeCondition{Type: kind, Status: status})
		}
	}
}

// TestConditionsTaint: a condition that is true taints its node, whoever keeps it; one that is not takes the taint off.
func TestConditionsTaint(t *testing.T) {
	for kind, key := range map[corev1.NodeConditionType]string{
		corev1.NodeDiskPressure: corev1.TaintNodeDiskPressure, corev1.NodeMemoryPressure: corev1.TaintNodeMemoryPressure,
		corev1.NodePIDPressure: corev1.TaintNodePIDPressure, corev1.NodeNetworkUnavailable: corev1.TaintNodeNetworkUnavailable,
	} {
		t.Run(string(kind), func(t *testing.T) {
			r := newRig(t)
			ready := map[string]corev1.ConditionStatus{"leased": corev1.ConditionTrue, "unleased": corev1.ConditionTrue, "unleased-down": corev1.ConditionFalse, "mute": ""}
			for name, status := range ready {
				r.addNode(name, status)
			}
			r.renew("leased")
			for _, status := range []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionUnknown, ""} {
				for name := range ready {
					r.change(name, condition(kind, corev1.ConditionTrue))
				}
				r.refresh()
				for name := range ready {
					r.expect(name, string(ready[name])+" "+key+":NoSchedule pod=true")
					r.change(name, condition(kind, status))
				}
				r.refresh()
				for name := range ready {
					r.expect(name, string(ready[name])+" pod=true")
				}
			}
		})
	}
}

func TestCordonTaints(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.renew("n")
	r.change("n", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	r.refresh()
	r.expect("n", "True node.kubernetes.io/unschedulable:NoSchedule pod=true")
	node := r.change("n", func(n *corev1.Node) { n.Spec.Unschedulable = false })
	if taints := node.Spec.Taints; len(taints) != 1 || taints[0].TimeAdded == nil || !taints[0].TimeAdded.Time.Equal(r.clock.Now()) {
		t.Errorf("%v: without the time when it was added", taints)
	}
	r.refresh()
	r.expect("n", "True pod=true")
}

// TestOthersTaintsBesideConditions: what has another key or effect is somebody's own. All that changes is one write.
func TestOthersTaintsBesideConditions(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.renew("n")
	r.change("n", func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{
			{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule},
			{Key: "mine", Effect: corev1.TaintEffectNoSchedule},
			{Key: corev1.TaintNodePIDPressure, Effect: corev1.TaintEffectNoSchedule},
			{Key: corev1.TaintNodeDiskPressure, Effect: corev1.TaintEffectNoExecute},
		}
		condition(corev1.NodeDiskPressure, corev1.ConditionTrue)(n)
	})
	r.client.ClearActions()
	r.refresh()
	r.expect("n", "True mine:NoSchedule node.kubernetes.io/disk-pressure:NoExecute node.kubernetes.io/disk-pressure:NoSchedule pod=true")
	r.refresh()
	patches := 0
	for _, action := range r.client.Actions() {
		if action.GetVerb() == "patch" {
			patches++
		}
	}
	if patches != 1 {
		t.Errorf("%d patches", patches)
	}
	r.change("n", condition(corev1.NodeDiskPressure, corev1.ConditionFalse))
	r.refresh()
	r.expect("n", "True mine:NoSchedule node.kubernetes.io/disk-pressure:NoExecute pod=true")
}

// TestPressureOfALostNode: what a node said about its disk is out of date when it has stopped reporting; about the network others may know more.
func TestPressureOfALostNode(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.addNode("other", corev1.ConditionTrue)
	r.renew("n")
	r.renew("other")
	r.change("n", condition(corev1.NodeDiskPressure, corev1.ConditionTrue))
	r.change("n", condition(corev1.NodeNetworkUnavailable, corev1.ConditionTrue))
	r.refresh()
	r.expect("n", "True node.kubernetes.io/disk-pressure:NoSchedule node.kubernetes.io/network-unavailable:NoSchedule pod=true")
	r.clock.Step(time.Minute)
	r.renew("other")
	r.refresh()
	r.expect("n", strings.Replace(unreachable, "Unknown", "Unknown node.kubernetes.io/network-unavailable:NoSchedule", 1))
}

// TestConditionsCountWithoutLeases: that nodes can't renew their Leases says nothing about what they report.
func TestConditionsCountWithoutLeases(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.renew("n")
	r.refresh()
	r.must(r.client.CoreV1().Namespaces().Delete(context.Background(), corev1.NamespaceNodeLease, metav1.DeleteOptions{}))
	r.change("n", condition(corev1.NodeDiskPressure, corev1.ConditionTrue))
	r.refresh()
	r.expect("n", "True node.kubernetes.io/disk-pressure:NoSchedule pod=true")
}

// TestWakes: nodes are judged at once when one's taints are not what it says of itself, and only then.
func TestWakes(t *testing.T) {
	tainted := func(key string) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule})
		}
	}
	cordoned := func(n *corev1.Node) { n.Spec.Unschedulable = true }
	ready, full := condition(corev1.NodeReady, corev1.ConditionTrue), condition(corev1.NodeDiskPressure, corev1.ConditionTrue)
	for name, c := range map[string]struct {
		node  []func(*corev1.Node)
		wakes bool
	}{
		"nothing said":       {nil, false},
		"ready":              {[]func(*corev1.Node){ready}, false},
		"ready, tainted":     {[]func(*corev1.Node){ready, tainted(corev1.TaintNodeNotReady)}, true},
		"full":               {[]func(*corev1.Node){ready, full}, true},
		"full, nothing else": {[]func(*corev1.Node){full}, true},
		"full, tainted":      {[]func(*corev1.Node){ready, full, tainted(corev1.TaintNodeDiskPressure)}, false},
		"no longer full":     {[]func(*corev1.Node){ready, tainted(corev1.TaintNodeDiskPressure)}, true},
		"cordoned":           {[]func(*corev1.Node){ready, cordoned}, true},
		"cordoned, tainted":  {[]func(*corev1.Node){ready, cordoned, tainted(corev1.TaintNodeUnschedulable)}, false},
		"somebody's taint":   {[]func(*corev1.Node){ready, tainted("mine")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			node := &corev1.Node{}
			for _, f := range c.node {
				f(node)
			}
			r.changed(node)
			if got := len(r.wake) == 1; got != c.wakes {
				t.Errorf("wakes: %t, want %t", got, c.wakes)
			}
		})
	}
}
