package statefulset

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"portal/internal/controllers/workload"
)

// State is a StatefulSet as it is found.
type State struct {
	Set  *appsv1.StatefulSet
	Pods []*corev1.Pod // those that are its own
	// Current and Update are the names of the revisions that Pods have, and are to get.
	Current, Update string
	Collisions      *int32
	// Held are failed Pods that are not to be replaced by the same yet.
	Held map[types.UID]bool
	Now  time.Time
}

// Plan is what to do about it now. When what was written is seen, the next plan follows.
type Plan struct {
	Create []Create
	Delete []*corev1.Pod
	// Relabel are Pods that lack the labels of their identity.
	Relabel []*corev1.Pod
	Status  appsv1.StatefulSetStatus
	Again   time.Duration // when another Pod will have been ready for long enough; 0: never
}

// Create is a Pod to create.
type Create struct {
	Ordinal  int
	Revision string
}

// place is an ordinal of the set and the Pod that has it, if there is one.
type place struct {
	ordinal int
	pod     *corev1.Pod
}

type planner struct {
	State
	plan     Plan
	wanted   []place // lowest first
	surplus  []place // highest first
	unlisted int     // how many places are wanted that are not in wanted: there are too many without a Pod
	first    int
	ordered  bool
}

// Decide makes the plan.
func Decide(s State) Plan {
	p := &planner{State: s, ordered: s.Set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement}
	p.sort()
	p.count()
	if s.Set.DeletionTimestamp == nil && p.fill() && p.shrink() {
		p.renew()
	}
	return p.plan
}

// Ordinal is the number at the end of the name of a set's Pod; -1 if it is none of them.
func Ordinal(set, pod string) int {
	number, ok := strings.CutPrefix(pod, set+"-")
	if !ok {
		return -1
	}
	n, err := strconv.ParseInt(number, 10, 32)
	if err != nil || fmt.Sprint(n) != number {
		return -1
	}
	return int(n)
}

func (p *planner) sort() {
	set := p.Set
	if set.Spec.Ordinals != nil {
		p.first = int(set.Spec.Ordinals.Start)
	}
	replicas := int(*set.Spec.Replicas)
	taken := map[int]bool{}
	for _, pod := range p.Pods {
		n := Ordinal(set.Name, pod.Name)
		switch {
		case n < 0:
		case n >= p.first && n < p.first+replicas:
			taken[n] = true
			p.wanted = append(p.wanted, place{n, pod})
		default:
			p.surplus = append(p.surplus, place{n, pod})
		}
	}
	missing := replicas - len(p.wanted)
	list := min(missing, workload.MaxBatch) // more are not created in one go
	p.unlisted = missing - list
	for n := p.first; list > 0; n++ {
		if !taken[n] {
			p.wanted = append(p.wanted, place{ordinal: n})
			list--
		}
	}
	slices.SortFunc(p.wanted, func(a, b place) int { return cmp.Compare(a.ordinal, b.ordinal) })
	slices.SortFunc(p.surplus, func(a, b place) int { return cmp.Compare(b.ordinal, a.ordinal) })
}

func revisionOf(pod *corev1.Pod) string { return pod.Labels[appsv1.ControllerRevisionHashLabelKey] }

func running(pod *corev1.Pod) bool {
	return pod != nil && pod.Status.Phase == corev1.PodRunning && workload.Ready(pod)
}

// available says whether a Pod runs, has been ready for long enough, and stays.
func (p *planner) available(pod *corev1.Pod) bool {
	if !running(pod) || pod.DeletionTimestamp != nil {
		return false
	}
	ok, left := workload.Available(pod, p.Set.Spec.MinReadySeconds, p.Now)
	p.plan.Again = workload.Sooner(p.plan.Again, left)
	return ok
}

