package workload

import (
	"context"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"portal/internal/controllers/queue"
)

// rig is a reconciler of ReplicaSets. Its informers never run: they have what a test puts there, while the API has what is stored.
type rig struct {
	Reconciler[*appsv1.ReplicaSet, *corev1.Pod]
	t      *testing.T
	synced []Work[*appsv1.ReplicaSet, *corev1.Pod]
	gone   []queue.Key
}

func newRig(t *testing.T, stored ...runtime.Object) *rig {
	client := fake.NewClientset(stored...)
	factory := informers.NewSharedInformerFactory(client, 0)
	pods := factory.Core().V1().Pods().Informer()
	if err := pods.AddIndexers(cache.Indexers{ByController: IndexByController}); err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t}
	r.Owners = Owners[*appsv1.ReplicaSet]{
		Kind: appsv1.SchemeGroupVersion.WithKind("ReplicaSet"), Informer: factory.Apps().V1().ReplicaSets().Informer(),
		Client:   func(namespace string) OwnerClient[*appsv1.ReplicaSet] { return client.AppsV1().ReplicaSets(namespace) },
		Selector: func(set *appsv1.ReplicaSet) *metav1.LabelSelector { return set.Spec.Selector },
		Ignore:   func(set *appsv1.ReplicaSet) bool { return set.Labels["ignore"] != "" },
		Gone:     func(key queue.Key) { r.gone = append(r.gone, key) },
	}
	r.Dependents = PodsOf[*appsv1.ReplicaSet](client, pods)
	r.Sync = func(_ context.Context, w Work[*appsv1.ReplicaSet, *corev1.Pod]) (queue.Result, error) {
		r.synced = append(r.synced, w)
		return queue.Result{}, nil
	}
	if err := r.Attach("test"); err != nil {
		t.Fatal(err)
	}
	return r
}

func newSet(name string) *appsv1.ReplicaSet {
	return &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)},
		Spec:       appsv1.ReplicaSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}},
	}
}

func podOf(name, app, kind, owner string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Labels: map[string]string{"app": app}}}
	if owner != "" {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: owner, UID: types.UID(owner), Controller: ptr.To(true)}}
	}
	return p
}

func (r *rig) put(informer cache.SharedIndexInformer, obj any) {
	r.t.Helper()
	if err := informer.GetStore().Add(obj); err != nil {
		r.t.Fatal(err)
	}
}

// TestWhoIsSynced: which owners a change of a Pod concerns.
func TestWhoIsSynced(t *testing.T) {
	orphan := podOf("p", "web", "", "")
	deleted := orphan.DeepCopy()
	deleted.DeletionTimestamp = ptr.To(metav1.NewTime(now))
	for name, c := range map[string]struct {
		old, pod *corev1.Pod
		concerns func(*appsv1.ReplicaSet, *corev1.Pod) bool
		synced   string
	}{
		"owned":             {pod: podOf("p", "web", "ReplicaSet", "db"), synced: "db"},
		"of another kind":   {pod: podOf("p", "web", "Job", "web")},
		"orphan":            {pod: orphan, synced: "web"},
		"orphan to go":      {pod: deleted},
		"orphan of nobody":  {pod: podOf("p", "other", "", "")},
		"other owner":       {old: podOf("p", "web", "ReplicaSet", "web"), pod: podOf("p", "web", "ReplicaSet", "db"), synced: "db web"},
		"same owner":        {old: podOf("p", "web", "ReplicaSet", "web"), pod: podOf("p", "other", "ReplicaSet", "web"), synced: "web"},
		"orphaned":          {old: podOf("p", "other", "ReplicaSet", "db"), pod: podOf("p", "other", "", ""), synced: "db"},
		"concerns by name":  {pod: deleted, concerns: func(set *appsv1.ReplicaSet, _ *corev1.Pod) bool { return set.Name == "db" }, synced: "db"},
		"concerns nobody":   {pod: orphan, concerns: func(*appsv1.ReplicaSet, *corev1.Pod) bool { return false }},
		"owner is not here": {pod: podOf("p", "web", "ReplicaSet", "none")},
	} {
		r := newRig(t)
		r.Dependents.Concerns = c.concerns
		for _, set := range []string{"web", "db", "last"} {
			r.put(r.Owners.Informer, newSet(set))
		}
		if c.old == nil {
			r.dependentChanged(nil, c.pod)
		} else {
			r.dependentChanged(c.old, c.pod)
		}
		r.Add(newSet("last"))
		ctx, cancel := context.WithCancel(t.Context())
		var names []string
		r.Sync = func(_ context.Context, w Work[*appsv1.ReplicaSet, *corev1.Pod]) (queue.Result, error) {
			if w.Owner.Name == "last" { // there is one worker, and this was added last
				cancel()
			} else {
				names = append(names, w.Owner.Name)
			}
			return queue.Result{}, nil
		}
		_ = r.Run(ctx)
		slices.Sort(names)
		if got := strings.Join(names, " "); got != c.synced {
			t.Errorf("%s: synced %q, want %q", name, got, c.synced)
		}
	}
}

// TestLostWrite: what a sync is given comes from the informers, and from the API server when they have lost a write.
func TestLostWrite(t *testing.T) {
	key := queue.Key{Namespace: "ns", Name: "web"}
	stored := newSet("web")
	stored.Generation = 2
	sync := func(r *rig, lost bool) *Work[*appsv1.ReplicaSet, *corev1.Pod] {
		r.synced = nil
		if lost {
			r.OwnerWrites.Lost(key)
		}
		if _, err := r.sync(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		if len(r.synced) == 0 {
			return nil
		}
		return &r.synced[0]
	}
	r := newRig(t, stored, podOf("new", "web", "ReplicaSet", "web"), podOf("theirs", "web", "ReplicaSet", "db"))
	if w := sync(r, false); w != nil || len(r.gone) != 1 {
		t.Errorf("an owner that the informer lacks: %+v, gone %v", w, r.gone)
	}
	r.put(r.Owners.Informer, newSet("web"))
	r.put(r.Dependents.Informer, podOf("old", "web", "ReplicaSet", "web"))
	if w := sync(r, false); w == nil || w.Stale || w.Owner.Generation != 0 || len(w.Own) != 1 || w.Own[0].Name != "old" {
		t.Errorf("from the informers: %+v", w)
	}
	if w := sync(r, true); w == nil || !w.Stale || w.Owner.Generation != 2 || len(w.Own) != 1 || w.Own[0].Name != "new" {
		t.Errorf("from the API server: %+v", w)
	}
	if w := sync(r, false); w == nil || w.Stale {
		t.Errorf("from the informers again: %+v", w)
	}
	ignored := stored.DeepCopy()
	ignored.Labels = map[string]string{"ignore": "yes"}
	for name, r := range map[string]*rig{"gone from the API server": newRig(t), "ignored since": newRig(t, ignored)} {
		r.put(r.Owners.Informer, newSet("web"))
		if w := sync(r, true); w != nil {
			t.Errorf("%s: %+v", name, w)
		}
	}
}
