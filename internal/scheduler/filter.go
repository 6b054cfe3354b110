package scheduler

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// Unfit says why no node fits, and how many nodes each reason is of.
type Unfit struct {
	Nodes   int
	Reasons map[string]int
}

// Error is what people read in an Event and in the Pod's condition.
func (u *Unfit) Error() string {
	if u.Nodes == 0 {
		return "0/0 nodes are available: there are no nodes."
	}
	var reasons []string
	for reason, n := range u.Reasons {
		reasons = append(reasons, fmt.Sprintf("%d %s", n, reason))
	}
	slices.Sort(reasons)
	return fmt.Sprintf("0/%d nodes are available: %s.", u.Nodes, strings.Join(reasons, ", "))
}

// Choose gives the name of the node that fits a Pod best, or an *Unfit. Among equally good ones chance decides.
func (c *Cluster) Choose(object *corev1.Pod, chance *rand.Rand) (string, error) {
	q := newQuestion(c, newPod(object))
	unfit := &Unfit{Reasons: map[string]int{}}
	var fits []*node
	for _, n := range q.nodes {
		unfit.Nodes++
		if reasons := q.misfit(n); len(reasons) == 0 {
			fits = append(fits, n)
		} else {
			for _, reason := range reasons {
				unfit.Reasons[reason]++
			}
		}
	}
	if len(fits) == 0 {
		return "", unfit
	}
	best := q.best(fits)
	return best[chance.IntN(len(best))].name, nil
}

// question is where a Pod should go, and what was found out to answer it.
type question struct {
	cluster  *Cluster
	pod      *pod
	nodes    []*node
	required nodeaffinity.RequiredNodeAffinity
	spreads  []*spreadCount
	affinity affinityCount
}

func newQuestion(c *Cluster, p *pod) *question {
	q := &question{cluster: c, pod: p, nodes: c.present(), required: nodeaffinity.GetRequiredNodeAffinity(p.Pod)}
	q.countSpreads()
	q.countAffinity()
	return q
}

// misfit is why a Pod can't go to a node: the first kind of reason that there is.
func (q *question) misfit(n *node) []string {
	for _, check := range []func(*node) []string{q.taints, q.selector, q.ports, q.room, q.spreading, q.company} {
		if reasons := check(n); len(reasons) > 0 {
			return reasons
		}
	}
	return nil
}

func (q *question) taints(n *node) []string {
	for _, taint := range Taints(n.object) {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule || Tolerates(q.pod.Spec.Tolerations, taint) {
			continue
		}
		switch taint.Key {
		case corev1.TaintNodeUnschedulable:
			return []string{"node(s) are cordoned (unschedulable)"}
		case corev1.TaintNodeNotReady:
			return []string{"node(s) are not ready"}
		}
		return []string{fmt.Sprintf("node(s) have the taint {%s: %s} that the Pod doesn't tolerate", taint.Key, taint.Value)}
	}
	return nil
}

// Tolerates says whether one of the tolerations covers a taint.
func Tolerates(tolerations []corev1.Toleration, taint corev1.Taint) bool {
	return Toleration(tolerations, taint) != nil
}

// Toleration is the first of the tolerations that covers a taint, or nil.
func Toleration(tolerations []corev1.Toleration, taint corev1.Taint) *corev1.Toleration {
	i := slices.IndexFunc(tolerations, func(t corev1.Toleration) bool {
		if t.Effect != "" && t.Effect != taint.Effect || t.Key != "" && t.Key != taint.Key {
			return false
		}
		switch t.Operator {
		case corev1.TolerationOpExists:
			return true
		case corev1.TolerationOpEqual, "":
			return t.Key != "" && t.Value == taint.Value
		}
		return false
	})
	if i < 0 {
		return nil
	}
	return &tolerations[i]
}

func (q *question) selector(n *node) []string {
	if ok, err := q.required.Match(n.object); !ok || err != nil {
		return []string{"node(s) don't match the Pod's node selector or affinity"}
	}
	return nil
}

func (q *question) ports(n *node) []string {
	if len(q.pod.ports) == 0 {
		return nil
	}
	for _, other := range n.pods {
		for _, taken := range other.ports {
			if slices.ContainsFunc(q.pod.ports, taken.conflicts) {
				return []string{"node(s) have no free port for the Pod's host ports"}
			}
		}
	}
	return nil
}

// room compares with what the node can give. A node that says nothing gives nothing.
func (q *question) room(n *node) []string {
	all := amountsOf(n.object.Status.Allocatable)
	if all[corev1.ResourcePods] == 0 {
		return []string{"node(s) run no Pods (status.allocatable says none)"}
	}
	if int64(len(n.pods)+1) > all[corev1.ResourcePods] {
		return []string{"node(s) have no room for another Pod"}
	}
	var out []string
	for name, need := range q.pod.needs {
		if need > 0 && need > all[name]-n.used[name] {
			out = append(out, "Insufficient "+string(name))
		}
	}
	return out
}
