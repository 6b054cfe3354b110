package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	testingclock "k8s.io/utils/clock/testing"

	"portal/internal/controllers/membership"
)

// rig is a controller whose informers are filled by hand, so that every step of it can be made to happen.
type rig struct {
	*Controller
	t      *testing.T
	client *fake.Clientset
	clock  *testingclock.FakeClock
}

func newRig(t *testing.T, ranges ...Range) *rig {
	client := fake.NewClientset(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: corev1.NamespaceNodeLease}})
	f := informers.NewSharedInformerFactory(client, 0)
	pods := f.Core().V1().Pods().Informer()
	if err := pods.AddIndexers(cache.Indexers{membership.ByNode: membership.IndexByNode}); err != nil {
		t.Fatal(err)
	}
	clock := testingclock.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	c, err := New(Deps{
		Client: client, Recorder: record.NewFakeRecorder(100), Nodes: f.Core().V1().Nodes().Informer(), Leases: f.Coordination().V1().Leases().Informer(),
		Pods: pods, Clock: clock, GracePeriod: 40 * time.Second, MonitorPeriod: time.Second, Ranges: ranges,
	})
	if err != nil {
		t.Fatal(err)
	}
	return &rig{Controller: c, t: t, client: client, clock: clock}
}

// refresh fills the informers with what the API server has, and has the nodes judged.
func (r *rig) refresh() {
	r.t.Helper()
	ctx := context.Background()
	nodes, err := r.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	r.must(err)
	fill(r.t, r.Nodes, len(nodes.Items), func(i int) any { return &nodes.Items[i] })
	leases, err := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
	r.must(err)
	fill(r.t, r.Leases, len(leases.Items), func(i int) any { return &leases.Items[i] })
	pods, err := r.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	r.must(err)
	fill(r.t, r.Pods, len(pods.Items), func(i int) any { return &pods.Items[i] })
	r.monitorAll(ctx)
}

func fill(t *testing.T, informer cache.SharedIndexInformer, n int, item func(int) any) {
	t.Helper()
	list := make([]any, n)
	for i := range list {
		list[i] = item(i)
	}
	if err := informer.GetStore().Replace(list, ""); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) addNode(name string, ready corev1.ConditionStatus) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if ready != "" {
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}, {Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionFalse}}
	}
	_, err := r.client.CoreV1().Nodes().Create(context.Background(), node, metav1.CreateOptions{})
	r.must(err)
	_, err = r.client.CoreV1().Pods("ns").Create(context.Background(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pod-of-" + name},
		Spec:       corev1.PodSpec{NodeName: name},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}, metav1.CreateOptions{})
	r.must(err)
}

func (r *rig) renew(name string) {
	client := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	now := metav1.NewMicroTime(r.clock.Now())
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: corev1.NamespaceNodeLease}, Spec: coordinationv1.LeaseSpec{RenewTime: &now}}
	if _, err := client.Update(context.Background(), lease, metav1.UpdateOptions{}); err != nil {
		_, err = client.Create(context.Background(), lease, metav1.CreateOptions{})
		r.must(err)
	}
}

// state is what the API server says of a node: readiness, taints, and whether its Pod is ready.
func (r *rig) state(name string) string {
	node, err := r.client.CoreV1().Nodes().Get(context.Background(), name, metav1.GetOptions{})
	r.must(err)
	pod, err := r.client.CoreV1().Pods("ns").Get(context.Background(), "pod-of-"+name, metav1.GetOptions{})
	r.must(err)
	taints := ""
	for _, t := range node.Spec.Taints {
		taints += " " + t.Key + ":" + string(t.Effect)
	}
	return fmt.Sprintf("%s%s pod=%t", readiness(node), taints, membership.Ready(pod))
}

func (r *rig) expect(name, want string) {
	r.t.Helper()
	if got := r.state(name); got != want {
		r.t.Errorf("%s: %s\nwant %s", name, got, want)
	}
}

const unreachable = "Unknown node.kubernetes.io/unreachable:NoSchedule node.kubernetes.io/unreachable:NoExecute pod=false"

// isolatedState is that of a lost node while no other is ready.
const isolatedState = "Unknown node.kubernetes.io/unreachable:NoSchedule pod=false"

