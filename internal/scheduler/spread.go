package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// spread is how evenly the Pods of a kind should be distributed.
type spread struct {
	key        string
	skew       int
	hard       bool
	pods       labels.Selector
	minDomains int
	// anyNode and tainted count nodes too that the Pod itself can't go to: for its selector, for their taints.
	anyNode, tainted bool
}

func spreadsOf(object *corev1.Pod) []spread {
	var out []spread
	for i := range object.Spec.TopologySpreadConstraints {
		c := &object.Spec.TopologySpreadConstraints[i]
		s := spread{
			key: c.TopologyKey, skew: int(c.MaxSkew), hard: c.WhenUnsatisfiable == corev1.DoNotSchedule, pods: selectorOf(c.LabelSelector), minDomains: 1,
			anyNode: c.NodeAffinityPolicy != nil && *c.NodeAffinityPolicy == corev1.NodeInclusionPolicyIgnore,
			tainted: c.NodeTaintsPolicy == nil || *c.NodeTaintsPolicy == corev1.NodeInclusionPolicyIgnore,
		}
		if c.MinDomains != nil {
			s.minDomains = int(*c.MinDomains)
		}
		out = append(out, s)
	}
	return out
}

// spreadCount is how a kind of Pods is distributed now.
type spreadCount struct {
	spread
	domains map[string]int
	least   int
	self    int // 1 if the Pod is one of them
}

func (q *question) countSpreads() {
	for _, s := range q.pod.spreads {
		count := &spreadCount{spread: s, domains: map[string]int{}}
		if s.pods.Matches(labels.Set(q.pod.Labels)) {
			count.self = 1
		}
		for _, n := range q.nodes {
			if domain, ok := n.object.Labels[s.key]; ok && q.counts(n, s) {
				count.domains[domain] += q.matching(n, s.pods)
			}
		}
		count.least = -1
		for _, number := range count.domains {
			if count.least < 0 || number < count.least {
				count.least = number
			}
		}
		if len(count.domains) < s.minDomains || count.least < 0 {
			count.least = 0
		}
		q.spreads = append(q.spreads, count)
	}
}

// counts says whether a node is one of those that Pods are spread over.
func (q *question) counts(n *node, s spread) bool {
	for _, other := range q.pod.spreads {
		if _, ok := n.object.Labels[other.key]; !ok && other.hard == s.hard {
			return false
		}
	}
	return (s.anyNode || len(q.selector(n)) == 0) && (s.tainted || len(q.taints(n)) == 0)
}

func (q *question) matching(n *node, selector labels.Selector) (number int) {
	for _, p := range n.pods {
		if p.Namespace == q.pod.Namespace && p.DeletionTimestamp == nil && selector.Matches(labels.Set(p.Labels)) {
			number++
		}
	}
	return number
}

// spreading judges whether a node would make the distribution too uneven.
func (q *question) spreading(n *node) []string {
	for _, s := range q.spreads {
		if !s.hard {
			continue
		}
		domain, ok := n.object.Labels[s.key]
		if !ok {
			return []string{"node(s) lack the label of a topology spread constraint"}
		}
		if s.domains[domain]+s.self-s.least > s.skew {
			return []string{"node(s) would violate the Pod's topology spread constraints"}
		}
	}
	return nil
}
