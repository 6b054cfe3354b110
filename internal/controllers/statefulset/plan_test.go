package statefulset

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"portal/internal/controllers/workload"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// world plays the API server and the nodes: what is planned comes true, Pods become ready and end when they are told.
type world struct {
	set     *appsv1.StatefulSet
	pods    map[string]*corev1.Pod
	update  string
	held    map[types.UID]bool
	created []string // in order
	now     time.Time
}

func newWorld(replicas int32, change func(*appsv1.StatefulSetSpec)) *world {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "s"}, Spec: appsv1.StatefulSetSpec{
		Replicas: &replicas, PodManagementPolicy: appsv1.OrderedReadyPodManagement,
		UpdateStrategy: appsv1.StatefulSetUpdateStrategy{Type: appsv1.RollingUpdateStatefulSetStrategyType,
			RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{Partition: ptr.To[int32](0), MaxUnavailable: ptr.To(intstr.FromInt32(1))}},
	}}
	if change != nil {
		change(&set.Spec)
	}
	return &world{set: set, pods: map[string]*corev1.Pod{}, update: "r1", now: start}
}

func (w *world) step() Plan {
	w.now = w.now.Add(time.Second)
	current := w.set.Status.CurrentRevision
	if current == "" {
		current = w.update
	}
	plan := Decide(State{Set: w.set, Pods: slices.Collect(maps.Values(w.pods)), Current: current, Update: w.update, Held: w.held, Now: w.now})
	w.set = w.set.DeepCopy()
	w.set.Status = plan.Status
	for _, pod := range plan.Delete {
		now := metav1.NewTime(w.now)
		gone := pod.DeepCopy()
		gone.DeletionTimestamp = &now
		w.pods[pod.Name] = gone
	}
	for _, c := range plan.Create {
		pod := newPod(w.set, &corev1.PodTemplateSpec{}, c.Ordinal, c.Revision)
		w.pods[pod.Name] = pod
		w.created = append(w.created, pod.Name)
	}
	return plan
}

func (w *world) ready(name string) {
	pod := w.pods[name].DeepCopy()
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(w.now)}}
	w.pods[name] = pod
}

// run ends what is ending, and makes everything else ready.
func (w *world) run() {
	for name, pod := range w.pods {
		if pod.DeletionTimestamp != nil {
			delete(w.pods, name)
		} else if !running(pod) {
			w.ready(name)
		}
	}
}

type fataler interface{ Fatalf(string, ...any) }

func (w *world) settle(t fataler) {
	for range 200 {
		w.run()
		plan := w.step()
		if len(plan.Create)+len(plan.Delete) == 0 && plan.Status.ReadyReplicas == *w.set.Spec.Replicas && plan.Status.Replicas == *w.set.Spec.Replicas {
			w.step()
			return
		}
	}
	t.Fatalf("it never comes to rest: %v", w.names())
}

func (w *world) names() string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		out = append(out, name+":"+revisionOf(w.pods[name]))
	}
	return strings.Join(out, " ")
}

func TestInOrder(t *testing.T) {
	w := newWorld(3, nil)
	if plan := w.step(); len(plan.Create) != 1 || plan.Create[0].Ordinal != 0 {
		t.Fatalf("first %+v", plan.Create)
	}
	if plan := w.step(); len(plan.Create) != 0 {
		t.Fatalf("the first is not ready, and %+v", plan.Create)
	}
	w.settle(t)
	if got := strings.Join(w.created, " "); got != "web-0 web-1 web-2" {
		t.Errorf("created %s", got)
	}
	w.set.Spec.Replicas = ptr.To[int32](1)
	if plan := w.step(); len(plan.Delete) != 1 || plan.Delete[0].Name != "web-2" {
		t.Errorf("scaled down: %+v", plan.Delete)
	}
	if plan := w.step(); len(plan.Delete) != 0 {
		t.Errorf("the last is still ending, and %+v", plan.Delete)
	}
	w.settle(t)
	if got := w.names(); got != "web-0:r1" {
		t.Errorf("left: %s", got)
	}
}

// TestHalts: a Pod that is not well stops both directions.
func TestHalts(t *testing.T) {
	w := newWorld(3, nil)
	w.settle(t)
	sick := w.pods["web-1"].DeepCopy()
	sick.Status.Conditions[0].Status = corev1.ConditionFalse
	w.pods["web-1"] = sick
	for _, replicas := range []int32{4, 2} {
		w.set.Spec.Replicas = ptr.To(replicas)
		if plan := w.step(); len(plan.Create)+len(plan.Delete) != 0 {
			t.Errorf("scaled to %d: %+v", replicas, plan)
		}
	}
}

