package deployment

import (
	"cmp"
	"math"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"

	"portal/internal/controllers/workload"
)

// State is a Deployment as it is found.
type State struct {
	Deployment *appsv1.Deployment
	Sets       []*appsv1.ReplicaSet // those that are its own
	// Pods are how many Pods each set has that have not ended; it is asked for strategy Recreate alone.
	Pods map[types.UID]int
	Now  time.Time
}

// Plan is what to do about it now. When what was written is seen, the next plan follows.
type Plan struct {
	Create *appsv1.ReplicaSet
	Update []*appsv1.ReplicaSet // as they should be
	Delete []*appsv1.ReplicaSet

	Status   appsv1.DeploymentStatus
	Revision string        // of the newest set; "" if there is none
	Again    time.Duration // when the plan may change without a change of the state; 0: never
}

// slot is a ReplicaSet and the size that it should have.
type slot struct {
	*appsv1.ReplicaSet
	size     int32
	annotate bool // what it says of the Deployment's size is to be brought up to date
}

func (s *slot) active() bool { return s.size > 0 }

type planner struct {
	State
	newest  *slot
	old     []*slot // oldest first
	created bool    // newest does not exist yet
	limits  limits
}

// limits are the numbers behind a strategy.
type limits struct{ replicas, surge, unavailable int32 }

// most is how many Pods there may be during a rollout.
func (l limits) most() int32 { return fit(int64(l.replicas) + int64(l.surge)) }

// fit is a number of Pods, or the largest one that there can be.
func fit(n int64) int32 { return int32(min(n, math.MaxInt32)) }

func limitsOf(d *appsv1.Deployment) limits {
	l := limits{replicas: *d.Spec.Replicas}
	rolling := d.Spec.Strategy.RollingUpdate
	if d.Spec.Strategy.Type != appsv1.RollingUpdateDeploymentStrategyType || rolling == nil {
		return l
	}
	share := func(value *intstr.IntOrString, up bool) int32 {
		n, err := intstr.GetScaledValueFromIntOrPercent(intstr.ValueOrDefault(value, intstr.FromInt32(0)), int(l.replicas), up)
		if err != nil {
			return 0 // the API takes none such
		}
		return fit(int64(n))
	}
	l.surge, l.unavailable = share(rolling.MaxSurge, true), share(rolling.MaxUnavailable, false)
	if l.surge == 0 && l.unavailable == 0 {
		l.unavailable = 1 // rounding must not stop everything
	}
	l.unavailable = min(l.unavailable, l.replicas)
	return l
}

// Decide makes the plan.
func Decide(s State) (Plan, error) {
	p := &planner{State: s, limits: limitsOf(s.Deployment)}
	p.sort()
	d := s.Deployment
	if d.DeletionTimestamp != nil {
		return Plan{Status: p.status(d.Status.Conditions)}, nil
	}
	var clean, rolls bool
	var err error
	switch {
	case d.Spec.Paused:
		p.scaleAll()
		clean = true
	case p.resized():
		p.scaleAll()
	case d.Spec.Strategy.Type == appsv1.RecreateDeploymentStrategyType:
		rolls = true
		clean, err = p.recreate()
	default:
		rolls = true
		clean, err = p.roll()
	}
	if err != nil {
		return Plan{}, err
	}
	return p.plan(rolls, clean && (d.Spec.Paused || complete(d, &d.Status))), nil
}

