package workload

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

var now = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

type change = func(*corev1.Pod)

func newPod(name string, changes ...change) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))}}
	p.Spec.NodeName, p.Status.Phase = "n-"+name, corev1.PodRunning
	for _, f := range changes {
		f(p)
	}
	return p
}

func ready(ago time.Duration) change {
	return func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now.Add(-ago))}}
	}
}

// TestFirstToGo: of two Pods the one called a goes first, for one reason.
func TestFirstToGo(t *testing.T) {
	for name, c := range map[string]struct{ a, b []change }{
		"no node":         {[]change{func(p *corev1.Pod) { p.Spec.NodeName = "" }}, nil},
		"pending":         {[]change{func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }}, nil},
		"not ready":       {nil, []change{ready(time.Hour)}},
		"cheap":           {[]change{ready(time.Hour), cost("-5")}, []change{ready(time.Hour)}},
		"not expensive":   {[]change{ready(time.Minute)}, []change{ready(time.Hour), cost("5")}},
		"ready for less":  {[]change{ready(time.Minute)}, []change{ready(time.Hour)}},
		"restarts":        {[]change{ready(time.Hour), restarted(3)}, []change{ready(time.Hour), restarted(1)}},
		"younger":         {[]change{ready(time.Hour), created(time.Minute)}, []change{ready(time.Hour)}},
		"neighbours":      {[]change{ready(time.Hour), func(p *corev1.Pod) { p.Spec.NodeName = "crowded" }}, []change{ready(time.Minute)}},
		"node is all":     {[]change{func(p *corev1.Pod) { p.Spec.NodeName = "" }, ready(time.Hour), cost("100")}, []change{func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }}},
		"about as old":    {[]change{ready(3600 * time.Second)}, []change{ready(3700 * time.Second)}}, // then the name decides, here
		"a cost of words": {[]change{ready(time.Minute), cost("x")}, []change{ready(time.Hour)}},
	} {
		a, b := newPod("a", c.a...), newPod("b", c.b...)
		related := []*corev1.Pod{a, b, newPod("x", ready(time.Hour), func(p *corev1.Pod) { p.Spec.NodeName = "crowded" })}
		if got := FirstToGo([]*corev1.Pod{b, a}, related, now); got[0] != a {
			t.Errorf("%s: %s goes first", name, got[0].Name)
		}
	}
}

func cost(value string) change {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.PodDeletionCost: value} }
}

func restarted(n int32) change {
	return func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: n}} }
}

func created(ago time.Duration) change {
	return func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(now.Add(-ago)) }
}

func TestAvailable(t *testing.T) {
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		min  int32
		ok   bool
		left time.Duration
	}{
		"not ready":   {newPod("a"), 0, false, 0},
		"ready":       {newPod("a", ready(0)), 0, true, 0},
		"long enough": {newPod("a", ready(10*time.Second)), 10, true, 0},
		"soon":        {newPod("a", ready(4*time.Second)), 10, false, 6 * time.Second},
	} {
		if ok, left := Available(c.pod, c.min, now); ok != c.ok || left != c.left {
			t.Errorf("%s: %v %s", name, ok, left)
		}
	}
}

func TestHash(t *testing.T) {
	template := &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b", "c": "d"}}}
	first, err := Hash(template, nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if again, _ := Hash(template.DeepCopy(), nil); again != first {
			t.Fatalf("%s and %s", first, again)
		}
	}
	if other, _ := Hash(template, ptr.To[int32](1)); other == first {
		t.Error("a collision changes nothing")
	}
	if len(first) > 10 || strings.ToLower(first) != first {
		t.Errorf("%s can't be a label", first)
	}
}

// TestSlowStart: what fails is not tried more than twice as often as what went well.
func TestSlowStart(t *testing.T) {
	var tries atomic.Int32
	done, err := SlowStart(100, func(int) error { tries.Add(1); return errors.New("quota") })
	if done != 0 || err == nil || tries.Load() != 1 {
		t.Errorf("%d of %d tries: %v", done, tries.Load(), err)
	}
	var seen [100]atomic.Int32
	if done, err := SlowStart(100, func(i int) error { seen[i].Add(1); return nil }); done != 100 || err != nil {
		t.Errorf("%d: %v", done, err)
	}
	for i := range seen {
		if seen[i].Load() != 1 {
			t.Fatalf("%d was done %d times", i, seen[i].Load())
		}
	}
}