func TestParallel(t *testing.T) {
	w := newWorld(3, func(s *appsv1.StatefulSetSpec) { s.PodManagementPolicy = appsv1.ParallelPodManagement })
	if plan := w.step(); len(plan.Create) != 3 {
		t.Errorf("created %+v", plan.Create)
	}
	w.settle(t)
	w.set.Spec.Replicas = ptr.To[int32](0)
	if plan := w.step(); len(plan.Delete) != 3 {
		t.Errorf("deleted %d", len(plan.Delete))
	}
}

func TestUpdate(t *testing.T) {
	w := newWorld(3, nil)
	w.settle(t)
	w.update = "r2"
	if plan := w.step(); len(plan.Delete) != 1 || plan.Delete[0].Name != "web-2" {
		t.Fatalf("first %+v", plan.Delete)
	}
	w.settle(t)
	if got := w.names(); got != "web-0:r2 web-1:r2 web-2:r2" || w.set.Status.CurrentRevision != "r2" || w.set.Status.UpdatedReplicas != 3 {
		t.Errorf("%s, %+v", got, w.set.Status)
	}
	if got := strings.Join(w.created, " "); got != "web-0 web-1 web-2 web-2 web-1 web-0" {
		t.Errorf("created %s", got)
	}
}

func TestPartition(t *testing.T) {
	w := newWorld(3, func(s *appsv1.StatefulSetSpec) { s.UpdateStrategy.RollingUpdate.Partition = ptr.To[int32](2) })
	w.settle(t)
	w.update = "r2"
	w.settle(t)
	w.settle(t)
	if got := w.names(); got != "web-0:r1 web-1:r1 web-2:r2" || w.set.Status.CurrentRevision != "r1" {
		t.Errorf("%s, %+v", got, w.set.Status)
	}
	// A Pod below the partition that gets lost comes back as it was.
	delete(w.pods, "web-0")
	w.settle(t)
	if got := w.names(); got != "web-0:r1 web-1:r1 web-2:r2" {
		t.Errorf("after a loss: %s", got)
	}
}

func TestOnDelete(t *testing.T) {
	w := newWorld(2, func(s *appsv1.StatefulSetSpec) { s.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: "OnDelete"} })
	w.settle(t)
	w.update = "r2"
	w.settle(t)
	if got := w.names(); got != "web-0:r1 web-1:r1" {
		t.Errorf("by itself: %s", got)
	}
	delete(w.pods, "web-1")
	w.settle(t)
	if got := w.names(); got != "web-0:r1 web-1:r2" {
		t.Errorf("deleted by hand: %s", got)
	}
}

func TestFailedIsReplaced(t *testing.T) {
	w := newWorld(1, nil)
	w.settle(t)
	failed := w.pods["web-0"].DeepCopy()
	failed.Status.Phase = corev1.PodFailed
	w.pods["web-0"] = failed
	if plan := w.step(); len(plan.Delete) != 1 {
		t.Errorf("%+v", plan)
	}
	w.settle(t)
	if !running(w.pods["web-0"]) {
		t.Error("it was not replaced")
	}
}

// TestHeld: a failed Pod that is to wait does, but not for a change of the template, nor if it is not wanted any more.
func TestHeld(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*world)
		deleted bool
	}{
		"the same again": {func(*world) {}, false},
		"a new template": {func(w *world) { w.update = "r2" }, true},
		"scaled down":    {func(w *world) { w.set.Spec.Replicas = ptr.To[int32](0) }, true},
	} {
		w := newWorld(1, nil)
		w.settle(t)
		failed := w.pods["web-0"].DeepCopy()
		failed.UID, failed.Status.Phase = "failed", corev1.PodFailed
		w.pods["web-0"], w.held = failed, map[types.UID]bool{"failed": true}
		c.change(w)
		if plan := w.step(); (len(plan.Delete) == 1) != c.deleted {
			t.Errorf("%s: deleted %d", name, len(plan.Delete))
		}
	}
}

