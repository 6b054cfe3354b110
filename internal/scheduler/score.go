package scheduler

import (
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// judge gives each node a mark. What is more is better, unless it is turned round; marks are brought to 0…100 before they
// are weighed.
type judge struct {
	weight float64
	// absolute marks are from 0 to 100 already. Of the others the best node gets 100.
	absolute bool
	less     bool // the less the better
	mark     func(*node) float64
}

func (q *question) judges() []judge {
	out := []judge{
		{weight: 1, absolute: true, mark: q.free},
		{weight: 1, absolute: true, mark: q.balance},
		{weight: 3, less: true, mark: q.unwelcome},
		{weight: 2, mark: q.companyScore},
	}
	if affinity := q.pod.Spec.Affinity; affinity != nil && affinity.NodeAffinity != nil {
		terms, err := nodeaffinity.NewPreferredSchedulingTerms(affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
		if err == nil {
			out = append(out, judge{weight: 2, mark: func(n *node) float64 { return float64(terms.Score(n.object)) }})
		}
	}
	soft := false
	for _, s := range q.spreads {
		if s.hard {
			continue
		}
		soft = true
		out = append(out, judge{weight: 2, less: true, mark: func(n *node) float64 {
			domain, ok := n.object.Labels[s.key]
			if !ok {
				return math.Inf(1)
			}
			return float64(s.domains[domain])
		}})
	}
	if !soft && q.pod.owner != "" {
		// Pods of one owner are spread over hosts and zones, without being asked.
		zones := map[string]float64{}
		for _, n := range q.nodes {
			zones[n.object.Labels[corev1.LabelTopologyZone]] += q.siblings(n)
		}
		out = append(out, judge{weight: 2, less: true, mark: q.siblings}, judge{weight: 1, less: true, mark: func(n *node) float64 {
			return zones[n.object.Labels[corev1.LabelTopologyZone]]
		}})
	}
	return out
}

// siblings are the Pods on a node that have the same owner.
func (q *question) siblings(n *node) (number float64) {
	for _, p := range n.pods {
		if p.owner == q.pod.owner && p.DeletionTimestamp == nil {
			number++
		}
	}
	return number
}

// best are the nodes with the highest sum of marks.
func (q *question) best(nodes []*node) []*node {
	sums := make([]float64, len(nodes))
	for _, j := range q.judges() {
		marks := make([]float64, len(nodes))
		low, high := math.Inf(1), math.Inf(-1)
		for i, n := range nodes {
			marks[i] = j.mark(n)
			if !math.IsInf(marks[i], 0) {
				low, high = min(low, marks[i]), max(high, marks[i])
			}
		}
		for i := range marks {
			sums[i] += j.weight * j.normal(marks[i], low, high)
		}
	}
	var out []*node
	most := math.Inf(-1)
	for i, n := range nodes {
		switch rounded := math.Round(sums[i]*1e6) / 1e6; {
		case rounded > most:
			most, out = rounded, []*node{n}
		case rounded == most:
			out = append(out, n)
		}
	}
	return out
}

// normal brings a mark to 0…100. Where all are the same, none is better.
func (j judge) normal(mark, low, high float64) float64 {
	switch {
	case j.absolute:
		return mark
	case math.IsInf(mark, 0) || low >= high:
		if math.IsInf(mark, 0) {
			return 0
		}
		return 100
	case j.less:
		return 100 * (high - mark) / (high - low)
	}
	return 100 * (mark - low) / (high - low)
}

// shares are how much of a node's CPU and memory would be taken.
func (q *question) shares(n *node) (cpu, memory float64) {
	all := amountsOf(n.object.Status.Allocatable)
	share := func(name corev1.ResourceName) float64 {
		if all[name] == 0 {
			return 1
		}
		return min((float64(n.counted[name])+float64(q.pod.counted[name]))/float64(all[name]), 1)
	}
	return share(corev1.ResourceCPU), share(corev1.ResourceMemory)
}

// free prefers nodes that have much left.
func (q *question) free(n *node) float64 {
	cpu, memory := q.shares(n)
	return 100 * (2 - cpu - memory) / 2
}

// balance prefers nodes that don't run out of one resource while they have another left.
func (q *question) balance(n *node) float64 {
	cpu, memory := q.shares(n)
	return 100 * (1 - math.Abs(cpu-memory)/2)
}

// unwelcome counts the taints that ask Pods to stay away if they can.
func (q *question) unwelcome(n *node) (number float64) {
	for _, taint := range n.object.Spec.Taints {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule && !Tolerates(q.pod.Spec.Tolerations, taint) {
			number++
		}
	}
	return number
}

// companyScore is what Pods wish of each other.
func (q *question) companyScore(n *node) (sum float64) {
	for at, score := range q.affinity.score {
		if value, ok := n.object.Labels[at.key]; ok && value == at.value {
			sum += float64(score)
		}
	}
	return sum
}
