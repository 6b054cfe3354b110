package controllers_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func template(app string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
}

func (w *world) addReplicaSet(name string, replicas int32) *appsv1.ReplicaSet {
	w.Helper()
	set, err := w.client.AppsV1().ReplicaSets(w.namespace).Create(w.ctx(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       appsv1.ReplicaSetSpec{Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}, Template: template(name)},
	}, metav1.CreateOptions{})
	w.must(err)
	return set
}

func (w *world) podsWith(selector string) []corev1.Pod {
	w.Helper()
	list, err := w.client.CoreV1().Pods(w.namespace).List(w.ctx(), metav1.ListOptions{LabelSelector: selector})
	w.must(err)
	return list.Items
}

// TestReplicaSetAdoptsAndReleases: a Pod that is there already counts, one whose labels change no longer does.
func TestReplicaSetAdoptsAndReleases(t *testing.T) {
	w := newWorld(t)
	w.run("replicaset")
	orphan := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "orphan", Labels: map[string]string{"app": "web"}}, Spec: template("web").Spec}
	_, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx(), orphan, metav1.CreateOptions{})
	w.must(err)
	set := w.addReplicaSet("web", 2)
	w.eventually(10*time.Second, func() string {
		pods := w.podsWith("app=web")
		for i := range pods {
			if !metav1.IsControlledBy(&pods[i], set) {
				return pods[i].Name + " is not the set's"
			}
		}
		now, err := w.client.AppsV1().ReplicaSets(w.namespace).Get(w.ctx(), "web", metav1.GetOptions{})
		if err != nil || len(pods) != 2 || now.Status.Replicas != 2 || now.Status.ObservedGeneration != 1 {
			return fmt.Sprintf("%d Pods, %v", len(pods), err)
		}
		return ""
	})
	_, err = w.client.CoreV1().Pods(w.namespace).Patch(w.ctx(), "orphan", "application/merge-patch+json", []byte(`{"metadata":{"labels":{"app":"free"}}}`), metav1.PatchOptions{})
	w.must(err)
	w.eventually(10*time.Second, func() string {
		free, err := w.client.CoreV1().Pods(w.namespace).Get(w.ctx(), "orphan", metav1.GetOptions{})
		if err != nil || len(free.OwnerReferences) > 0 || len(w.podsWith("app=web")) != 2 {
			return fmt.Sprintf("%v, owners %v, %d others", err, free.OwnerReferences, len(w.podsWith("app=web")))
		}
		return ""
	})
}

// TestManyReplicas: a number that changes all the time ends with exactly as many Pods.
func TestManyReplicas(t *testing.T) {
	w := newWorld(t)
	w.run("replicaset")
	w.addReplicaSet("web", 0)
	for _, n := range []int32{30, 3, 20, 0, 25} {
		_, err := w.client.AppsV1().ReplicaSets(w.namespace).Patch(w.ctx(), "web", "application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n), metav1.PatchOptions{})
		w.must(err)
		time.Sleep(50 * time.Millisecond)
	}
	w.eventually(20*time.Second, func() string {
		if n := len(w.podsWith("app=web")); n != 25 {
			return fmt.Sprintf("%d Pods", n)
		}
		return ""
	})
	time.Sleep(300 * time.Millisecond)
	if n := len(w.podsWith("app=web")); n != 25 {
		t.Errorf("later %d Pods", n)
	}
}

// TestPodsThatFailAtOnce: a set whose Pods are all rejected tries less and less often, and says so. It still creates what it is scaled to.
func TestPodsThatFailAtOnce(t *testing.T) {
	w := newWorld(t)
	w.run("replicaset")
	w.addReplicaSet("web", 2)
	reject := func() {
		t.Helper()
		for _, pod := range w.podsWith("app=web") {
			if pod.Status.Phase == corev1.PodFailed {
				continue
			}
			_, err := w.client.CoreV1().Pods(w.namespace).Patch(w.ctx(), pod.Name, types.MergePatchType, []byte(`{"status":{"phase":"Failed","reason":"Evicted"}}`), metav1.PatchOptions{}, "status")
			w.must(err)
		}
	}
	w.eventually(20*time.Second, func() string {
		reject()
		events, err := w.client.CoreV1().Events(w.namespace).List(w.ctx(), metav1.ListOptions{FieldSelector: "reason=FailedPodBackoff,involvedObject.kind=ReplicaSet,involvedObject.name=web"})
		w.must(err)
		for _, e := range events.Items {
			if strings.Contains(e.Message, "(Evicted)") && strings.HasSuffix(e.Message, " 2s") {
				return ""
			}
		}
		return fmt.Sprintf("%d Events, %d Pods", len(events.Items), len(w.podsWith("app=web")))
	})
	if n := len(w.podsWith("app=web")); n > 10 {
		t.Errorf("%d Pods", n)
	}
	_, err := w.client.AppsV1().ReplicaSets(w.namespace).Patch(w.ctx(), "web", types.MergePatchType, []byte(`{"spec":{"replicas":5}}`), metav1.PatchOptions{})
	w.must(err)
	w.eventually(20*time.Second, func() string {
		active := 0
		for _, pod := range w.podsWith("app=web") {
			if pod.Status.Phase != corev1.PodFailed {
				active++
			}
		}
		if active != 5 {
			return fmt.Sprintf("%d Pods of 5 have not failed", active)
		}
		return ""
	})
}

// TestCollision: a ReplicaSet of somebody else has the name that a Deployment's should have.
func TestCollision(t *testing.T) {
	w := newWorld(t)
	stop := w.run("deployment")
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}, Template: template("web"),
	}}
	client := w.client.AppsV1()
	_, err := client.Deployments(w.namespace).Create(w.ctx(), d, metav1.CreateOptions{})
	w.must(err)
	var name string
	w.eventually(10*time.Second, func() string {
		sets, err := client.ReplicaSets(w.namespace).List(w.ctx(), metav1.ListOptions{})
		if err != nil || len(sets.Items) != 1 {
			return fmt.Sprintf("%d sets, %v", len(sets.Items), err)
		}
		name = sets.Items[0].Name
		return ""
	})
	stop()
	w.must(client.Deployments(w.namespace).Delete(w.ctx(), "web", metav1.DeleteOptions{}))
	w.must(client.ReplicaSets(w.namespace).Delete(w.ctx(), name, metav1.DeleteOptions{}))
	other := w.addReplicaSet("other", 0).DeepCopy()
	other.ObjectMeta = metav1.ObjectMeta{Name: name}
	_, err = client.ReplicaSets(w.namespace).Create(w.ctx(), other, metav1.CreateOptions{})
	w.must(err)
	w.run("deployment")
	_, err = client.Deployments(w.namespace).Create(w.ctx(), d, metav1.CreateOptions{})
	w.must(err)
	w.eventually(10*time.Second, func() string {
		now, err := client.Deployments(w.namespace).Get(w.ctx(), "web", metav1.GetOptions{})
		if err != nil || now.Status.CollisionCount == nil || *now.Status.CollisionCount != 1 {
			return fmt.Sprintf("%v: %v", err, now.Status.CollisionCount)
		}
		sets, err := client.ReplicaSets(w.namespace).List(w.ctx(), metav1.ListOptions{LabelSelector: "app=web"})
		if err != nil || len(sets.Items) != 1 || sets.Items[0].Name == name {
			return fmt.Sprintf("%d sets, %v", len(sets.Items), err)
		}
		return ""
	})
}