// sort finds the set that has the Deployment's template: the oldest, if there are several.
func (p *planner) sort() {
	sets := slices.SortedFunc(slices.Values(p.Sets), func(a, b *appsv1.ReplicaSet) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for _, set := range sets {
		s := &slot{ReplicaSet: set}
		if set.Spec.Replicas != nil {
			s.size = *set.Spec.Replicas
		}
		if p.newest == nil && sameTemplate(p.Deployment, set) {
			p.newest = s
		} else {
			p.old = append(p.old, s)
		}
	}
}

func sameTemplate(d *appsv1.Deployment, set *appsv1.ReplicaSet) bool {
	template := set.Spec.Template.DeepCopy()
	delete(template.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	wanted := d.Spec.Template.DeepCopy()
	delete(wanted.Labels, appsv1.DefaultDeploymentUniqueLabelKey)
	return equality.Semantic.DeepEqual(template, wanted)
}

// all are the sets, in a list of the caller's own.
func (p *planner) all() []*slot {
	out := slices.Clone(p.old)
	if p.newest != nil {
		out = append(out, p.newest)
	}
	return out
}

func total(slots []*slot) int32 {
	var n int64
	for _, s := range slots {
		n += int64(s.size)
	}
	return fit(n)
}

// available are the Pods that are available and stay. A set's status may be older than its size: of what it still reports,
// the part above its size is going.
func (s *slot) available() int32 { return min(s.Status.AvailableReplicas, s.size) }

func available(slots []*slot) (n int32) {
	for _, s := range slots {
		n += s.available()
	}
	return n
}

// resized says whether somebody asked for another number of Pods since a set was last scaled.
func (p *planner) resized() bool {
	return slices.ContainsFunc(p.all(), func(s *slot) bool {
		desired, known := number(s.ReplicaSet, desiredAnnotation)
		return s.active() && known && desired != p.limits.replicas
	})
}

// scaleAll makes all sets larger or smaller in proportion. In the middle of a rollout the shares of old and new stay what
// they were: scaling is no reason to hurry.
func (p *planner) scaleAll() {
	active := slices.DeleteFunc(p.all(), func(s *slot) bool { return !s.active() })
	for _, s := range active {
		s.annotate = true
	}
	switch {
	case len(active) == 1:
		active[0].size = p.limits.replicas
	case len(active) == 0:
		if p.newest != nil {
			p.newest.size, p.newest.annotate = p.limits.replicas, true
		} else if len(p.old) > 0 {
			latest := p.old[len(p.old)-1]
			latest.size, latest.annotate = p.limits.replicas, true
		}
	case p.saturated():
		for _, s := range p.old {
			s.size = 0
		}
	case p.Deployment.Spec.Strategy.Type == appsv1.RollingUpdateDeploymentStrategyType:
		p.proportion(active)
	}
}

// saturated says that the newest set has all Pods, and they are available.
func (p *planner) saturated() bool {
	if p.newest == nil {
		return false
	}
	desired, known := number(p.newest.ReplicaSet, desiredAnnotation)
	return known && desired == p.limits.replicas && p.newest.size == desired && p.newest.Status.AvailableReplicas == desired
}

// proportion distributes the difference to the allowed size over the sets by their sizes, the largest first. Of equal ones
// the newer grows first, and the older shrinks first.
func (p *planner) proportion(active []*slot) {
	add := -total(active)
	if p.limits.replicas > 0 {
		add += p.limits.most()
	}
	if add == 0 {
		return
	}
	slices.SortStableFunc(active, func(a, b *slot) int {
		age := a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
		if add > 0 {
			age = -age
		}
		return cmp.Or(cmp.Compare(b.size, a.size), age)
	})
	left := add
	for _, s := range active {
		change := p.share(s)
		if add > 0 {
			change = max(min(change, left), 0)
		} else {
			change = min(max(change, left, -s.size), 0)
		}
		s.size += change
		left -= change
	}
	active[0].size = max(active[0].size+left, 0)
}

// share is by how much a set should change for its part of the whole to stay the same.
func (p *planner) share(s *slot) int32 {
	if p.limits.replicas == 0 {
		return -s.size
	}
	before, known := number(s.ReplicaSet, maxAnnotation)
	if !known || before == 0 {
		before = p.Deployment.Status.Replicas
	}
	if before == 0 {
		return 0
	}
	return fit(int64(math.Round(float64(s.size)*float64(p.limits.most())/float64(before)))) - s.size
}

// recreate ends all old Pods before it starts a new one.
func (p *planner) recreate() (clean bool, err error) {
	ending := false
	for _, s := range p.old {
		if s.active() {
			s.size, s.annotate, ending = 0, true, true
		}
		ending = ending || s.Status.Replicas > 0 || p.Pods[s.UID] > 0
	}
	if ending {
		return false, nil
	}
	if p.newest == nil {
		if err := p.create(); err != nil {
			return false, err
		}
	}
	if p.newest.size != p.limits.replicas {
		p.newest.size, p.newest.annotate = p.limits.replicas, true
	}
	return true, nil
}

// roll adds new Pods as far as the surge allows, and then takes old ones away as far as enough stay available.
func (p *planner) roll() (clean bool, err error) {
	if p.newest == nil {
		if err := p.create(); err != nil {
			return false, err
		}
		p.grow()
	} else if before := p.newest.size; before != p.limits.replicas {
		p.grow()
		if p.newest.size != before {
			p.newest.annotate = true
			return false, nil
		}
	}
	return !p.shrink(), nil
}

// grow sets the newest set's size to what it should have and may have.
func (p *planner) grow() {
	if p.newest.size >= p.limits.replicas {
		p.newest.size = p.limits.replicas
		return
	}
	room := p.limits.most() - total(p.all())
	p.newest.size += max(min(room, p.limits.replicas-p.newest.size), 0)
}

// shrink takes Pods from old sets: first those that are not available anyway, then those that are no longer needed.
func (p *planner) shrink() (changed bool) {
	if total(p.old) == 0 {
		return false
	}
	atLeast := p.limits.replicas - p.limits.unavailable
	starting := p.newest.size - p.newest.available()
	budget := total(p.all()) - atLeast - starting
	take := func(s *slot, n int32) int32 {
		n = max(min(n, s.size), 0)
		if n > 0 {
			s.size -= n
			s.annotate, changed = true, true
		}
		return n
	}
	if budget <= 0 {
		return false
	}
	for _, s := range p.old {
		budget -= take(s, min(budget, s.size-s.available()))
	}
	spare := available(p.all()) - atLeast
	for _, s := range p.old {
		spare -= take(s, spare)
	}
	return changed
}

// create begins a set with the Deployment's template.
func (p *planner) create() error {
	d := p.Deployment
	hash, err := workload.Hash(&d.Spec.Template, d.Status.CollisionCount)
	if err != nil {
		return err
	}
	set := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{
			Name: setName(d.Name, hash), Namespace: d.Namespace,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(d, Kind)},
		},
		Spec: appsv1.ReplicaSetSpec{MinReadySeconds: d.Spec.MinReadySeconds, Selector: d.Spec.Selector.DeepCopy(), Template: *d.Spec.Template.DeepCopy()},
	}
	if set.Spec.Selector.MatchLabels == nil {
		set.Spec.Selector.MatchLabels = map[string]string{}
	}
	if set.Spec.Template.Labels == nil {
		set.Spec.Template.Labels = map[string]string{}
	}
	set.Spec.Selector.MatchLabels[appsv1.DefaultDeploymentUniqueLabelKey] = hash
	set.Spec.Template.Labels[appsv1.DefaultDeploymentUniqueLabelKey] = hash
	set.Labels = set.Spec.Template.DeepCopy().Labels
	p.newest, p.created = &slot{ReplicaSet: set, annotate: true}, true
	return nil
}

