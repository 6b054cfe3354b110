package controllers_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

const evictTaint = "example.com/evict"

// taint sets a node's taints.
func (w *world) taint(node, taints string) {
	w.Helper()
	_, err := w.client.CoreV1().Nodes().Patch(w.ctx(), node, types.MergePatchType, []byte(`{"spec":{"taints":`+taints+`}}`), metav1.PatchOptions{})
	w.must(err)
}

// addTolerant makes a Pod that tolerates the taint: for ever, for seconds, or (nil) not at all.
func (w *world) addTolerant(name, node string, seconds *int64) {
	w.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	if seconds != nil {
		t := corev1.Toleration{Key: evictTaint, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}
		if *seconds >= 0 {
			t.TolerationSeconds = seconds
		}
		pod.Spec.Tolerations = []corev1.Toleration{t}
	}
	_, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx(), pod, metav1.CreateOptions{})
	w.must(err)
}

// evicted are the Pods that are being deleted, each for its node's taint.
func (w *world) evicted() string {
	w.Helper()
	list, err := w.client.CoreV1().Pods(w.namespace).List(w.ctx(), metav1.ListOptions{})
	w.must(err)
	var out []string
	for _, pod := range list.Items {
		if pod.DeletionTimestamp == nil {
			continue
		}
		out = append(out, pod.Name)
		if !slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.DisruptionTarget && c.Status == corev1.ConditionTrue && c.Reason == "DeletionByTaintManager"
		}) {
			w.Errorf("Pod %s is deleted without the condition: %v", pod.Name, pod.Status.Conditions)
		}
	}
	return joinSorted(out)
}

func (w *world) waitEvicted(want string) {
	w.Helper()
	w.eventually(30*time.Second, func() string {
		if got := w.evicted(); got != want {
			return fmt.Sprintf("evicted: %q, want %q", got, want)
		}
		return ""
	})
}

func TestPodsAreEvictedForTaints(t *testing.T) {
	w := newWorld(t)
	node, other := w.namespace+"-n", w.namespace+"-other"
	w.addNode(node, nil)
	w.addNode(other, nil)
	w.addTolerant("none", node, nil)
	w.addTolerant("elsewhere", other, nil)
	w.addTolerant("brief", node, ptr.To[int64](3))
	w.addTolerant("long", node, ptr.To[int64](1000))
	w.addTolerant("always", node, ptr.To[int64](-1))
	w.run("taint-eviction")
	tainted := time.Now()
	w.taint(node, `[{"key":"`+evictTaint+`","effect":"NoExecute"},{"key":"other","effect":"NoSchedule"}]`)
	w.waitEvicted("brief none")
	if took := time.Since(tainted); took < 3*time.Second {
		t.Errorf("a Pod that tolerates the taint for 3 s was evicted after %v", took)
	}
	// One that comes to the node later.
	w.addTolerant("late", node, nil)
	w.waitEvicted("brief late none")
	w.eventually(30*time.Second, func() string {
		events, err := w.client.CoreV1().Events(w.namespace).List(w.ctx(), metav1.ListOptions{FieldSelector: "reason=TaintManagerEviction,involvedObject.name=brief"})
		w.must(err)
		if len(events.Items) == 0 {
			return "the eviction has no Event"
		}
		return ""
	})
}

func TestRemovingATaintCancelsEvictions(t *testing.T) {
	w := newWorld(t)
	node := w.namespace + "-n"
	w.addNode(node, nil)
	w.addTolerant("reprieved", node, ptr.To[int64](10))
	w.addTolerant("none", node, nil)
	w.run("taint-eviction")
	taints := `[{"key":"` + evictTaint + `","effect":"NoExecute"}]`
	w.taint(node, taints)
	w.waitEvicted("none") // so the taint is known
	w.taint(node, `null`)
	w.eventually(30*time.Second, func() string {
		events, err := w.client.CoreV1().Events(w.namespace).List(w.ctx(), metav1.ListOptions{FieldSelector: "reason=TaintManagerEviction,involvedObject.name=reprieved"})
		w.must(err)
		if len(events.Items) == 0 {
			return "no Event says that the eviction is cancelled"
		}
		return ""
	})
	// One that tolerates a taint for longer, of another node, is evicted; the first is not, though its time has passed by then.
	other := w.namespace + "-other"
	w.addNode(other, nil)
	w.addTolerant("witness", other, ptr.To[int64](11))
	w.taint(other, taints)
	w.waitEvicted("none witness")
}

// conflicts answers the first request that would change a Pod's status with a conflict, as an API server does to which others keep writing.
type conflicts struct {
	next http.RoundTripper
	left *atomic.Int32
}

func (c conflicts) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/status") && c.left.Add(-1) >= 0 {
		return &http.Response{StatusCode: http.StatusConflict, Body: http.NoBody, Request: r}, nil
	}
	return c.next.RoundTrip(r)
}

// TestAConflictDoesNotSaveAPod: a Pod that could not be evicted because it was changed at that moment is evicted all the same.
func TestAConflictDoesNotSaveAPod(t *testing.T) {
	w := newWorld(t)
	node := w.namespace + "-n"
	w.addNode(node, nil)
	w.addTolerant("contended", node, nil)
	var left atomic.Int32
	left.Store(1)
	direct := w.config
	w.config = rest.CopyConfig(direct)
	w.config.Wrap(func(next http.RoundTripper) http.RoundTripper { return conflicts{next, &left} })
	w.run("taint-eviction")
	w.config = direct
	w.taint(node, `[{"key":"`+evictTaint+`","effect":"NoExecute"}]`)
	w.waitEvicted("contended")
	if left.Load() >= 0 {
		t.Error("there was no conflict: this has tested nothing")
	}
}
