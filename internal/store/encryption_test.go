package store

import (
	"bytes"
	"crypto/aes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	aestransformer "k8s.io/apiserver/pkg/storage/value/encrypt/aes"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	"k8s.io/apiserver/pkg/storage/value/encrypt/secretbox"
)

// boxes is a provider as the configuration makes them: the first key writes, all read. A name with a ! has another key.
func boxes(names ...string) value.Transformer {
	var keys []value.PrefixTransformer
	for _, name := range names {
		if name == "identity" {
			keys = append(keys, value.PrefixTransformer{Transformer: identity.NewEncryptCheckTransformer()})
			continue
		}
		keys = append(keys, value.PrefixTransformer{
			Prefix:      []byte("k8s:enc:secretbox:v1:" + strings.TrimSuffix(name, "!") + ":"),
			Transformer: secretbox.NewSecretboxTransformer([32]byte(bytes.Repeat([]byte(name), 32)[:32])),
		})
	}
	return value.NewPrefixTransformers(nil, keys...)
}

func use(o *RESTOptions, t value.Transformer) *RESTOptions {
	return &RESTOptions{
		Store: o.Store, Codec: o.Codec, Claimers: o.Claimers, Places: o.Places, ClaimPaths: map[string]schema.GroupResource{"/claims/": configMaps},
		Transformers: encryptionconfig.StaticTransformers{configMaps: t},
	}
}

func survey(t *testing.T, o *RESTOptions) []string {
	t.Helper()
	usage, err := o.Survey(t.Context(), true)
	must(t, err)
	var out []string
	for _, u := range usage {
		out = append(out, fmt.Sprintf("%d (%d) %s %s stale=%v unreadable=%d", u.Count, u.Claims, u.Resource, u.Header, u.Stale, u.Unreadable))
	}
	return out
}

