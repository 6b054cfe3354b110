// Package registrytest runs a resource's rules in the order the server does, without a store behind them or with one.
package registrytest

import (
	"context"
	"errors"
	"sort"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"portal/internal/apiserver/registry"
)

// Rules are a resource's rules.
type Rules struct {
	Scheme  *runtime.Scheme
	Storage map[string]rest.Storage
	main    *registry.REST
}

// For builds the rules of a resource. types teach the scheme the resource's types (an API package's AddToScheme).
func For(t testing.TB, resource registry.Resource, types ...func(*runtime.Scheme) error) *Rules {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range append(types, resource.AddToScheme) {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	built, err := resource.Storage(scheme, nowhere{})
	if err != nil {
		t.Fatal(err)
	}
	rules := &Rules{Scheme: scheme, Storage: built}
	switch main := built[resource.Name()].(type) {
	case *registry.REST:
		rules.main = main
	case interface{ Unguarded() *registry.REST }:
		rules.main = main.Unguarded()
	}
	return rules
}

// Create defaults and validates a new object; obj becomes what would be stored. It gives the causes of a refusal.
func (r *Rules) Create(t testing.TB, obj runtime.Object) []string {
	t.Helper()
	r.Scheme.Default(obj)
	o := access(t, obj)
	rest.FillObjectMetaSystemFields(o)
	return causes(t, rest.BeforeCreate(r.main.CreateStrategy, within(o), obj))
}

// Update defaults and validates the change from old to obj; obj becomes what would be stored.
func (r *Rules) Update(t testing.TB, obj, old runtime.Object) []string {
	t.Helper()
	r.Scheme.Default(obj)
	o := access(t, obj)
	o.SetResourceVersion("1")
	return causes(t, rest.BeforeUpdate(r.main.UpdateStrategy, within(o), obj, old))
}

// Row gives the cells of an object's table row by column.
func (r *Rules) Row(t testing.TB, obj runtime.Object) map[string]any {
	t.Helper()
	table, err := r.main.ConvertToTable(context.Background(), obj, &metav1.TableOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cells := map[string]any{}
	for i, col := range table.ColumnDefinitions {
		cells[col.Name] = table.Rows[0].Cells[i]
	}
	return cells
}

func access(t testing.TB, obj runtime.Object) metav1.Object {
	t.Helper()
	o, err := meta.Accessor(obj)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func within(o metav1.Object) context.Context {
	return request.WithNamespace(context.Background(), o.GetNamespace())
}

// causes are the field and reason of what err rejects, sorted.
func causes(t testing.TB, err error) []string {
	t.Helper()
	if err == nil {
		return nil
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Reason != metav1.StatusReasonInvalid {
		t.Fatalf("not a refusal but: %v", err)
	}
	var out []string
	for _, c := range status.Status().Details.Causes {
		out = append(out, c.Field+" "+string(c.Type))
	}
	sort.Strings(out)
	return out
}

// nowhere gives stores that must not be used.
type nowhere struct{}

func (nowhere) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig:  &storagebackend.ConfigForResource{GroupResource: resource},
		ResourcePrefix: resource.Resource,
		Decorator: func(*storagebackend.ConfigForResource, string, func(runtime.Object) (string, error),
			func() runtime.Object, func() runtime.Object, storage.AttrFunc, storage.IndexerFuncs, *cache.Indexers,
		) (storage.Interface, factory.DestroyFunc, error) {
			return nil, func() {}, nil
		},
	}, nil
}
