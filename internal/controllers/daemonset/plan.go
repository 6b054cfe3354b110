package daemonset

import (
	"cmp"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"portal/internal/controllers/workload"
	"portal/internal/scheduler"
)

// State is a DaemonSet as it is found.
type State struct {
	Set   *appsv1.DaemonSet
	Nodes []*corev1.Node
	Pods  []*corev1.Pod // those that are its own
	// Hash is the label of Pods that have the newest template.
	Hash       string
	Collisions *int32
	Now        time.Time
}

// Plan is what to do about it now. When what was written is seen, the next plan follows.
type Plan struct {
	Create []string // on these nodes
	Delete []*corev1.Pod
	Failed []*corev1.Pod // have ended: to be deleted, after a backoff if they failed
	Status appsv1.DaemonSetStatus
	Again  time.Duration // when another Pod will have been ready for long enough; 0: never
}

// nodePods are a node and the set's Pods on it.
type nodePods struct {
	node           string
	wanted, stays  bool          // a Pod should be there; one that is there may stay
	old, new       []*corev1.Pod // that run or will; oldest first
	ending, failed []*corev1.Pod
}

func (s *nodePods) pods() []*corev1.Pod { return slices.Concat(s.old, s.new) }

type planner struct {
	State
	plan  Plan
	nodes []*nodePods
}

// Decide makes the plan.
func Decide(s State) Plan {
	p := &planner{State: s}
	p.sort()
	p.count()
	if s.Set.DeletionTimestamp != nil {
		return p.plan
	}
	surge, unavailable := p.limits()
	for _, at := range p.nodes {
		p.settle(at, surge > 0)
	}
	if s.Set.Spec.UpdateStrategy.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		p.roll(surge, unavailable)
	}
	return p.plan
}

// Template is the template with what Pods of a DaemonSet tolerate: a node's troubles are no reason not to be there.
func Template(set *appsv1.DaemonSet) *corev1.PodTemplateSpec {
	out := set.Spec.Template.DeepCopy()
	add := func(key string, effect corev1.TaintEffect) {
		t := corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: effect}
		known := false
		for i := range out.Spec.Tolerations {
			if out.Spec.Tolerations[i].MatchToleration(&t) {
				out.Spec.Tolerations[i], known = t, true // for any time, also if the template has one for some seconds
			}
		}
		if !known {
			out.Spec.Tolerations = append(out.Spec.Tolerations, t)
		}
	}
	add(corev1.TaintNodeNotReady, corev1.TaintEffectNoExecute)
	add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute)
	for _, key := range []string{corev1.TaintNodeDiskPressure, corev1.TaintNodeMemoryPressure, corev1.TaintNodePIDPressure, corev1.TaintNodeUnschedulable} {
		add(key, corev1.TaintEffectNoSchedule)
	}
	if out.Spec.HostNetwork {
		add(corev1.TaintNodeNetworkUnavailable, corev1.TaintEffectNoSchedule)
	}
	return out
}

// fits says whether a Pod should be on a node, and whether one that is there may stay.
func fits(template *corev1.PodTemplateSpec, node *corev1.Node) (wanted, stays bool) {
	spec := &template.Spec
	if spec.NodeName != "" && spec.NodeName != node.Name {
		return false, false
	}
	if ok, err := nodeaffinity.NewRequiredNodeAffinity(spec.NodeSelector, spec.Affinity).Match(node); !ok || err != nil {
		return false, false
	}
	wanted, stays = true, true
	for _, taint := range scheduler.Taints(node) {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule || scheduler.Tolerates(spec.Tolerations, taint) {
			continue
		}
		wanted = false
		stays = stays && taint.Effect != corev1.TaintEffectNoExecute
	}
	return wanted, stays
}

// Target is the node that a Pod is on, or was made for.
func Target(pod *corev1.Pod) string {
	if pod.Spec.NodeName != "" {
		return pod.Spec.NodeName
	}
	if a := pod.Spec.Affinity; a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	for _, term := range pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, f := range term.MatchFields {
			if f.Key == "metadata.name" && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
				return f.Values[0]
			}
		}
	}
	return ""
}

// pin makes a Pod one for a node: the scheduler has the last word, but no choice.
func pin(pod *corev1.Pod, node string) {
	here := []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}
	if pod.Spec.Affinity == nil {
		pod.Spec.Affinity = &corev1.Affinity{}
	}
	if pod.Spec.Affinity.NodeAffinity == nil {
		pod.Spec.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	required := &pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	// That the node fits the other terms is known: it was checked before.
	*required = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: here}}}
}

func (p *planner) sort() {
	template := Template(p.Set)
	known := map[string]*nodePods{}
	at := func(name string) *nodePods {
		if known[name] == nil {
			known[name] = &nodePods{node: name}
			p.nodes = append(p.nodes, known[name])
		}
		return known[name]
	}
	for _, node := range p.Nodes {
		s := at(node.Name)
		s.wanted, s.stays = fits(template, node)
	}
	for _, pod := range p.Pods {
		target := Target(pod)
		if target == "" || pod.DeletionTimestamp != nil && workload.Finished(pod) {
			continue // it is for no node, or takes nothing from it any more
		}
		s := at(target)
		switch {
		case pod.DeletionTimestamp != nil:
			s.ending = append(s.ending, pod)
		case workload.Finished(pod):
			s.failed = append(s.failed, pod)
		case p.fresh(pod):
			s.new = append(s.new, pod)
		default:
			s.old = append(s.old, pod)
		}
	}
	slices.SortFunc(p.nodes, func(a, b *nodePods) int { return cmp.Compare(a.node, b.node) })
	for _, s := range p.nodes {
		for _, list := range [][]*corev1.Pod{s.old, s.new} {
			slices.SortFunc(list, func(a, b *corev1.Pod) int {
				return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
			})
		}
	}
}

