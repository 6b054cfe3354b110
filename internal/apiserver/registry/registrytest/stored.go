package registrytest

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/store"
)

// Stored builds the storage of a resource of the core group, with an etcd of its own behind it.
func Stored(t testing.TB, resource registry.Resource) map[string]rest.Storage {
	t.Helper()
	opts := store.DefaultOptions()
	opts.Dir = t.TempDir()
	etcd, err := store.Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, resource.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	codec := serializer.NewCodecFactory(scheme).LegacyCodec(corev1.SchemeGroupVersion)
	storage, err := resource.Storage(scheme, &store.RESTOptions{
		Store: etcd, Codec: func(schema.GroupResource) runtime.Codec { return codec },
		Uncached: map[schema.GroupResource]bool{corev1.Resource(resource.Name()): true},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(storage[resource.Name()].Destroy)
	return storage
}