// TestScheduler: the more important Pod gets the place that there is.
func TestScheduler(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"low", "high"} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: template("x").Spec}
		pod.Spec.NodeSelector = map[string]string{"only": w.namespace}
		pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": resource.MustParse("1")}
		if name == "high" {
			pod.Spec.PriorityClassName = "system-cluster-critical"
		}
		_, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx(), pod, metav1.CreateOptions{})
		w.must(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.namespace, Labels: map[string]string{"only": w.namespace}}}
	made, err := w.client.CoreV1().Nodes().Create(w.ctx(), node, metav1.CreateOptions{})
	w.must(err)
	t.Cleanup(func() { _ = w.client.CoreV1().Nodes().Delete(w.ctx(), node.Name, metav1.DeleteOptions{}) })
	made.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("1"), "pods": resource.MustParse("5")}
	made.Status.Capacity = made.Status.Allocatable
	made.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	_, err = w.client.CoreV1().Nodes().UpdateStatus(w.ctx(), made, metav1.UpdateOptions{})
	w.must(err)
	w.run("node") // a new node is tainted until it is known to be ready
	w.eventually(20*time.Second, func() string {
		now, err := w.client.CoreV1().Nodes().Get(w.ctx(), node.Name, metav1.GetOptions{})
		if err != nil || len(now.Spec.Taints) > 0 {
			return fmt.Sprintf("taints %v, %v", now.Spec.Taints, err)
		}
		return ""
	})
	w.run("scheduler")
	state := func() string {
		out := ""
		for _, name := range []string{"low", "high"} {
			pod, err := w.client.CoreV1().Pods(w.namespace).Get(w.ctx(), name, metav1.GetOptions{})
			w.must(err)
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled {
					out += fmt.Sprintf("%s %s %s;", name, c.Status, pod.Spec.NodeName)
				}
			}
		}
		return out
	}
	want := "low False ;high True " + node.Name + ";"
	w.eventually(10*time.Second, func() string {
		if got := state(); got != want {
			return got
		}
		return ""
	})
	w.must(w.client.CoreV1().Pods(w.namespace).Delete(w.ctx(), "high", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	w.eventually(20*time.Second, func() string {
		pod, err := w.client.CoreV1().Pods(w.namespace).Get(w.ctx(), "low", metav1.GetOptions{})
		if err != nil || pod.Spec.NodeName != node.Name {
			return fmt.Sprintf("low is on %q, %v", pod.Spec.NodeName, err)
		}
		return ""
	})
}