// fresh says whether a Pod has the newest template.
func (p *planner) fresh(pod *corev1.Pod) bool {
	return pod.Labels[appsv1.DefaultDaemonSetUniqueLabelKey] == p.Hash
}

func (p *planner) available(pod *corev1.Pod) bool {
	ok, left := workload.Available(pod, p.Set.Spec.MinReadySeconds, p.Now)
	p.plan.Again = workload.Sooner(p.plan.Again, left)
	return ok
}

func (p *planner) count() {
	status := &p.plan.Status
	*status = appsv1.DaemonSetStatus{ObservedGeneration: p.Set.Generation, CollisionCount: p.Collisions, Conditions: p.Set.Status.Conditions}
	for _, s := range p.nodes {
		pods := slices.Concat(s.pods(), s.failed, s.ending)
		if !s.wanted {
			if len(pods) > 0 {
				status.NumberMisscheduled++
			}
			continue
		}
		status.DesiredNumberScheduled++
		if len(pods) == 0 {
			continue
		}
		status.CurrentNumberScheduled++
		slices.SortFunc(pods, func(a, b *corev1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
		if slices.ContainsFunc(pods, workload.Ready) {
			status.NumberReady++
		}
		if slices.ContainsFunc(pods, p.available) {
			status.NumberAvailable++
		}
		if slices.ContainsFunc(pods, p.fresh) {
			status.UpdatedNumberScheduled++
		}
	}
	status.NumberUnavailable = status.DesiredNumberScheduled - status.NumberAvailable
}

func (p *planner) limits() (surge, unavailable int) {
	strategy := p.Set.Spec.UpdateStrategy
	if strategy.Type != appsv1.RollingUpdateDaemonSetStrategyType || strategy.RollingUpdate == nil {
		return 0, 0
	}
	share := func(value *intstr.IntOrString) int {
		n, err := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(value, intstr.FromInt32(0)), int(p.plan.Status.DesiredNumberScheduled), true)
		if err != nil {
			return 0 // the API takes none such
		}
		return n
	}
	surge, unavailable = share(strategy.RollingUpdate.MaxSurge), share(strategy.RollingUpdate.MaxUnavailable)
	if surge == 0 && unavailable == 0 {
		unavailable = 1
	}
	return surge, unavailable
}

// settle makes sure that there is a Pod on a node that should have one, and no more than that.
func (p *planner) settle(s *nodePods, surging bool) {
	if !s.stays {
		p.plan.Delete = append(p.plan.Delete, slices.Concat(s.pods(), s.failed)...)
		s.old, s.new = nil, nil
		return
	}
	p.plan.Failed = append(p.plan.Failed, s.failed...)
	keep := func(list []*corev1.Pod) []*corev1.Pod {
		if len(list) > 1 {
			p.plan.Delete = append(p.plan.Delete, list[1:]...)
			return list[:1]
		}
		return list
	}
	s.old, s.new = keep(s.old), keep(s.new)
	if !surging && len(s.old) > 0 && len(s.new) > 0 {
		p.plan.Delete = append(p.plan.Delete, s.old...)
		s.old = nil
	}
	// The next Pod comes when the last one has gone: they may need the same ports of the host. With a surge they must not.
	if s.wanted && len(s.pods()) == 0 && len(s.failed) == 0 && (surging || len(s.ending) == 0) {
		p.plan.Create = append(p.plan.Create, s.node)
	}
}

// roll replaces old Pods: with a surge the new one comes first, without one the old one goes first.
func (p *planner) roll(surge, unavailable int) {
	surging := surge > 0
	for _, s := range p.nodes { // what is under way already
		switch {
		case !s.wanted:
		case surging && len(s.old) > 0 && len(s.new) > 0:
			surge--
		case !surging && !slices.ContainsFunc(s.pods(), p.available):
			unavailable--
		}
	}
	for _, s := range p.nodes {
		if !s.wanted || len(s.old) == 0 {
			continue
		}
		old := s.old[0]
		switch {
		case surging && len(s.new) > 0:
			if p.available(s.new[0]) || !workload.Ready(old) {
				p.plan.Delete = append(p.plan.Delete, old)
			}
		case surging && !p.available(old):
			// It does nothing for anybody: the next one need not wait for its turn.
			p.plan.Create = append(p.plan.Create, s.node)
		case !p.available(old):
			// It makes room at once.
			p.plan.Delete = append(p.plan.Delete, old)
		case surging && surge > 0:
			surge--
			p.plan.Create = append(p.plan.Create, s.node)
		case !surging && unavailable > 0:
			unavailable--
			p.plan.Delete = append(p.plan.Delete, old)
		}
	}
}