func TestASilentNodeIsLost(t *testing.T) {
	r := newRig(t)
	r.addNode("silent", corev1.ConditionTrue)
	r.addNode("alive", corev1.ConditionTrue)
	r.addNode("without-lease", corev1.ConditionTrue)
	r.addNode("never-reported", "")
	for _, name := range []string{"silent", "alive", "never-reported"} {
		r.renew(name)
	}
	r.refresh()
	for range 6 { // Pods of one node are evicted at a time
		r.clock.Step(10 * time.Second)
		r.renew("alive")
		r.refresh()
	}
	r.expect("silent", unreachable)
	r.expect("alive", "True pod=true")
	r.expect("without-lease", "True pod=true")
	r.expect("never-reported", unreachable)

	// The node comes back: it reports itself and its Pods, and the taints go.
	r.renew("silent")
	r.report("silent", corev1.ConditionTrue)
	r.refresh()
	r.expect("silent", "True pod=true")
}

// report is what a node writes about itself and its Pod.
func (r *rig) report(name string, ready corev1.ConditionStatus) {
	ctx := context.Background()
	node, err := r.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	r.must(err)
	node.Status.Conditions[0].Status = ready
	_, err = r.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	r.must(err)
	pod, err := r.client.CoreV1().Pods("ns").Get(ctx, "pod-of-"+name, metav1.GetOptions{})
	r.must(err)
	pod.Status.Conditions[0].Status = corev1.ConditionTrue
	_, err = r.client.CoreV1().Pods("ns").UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	r.must(err)
}

func TestANodeThatSaysItIsNotReady(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.addNode("other", corev1.ConditionTrue)
	r.renew("other")
	r.renew("n")
	r.refresh()
	r.report("n", corev1.ConditionFalse)
	r.renew("n")
	r.refresh()
	const notReady = "False node.kubernetes.io/not-ready:NoSchedule node.kubernetes.io/not-ready:NoExecute pod="
	r.expect("n", notReady+"false")
	// It is alive, so what it says about its Pods afterwards counts.
	r.report("n", corev1.ConditionFalse)
	r.renew("n")
	r.refresh()
	r.expect("n", notReady+"true")
	// Silent from now on: one taint takes the other's place.
	r.clock.Step(time.Minute)
	r.renew("other")
	r.refresh()
	r.expect("n", unreachable)
}

// TestAConflictLeavesNoPodReady: a Pod that could not be marked since it was changed at that moment is marked in the next round, and
// holds up no other.
func TestAConflictLeavesNoPodReady(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.addNode("other", corev1.ConditionTrue)
	r.renew("n")
	r.renew("other")
	r.refresh()
	conflicts := 1
	r.client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		conflicts--
		return conflicts >= 0, nil, apierrors.NewConflict(corev1.Resource("pods"), "pod-of-n", errors.New("it was changed"))
	})
	r.report("n", corev1.ConditionFalse)
	for range 2 {
		r.renew("n")
		r.refresh()
	}
	r.expect("n", "False node.kubernetes.io/not-ready:NoSchedule node.kubernetes.io/not-ready:NoExecute pod=false")
}

func TestAWatchThatHangsCondemnsNobody(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	r.renew("n")
	r.refresh()
	r.clock.Step(time.Minute)
	r.renew("n") // the API server knows, the informer doesn't
	r.monitorAll(context.Background())
	r.expect("n", "True pod=true")
}

func TestTaintsOfOthersStay(t *testing.T) {
	r := newRig(t)
	r.addNode("n", corev1.ConditionTrue)
	node, err := r.client.CoreV1().Nodes().Get(context.Background(), "n", metav1.GetOptions{})
	r.must(err)
	node.Spec.Taints = []corev1.Taint{{Key: "mine", Effect: corev1.TaintEffectNoSchedule}, {Key: corev1.TaintNodeUnreachable, Effect: corev1.TaintEffectNoExecute}}
	_, err = r.client.CoreV1().Nodes().Update(context.Background(), node, metav1.UpdateOptions{})
	r.must(err)
	r.renew("n")
	r.refresh()
	r.expect("n", "True mine:NoSchedule pod=true")
}

