package store

import (
	"bytes"
	"context"
	"crypto/aes"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	aestransformer "k8s.io/apiserver/pkg/storage/value/encrypt/aes"
	"k8s.io/apiserver/pkg/storage/value/encrypt/secretbox"
)

var (
	configMaps = corev1.Resource("configmaps")
	// theirs has the same plural name as configMaps, and a claim of the tests is one of its objects.
	theirs = schema.GroupResource{Group: "example.com", Resource: "configmaps"}
)

func aesgcm(t *testing.T) value.Transformer {
	t.Helper()
	block, err := aes.NewCipher(bytes.Repeat([]byte{7}, 32))
	must(t, err)
	gcm, err := aestransformer.NewGCMTransformer(block)
	must(t, err)
	return value.NewPrefixTransformers(nil, value.PrefixTransformer{Prefix: []byte("k8s:enc:aesgcm:v1:key1:"), Transformer: gcm})
}

func box() value.Transformer {
	return value.NewPrefixTransformers(nil, value.PrefixTransformer{
		Prefix: []byte("k8s:enc:secretbox:v1:key1:"), Transformer: secretbox.NewSecretboxTransformer([32]byte{9}),
	})
}

func options(t *testing.T, s *Store) *RESTOptions {
	t.Helper()
	scheme := runtime.NewScheme()
	must(t, corev1.AddToScheme(scheme))
	// Watches decode into the hub version, which is the same type, as in the server.
	scheme.AddKnownTypes(schema.GroupVersion{Version: runtime.APIVersionInternal}, &corev1.ConfigMap{}, &corev1.ConfigMapList{})
	codec := serializer.NewCodecFactory(scheme).LegacyCodec(corev1.SchemeGroupVersion)
	return &RESTOptions{
		Store: s, Codec: func(schema.GroupResource) runtime.Codec { return codec },
		Claimers: map[schema.GroupResource]Claimer{configMaps: dataClaims}, Places: map[string]schema.GroupResource{"configmaps": configMaps},
	}
}

// storageOf builds a resource's storage as the API server has it, watch cache included.
func storageOf(t *testing.T, o *RESTOptions, resource schema.GroupResource) storage.Interface {
	t.Helper()
	opts, err := o.GetRESTOptions(resource, nil)
	must(t, err)
	s, destroy, err := opts.Decorator(opts.StorageConfig, opts.ResourcePrefix,
		func(obj runtime.Object) (string, error) {
			return registry.NoNamespaceKeyFunc(context.Background(), opts.ResourcePrefix, obj.(*corev1.ConfigMap).Name)
		},
		func() runtime.Object { return &corev1.ConfigMap{} }, func() runtime.Object { return &corev1.ConfigMapList{} },
		storage.DefaultClusterScopedAttr, nil, nil)
	must(t, err)
	t.Cleanup(destroy)
	for end := time.Now().Add(20 * time.Second); s.ReadinessCheck() != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%v: %v", resource, s.ReadinessCheck())
		}
	}
	return s
}

// Objects and claims are encrypted, each bound to its key, and whoever reads etcd beside the API gets them plain.
func TestNothingPlainInEtcd(t *testing.T) {
	f := open(t)
	o := options(t, f.Store)
	o.Transformers = encryptionconfig.StaticTransformers{configMaps: aesgcm(t), theirs: box()}
	o.ClaimPaths = map[string]schema.GroupResource{"/claims/": configMaps}
	s := storageOf(t, o, configMaps)
	cm := object("treasure", "1", "2")
	cm.BinaryData = map[string][]byte{"where": []byte("under the tree")}
	must(t, s.Create(t.Context(), "/configmaps/treasure", cm, &corev1.ConfigMap{}, 0))
	resp, err := f.Client().Get(t.Context(), Prefix+"/", clientv3.WithPrefix())
	must(t, err)
	if len(resp.Kvs) != 3 {
		t.Fatalf("%d keys, want the object and two claims", len(resp.Kvs))
	}
	for _, kv := range resp.Kvs {
		if !bytes.HasPrefix(kv.Value, []byte("k8s:enc:aesgcm:")) || bytes.Contains(kv.Value, []byte("treasure")) || bytes.Contains(kv.Value, []byte("tree")) {
			t.Errorf("%s is plain in etcd: %q", kv.Key, kv.Value)
		}
	}
	var out corev1.ConfigMap
	must(t, s.Get(t.Context(), "/configmaps/treasure", storage.GetOptions{}, &out))
	if string(out.BinaryData["where"]) != "under the tree" {
		t.Errorf("read back: %v", out.BinaryData)
	}
	plain, err := o.KV().Get(t.Context(), Prefix+"/claims/1")
	must(t, err)
	if string(plain.Kvs[0].Value) != "treasure" {
		t.Errorf("the claim reads %q", plain.Kvs[0].Value)
	}
	// What is put beside the API is encrypted too.
	_, err = o.KV().Txn(t.Context()).Then(clientv3.OpPut(Prefix+"/claims/3", "treasure")).Commit()
	must(t, err)
	raw, err := f.Client().Get(t.Context(), Prefix+"/claims/3")
	must(t, err)
	if bytes.Contains(raw.Kvs[0].Value, []byte("treasure")) {
		t.Errorf("a repaired claim is plain: %q", raw.Kvs[0].Value)
	}
	// A value that was moved to another key is not believed.
	_, err = f.Client().Put(t.Context(), Prefix+"/claims/4", string(raw.Kvs[0].Value))
	must(t, err)
	moved, err := o.KV().Get(t.Context(), Prefix+"/claims/4")
	must(t, err)
	if string(moved.Kvs[0].Value) == "treasure" {
		t.Error("a claim that was copied to another key was accepted")
	}
}

// Two groups may have resources of one name: neither sees the other's objects.
func TestGroupsAreKeptApart(t *testing.T) {
	f := open(t)
	o := options(t, f.Store)
	ours, other := storageOf(t, o, configMaps), storageOf(t, o, theirs)
	must(t, ours.Create(t.Context(), "/configmaps/a", object("a"), &corev1.ConfigMap{}, 0))
	must(t, other.Create(t.Context(), "/example.com/configmaps/b", object("b"), &corev1.ConfigMap{}, 0))
	for name, s := range map[string]storage.Interface{"/configmaps/": ours, "/example.com/configmaps/": other} {
		var list corev1.ConfigMapList
		must(t, s.GetList(t.Context(), name, storage.ListOptions{Predicate: storage.Everything, Recursive: true}, &list))
		if len(list.Items) != 1 {
			t.Errorf("%s holds %d objects, want its own one", name, len(list.Items))
		}
	}
	o.Paths = map[schema.GroupResource]string{discoveryv1.Resource("endpointslices"): "configmaps"}
	if _, err := o.GetRESTOptions(discoveryv1.Resource("endpointslices"), nil); err == nil || !strings.Contains(err.Error(), "both") {
		t.Errorf("two resources at one place: %v", err)
	}
}
