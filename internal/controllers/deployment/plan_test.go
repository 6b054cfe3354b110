package deployment

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newDeployment(replicas int32, image string, surge, unavailable intstr.IntOrString) *appsv1.Deployment {
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "d", Generation: 1},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, ProgressDeadlineSeconds: ptr.To[int32](600), RevisionHistoryLimit: ptr.To[int32](10),
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: image}}},
			},
			Strategy: appsv1.DeploymentStrategy{
				Type:          appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &surge, MaxUnavailable: &unavailable},
			},
		},
	}
}

// world plays the API server and the ReplicaSets' controller: plans come true, and Pods become available one by one.
type world struct {
	d    *appsv1.Deployment
	sets map[string]*appsv1.ReplicaSet
	now  time.Time
	made int
}

func newWorld(d *appsv1.Deployment) *world {
	return &world{d: d, sets: map[string]*appsv1.ReplicaSet{}, now: start}
}

func (w *world) sorted() []*appsv1.ReplicaSet {
	var out []*appsv1.ReplicaSet
	for _, name := range slices.Sorted(maps.Keys(w.sets)) {
		out = append(out, w.sets[name])
	}
	return out
}

type fataler interface {
	Fatalf(string, ...any)
}

// step carries out one plan, and says whether it changed a set.
func (w *world) step(t fataler) bool {
	w.now = w.now.Add(time.Second)
	pods := map[types.UID]int{}
	for _, set := range w.sets {
		pods[set.UID] = int(set.Status.Replicas)
	}
	plan, err := Decide(State{Deployment: w.d, Sets: w.sorted(), Pods: pods, Now: w.now})
	if err != nil {
		t.Fatalf("%v", err)
	}
	if set := plan.Create; set != nil {
		if w.sets[set.Name] != nil {
			t.Fatalf("%s is created twice", set.Name)
		}
		w.made++
		set.UID, set.CreationTimestamp = types.UID(fmt.Sprint(w.made)), metav1.NewTime(w.now)
		w.sets[set.Name] = set
	}
	for _, set := range plan.Update {
		w.sets[set.Name] = set
	}
	for _, set := range plan.Delete {
		delete(w.sets, set.Name)
	}
	w.d = w.d.DeepCopy()
	w.d.Status = plan.Status
	if plan.Revision != "" {
		w.d.Annotations = map[string]string{RevisionAnnotation: plan.Revision}
	}
	return plan.Create != nil || len(plan.Update)+len(plan.Delete) > 0
}

// run has the sets' Pods created, deleted and become available: as many as ready gives.
func (w *world) run(ready func(set *appsv1.ReplicaSet, missing int32) int32) {
	for name, set := range w.sets {
		set = set.DeepCopy()
		size := *set.Spec.Replicas
		set.Status.Replicas = size
		set.Status.AvailableReplicas = min(set.Status.AvailableReplicas, size)
		if missing := size - set.Status.AvailableReplicas; missing > 0 {
			set.Status.AvailableReplicas += ready(set, missing)
		}
		set.Status.ReadyReplicas = set.Status.AvailableReplicas
		w.sets[name] = set
	}
}

func all(_ *appsv1.ReplicaSet, missing int32) int32 { return missing }

// settle goes on until nothing changes any more.
func (w *world) settle(t fataler, ready func(*appsv1.ReplicaSet, int32) int32) {
	for range 500 {
		changed := w.step(t)
		before := w.d.Status
		w.run(ready)
		if !changed && w.step(t) == false && before.AvailableReplicas == w.d.Status.AvailableReplicas {
			return
		}
	}
	t.Fatalf("it never comes to rest")
}

func (w *world) sizes() map[string]int32 {
	out := map[string]int32{}
	for _, set := range w.sets {
		out[set.Spec.Template.Spec.Containers[0].Image] += *set.Spec.Replicas
	}
	return out
}

func (w *world) setImage(image string) {
	w.d = w.d.DeepCopy()
	w.d.Spec.Template.Spec.Containers[0].Image = image
	w.d.Generation++
}

func (w *world) reason(kind appsv1.DeploymentConditionType) string {
	if c := condition(&w.d.Status, kind); c != nil {
		return c.Reason
	}
	return ""
}