func TestANodeThatIsReadyLosesTheTaintOfNewOnes(t *testing.T) {
	r := newRig(t)
	for name, ready := range map[string]corev1.ConditionStatus{"up": corev1.ConditionTrue, "down": corev1.ConditionFalse} {
		r.addNode(name, ready)
		node, err := r.client.CoreV1().Nodes().Get(context.Background(), name, metav1.GetOptions{})
		r.must(err)
		node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}}
		_, err = r.client.CoreV1().Nodes().Update(context.Background(), node, metav1.UpdateOptions{})
		r.must(err)
	}
	r.refresh()
	r.expect("up", "True pod=true")
	r.expect("down", "False node.kubernetes.io/not-ready:NoSchedule pod=true")
}

// Nodes that can't renew their Leases are not dead: the namespace of the Leases is gone, or the API is.
func TestNodesThatCannotRenew(t *testing.T) {
	ctx := context.Background()
	away := false
	var namespace *corev1.Namespace
	for _, c := range []struct {
		name        string
		begin, mend func(r *rig)
	}{
		{"namespace deleted", func(r *rig) {
			r.must(r.client.CoreV1().Namespaces().Delete(ctx, corev1.NamespaceNodeLease, metav1.DeleteOptions{}))
			r.must(r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Delete(ctx, "n", metav1.DeleteOptions{}))
		}, func(r *rig) {
			_, err := r.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: corev1.NamespaceNodeLease}}, metav1.CreateOptions{})
			r.must(err)
		}},
		{"namespace terminating", func(r *rig) {
			var err error
			namespace, err = r.client.CoreV1().Namespaces().Get(ctx, corev1.NamespaceNodeLease, metav1.GetOptions{})
			r.must(err)
			namespace.DeletionTimestamp = &metav1.Time{Time: r.clock.Now()}
			namespace, err = r.client.CoreV1().Namespaces().Update(ctx, namespace, metav1.UpdateOptions{})
			r.must(err)
		}, func(r *rig) {
			namespace.DeletionTimestamp = nil
			_, err := r.client.CoreV1().Namespaces().Update(ctx, namespace, metav1.UpdateOptions{})
			r.must(err)
		}},
		{"API away", func(*rig) { away = true }, func(*rig) { away = false }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			r.client.PrependReactor("get", "namespaces", func(clienttesting.Action) (bool, runtime.Object, error) {
				return away, nil, apierrors.NewServiceUnavailable("away")
			})
			r.addNode("n", corev1.ConditionTrue)
			r.renew("n")
			r.refresh()
			c.begin(r)
			for range 20 {
				r.clock.Step(10 * time.Second)
				r.refresh()
			}
			r.expect("n", "True pod=true")
			c.mend(r)
			for range 3 { // within the grace period
				r.clock.Step(10 * time.Second)
				r.refresh()
			}
			r.expect("n", "True pod=true")
			for range 3 { // still silent
				r.clock.Step(10 * time.Second)
				r.refresh()
			}
			r.expect("n", isolatedState)
		})
	}
}

// TestReservedPartIsNeverFree: between the reservation for a node and the node that has its part, nobody else gets it.
func TestReservedPartIsNeverFree(t *testing.T) {
	r := newRig(t, Range{prefix("10.244.0.0/24"), 24})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.0.0/24"}}}
	for range 500 {
		if _, err := r.allocate("a"); err != nil {
			t.Fatal(err)
		}
		var taken atomic.Bool
		var done sync.WaitGroup
		done.Go(func() {
			for range 20 {
				if _, err := r.allocate("b"); err == nil {
					taken.Store(true)
				}
			}
		})
		r.seen(node)
		done.Wait()
		if taken.Load() {
			t.Fatal("another node got the part that was reserved")
		}
		r.gone(node)
	}
}

// TestConflictIsReported: a node that comes with addresses of another one is reported in an Event, once.
func TestConflictIsReported(t *testing.T) {
	r := newRig(t, Range{prefix("10.244.0.0/23"), 24})
	for range 2 {
		for _, name := range []string{"a", "b"} {
			r.seen(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.244.0.0/24"}}})
		}
	}
	events := r.Recorder.(*record.FakeRecorder).Events
	if len(events) != 1 {
		t.Fatalf("%d Events", len(events))
	}
	if e := <-events; !strings.Contains(e, "CIDRConflict") || !strings.Contains(e, "10.244.0.0/24") || !strings.Contains(e, " a") {
		t.Error(e)
	}
}