func TestOrdinal(t *testing.T) {
	for name, want := range map[string]int{"web-0": 0, "web-12": 12, "web-01": -1, "web--1": -1, "web-": -1, "other-1": -1, "web-1-2": -1} {
		if got := Ordinal("web", name); got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
}

// TestAvailability: an update never takes more than is allowed, and ends with the newest revision everywhere.
func TestAvailability(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		most := rapid.IntRange(1, 4).Draw(t, "most")
		replicas := rapid.Int32Range(0, 8).Draw(t, "replicas")
		w := newWorld(replicas, func(s *appsv1.StatefulSetSpec) {
			s.UpdateStrategy.RollingUpdate.MaxUnavailable = ptr.To(intstr.FromInt32(int32(most)))
			if rapid.Bool().Draw(t, "parallel") {
				s.PodManagementPolicy = appsv1.ParallelPodManagement
			}
		})
		w.settle(t)
		for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
			if rapid.IntRange(0, 9).Draw(t, "new") == 0 {
				w.update = fmt.Sprintf("r%d", 2+i)
			}
			w.step()
			down := int(replicas)
			for _, pod := range w.pods {
				if running(pod) && pod.DeletionTimestamp == nil {
					down--
				}
			}
			if down > most {
				t.Fatalf("%d of %d are down, %d may be: %s", down, replicas, most, w.names())
			}
			for _, name := range slices.Sorted(maps.Keys(w.pods)) {
				switch pod := w.pods[name]; {
				case rapid.Bool().Draw(t, "slow"):
				case pod.DeletionTimestamp != nil:
					delete(w.pods, name)
				default:
					w.ready(name)
				}
			}
		}
		w.settle(t)
		w.settle(t)
		for name, pod := range w.pods {
			if revisionOf(pod) != w.update {
				t.Fatalf("%s has %s, want %s", name, revisionOf(pod), w.update)
			}
		}
	})
}

// TestHaltsGoingDown: of several Pods that are not well none is deleted; a single one is.
func TestHaltsGoingDown(t *testing.T) {
	w := newWorld(3, nil)
	w.settle(t)
	sicken := func(names ...string) {
		for _, name := range names {
			pod := w.pods[name].DeepCopy()
			pod.Status.Conditions[0].Status = corev1.ConditionFalse
			w.pods[name] = pod
		}
	}
	sicken("web-0", "web-1", "web-2")
	w.set.Spec.Replicas = ptr.To[int32](0)
	if plan := w.step(); len(plan.Delete) != 0 {
		t.Errorf("none is well, and deleted %s", plan.Delete[0].Name)
	}
	w.ready("web-0")
	w.ready("web-1")
	if plan := w.step(); len(plan.Delete) != 1 || plan.Delete[0].Name != "web-2" {
		t.Errorf("the last is not well: %+v", plan.Delete)
	}
	w.settle(t)
}

// TestManyReplicas: what is asked for is not what is kept in memory.
func TestManyReplicas(t *testing.T) {
	for _, policy := range []appsv1.PodManagementPolicyType{appsv1.ParallelPodManagement, appsv1.OrderedReadyPodManagement} {
		w := newWorld(math.MaxInt32, func(s *appsv1.StatefulSetSpec) {
			s.PodManagementPolicy = policy
			s.UpdateStrategy.RollingUpdate.MaxUnavailable = ptr.To(intstr.FromString("50%"))
		})
		for i := range 3 {
			plan := w.step()
			w.run()
			want, first := workload.MaxBatch, i*workload.MaxBatch
			if policy == appsv1.OrderedReadyPodManagement {
				want, first = 1, i
			}
			if len(plan.Create) != want || plan.Create[0].Ordinal != first {
				t.Errorf("%s: %d from %+v", policy, len(plan.Create), plan.Create[0])
			}
		}
		w.update = "r2"
		if plan := w.step(); len(plan.Delete) != 0 {
			t.Errorf("%s: %d are deleted although most are missing", policy, len(plan.Delete))
		}
	}
}

// TestRelabel: a Pod that has lost the labels of its identity gets them back.
func TestRelabel(t *testing.T) {
	w := newWorld(2, nil)
	w.settle(t)
	if plan := w.step(); len(plan.Relabel) != 0 {
		t.Errorf("nothing is missing: %+v", plan.Relabel)
	}
	pod := w.pods["web-1"].DeepCopy()
	delete(pod.Labels, appsv1.PodIndexLabel)
	w.pods["web-1"] = pod
	if plan := w.step(); len(plan.Relabel) != 1 || plan.Relabel[0] != pod || len(plan.Delete) != 0 {
		t.Errorf("%+v", plan)
	}
}