func wantSurvey(t *testing.T, o *RESTOptions, want ...string) {
	t.Helper()
	if got := survey(t, o); !slices.Equal(got, want) {
		t.Errorf("survey:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func create(t *testing.T, s storage.Interface, name string, claims ...string) {
	t.Helper()
	must(t, s.Create(t.Context(), "/configmaps/"+name, object(name, claims...), &corev1.ConfigMap{}, 0))
}

// From plain to encrypted, from key to key, and back: every object and claim is rewritten, and none is changed.
func TestReencrypt(t *testing.T) {
	f := open(t)
	base := options(t, f.Store)
	create(t, storageOf(t, base, configMaps), "a", "1", "2")
	ignore := func(Reencryption) {}

	one := use(base, boxes("one", "identity"))
	wantSurvey(t, one, "3 (2) configmaps plain stale=true unreadable=0")
	must(t, one.RegisterKeys(t.Context(), []schema.GroupResource{configMaps}))
	done, err := one.Reencrypt(t.Context(), []schema.GroupResource{configMaps}, ignore)
	must(t, err)
	if done.Rewritten != 3 || !done.Done || len(done.Left) != 0 {
		t.Errorf("%+v", done)
	}
	wantSurvey(t, one, `3 (2) configmaps secretbox key "one" stale=false unreadable=0`)

	two := use(base, boxes("two", "one"))
	must(t, two.RegisterKeys(t.Context(), []schema.GroupResource{configMaps}))
	create(t, storageOf(t, two, configMaps), "b", "3")
	wantSurvey(t, two, `3 (2) configmaps secretbox key "one" stale=true unreadable=0`, `2 (1) configmaps secretbox key "two" stale=false unreadable=0`)
	registered, missing, err := two.RegisteredKeys(t.Context(), []schema.GroupResource{configMaps}, nil)
	must(t, err)
	if len(registered) != 2 || len(missing) != 0 {
		t.Errorf("registered %v, missing %v", registered, missing)
	}
	// A server with another configuration is missing a key that is in use; so is one with another key of the same name.
	for _, other := range []value.Transformer{boxes("one"), boxes("two!", "one")} {
		_, missing, err = use(base, other).RegisteredKeys(t.Context(), []schema.GroupResource{configMaps}, nil)
		must(t, err)
		if len(missing) != 1 || missing[0].Key != "two" {
			t.Errorf("missing %v, want two", missing)
		}
	}
	_, err = two.Reencrypt(t.Context(), []schema.GroupResource{configMaps}, ignore)
	must(t, err)
	only := use(base, boxes("two"))
	wantSurvey(t, only, `5 (3) configmaps secretbox key "two" stale=false unreadable=0`)
	if registered, missing, err = only.RegisteredKeys(t.Context(), []schema.GroupResource{configMaps}, nil); err != nil || len(registered) != 1 || len(missing) != 0 {
		t.Errorf("registered %v, missing %v, %v: the old key should be forgotten", registered, missing, err)
	}

	plain := use(base, boxes("identity", "two"))
	_, err = plain.Reencrypt(t.Context(), []schema.GroupResource{configMaps}, ignore)
	must(t, err)
	resp, err := f.Client().Get(t.Context(), Prefix+"/claims/1")
	must(t, err)
	if string(resp.Kvs[0].Value) != "a" {
		t.Errorf("the claim is %q after all that", resp.Kvs[0].Value)
	}
	var out corev1.ConfigMap
	must(t, storageOf(t, base, configMaps).Get(t.Context(), "/configmaps/a", storage.GetOptions{}, &out))
	if len(out.Data) != 2 {
		t.Errorf("the object is %v after all that", out.Data)
	}
}

// What is written during the rewriting stays as it was written.
func TestReencryptBesideWriters(t *testing.T) {
	f := open(t)
	base := options(t, f.Store)
	s := storageOf(t, use(base, boxes("one")), configMaps)
	const objects = 40
	for i := range objects {
		create(t, s, fmt.Sprintf("o%d", i), fmt.Sprint(i))
	}
	two := use(base, boxes("two", "one"))
	s = storageOf(t, two, configMaps)
	const rounds = 5
	var writers sync.WaitGroup
	for i := range objects {
		writers.Go(func() {
			for range rounds {
				err := s.GuaranteedUpdate(t.Context(), fmt.Sprintf("/configmaps/o%d", i), &corev1.ConfigMap{}, false, nil,
					storage.SimpleUpdate(func(in runtime.Object) (runtime.Object, error) {
						cm := in.(*corev1.ConfigMap)
						cm.BinaryData = map[string][]byte{"round": append(cm.BinaryData["round"], 'x')}
						return cm, nil
					}), nil)
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	_, err := two.Reencrypt(t.Context(), []schema.GroupResource{configMaps}, func(Reencryption) {})
	must(t, err)
	writers.Wait()
	wantSurvey(t, use(base, boxes("two")), fmt.Sprintf(`%d (%d) configmaps secretbox key "two" stale=false unreadable=0`, 2*objects, objects))
	for i := range objects {
		var out corev1.ConfigMap
		must(t, s.Get(t.Context(), fmt.Sprintf("/configmaps/o%d", i), storage.GetOptions{}, &out))
		if len(out.BinaryData["round"]) != rounds {
			t.Errorf("o%d has %d of %d updates", i, len(out.BinaryData["round"]), rounds)
		}
	}
}

// A wrong or missing key is told from a damaged value, whatever the provider.
func TestSurveyOfWrongKeys(t *testing.T) {
	cbc := func(key byte) value.Transformer {
		block, err := aes.NewCipher(bytes.Repeat([]byte{key}, 32))
		must(t, err)
		return value.NewPrefixTransformers(nil, value.PrefixTransformer{Prefix: []byte("k8s:enc:aescbc:v1:one:"), Transformer: aestransformer.NewCBCTransformer(block)})
	}
	for name, c := range map[string]struct{ right, wrong value.Transformer }{
		"another key of that name": {boxes("one"), boxes("one!")},
		"no such key":              {boxes("one"), boxes("two")},
		"not encrypted":            {boxes("one"), boxes("identity")},
		"plain, and not expected":  {boxes("identity"), boxes("one")},
		"without authentication":   {cbc(1), cbc(2)},
	} {
		t.Run(name, func(t *testing.T) {
			f := open(t)
			base := options(t, f.Store)
			s := storageOf(t, use(base, c.right), configMaps)
			for i := range 20 {
				create(t, s, fmt.Sprintf("o%d", i))
			}
			usage, err := use(base, c.wrong).Survey(t.Context(), false)
			must(t, err)
			if len(usage) != 1 || !usage[0].Lost() || usage[0].Count != 20 || usage[0].Example == "" || usage[0].Reason == "" {
				t.Errorf("with the wrong key: %+v", usage)
			}
			_, err = f.Client().Put(t.Context(), Prefix+"/configmaps/o0", "k8s:enc:secretbox:v1:one:garbage")
			must(t, err)
			if c.right = boxes("one"); name != "another key of that name" {
				return
			}
			usage, err = use(base, c.right).Survey(t.Context(), false)
			must(t, err)
			if len(usage) != 1 || usage[0].Lost() || usage[0].Unreadable != 1 || usage[0].Count != 20 {
				t.Errorf("with one damaged value: %+v", usage)
			}
			done, err := use(base, boxes("two", "one")).Reencrypt(t.Context(), []schema.GroupResource{configMaps}, func(Reencryption) {})
			must(t, err)
			if len(done.Unreadable) != 1 || done.Unreadable[0] != Prefix+"/configmaps/o0" || done.Rewritten != 19 || len(done.Left) != 1 {
				t.Errorf("%+v", done)
			}
		})
	}
}

// A damaged object fails reads with its key in the error, and can be deleted by somebody who says so.
func TestDamagedObjectCanBeDeleted(t *testing.T) {
	f := open(t)
	o := use(options(t, f.Store), boxes("one"))
	o.Uncached = map[schema.GroupResource]bool{configMaps: true}
	s := storageOf(t, o, configMaps)
	create(t, s, "good")
	create(t, s, "bad", "1")
	_, err := f.Client().Put(t.Context(), Prefix+"/configmaps/bad", "k8s:enc:secretbox:v1:one:garbage")
	must(t, err)
	var list corev1.ConfigMapList
	err = s.GetList(t.Context(), "/configmaps/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, &list)
	if err == nil || !strings.Contains(err.Error(), "/configmaps/bad") {
		t.Errorf("list: %v", err)
	}
	all := func() storage.DeleteOptions { return storage.DeleteOptions{ExpectTransformOrDecodeError: true} }
	if err := s.Delete(t.Context(), "/configmaps/good", &corev1.ConfigMap{}, nil, rest.ValidateAllObjectFunc, nil, all()); err == nil {
		t.Error("an intact object was deleted as a damaged one")
	}
	must(t, s.Delete(t.Context(), "/configmaps/bad", &corev1.ConfigMap{}, nil, rest.ValidateAllObjectFunc, nil, all()))
	must(t, s.GetList(t.Context(), "/configmaps/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, &list))
	resp, err := f.Client().Get(t.Context(), Prefix+"/configmaps/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	must(t, err)
	if resp.Count != 1 {
		t.Errorf("%d objects are left, want 1", resp.Count)
	}
}
