package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
)

// The objects of these tests are ConfigMaps; each key of data is a claim.
func dataClaims(obj runtime.Object) []Claim {
	var out []Claim
	for key := range obj.(*corev1.ConfigMap).Data {
		out = append(out, Claim{Key: "/claims/" + key, Encode: func() ([]byte, error) {
			return []byte(obj.(*corev1.ConfigMap).Name), nil
		}})
	}
	return out
}

type fixture struct {
	*Store
	claiming storage.Interface
	end      func()
}

func open(t *testing.T) fixture {
	t.Helper()
	opts := DefaultOptions()
	opts.Dir = t.TempDir()
	return openWith(t, opts)
}

func openWith(t *testing.T, opts Options) fixture {
	t.Helper()
	s, err := Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	codec := serializer.NewCodecFactory(scheme).LegacyCodec(corev1.SchemeGroupVersion)
	versioner := storage.APIObjectVersioner{}
	name := schema.GroupResource{Resource: "configmaps"}
	raw, err := etcd3.New(s.client, s.compaction, codec, func() runtime.Object { return &corev1.ConfigMap{} },
		func() runtime.Object { return &corev1.ConfigMapList{} }, Prefix, "/configmaps", name,
		identity.NewEncryptCheckTransformer(), leases, etcd3.NewDefaultDecoder(codec, versioner), versioner)
	if err != nil {
		t.Fatal(err)
	}
	direct := newResource(raw, s, name, false)
	f := fixture{Store: s, claiming: &claiming{Interface: direct, claims: dataClaims, versioner: versioner, seal: (&RESTOptions{}).seal}}
	f.end = sync.OnceFunc(func() {
		direct.close()
		raw.Close()
		s.Close()
	})
	t.Cleanup(f.end)
	return f
}

func object(name string, claims ...string) *corev1.ConfigMap {
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{}}
	for _, claim := range claims {
		cm.Data[claim] = ""
	}
	return cm
}

func (f fixture) create(t *testing.T, name string, claims ...string) error {
	t.Helper()
	return f.claiming.Create(t.Context(), "/configmaps/"+name, object(name, claims...), &corev1.ConfigMap{}, 0)
}

func (f fixture) update(ctx context.Context, name string, change func(*corev1.ConfigMap)) error {
	return f.claiming.GuaranteedUpdate(ctx, "/configmaps/"+name, &corev1.ConfigMap{}, true, &storage.Preconditions{},
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			cm := obj.(*corev1.ConfigMap)
			cm.Name = name
			change(cm)
			return cm, nil
		}), nil)
}

func (f fixture) remove(t *testing.T, name string) error {
	t.Helper()
	return f.claiming.Delete(t.Context(), "/configmaps/"+name, &corev1.ConfigMap{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
}

// claims are what is claimed in etcd: claim → owner.
func (f fixture) claims(t *testing.T) map[string]string {
	t.Helper()
	resp, err := f.Client().Get(t.Context(), Prefix+"/claims/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, kv := range resp.Kvs {
		out[strings.TrimPrefix(string(kv.Key), Prefix+"/claims/")] = string(kv.Value)
	}
	return out
}

func (f fixture) want(t *testing.T, want string) {
	t.Helper()
	if got := fmt.Sprint(f.claims(t)); got != "map["+want+"]" {
		t.Errorf("claims are %s, want map[%s]", got, want)
	}
}

func TestClaimsComeAndGoWithTheirObject(t *testing.T) {
	f := open(t)
	if err := f.create(t, "a", "1", "2"); err != nil {
		t.Fatal(err)
	}
	f.want(t, "1:a 2:a")
	if err := f.update(t.Context(), "a", func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"2": "", "3": ""} }); err != nil {
		t.Fatal(err)
	}
	f.want(t, "2:a 3:a")
	// An update that creates, as PUT and server-side apply do.
	if err := f.update(t.Context(), "b", func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"4": ""} }); err != nil {
		t.Fatal(err)
	}
	f.want(t, "2:a 3:a 4:b")
	if err := f.remove(t, "a"); err != nil {
		t.Fatal(err)
	}
	f.want(t, "4:b")
}

func TestTakenClaimStopsTheWholeWrite(t *testing.T) {
	f := open(t)
	if err := f.create(t, "a", "1"); err != nil {
		t.Fatal(err)
	}
	if err := f.create(t, "b", "2", "1"); err == nil {
		t.Fatal("two objects hold one claim")
	} else if key, ok := Claimed(err); !ok || key != "/claims/1" {
		t.Fatalf("got %v, want an error that names /claims/1", err)
	}
	f.want(t, "1:a")
	if err := f.claiming.Get(t.Context(), "/configmaps/b", storage.GetOptions{}, &corev1.ConfigMap{}); !storage.IsNotFound(err) {
		t.Errorf("half of a refused write is there: %v", err)
	}
	if err := f.create(t, "b", "2"); err != nil {
		t.Fatal(err)
	}
	err := f.update(t.Context(), "b", func(cm *corev1.ConfigMap) { cm.Data = map[string]string{"1": ""} })
	if key, ok := Claimed(err); !ok || key != "/claims/1" {
		t.Errorf("an update to a taken claim: %v", err)
	}
	f.want(t, "1:a 2:b")
	// The name is taken too, and that is the better answer.
	if err := f.create(t, "a", "1"); !storage.IsExist(err) {
		t.Errorf("got %v, want that the object exists", err)
	}
}

// TestContention has many writers fight for few claims: in the end the claims are exactly those of the stored objects.
func TestContention(t *testing.T) {
	f := open(t)
	var group sync.WaitGroup
	var conflicts atomic.Int64
	for worker := range 8 {
		group.Go(func() {
			name := "w" + strconv.Itoa(worker%5) // some objects have two writers
			for i := range 60 {
				claim := strconv.Itoa((worker*7 + i*3) % 11)
				err := f.update(context.Background(), name, func(cm *corev1.ConfigMap) { cm.Data = map[string]string{claim: ""} })
				if _, taken := Claimed(err); taken {
					conflicts.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if conflicts.Load() == 0 {
		t.Error("nobody ever met a taken claim: the test tests nothing")
	}
	stored := map[string]string{}
	list := &corev1.ConfigMapList{}
	err := f.claiming.GetList(t.Context(), "/configmaps/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, list)
	if err != nil {
		t.Fatal(err)
	}
	for _, cm := range list.Items {
		for claim := range cm.Data {
			stored[claim] = cm.Name
		}
	}
	if got, want := fmt.Sprint(f.claims(t)), fmt.Sprint(stored); got != want {
		t.Errorf("claims are %s, the objects say %s", got, want)
	}
}

func TestFolderInUse(t *testing.T) {
	opts := DefaultOptions()
	opts.Dir = t.TempDir()
	s, err := Open(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "in use by another server") {
		t.Errorf("a second server on the same folder: %v", err)
	}
	s.Close()
	s, err = Open(t.Context(), opts)
	if err != nil {
		t.Fatalf("after the first one ended: %v", err)
	}
	s.Close()
}

func TestTooManyOperationsSaysWhatToDo(t *testing.T) {
	err := explainTxn(errors.New("etcdserver: too many operations in txn request"), 300)
	if !strings.Contains(err.Error(), "--max-txn-ops") {
		t.Errorf("got %v", err)
	}
}