// count makes the status from the Pods that there are.
func (p *planner) count() {
	set := p.Set
	status := &p.plan.Status
	*status = appsv1.StatefulSetStatus{
		ObservedGeneration: set.Generation, CurrentRevision: p.Current, UpdateRevision: p.Update, CollisionCount: p.Collisions,
		Conditions: set.Status.Conditions,
	}
	for _, at := range slices.Concat(p.wanted, p.surplus) {
		pod := at.pod
		if pod == nil || workload.Finished(pod) {
			continue
		}
		status.Replicas++
		if running(pod) {
			status.ReadyReplicas++
			if ok, left := workload.Available(pod, set.Spec.MinReadySeconds, p.Now); ok {
				status.AvailableReplicas++
			} else {
				p.plan.Again = workload.Sooner(p.plan.Again, left)
			}
		}
		if pod.DeletionTimestamp != nil {
			continue
		}
		if revisionOf(pod) == p.Current {
			status.CurrentReplicas++
		}
		if revisionOf(pod) == p.Update {
			status.UpdatedReplicas++
		}
	}
	wanted := *set.Spec.Replicas
	if set.Spec.UpdateStrategy.Type == appsv1.RollingUpdateStatefulSetStrategyType && p.Current != p.Update &&
		status.UpdatedReplicas == wanted && status.ReadyReplicas == wanted && status.Replicas == wanted {
		status.CurrentReplicas, status.CurrentRevision = status.UpdatedReplicas, p.Update // the update is over
	}
}

// revision is the one that a new Pod with an ordinal gets: below the partition that which the set had before.
func (p *planner) revision(ordinal int) string {
	strategy := p.Set.Spec.UpdateStrategy
	if strategy.Type != appsv1.RollingUpdateStatefulSetStrategyType {
		return p.Update
	}
	keep := int(p.Set.Status.CurrentReplicas)
	if strategy.RollingUpdate != nil && strategy.RollingUpdate.Partition != nil {
		keep = int(*strategy.RollingUpdate.Partition)
	}
	if ordinal < p.first+keep {
		return p.Current
	}
	return p.Update
}

// fill creates the Pods that are missing. In order each waits for those before it. It says whether the set is complete.
func (p *planner) fill() bool {
	whole := true
	for _, at := range p.wanted {
		switch pod := at.pod; {
		case pod == nil:
			p.plan.Create = append(p.plan.Create, Create{at.ordinal, p.revision(at.ordinal)})
		case workload.Finished(pod):
			if pod.DeletionTimestamp == nil && !(p.Held[pod.UID] && revisionOf(pod) == p.revision(at.ordinal)) {
				p.plan.Delete = append(p.plan.Delete, pod) // its name is needed for the next one
			}
		case p.ordered && !p.available(pod):
		default:
			for key, value := range identity(pod.Name, at.ordinal) {
				if pod.DeletionTimestamp == nil && pod.Labels[key] != value {
					p.plan.Relabel = append(p.plan.Relabel, pod)
					break
				}
			}
			continue
		}
		if p.ordered {
			return false
		}
		whole = false
	}
	return whole || !p.ordered
}

// shrink deletes the Pods that are too many. In order the last goes first, and only while all others are well. It says
// whether none is left.
func (p *planner) shrink() bool {
	for i, at := range p.surplus {
		pod := at.pod
		if p.ordered && pod.DeletionTimestamp == nil && !p.available(pod) &&
			slices.ContainsFunc(p.surplus[i+1:], func(before place) bool { return !p.available(before.pod) }) {
			return false // one before it is not well either: somebody should look at it first
		}
		if pod.DeletionTimestamp == nil {
			p.plan.Delete = append(p.plan.Delete, pod)
		}
		if p.ordered {
			return false
		}
	}
	return len(p.surplus) == 0 || !p.ordered
}

// renew deletes Pods that have an old template, the last first, as long as enough others are available.
func (p *planner) renew() {
	strategy := p.Set.Spec.UpdateStrategy
	if strategy.Type != appsv1.RollingUpdateStatefulSetStrategyType {
		return
	}
	partition, most := 0, 1
	if rolling := strategy.RollingUpdate; rolling != nil {
		if rolling.Partition != nil {
			partition = int(*rolling.Partition)
		}
		if rolling.MaxUnavailable != nil {
			n, err := intstr.GetScaledValueFromIntOrPercent(rolling.MaxUnavailable, int(*p.Set.Spec.Replicas), true)
			if err == nil {
				most = max(n, 1)
			}
		}
	}
	left := most - p.unlisted
	for _, at := range p.wanted {
		if !p.available(at.pod) {
			left--
		}
	}
	for _, at := range slices.Backward(p.wanted) {
		pod := at.pod
		if pod == nil || pod.DeletionTimestamp != nil || workload.Finished(pod) || revisionOf(pod) == p.Update || at.ordinal < p.first+partition {
			continue
		}
		switch {
		case !p.available(pod): // nobody misses it
		case left > 0:
			left--
		default:
			continue
		}
		p.plan.Delete = append(p.plan.Delete, pod)
	}
}
