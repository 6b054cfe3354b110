package daemonset

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func rolling(surge, unavailable int32) appsv1.DaemonSetUpdateStrategy {
	return appsv1.DaemonSetUpdateStrategy{Type: appsv1.RollingUpdateDaemonSetStrategyType, RollingUpdate: &appsv1.RollingUpdateDaemonSet{
		MaxSurge: ptr.To(intstr.FromInt32(surge)), MaxUnavailable: ptr.To(intstr.FromInt32(unavailable)),
	}}
}

// world plays the API server, the scheduler and the nodes.
type world struct {
	set   *appsv1.DaemonSet
	nodes []*corev1.Node
	pods  map[string]*corev1.Pod
	hash  string
	made  int
	now   time.Time
}

func newWorld(nodes int, strategy appsv1.DaemonSetUpdateStrategy) *world {
	w := &world{
		set:  &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "d", UID: "d"}, Spec: appsv1.DaemonSetSpec{UpdateStrategy: strategy}},
		pods: map[string]*corev1.Pod{}, hash: "h1", now: start,
	}
	for i := range nodes {
		name := fmt.Sprintf("n%d", i)
		w.nodes = append(w.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}})
	}
	return w
}

func (w *world) step() Plan {
	w.now = w.now.Add(time.Second)
	plan := Decide(State{Set: w.set, Nodes: w.nodes, Pods: slices.Collect(maps.Values(w.pods)), Hash: w.hash, Now: w.now})
	for _, pod := range slices.Concat(plan.Delete, plan.Failed) {
		gone := pod.DeepCopy()
		gone.DeletionTimestamp = ptr.To(metav1.NewTime(w.now))
		w.pods[pod.Name] = gone
	}
	for _, node := range plan.Create {
		w.made++
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(w.made), CreationTimestamp: metav1.NewTime(w.now),
			Labels: map[string]string{appsv1.DefaultDaemonSetUniqueLabelKey: w.hash}}}
		pin(pod, node)
		w.pods[pod.Name] = pod
	}
	return plan
}

func (w *world) ready(name string) {
	pod := w.pods[name].DeepCopy()
	pod.Spec.NodeName, pod.Status.Phase = Target(pod), corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(w.now)}}
	w.pods[name] = pod
}

func (w *world) run() {
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		if w.pods[name].DeletionTimestamp != nil {
			delete(w.pods, name)
		} else {
			w.ready(name)
		}
	}
}

type fataler interface{ Fatalf(string, ...any) }

func (w *world) settle(t fataler) Plan {
	for range 200 {
		w.run()
		plan := w.step()
		if len(plan.Create)+len(plan.Delete)+len(plan.Failed) == 0 && plan.Status.NumberUnavailable == 0 {
			return plan
		}
	}
	t.Fatalf("it never comes to rest")
	return Plan{}
}

func (w *world) on(node string) (out []*corev1.Pod) {
	for _, pod := range w.pods {
		if Target(pod) == node && pod.DeletionTimestamp == nil {
			out = append(out, pod)
		}
	}
	return out
}

func TestOnePerNode(t *testing.T) {
	w := newWorld(3, rolling(0, 1))
	status := w.settle(t).Status
	if status.DesiredNumberScheduled != 3 || status.NumberAvailable != 3 || status.UpdatedNumberScheduled != 3 || status.NumberMisscheduled != 0 {
		t.Errorf("%+v", status)
	}
	w.nodes = append(w.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "late"}})
	w.settle(t)
	if len(w.on("late")) != 1 {
		t.Error("a new node has no Pod")
	}
	w.nodes[0].Spec.Taints = []corev1.Taint{{Key: "k", Effect: corev1.TaintEffectNoSchedule}}
	if plan := w.step(); len(plan.Delete) != 0 || plan.Status.NumberMisscheduled != 1 || plan.Status.DesiredNumberScheduled != 3 {
		t.Errorf("NoSchedule: %+v", plan)
	}
	w.nodes[0].Spec.Taints[0].Effect = corev1.TaintEffectNoExecute
	if plan := w.step(); len(plan.Delete) != 1 {
		t.Errorf("NoExecute: %+v", plan)
	}
	w.run()
	w.set.Spec.Template.Spec.NodeSelector = map[string]string{"name": "n1"}
	w.hash = "h2"
	w.settle(t)
	if len(w.pods) != 1 || len(w.on("n1")) != 1 {
		t.Errorf("with a selector: %d Pods", len(w.pods))
	}
}

// TestTroubles: what a node suffers from is no reason to leave it.
func TestTroubles(t *testing.T) {
	w := newWorld(1, rolling(0, 1))
	w.nodes[0].Spec.Taints = []corev1.Taint{
		{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoExecute}, {Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodeDiskPressure, Effect: corev1.TaintEffectNoSchedule},
	}
	w.settle(t)
	if len(w.on("n0")) != 1 {
		t.Error("no Pod")
	}
}

func TestFailedAndExtra(t *testing.T) {
	w := newWorld(1, rolling(0, 1))
	w.settle(t)
	extra := w.pods["1"].DeepCopy()
	extra.Name, extra.CreationTimestamp = "extra", metav1.NewTime(w.now)
	w.pods["extra"] = extra
	if plan := w.step(); len(plan.Delete) != 1 || plan.Delete[0].Name != "extra" {
		t.Errorf("%+v", plan.Delete)
	}
	w.run()
	failed := w.pods["1"].DeepCopy()
	failed.Status.Phase = corev1.PodFailed
	w.pods["1"] = failed
	if plan := w.step(); len(plan.Failed) != 1 || len(plan.Create) != 0 {
		t.Errorf("%+v", plan)
	}
	w.settle(t)
	if len(w.on("n0")) != 1 || w.pods["1"] != nil {
		t.Error("it was not replaced")
	}
}

