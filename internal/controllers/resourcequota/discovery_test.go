package resourcequota

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"
)

// served makes a controller of an API that serves the lists, and the API.
func served(t *testing.T, lists ...*metav1.APIResourceList) (*Controller, *fake.Clientset, *metadatafake.FakeMetadataClient, *clocktesting.FakeClock) {
	t.Helper()
	client, clock := fake.NewClientset(), clocktesting.NewFakeClock(time.Unix(1e9, 0))
	client.Resources = lists
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	metadata := metadatafake.NewSimpleMetadataClient(scheme)
	c, err := New(client, metadata, client.Discovery(), informers.NewSharedInformerFactory(client, 0), clock)
	if err != nil {
		t.Fatal(err)
	}
	return c, client, metadata, clock
}

var (
	core = &metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{
		{Name: "pods", Kind: "Pod", Namespaced: true}, {Name: "nodes", Kind: "Node"},
	}}
	gadgets = &metav1.APIResourceList{GroupVersion: "example.com/v2", APIResources: []metav1.APIResource{
		{Name: "gadgets", Kind: "Gadget", Namespaced: true},
	}}
)

const count = corev1.ResourceName("count/gadgets.example.com")

// A resource that is new is found soon, and what is not served is not asked for all the time.
func TestANewResourceIsFound(t *testing.T) {
	c, client, _, clock := served(t, core)
	unserved := func() {
		t.Helper()
		if found, ok, err := c.countedBy(count); ok || err != nil || !found.Empty() {
			t.Fatal(found, ok, err)
		}
	}
	unserved()
	client.Resources = append(client.Resources, gadgets)
	unserved()
	clock.Step(rediscover)
	if found, ok, err := c.countedBy(count); !ok || err != nil || found.Version != "v2" {
		t.Error(found, ok, err)
	}
	if found, ok, err := c.countedBy("count/nodes"); ok || err != nil || found.Empty() {
		t.Error("a resource outside of namespaces:", found, ok, err)
	}
}

// That discovery fails does not mean that nothing is served.
func TestDiscoveryFails(t *testing.T) {
	c, client, _, _ := served(t, core, gadgets)
	down := errors.New("down")
	client.PrependReactor("get", "group", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, down })
	if _, _, err := c.countedBy(count); !errors.Is(err, down) {
		t.Error(err)
	}
}

// A version that is not served any more does not mean that there are no objects; a resource that is not served does.
func TestNotFoundIsNotNone(t *testing.T) {
	c, client, metadata, _ := served(t, core, gadgets)
	metadata.PrependReactor("list", "gadgets", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewNotFound(schema.GroupResource{Group: "example.com", Resource: "gadgets"}, "")
	})
	list := c.lister(t.Context())(schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "gadgets"})
	if _, err := list("ns"); !apierrors.IsNotFound(err) {
		t.Errorf("served in another version: %v", err)
	}
	client.Resources = client.Resources[:1]
	if found, err := list("ns"); err != nil || len(found) != 0 {
		t.Errorf("not served: %v, %v", found, err)
	}
}
