package scheduling

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/scheduler"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func named(name string) types.NamespacedName { return types.NamespacedName{Name: name} }

// TestOrder: the most important Pod is tried first, then the oldest.
func TestOrder(t *testing.T) {
	w := newWaiting()
	w.add(named("young"), 0, start.Add(time.Minute))
	w.add(named("old"), 0, start)
	w.add(named("important"), 5, start.Add(time.Hour))
	for _, want := range []string{"important", "old", "young"} {
		got, wait := w.take(start)
		if got.Name != want || wait != 0 {
			t.Errorf("%s after %s, want %s", got.Name, wait, want)
		}
		w.drop(got)
	}
	if _, wait := w.take(start); wait <= 0 {
		t.Error("there is one too many")
	}
}

// TestParked: a Pod that fitted nowhere waits for a change, then for its backoff, which grows.
func TestParked(t *testing.T) {
	w, now := newWaiting(), start
	w.add(named("p"), 0, start)
	for _, backoff := range []time.Duration{1, 2, 4, 8, 10, 10} {
		if key, wait := w.take(now); wait != 0 {
			t.Fatalf("%s is not tried for %s", key, wait)
		}
		w.park(named("p"), now)
		if _, wait := w.take(now); wait != retryInterval {
			t.Errorf("without a change it is tried after %s", wait)
		}
		if !w.retryAll() {
			t.Error("nothing is tried again")
		}
		if _, wait := w.take(now); wait != backoff*time.Second {
			t.Errorf("after a change it waits %s, want %ds", wait, backoff)
		}
		now = now.Add(backoff * time.Second)
	}
	if w.add(named("p"), 0, start) {
		t.Error("it is there twice")
	}
}

func TestWanted(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   bool
	}{
		"new":        {func(*corev1.Pod) {}, true},
		"has a node": {func(p *corev1.Pod) { p.Spec.NodeName = "n" }, false},
		"another's":  {func(p *corev1.Pod) { p.Spec.SchedulerName = "mine" }, false},
		"gated":      {func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "g"}} }, false},
		"runs":       {func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning }, false},
		"has an IP":  {func(p *corev1.Pod) { p.Status.PodIP = "10.0.0.1" }, false},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: corev1.DefaultSchedulerName}, Status: corev1.PodStatus{Phase: corev1.PodPending}}
		c.change(pod)
		if got := wanted(pod); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestStandby: Pods that come and go while nobody takes any leave nothing.
func TestStandby(t *testing.T) {
	w := newWaiting()
	w.add(named("stays"), 0, start)
	for i := range 10000 {
		key := named(fmt.Sprint(i))
		w.add(key, int32(i), start)
		w.drop(key)
	}
	if len(w.ready) > 100 {
		t.Errorf("%d are kept for one Pod", len(w.ready))
	}
	if got, wait := w.take(start); got.Name != "stays" || wait != 0 {
		t.Errorf("%s after %s", got.Name, wait)
	}
}

// TestBack: a Pod whose binding fails again and again waits longer each time.
func TestBack(t *testing.T) {
	w, now := newWaiting(), start
	w.add(named("p"), 0, start)
	for _, backoff := range []time.Duration{1, 2, 4, 8, 10} {
		key, wait := w.take(now)
		if wait != 0 {
			t.Fatalf("it is not tried for %s", wait)
		}
		failures := w.failures(key)
		w.drop(key)
		w.back(key, 0, start, failures, now)
		w.retryAll()
		if _, wait := w.take(now); wait != backoff*time.Second {
			t.Errorf("it waits %s, want %ds", wait, backoff)
		}
		now = now.Add(backoff * time.Second)
	}
}

// TestUnpark: a Pod that has changed is tried again, others are not.
func TestUnpark(t *testing.T) {
	w := newWaiting()
	for _, name := range []string{"a", "b"} {
		w.add(named(name), 0, start)
		w.take(start)
		w.park(named(name), start)
	}
	if !w.unpark(named("b")) || w.unpark(named("b")) || w.unpark(named("none")) {
		t.Error("unpark says something else than it does")
	}
	if got, wait := w.take(start.Add(minBackoff)); got.Name != "b" || wait != 0 {
		t.Errorf("%s after %s", got.Name, wait)
	}
	if _, wait := w.take(start.Add(minBackoff)); wait == 0 {
		t.Error("another one is tried")
	}
}

// TestSamePlace: a label and a toleration may change where a Pod can go, its status does not.
func TestSamePlace(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   bool
	}{
		"status":     {func(p *corev1.Pod) { p.Status.Message = "m" }, true},
		"label":      {func(p *corev1.Pod) { p.Labels = map[string]string{"a": "b"} }, false},
		"toleration": {func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "k"}} }, false},
	} {
		pod := &corev1.Pod{}
		c.change(pod)
		if got := samePlace(&corev1.Pod{}, pod); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestAnotherOfItsName: a Pod that an informer shows in the place of another one takes nothing of that one's node.
func TestAnotherOfItsName(t *testing.T) {
	c := &Controller{
		cluster: scheduler.NewCluster(func(string) labels.Set { return nil }), waiting: newWaiting(),
		binding: map[types.NamespacedName]underway{}, wake: make(chan struct{}, 1),
	}
	pod := func(uid types.UID, node string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: uid}, Spec: corev1.PodSpec{NodeName: node, SchedulerName: corev1.DefaultSchedulerName}}
	}
	first, second := pod("1", "n"), pod("2", "")
	c.podChanged(nil, first)
	if got := c.cluster.On(named("p")); got != "n" {
		t.Fatalf("on %q", got)
	}
	c.podChanged(first, second)
	if got := c.cluster.On(named("p")); got != "" || c.waiting.pods[named("p")] == nil {
		t.Errorf("on %q", got)
	}
}
