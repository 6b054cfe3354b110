package garbage

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

var (
	secrets = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	widgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
)

// preferred is the fake discovery, which says nothing of preferred versions, with the only versions that there are.
type preferred struct {
	discovery.DiscoveryInterface
	lists []*metav1.APIResourceList
}

func (p preferred) ServerPreferredResources() ([]*metav1.APIResourceList, error) { return p.lists, nil }

// logged counts the lines that say that the kind is left out.
type logged struct{ lines *atomic.Int32 }

func (l logged) Write(b []byte) (int, error) {
	if strings.Contains(string(b), widgets.Resource) && strings.Contains(string(b), "can't be listed") {
		l.lines.Add(1)
	}
	return len(b), nil
}

// A kind that can't be listed, because its conversion webhook is gone for instance, must not stop the collection of all
// others.
func TestAKindThatCantBeListed(t *testing.T) {
	verbs := metav1.Verbs{"delete", "get", "list", "watch"}
	lists := []*metav1.APIResourceList{
		{GroupVersion: "v1", APIResources: []metav1.APIResource{{Name: "secrets", Kind: "Secret", Namespaced: true, Verbs: verbs}}},
		{GroupVersion: "example.com/v1", APIResources: []metav1.APIResource{{Name: "widgets", Kind: "Widget", Namespaced: true, Verbs: verbs}}},
	}
	client := fake.NewClientset()
	client.Resources = lists
	owner := func(name string) []metav1.OwnerReference {
		yes := true
		return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Secret", Name: name, UID: types.UID("uid-" + name), BlockOwnerDeletion: &yes}}
	}
	secret := func(name string, change func(*metav1.ObjectMeta)) *metav1.PartialObjectMetadata {
		m := &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)},
		}
		change(&m.ObjectMeta)
		return m
	}
	deleting := func(finalizer string) func(*metav1.ObjectMeta) {
		return func(m *metav1.ObjectMeta) {
			now := metav1.Now()
			m.DeletionTimestamp, m.Finalizers = &now, []string{finalizer}
		}
	}
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	api := metadatafake.NewSimpleMetadataClient(scheme,
		secret("ownerless", func(m *metav1.ObjectMeta) { m.OwnerReferences = owner("gone") }),
		secret("foreground", deleting(metav1.FinalizerDeleteDependents)),
		secret("orphaning", deleting(metav1.FinalizerOrphanDependents)),
		secret("orphan", func(m *metav1.ObjectMeta) { m.OwnerReferences = owner("orphaning") }))
	var tries atomic.Int32
	var listable atomic.Bool
	api.PrependReactor("list", widgets.Resource, func(clienttesting.Action) (bool, runtime.Object, error) {
		tries.Add(1)
		if listable.Load() {
			return false, nil, nil
		}
		return true, nil, apierrors.NewInternalError(context.DeadlineExceeded)
	})
	core := informers.NewSharedInformerFactory(client, 0).Core().V1()
	namespaces := core.Namespaces().Informer()
	if err := namespaces.GetStore().Add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns"}}); err != nil {
		t.Fatal(err)
	}
	c, err := New(Deps{
		Client: client, Metadata: api, Discovery: preferred{client.Discovery(), lists}, Namespaces: namespaces,
		Pods: core.Pods().Informer(), Nodes: core.Nodes().Informer(), SyncTimeout: 500 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	var lines atomic.Int32
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(logged{&lines})))))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = c.Run(ctx)
	}()
	defer func() { stop(); <-ended }()

	get := func(name string) *metav1.PartialObjectMetadata {
		m, err := api.Resource(secrets).Namespace("ns").Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		} else if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for what, done := range map[string]func() bool{
		"an object without its owner is deleted": func() bool { return get("ownerless") == nil },
		"a deletion in the foreground goes on":   func() bool { m := get("foreground"); return m == nil || len(m.Finalizers) == 0 },
	} {
		for deadline := time.Now().Add(10 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not so: %s", what)
			}
		}
	}
	// What it orphans of the kind that can't be listed would be deleted later on.
	time.Sleep(2 * c.SyncTimeout)
	if m := get("orphaning"); m == nil || len(m.Finalizers) == 0 {
		t.Error("a deletion that orphans went on without knowing all dependents")
	}
	listable.Store(true)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		owner, orphan := get("orphaning"), get("orphan")
		if (owner == nil || len(owner.Finalizers) == 0) && orphan != nil && len(orphan.OwnerReferences) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a deletion that orphans does not go on when the kind can be listed")
		}
	}
	if tries.Load() == 0 {
		t.Error("the kind that can't be listed was not listed")
	}
	if n := lines.Load(); n != 1 {
		t.Errorf("that the kind is left out was logged %d times, want once", n)
	}
}
