package garbage

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	testingclock "k8s.io/utils/clock/testing"
)

type podRig struct {
	podCollector
	t      *testing.T
	client *fake.Clientset
	clock  *testingclock.FakeClock
}

func newPodRig(t *testing.T, keep int) *podRig {
	client := fake.NewClientset()
	f := informers.NewSharedInformerFactory(client, 0)
	clock := testingclock.NewFakeClock(time.Now())
	return &podRig{t: t, client: client, clock: clock, podCollector: podCollector{
		client: client, pods: f.Core().V1().Pods().Informer(), nodes: f.Core().V1().Nodes().Informer(), clock: clock, keep: keep,
	}}
}

func (r *podRig) add(name, node string, phase corev1.PodPhase, change ...func(*corev1.Pod)) {
	r.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: metav1.NewTime(r.clock.Now())},
		Spec:       corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: phase},
	}
	for _, f := range change {
		f(pod)
	}
	r.clock.Step(time.Second)
	if _, err := r.client.CoreV1().Pods("ns").Create(context.Background(), pod, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// left collects and says which Pods are left.
func (r *podRig) left() string {
	r.t.Helper()
	ctx := context.Background()
	list := func() []string {
		pods, err := r.client.CoreV1().Pods("ns").List(ctx, metav1.ListOptions{})
		if err != nil {
			r.t.Fatal(err)
		}
		var names []string
		store := []any{}
		for i := range pods.Items {
			names = append(names, pods.Items[i].Name)
			store = append(store, &pods.Items[i])
		}
		if err := r.pods.GetStore().Replace(store, ""); err != nil {
			r.t.Fatal(err)
		}
		slices.Sort(names)
		return names
	}
	list()
	r.collect(ctx)
	return fmt.Sprint(list())
}

func (r *podRig) node(name string, change ...func(*corev1.Node)) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, f := range change {
		f(node)
	}
	if err := r.nodes.GetStore().Add(node); err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.client.CoreV1().Nodes().Create(context.Background(), node, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

func TestFinishedPodsOverTheLimitGo(t *testing.T) {
	r := newPodRig(t, 2)
	r.node("n")
	r.add("old", "n", corev1.PodSucceeded)
	r.add("running", "n", corev1.PodRunning)
	r.add("middle", "n", corev1.PodFailed)
	r.add("new", "n", corev1.PodSucceeded)
	r.add("evicted", "n", corev1.PodFailed, func(p *corev1.Pod) { p.Status.Reason = "Evicted" })
	if got := r.left(); got != "[middle new running]" {
		t.Errorf("left: %s", got)
	}
}

func TestPodsOfANodeThatIsGoneGo(t *testing.T) {
	r := newPodRig(t, 100)
	r.node("here")
	r.add("a", "here", corev1.PodRunning)
	r.add("b", "gone", corev1.PodRunning)
	if got := r.left(); got != "[a b]" {
		t.Errorf("at once: %s", got)
	}
	r.clock.Step(quarantine)
	if got := r.left(); got != "[a]" {
		t.Errorf("after the quarantine: %s", got)
	}
}

func TestANodeThatComesLateKeepsItsPods(t *testing.T) {
	r := newPodRig(t, 100)
	r.add("b", "late", corev1.PodRunning)
	r.left()
	r.clock.Step(quarantine)
	// The informer hasn't seen it yet, so the API server is asked.
	if _, err := r.client.CoreV1().Nodes().Create(context.Background(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "late"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := r.left(); got != "[b]" {
		t.Errorf("left: %s", got)
	}
}

func TestPodsWithoutANodeThatAreBeingDeletedGo(t *testing.T) {
	r := newPodRig(t, 100)
	now := metav1.Now()
	deleting := func(p *corev1.Pod) { p.DeletionTimestamp = &now }
	r.add("a", "", corev1.PodPending, deleting)
	r.add("b", "", corev1.PodPending, deleting, func(p *corev1.Pod) { p.Finalizers = []string{"example.com/wait"} })
	r.add("c", "", corev1.PodPending)
	if got := r.left(); got != "[b c]" {
		t.Errorf("left: %s", got)
	}
}

func TestPodsBeingDeletedOnANodeWithoutAnAgentGo(t *testing.T) {
	r := newPodRig(t, 100)
	r.node("by-hand")
	r.node("agent", func(n *corev1.Node) { n.Status.NodeInfo.KubeletVersion = "v1.37.1" })
	r.node("leased")
	_, err := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(context.Background(),
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "leased"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ends := metav1.NewTime(r.clock.Now().Add(30 * time.Second))
	deleting := func(p *corev1.Pod) { p.DeletionTimestamp = &ends }
	r.add("a", "by-hand", corev1.PodRunning, deleting)
	r.add("b", "by-hand", corev1.PodRunning)
	r.add("c", "agent", corev1.PodRunning, deleting)
	r.add("d", "leased", corev1.PodRunning, deleting)
	if got := r.left(); got != "[a b c d]" {
		t.Errorf("before their time is over: %s", got)
	}
	r.clock.Step(time.Minute)
	if got := r.left(); got != "[b c d]" {
		t.Errorf("when their time is over: %s", got)
	}
}

func TestPodsBeingDeletedOnANodeThatIsOutOfServiceGo(t *testing.T) {
	r := newPodRig(t, 100)
	now := metav1.Now()
	deleting := func(p *corev1.Pod) { p.DeletionTimestamp = &now }
	taint := func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Value: "nodeshutdown", Effect: corev1.TaintEffectNoExecute}}
	}
	is := func(status corev1.ConditionStatus) func(*corev1.Node) {
		return func(n *corev1.Node) {
			n.Status.NodeInfo.KubeletVersion = "v1.37.1"
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: status}}
		}
	}
	r.node("off", is(corev1.ConditionUnknown), taint)
	r.node("lost", is(corev1.ConditionUnknown))
	r.node("on", is(corev1.ConditionTrue), taint)
	for _, node := range []string{"off", "lost", "on"} {
		r.add(node+"-deleted", node, corev1.PodRunning, deleting)
		r.add(node, node, corev1.PodRunning)
	}
	if got := r.left(); got != "[lost lost-deleted off on on-deleted]" {
		t.Errorf("left: %s", got)
	}
}