// TestRollout rolls out, rolls back, and keeps revisions as kubectl expects them.
func TestRollout(t *testing.T) {
	w := newWorld(newDeployment(3, "a", intstr.FromString("25%"), intstr.FromString("25%")))
	w.settle(t, all)
	if got := w.sizes(); got["a"] != 3 || w.reason(appsv1.DeploymentProgressing) != reasonAvailable || w.reason(appsv1.DeploymentAvailable) != reasonEnough {
		t.Fatalf("first: %v %+v", got, w.d.Status)
	}
	w.setImage("b")
	w.step(t)
	if got := w.sizes(); got["a"] != 3 || got["b"] != 1 || w.reason(appsv1.DeploymentProgressing) != reasonCreated {
		t.Errorf("a surge of 1, none unavailable: %v", got)
	}
	w.settle(t, all)
	w.setImage("a")
	w.settle(t, all)
	if got := w.sizes(); got["a"] != 3 || got["b"] != 0 || len(w.sets) != 2 {
		t.Errorf("rolled back: %v", got)
	}
	if got := w.d.Annotations[RevisionAnnotation]; got != "3" {
		t.Errorf("revision %s", got)
	}
	for _, set := range w.sets {
		if set.Spec.Template.Spec.Containers[0].Image == "a" && set.Annotations[historyAnnotation] != "1" {
			t.Errorf("history %q", set.Annotations[historyAnnotation])
		}
	}
}

func TestHistoryLimit(t *testing.T) {
	w := newWorld(newDeployment(1, "0", intstr.FromInt32(1), intstr.FromInt32(0)))
	w.d.Spec.RevisionHistoryLimit = ptr.To[int32](2)
	for i := range 6 {
		w.setImage(fmt.Sprint(i))
		w.settle(t, all)
	}
	if got := w.sizes(); len(got) != 3 || got["5"] != 1 {
		t.Errorf("kept %v", got)
	}
}

func TestPause(t *testing.T) {
	w := newWorld(newDeployment(3, "0", intstr.FromInt32(1), intstr.FromInt32(0)))
	w.settle(t, all)
	w.setImage("a")
	w.settle(t, all)
	w.setImage("b")
	w.d.Spec.Paused = true
	w.settle(t, all)
	if got := w.sizes(); len(got) != 2 || got["a"] != 3 || w.reason(appsv1.DeploymentProgressing) != reasonPaused {
		t.Errorf("paused: %v, %s", got, w.reason(appsv1.DeploymentProgressing))
	}
	w.d.Spec.Replicas = ptr.To[int32](5)
	w.settle(t, all)
	if got := w.sizes(); got["a"] != 5 {
		t.Errorf("scaled while paused: %v", got)
	}
	w.d.Spec.Paused = false
	w.step(t)
	w.settle(t, all)
	if got := w.sizes(); got["a"] != 0 || got["b"] != 5 || w.reason(appsv1.DeploymentProgressing) != reasonAvailable {
		t.Errorf("resumed: %v", got)
	}
}

// TestScaleInProportion: ten Pods, of which a broken rollout has replaced some, become thirty. This is the example of
// Kubernetes' documentation.
func TestScaleInProportion(t *testing.T) {
	w := newWorld(newDeployment(10, "a", intstr.FromInt32(3), intstr.FromInt32(2)))
	w.settle(t, all)
	w.setImage("broken")
	never := func(set *appsv1.ReplicaSet, missing int32) int32 {
		if set.Spec.Template.Spec.Containers[0].Image == "broken" {
			return 0
		}
		return missing
	}
	w.settle(t, never)
	if got := w.sizes(); got["a"] != 8 || got["broken"] != 5 {
		t.Fatalf("stuck at %v", got)
	}
	w.d.Spec.Replicas = ptr.To[int32](15)
	w.settle(t, never)
	if got := w.sizes(); got["a"] != 11 || got["broken"] != 7 {
		t.Errorf("scaled to %v", got)
	}
}

func TestRecreate(t *testing.T) {
	w := newWorld(newDeployment(3, "a", intstr.FromInt32(0), intstr.FromInt32(0)))
	w.d.Spec.Strategy = appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType}
	w.settle(t, all)
	w.setImage("b")
	w.step(t)
	if got := w.sizes(); got["a"] != 0 || got["b"] != 0 {
		t.Errorf("at once: %v", got)
	}
	w.step(t)
	if got := w.sizes(); got["b"] != 0 {
		t.Errorf("old Pods still run: %v", got)
	}
	w.run(all)
	w.step(t)
	if got := w.sizes(); got["b"] != 3 {
		t.Errorf("when they have ended: %v", got)
	}
}