// setName is as long as a name may be.
func setName(deployment, hash string) string {
	room := validation.DNS1123SubdomainMaxLength - len(hash) - 1
	return deployment[:min(len(deployment), room)] + "-" + hash
}

// plan is what the sizes mean.
func (p *planner) plan(rolls, clean bool) Plan {
	var out Plan
	if p.newest != nil {
		next := p.annotated()
		out.Revision = next.Annotations[RevisionAnnotation]
		if p.created {
			out.Create = next
		} else if !equality.Semantic.DeepEqual(next, p.newest.ReplicaSet) {
			out.Update = append(out.Update, next)
		}
	}
	for _, s := range p.old {
		if next := p.sized(s); !equality.Semantic.DeepEqual(next, s.ReplicaSet) {
			out.Update = append(out.Update, next)
		}
	}
	if clean {
		out.Delete = p.outdated()
	}
	out.Status = p.status(p.pauses())
	if rolls {
		out.Again = p.progress(&out.Status)
	}
	return out
}

// sized is a set with the size that it should have.
func (p *planner) sized(s *slot) *appsv1.ReplicaSet {
	next := s.ReplicaSet.DeepCopy()
	next.Spec.Replicas = &s.size
	if s.annotate {
		setNumber(next, desiredAnnotation, p.limits.replicas)
		setNumber(next, maxAnnotation, p.limits.most())
	}
	return next
}

// outdated are the old sets that nobody will go back to.
func (p *planner) outdated() []*appsv1.ReplicaSet {
	limit := p.Deployment.Spec.RevisionHistoryLimit
	if limit == nil || *limit == math.MaxInt32 {
		return nil
	}
	old := slices.DeleteFunc(slices.Clone(p.old), func(s *slot) bool { return s.DeletionTimestamp != nil })
	slices.SortStableFunc(old, func(a, b *slot) int { return cmp.Compare(revision(a.ReplicaSet), revision(b.ReplicaSet)) })
	var out []*appsv1.ReplicaSet
	for _, s := range old[:max(len(old)-int(*limit), 0)] {
		if s.size == 0 && s.Status.Replicas == 0 && s.Status.ObservedGeneration >= s.Generation {
			out = append(out, s.ReplicaSet)
		}
	}
	return out
}
