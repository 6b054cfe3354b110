package membership

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

func compareKeys(a, b Key) int { return strings.Compare(a.String(), b.String()) }

// TestIndexAgainstScan does random things to an Index and to two plain maps, and asks both.
func TestIndexAgainstScan(t *testing.T) {
	label := rapid.MapOfN(rapid.SampledFrom([]string{"app", "tier", "env", "zone"}), rapid.SampledFrom([]string{"a", "b", "c", ""}), 0, 4)
	name := rapid.SampledFrom([]string{"p", "q", "r", "s", "t"})
	namespace := rapid.SampledFrom([]string{"one", "two"})
	rapid.Check(t, func(t *rapid.T) {
		x := NewIndex()
		pods, services := map[Key]*corev1.Pod{}, map[Key]map[string]string{}
		draw := func(t *rapid.T) Key {
			return Key{Namespace: namespace.Draw(t, "namespace"), Name: name.Draw(t, "name")}
		}
		t.Repeat(map[string]func(*rapid.T){
			"set pod": func(t *rapid.T) {
				key := draw(t)
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, Labels: label.Draw(t, "labels")}}
				pods[key] = pod
				x.SetPod(pod)
			},
			"delete pod": func(t *rapid.T) {
				key := draw(t)
				delete(pods, key)
				x.DeletePod(key.Namespace, key.Name)
			},
			"set service": func(t *rapid.T) {
				key := draw(t)
				services[key] = label.Draw(t, "selector")
				x.SetService(key, services[key])
			},
			"delete service": func(t *rapid.T) {
				key := draw(t)
				delete(services, key)
				x.DeleteService(key)
			},
			"": func(t *rapid.T) { compareWithScan(t, x, pods, services) },
		})
		for key := range maps.Clone(pods) {
			x.DeletePod(key.Namespace, key.Name)
		}
		for key := range services {
			x.DeleteService(key)
		}
		if len(x.spaces) != 0 {
			t.Fatalf("something is left of nothing: %v", x.spaces)
		}
	})
}

func compareWithScan(t *rapid.T, x *Index, pods map[Key]*corev1.Pod, services map[Key]map[string]string) {
	selects := func(svc Key, pod *corev1.Pod) bool {
		return svc.Namespace == pod.Namespace && len(services[svc]) > 0 && matches(services[svc], pod.Labels)
	}
	for svc := range services {
		var want, got []string
		for _, pod := range pods {
			if selects(svc, pod) {
				want = append(want, fmt.Sprintf("%p", pod))
			}
		}
		for _, pod := range x.Pods(svc) {
			got = append(got, fmt.Sprintf("%p", pod))
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(want, got) {
			t.Fatalf("%s selects %v, the index says %v", svc, want, got)
		}
	}
	for _, pod := range pods {
		var want []Key
		for svc := range services {
			if selects(svc, pod) {
				want = append(want, svc)
			}
		}
		got := x.Services(nil, pod.Namespace, pod.Labels)
		slices.SortFunc(want, compareKeys)
		slices.SortFunc(got, compareKeys)
		if !slices.Equal(want, got) {
			t.Fatalf("%s/%s %v is of %v, the index says %v", pod.Namespace, pod.Name, pod.Labels, want, got)
		}
	}
}

// A Pod's change looks at the Services filed under its labels, and no others, also when a label is everybody's.
func TestOneChangeLooksAtFewServices(t *testing.T) {
	x := NewIndex()
	const others = 5000
	for i := range others {
		name := fmt.Sprintf("s%d", i)
		x.SetService(Key{Namespace: "ns", Name: name}, map[string]string{"env": "prod", "app": name, "tier": "web"})
	}
	labels := map[string]string{"env": "prod", "app": "s7", "tier": "web"}
	looked := 0
	for label, value := range labels {
		looked += len(x.spaces["ns"].anchored[pair{label, value}])
	}
	// The first few may have been filed under what turned out to be common.
	if looked > 10 {
		t.Errorf("a Pod's change looks at %d of %d Services", looked, others)
	}
	if got := x.Services(nil, "ns", labels); len(got) != 1 || got[0].Name != "s7" {
		t.Errorf("the Pod is of %v", got)
	}
}

func BenchmarkPodChange(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			w := NewWatch()
			w.Subscribe(func(Key) {})
			for i := range n {
				name := fmt.Sprintf("s%d", i)
				w.SetService(Key{Namespace: "ns", Name: name}, map[string]string{"app": name})
				w.SetPod(pod(fmt.Sprintf("p%d", i), map[string]string{"app": name, "env": "prod"}, true))
			}
			ready, not := pod("p7", map[string]string{"app": "s7", "env": "prod"}, true), pod("p7", map[string]string{"app": "s7", "env": "prod"}, false)
			for b.Loop() {
				w.podChanged(ready, not)
				w.podChanged(not, ready)
			}
		})
	}
}

func pod(name string, labels map[string]string, ready bool) *corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: labels},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}},
	}
}

func TestAffectedServices(t *testing.T) {
	now := metav1.Now()
	base := pod("p", map[string]string{"app": "a"}, true)
	change := func(f func(*corev1.Pod)) *corev1.Pod {
		p := base.DeepCopy()
		f(p)
		return p
	}
	for _, c := range []struct {
		name string
		pod  *corev1.Pod
		want []string
	}{
		{"nothing", base, nil},
		{"an annotation", change(func(p *corev1.Pod) { p.Annotations = map[string]string{"x": "y"} }), nil},
		{"another condition", change(func(p *corev1.Pod) {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodInitialized})
		}), nil},
		{"readiness", pod("p", map[string]string{"app": "a"}, false), []string{"a"}},
		{"deletion", change(func(p *corev1.Pod) { p.DeletionTimestamp = &now }), []string{"a"}},
		{"phase", change(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), []string{"a"}},
		{"address", change(func(p *corev1.Pod) { p.Status.PodIPs = []corev1.PodIP{{IP: "10.0.0.1"}} }), []string{"a"}},
		{"another Pod of the name", change(func(p *corev1.Pod) { p.UID = "2" }), []string{"a"}},
		{"labels", change(func(p *corev1.Pod) { p.Labels = map[string]string{"app": "b"} }), []string{"a", "b"}},
		{"a label that nobody asks for", change(func(p *corev1.Pod) { p.Labels = map[string]string{"app": "a", "x": "y"} }), []string{"a"}},
		{"gone", nil, []string{"a"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := NewWatch()
			var told []string
			w.Subscribe(func(k Key) { told = append(told, k.Name) })
			w.SetService(Key{Namespace: "ns", Name: "a"}, map[string]string{"app": "a"})
			w.SetService(Key{Namespace: "ns", Name: "b"}, map[string]string{"app": "b"})
			w.SetPod(base)
			w.podChanged(base, c.pod)
			slices.Sort(told)
			if told = slices.Compact(told); !slices.Equal(told, c.want) {
				t.Errorf("told %v, want %v", told, c.want)
			}
		})
	}
}