func TestDeadline(t *testing.T) {
	w := newWorld(newDeployment(1, "a", intstr.FromInt32(1), intstr.FromInt32(0)))
	w.d.Spec.ProgressDeadlineSeconds = ptr.To[int32](10)
	nothing := func(*appsv1.ReplicaSet, int32) int32 { return 0 }
	w.step(t)
	w.run(nothing)
	w.step(t)
	w.now = w.now.Add(5 * time.Second)
	w.step(t)
	if got := w.reason(appsv1.DeploymentProgressing); got != reasonUpdated {
		t.Errorf("after 5 s: %s", got)
	}
	plan, err := Decide(State{Deployment: w.d, Sets: w.sorted(), Now: w.now})
	if err != nil || plan.Again <= 0 || plan.Again > 11*time.Second {
		t.Errorf("looked at again after %s: %v", plan.Again, err)
	}
	w.now = w.now.Add(10 * time.Second)
	w.step(t)
	if got := w.reason(appsv1.DeploymentProgressing); got != reasonTimedOut {
		t.Errorf("after 15 s: %s", got)
	}
	w.run(all)
	w.step(t)
	if got := w.reason(appsv1.DeploymentProgressing); got != reasonAvailable {
		t.Errorf("available at last: %s", got)
	}
}

// TestLimits: whatever is asked for and however Pods come up, there are never more Pods than allowed, never fewer available
// than needed, and in the end all have the last template.
func TestLimits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		share := func(name string) intstr.IntOrString {
			if rapid.Bool().Draw(t, name+" percent") {
				return intstr.FromString(fmt.Sprintf("%d%%", rapid.IntRange(0, 100).Draw(t, name)))
			}
			return intstr.FromInt32(rapid.Int32Range(0, 12).Draw(t, name))
		}
		w := newWorld(newDeployment(rapid.Int32Range(0, 12).Draw(t, "replicas"), "0", share("surge"), share("unavailable")))
		limits := limitsOf(w.d)
		reached := false // from then on the minimum holds
		ready := func(_ *appsv1.ReplicaSet, missing int32) int32 { return rapid.Int32Range(0, missing).Draw(t, "ready") }
		for i := range rapid.IntRange(1, 40).Draw(t, "steps") {
			if rapid.IntRange(0, 9).Draw(t, "new") == 0 {
				w.setImage(fmt.Sprint(i % 4))
			}
			w.step(t)
			var size, up int32
			for _, set := range w.sets {
				size += *set.Spec.Replicas
				up += min(set.Status.AvailableReplicas, *set.Spec.Replicas)
			}
			if size > limits.replicas+limits.surge {
				t.Fatalf("%d Pods, at most %d are allowed: %v", size, limits.replicas+limits.surge, w.sizes())
			}
			if reached && up < limits.replicas-limits.unavailable {
				t.Fatalf("%d Pods are available, %d are needed: %v", up, limits.replicas-limits.unavailable, w.sizes())
			}
			if rapid.IntRange(0, 3).Draw(t, "behind") > 0 { // else the sets' status is old at the next step
				w.run(ready)
			}
			reached = reached || up >= limits.replicas-limits.unavailable
		}
		w.settle(t, all)
		last := w.d.Spec.Template.Spec.Containers[0].Image
		for image, size := range w.sizes() {
			if image == last && size != limits.replicas || image != last && size != 0 {
				t.Fatalf("in the end %v, want all of %s", w.sizes(), last)
			}
		}
	})
}

// TestLargeNumbers: numbers that the API takes, and to which nothing can be added.
func TestLargeNumbers(t *testing.T) {
	d := newDeployment(math.MaxInt32, "a", intstr.FromString("50%"), intstr.FromInt32(0))
	plan, err := Decide(State{Deployment: d, Now: start})
	if err != nil || *plan.Create.Spec.Replicas != math.MaxInt32 {
		t.Fatalf("%v: %+v", err, plan.Create)
	}
	old := plan.Create.DeepCopy()
	old.Name, old.UID, old.Spec.Template.Spec.Containers[0].Image = "old", "old", "b"
	old.Annotations[RevisionAnnotation] = strconv.Itoa(math.MaxInt64)
	plan, err = Decide(State{Deployment: d, Sets: []*appsv1.ReplicaSet{old}, Now: start})
	if err != nil || revision(plan.Create) < 1 {
		t.Fatalf("%v: revision %s", err, plan.Create.Annotations[RevisionAnnotation])
	}
	plan.Create.UID = "new"
	again, err := Decide(State{Deployment: d, Sets: []*appsv1.ReplicaSet{old, plan.Create}, Now: start})
	if err != nil || again.Revision != plan.Revision {
		t.Errorf("%v: revision %s becomes %s", err, plan.Revision, again.Revision)
	}
}