// TestRolling: an update never leaves more nodes without an available Pod than allowed, nor two Pods on more than the surge.
func TestRolling(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.IntRange(1, 8).Draw(t, "nodes")
		surge, unavailable := int32(0), rapid.Int32Range(1, 4).Draw(t, "limit")
		if rapid.Bool().Draw(t, "surges") {
			surge, unavailable = unavailable, 0
		}
		w := newWorld(number, rolling(surge, unavailable))
		w.settle(t)
		for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
			if rapid.IntRange(0, 9).Draw(t, "new") == 0 {
				w.hash = fmt.Sprintf("h%d", 2+i)
			}
			w.step()
			down, doubled := 0, 0
			for _, node := range w.nodes {
				pods := w.on(node.Name)
				if !slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return len(p.Status.Conditions) > 0 }) {
					down++
				}
				if len(pods) > 1 {
					doubled++
				}
			}
			if down > int(unavailable) || doubled > int(surge) {
				t.Fatalf("%d nodes without a Pod, %d may be; %d with two, %d may be", down, unavailable, doubled, surge)
			}
			for _, name := range slices.Sorted(maps.Keys(w.pods)) {
				switch {
				case rapid.Bool().Draw(t, "slow"):
				case w.pods[name].DeletionTimestamp != nil:
					delete(w.pods, name)
				default:
					w.ready(name)
				}
			}
		}
		w.settle(t)
		for _, node := range w.nodes {
			if pods := w.on(node.Name); len(pods) != 1 || pods[0].Labels[appsv1.DefaultDaemonSetUniqueLabelKey] != w.hash {
				t.Fatalf("%s has %d Pods in the end", node.Name, len(pods))
			}
		}
	})
}

// change changes a Pod of the world.
func (w *world) change(name string, f func(*corev1.Pod)) {
	pod := w.pods[name].DeepCopy()
	f(pod)
	w.pods[name] = pod
}

// TestEnded: a Pod that has ended is replaced, whichever way it ended.
func TestEnded(t *testing.T) {
	for _, phase := range []corev1.PodPhase{corev1.PodFailed, corev1.PodSucceeded} {
		w := newWorld(1, rolling(0, 1))
		w.settle(t)
		w.change("1", func(p *corev1.Pod) { p.Status.Phase, p.Status.Conditions = phase, nil })
		if plan := w.step(); len(plan.Failed) != 1 || len(plan.Create) != 0 {
			t.Errorf("%s: %+v", phase, plan)
		}
		// A finalizer keeps it, but it has ended.
		if plan := w.step(); len(plan.Create) != 1 {
			t.Errorf("%s: what only a finalizer keeps is in the way: %+v", phase, plan)
		}
	}
}

// TestNoTarget: a Pod that was made for no node is nobody's business.
func TestNoTarget(t *testing.T) {
	w := newWorld(1, rolling(0, 1))
	w.settle(t)
	w.pods["stray"] = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "stray"}}
	if plan := w.step(); len(plan.Delete)+len(plan.Create)+len(plan.Failed) != 0 || plan.Status.NumberMisscheduled != 0 {
		t.Errorf("%+v", plan)
	}
}

// TestSurge: an old Pod that is not ready stays until there is a new one, which does not wait for its turn.
func TestSurge(t *testing.T) {
	w := newWorld(3, rolling(1, 0))
	w.settle(t)
	for _, name := range []string{"1", "2", "3"} {
		w.change(name, func(p *corev1.Pod) { p.Status.Conditions = nil })
	}
	w.hash = "h2"
	if plan := w.step(); len(plan.Create) != 3 || len(plan.Delete) != 0 {
		t.Fatalf("created %v, deleted %d", plan.Create, len(plan.Delete))
	}
	if plan := w.step(); len(plan.Create) != 0 || len(plan.Delete) != 3 {
		t.Fatalf("created %v, deleted %d", plan.Create, len(plan.Delete))
	}
	w.settle(t)
	for _, pod := range w.pods { // what ends need not have gone
		w.change(pod.Name, func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.NewTime(w.now)) })
	}
	if plan := w.step(); len(plan.Create) != 3 {
		t.Errorf("created %v", plan.Create)
	}
}

// TestTolerations: a toleration for some seconds becomes one for any time, others stay.
func TestTolerations(t *testing.T) {
	set := &appsv1.DaemonSet{}
	mine := corev1.Toleration{Key: "mine", Operator: corev1.TolerationOpExists, TolerationSeconds: ptr.To[int64](5)}
	set.Spec.Template.Spec.Tolerations = []corev1.Toleration{mine,
		{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](5)}}
	got := Template(set).Spec.Tolerations
	if len(got) != 7 || got[0].TolerationSeconds == nil || got[1].TolerationSeconds != nil {
		t.Errorf("%+v", got)
	}
}

// TestSelects: a set must know its Pods as its own, with the labels that they get on the way.
func TestSelects(t *testing.T) {
	set := &appsv1.DaemonSet{Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "d"}}}}
	set.Spec.Template.Labels = map[string]string{"app": "d"}
	if err := selects(set, newPod(set, &set.Spec.Template, "h", "n")); err != nil {
		t.Error(err)
	}
	set.Spec.Selector.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: appsv1.DefaultDaemonSetUniqueLabelKey, Operator: metav1.LabelSelectorOpDoesNotExist}}
	if err := selects(set, newPod(set, &set.Spec.Template, "h", "n")); err == nil {
		t.Error("its Pods are not its own, and it creates them")
	}
}
