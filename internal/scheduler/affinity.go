package scheduler

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// term is what a Pod says about other Pods: which ones, and how far "near" is.
type term struct {
	pods       labels.Selector
	namespaces []string
	within     labels.Selector // of namespaces; nil: none
	topology   string
}

// wish is a term that need not be met. A negative weight wants distance.
type wish struct {
	term
	weight int64
}

func selectorOf(selector *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(selector) // nil selects nothing
	if err != nil {
		return labels.Nothing()
	}
	return out
}

func newTerm(object *corev1.Pod, t *corev1.PodAffinityTerm) term {
	out := term{pods: selectorOf(t.LabelSelector), namespaces: t.Namespaces, topology: t.TopologyKey}
	if t.NamespaceSelector != nil {
		out.within = selectorOf(t.NamespaceSelector)
	} else if len(t.Namespaces) == 0 {
		out.namespaces = []string{object.Namespace}
	}
	return out
}

func termsOf(object *corev1.Pod) (near, far []term, wishes []wish) {
	affinity := object.Spec.Affinity
	if affinity == nil {
		return nil, nil, nil
	}
	required := func(list []corev1.PodAffinityTerm) (out []term) {
		for i := range list {
			out = append(out, newTerm(object, &list[i]))
		}
		return out
	}
	preferred := func(list []corev1.WeightedPodAffinityTerm, sign int64) {
		for i := range list {
			wishes = append(wishes, wish{newTerm(object, &list[i].PodAffinityTerm), sign * int64(list[i].Weight)})
		}
	}
	if a := affinity.PodAffinity; a != nil {
		near = required(a.RequiredDuringSchedulingIgnoredDuringExecution)
		preferred(a.PreferredDuringSchedulingIgnoredDuringExecution, 1)
	}
	if a := affinity.PodAntiAffinity; a != nil {
		far = required(a.RequiredDuringSchedulingIgnoredDuringExecution)
		preferred(a.PreferredDuringSchedulingIgnoredDuringExecution, -1)
	}
	return near, far, wishes
}

// means says whether a term is about a Pod.
func (t *term) means(p *corev1.Pod, namespaces func(string) labels.Set) bool {
	in := slices.Contains(t.namespaces, p.Namespace) || t.within != nil && t.within.Matches(namespaces(p.Namespace))
	return in && t.pods.Matches(labels.Set(p.Labels))
}

// place is a value of a topology label: a zone, a host.
type place struct{ key, value string }

func placeOf(n *node, key string) (place, bool) {
	if n == nil || n.object == nil {
		return place{}, false
	}
	value, ok := n.object.Labels[key]
	return place{key, value}, ok
}

// affinityCount is where the Pods are that matter to a Pod's place.
type affinityCount struct {
	forbidden map[place]bool // somebody there wants distance
	avoided   map[place]bool // somebody is there whom the Pod wants far
	company   map[place]int  // how many are there whom the Pod wants near
	alone     bool           // whom it wants near is nowhere, and it is one of those itself
	score     map[place]int64
}

// hardNear is what another Pod's demand to be near this one counts for, beside its wishes.
const hardNear = 1

func (q *question) countAffinity() {
	a := &q.affinity
	a.forbidden, a.avoided, a.company, a.score = map[place]bool{}, map[place]bool{}, map[place]int{}, map[place]int64{}
	c, p := q.cluster, q.pod
	for _, other := range c.withTerms {
		n := c.nodes[other.Spec.NodeName]
		for i := range other.far {
			if at, ok := placeOf(n, other.far[i].topology); ok && other.far[i].means(p.Pod, c.namespaces) {
				a.forbidden[at] = true
			}
		}
		for i := range other.near {
			if at, ok := placeOf(n, other.near[i].topology); ok && other.near[i].means(p.Pod, c.namespaces) {
				a.score[at] += hardNear
			}
		}
		for i := range other.wishes {
			if at, ok := placeOf(n, other.wishes[i].topology); ok && other.wishes[i].means(p.Pod, c.namespaces) {
				a.score[at] += other.wishes[i].weight
			}
		}
	}
	if len(p.near)+len(p.far)+len(p.wishes) == 0 {
		return
	}
	for _, other := range c.pods {
		q.countOther(other, c.nodes[other.Spec.NodeName])
	}
	a.alone = len(p.near) > 0 && len(a.company) == 0 && q.meansAll(p.Pod)
}

func (q *question) countOther(other *pod, n *node) {
	a, p := &q.affinity, q.pod
	for i := range p.far {
		if at, ok := placeOf(n, p.far[i].topology); ok && p.far[i].means(other.Pod, q.cluster.namespaces) {
			a.avoided[at] = true
		}
	}
	for i := range p.wishes {
		if at, ok := placeOf(n, p.wishes[i].topology); ok && p.wishes[i].means(other.Pod, q.cluster.namespaces) {
			a.score[at] += p.wishes[i].weight
		}
	}
	if len(p.near) == 0 || !q.meansAll(other.Pod) {
		return
	}
	for i := range p.near {
		if at, ok := placeOf(n, p.near[i].topology); ok {
			a.company[at]++
		}
	}
}

// meansAll says whether all that the Pod wants near is true of another one.
func (q *question) meansAll(other *corev1.Pod) bool {
	for i := range q.pod.near {
		if !q.pod.near[i].means(other, q.cluster.namespaces) {
			return false
		}
	}
	return true
}

// company judges a node by who else is there.
func (q *question) company(n *node) []string {
	a := &q.affinity
	for i := range q.pod.near {
		at, ok := placeOf(n, q.pod.near[i].topology)
		if !ok || a.company[at] == 0 && !a.alone {
			return []string{"node(s) are not near the Pods that the Pod's affinity asks for"}
		}
	}
	for i := range q.pod.far {
		if at, ok := placeOf(n, q.pod.far[i].topology); ok && a.avoided[at] {
			return []string{"node(s) are near Pods that the Pod's anti-affinity excludes"}
		}
	}
	for at := range a.forbidden {
		if here, ok := placeOf(n, at.key); ok && here == at {
			return []string{"node(s) are near Pods whose anti-affinity excludes the Pod"}
		}
	}
	return nil
}