// TestClaim: who is adopted, kept, released and left alone.
func TestClaim(t *testing.T) {
	owner := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: "set", UID: "set"}}
	pod := func(name, app string, owner types.UID) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{"app": app}}}
		if owner != "" {
			p.OwnerReferences = []metav1.OwnerReference{{UID: owner, Controller: ptr.To(true)}}
		}
		return p
	}
	deleted := pod("deleted", "web", "")
	deleted.DeletionTimestamp = ptr.To(metav1.NewTime(now))
	pods := []*corev1.Pod{pod("mine", "web", "set"), pod("orphan", "web", ""), pod("lost", "other", "set"), pod("theirs", "web", "another"), pod("stranger", "other", ""), deleted}
	for name, c := range map[string]struct {
		live          *appsv1.ReplicaSet
		err           error
		mine, patched string
		fails         bool
	}{
		"as it is":        {owner, nil, "mine orphan", "orphan lost", false},
		"another one":     {&appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{UID: "new"}}, nil, "mine", "lost", true},
		"being deleted":   {&appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{UID: "set", DeletionTimestamp: ptr.To(metav1.NewTime(now))}}, nil, "mine", "lost", true},
		"gone":            {nil, apierrors.NewNotFound(appsv1.Resource("replicasets"), "set"), "mine", "lost", true},
		"API is not well": {nil, errors.New("unavailable"), "mine", "lost", true},
	} {
		var patched []string
		claim := &Claim{
			Owner: owner, Kind: appsv1.SchemeGroupVersion.WithKind("ReplicaSet"), Selector: labels.SelectorFromSet(labels.Set{"app": "web"}),
			Live: func(context.Context) (metav1.Object, error) {
				if c.live == nil {
					return nil, c.err
				}
				return c.live, nil
			},
			Patch: func(_ context.Context, name string, patch []byte) error {
				if !json.Valid(patch) || !strings.Contains(string(patch), `"uid":"`+name+`"`) {
					t.Errorf("patch %s", patch)
				}
				patched = append(patched, name)
				return nil
			},
		}
		got, err := Sort(t.Context(), claim, pods)
		var mine []string
		for _, p := range got {
			mine = append(mine, p.Name)
		}
		slices.Sort(mine)
		if strings.Join(mine, " ") != c.mine || strings.Join(patched, " ") != c.patched || (err != nil) != c.fails {
			t.Errorf("%s: mine %v, patched %v, %v", name, mine, patched, err)
		}
	}
}

func TestRevisions(t *testing.T) {
	template := &corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	data, err := RevisionData(template)
	if err != nil {
		t.Fatal(err)
	}
	revision := &appsv1.ControllerRevision{}
	revision.Data.Raw = data
	back, err := TemplateOf(revision)
	if err != nil || back.Spec.Containers[0].Image != "i" || back.Labels["a"] != "b" {
		t.Errorf("%v: %+v", err, back)
	}
	var indented any
	if err := json.Unmarshal(data, &indented); err != nil {
		t.Fatal(err)
	}
	other, _ := json.MarshalIndent(indented, "", " ")
	if !SameData(data, other) || SameData(data, []byte(`{}`)) {
		t.Error("the same is not the same")
	}
}

// TestRevisionNumbers: a number that a float can't hold is kept.
func TestRevisionNumbers(t *testing.T) {
	with := func(id int64) []byte {
		data, err := RevisionData(&corev1.PodTemplateSpec{Spec: corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{RunAsUser: &id}}})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	const big = 1<<53 + 1
	back, err := TemplateOf(&appsv1.ControllerRevision{Data: runtime.RawExtension{Raw: with(big)}})
	if err != nil || *back.Spec.SecurityContext.RunAsUser != big {
		t.Errorf("%v: %+v", err, back.Spec.SecurityContext)
	}
	if SameData(with(big), with(big-1)) {
		t.Error("two numbers are taken for the same")
	}
}

// TestSameDataOfOlderServers: those wrote fields that are empty.
func TestSameDataOfOlderServers(t *testing.T) {
	old := `{"spec":{"template":{"$patch":"replace","metadata":{"creationTimestamp":null,"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","resources":{}}]}}}}`
	now := `{"spec":{"template":{"$patch":"replace","metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c"}]}}}}`
	other := strings.Replace(now, `"name":"c"`, `"name":"d"`, 1)
	if !SameData([]byte(old), []byte(now)) || SameData([]byte(old), []byte(other)) || SameData([]byte(old), []byte(`no JSON`)) {
		t.Error("what is the same is not found out")
	}
}

// TestTrimNothing: without a limit, and with one below 0, every revision is kept.
func TestTrimNothing(t *testing.T) {
	revisions := []*appsv1.ControllerRevision{{}, {}}
	for _, limit := range []*int32{nil, ptr.To[int32](-1)} {
		if err := (&History{}).Trim(t.Context(), revisions, limit, nil); err != nil { // without a client it can delete nothing
			t.Error(err)
		}
	}
}

// TestBatches: many Pods are not created all at a time.
func TestBatches(t *testing.T) {
	var running, most atomic.Int32
	done, err := SlowStart(5000, func(int) error {
		now := running.Add(1)
		defer running.Add(-1)
		for before := most.Load(); now > before && !most.CompareAndSwap(before, now); before = most.Load() {
		}
		time.Sleep(5 * time.Millisecond)
		return nil
	})
	if done != 5000 || err != nil || most.Load() > MaxBatch {
		t.Errorf("%d done, %d at a time: %v", done, most.Load(), err)
	}
}

// TestPanicsReachTheCaller: one can recover only in one's own goroutine.
func TestPanicsReachTheCaller(t *testing.T) {
	for name, run := range map[string]func(){
		"SlowStart": func() { _, _ = SlowStart(5, func(i int) error { panic("boom") }) },
		"Together":  func() { _ = Together([]int{1, 2}, func(int) error { panic("boom") }) },
	} {
		func() {
			defer func() {
				if p := recover(); p == nil || !strings.HasPrefix(p.(string), "boom\n") {
					t.Errorf("%s: %v", name, p)
				}
			}()
			run()
		}()
	}
}
