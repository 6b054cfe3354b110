package registry

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// REST answers requests to a resource.
type REST struct {
	*genericregistry.Store
	shortNames []string
	categories []string
}

var (
	_ rest.ShortNamesProvider = &REST{}
	_ rest.CategoriesProvider = &REST{}
	_ rest.StandardStorage    = &REST{}
)

// ShortNames are the short names kubectl accepts.
func (r *REST) ShortNames() []string { return r.shortNames }

// Categories are the groups of resources ("all") this one belongs to.
func (r *REST) Categories() []string { return r.categories }

// StatusREST answers requests to a status subresource.
type StatusREST struct{ store *genericregistry.Store }

var (
	_ rest.Getter              = &StatusREST{}
	_ rest.Updater             = &StatusREST{}
	_ rest.ResetFieldsStrategy = &StatusREST{}
)

// NewSubresource answers reads and updates of a subresource through its own update strategy.
func NewSubresource(store *genericregistry.Store, update rest.RESTUpdateStrategy, reset rest.ResetFieldsStrategy) *StatusREST {
	sub := *store
	sub.UpdateStrategy = update
	sub.ResetFieldsStrategy = reset
	return &StatusREST{store: &sub}
}

// New returns an empty object.
func (r *StatusREST) New() runtime.Object { return r.store.New() }

// Destroy does nothing: the main resource owns the store.
func (r *StatusREST) Destroy() {}

// Get reads the whole object.
func (r *StatusREST) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return r.store.Get(ctx, name, options)
}

// Update changes what the subresource may change. It never creates.
func (r *StatusREST) Update(ctx context.Context, name string, obj rest.UpdatedObjectInfo,
	createValidation rest.ValidateObjectFunc, updateValidation rest.ValidateObjectUpdateFunc, _ bool,
	options *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	return r.store.Update(ctx, name, obj, createValidation, updateValidation, false, options)
}

// GetResetFields tells server-side apply which fields cannot be owned through the subresource.
func (r *StatusREST) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	if r.store.ResetFieldsStrategy == nil {
		return nil
	}
	return r.store.ResetFieldsStrategy.GetResetFields()
}

// ConvertToTable answers a request for a table.
func (r *StatusREST) ConvertToTable(ctx context.Context, object, options runtime.Object) (*metav1.Table, error) {
	return r.store.ConvertToTable(ctx, object, options)
}

// AddToScheme teaches the scheme this resource's defaults and the fields that can be selected by.
func (k *Kind[T, P]) AddToScheme(scheme *runtime.Scheme) error {
	if k.Default != nil {
		scheme.AddTypeDefaultingFunc(k.newObject(), func(obj any) { k.Default(obj.(P)) })
		scheme.AddTypeDefaultingFunc(k.NewList(), func(list any) { eachItem[T, P](list.(runtime.Object), k.Default) })
	}
	known := map[string]bool{"metadata.name": true}
	// The reference takes a selector by namespace also for kinds that are in none, unless they have fields of their own.
	if !k.ClusterScoped || len(k.SelectableFields) == 0 {
		known["metadata.namespace"] = true
	}
	for _, name := range k.SelectableFields {
		known[name] = true
	}
	return scheme.AddFieldLabelConversionFunc(k.Served.WithKind(k.KindName), func(label, value string) (string, string, error) {
		if !known[label] {
			return "", "", fmt.Errorf("%s cannot be selected by the field %q", k.Plural, label)
		}
		return label, value, nil
	})
}

// Storage builds the REST storage of the resource and of its subresources.
func (k *Kind[T, P]) Storage(scheme *runtime.Scheme, getter generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	base := strategy[T, P]{ObjectTyper: scheme, NameGenerator: names.SimpleNameGenerator, kind: k}
	group := k.Served.Group
	if k.StoredGroup != nil {
		group = *k.StoredGroup
	}
	store := &genericregistry.Store{
		NewFunc:                   func() runtime.Object { return k.newObject() },
		NewListFunc:               k.NewList,
		DefaultQualifiedResource:  schema.GroupResource{Group: group, Resource: k.Plural},
		SingularQualifiedResource: schema.GroupResource{Group: group, Resource: k.Singular},
		PredicateFunc:             k.predicate,
		CreateStrategy:            base,
		UpdateStrategy:            base,
		DeleteStrategy:            base,
		ResetFieldsStrategy:       base,
		TableConvertor:            table[T, P]{kind: k},
		ReturnDeletedObject:       k.ReturnDeleted,
	}
	if k.Graceful != nil {
		store.DeleteStrategy = gracefulStrategy[T, P]{base, k.Graceful}
	}
	if k.TTL != nil {
		store.TTLFunc = func(obj runtime.Object, _ uint64, _ bool) (uint64, error) { return k.TTL(obj.(P)), nil }
	}
	if err := store.CompleteWithOptions(&generic.StoreOptions{RESTOptions: getter, AttrFunc: k.attributes}); err != nil {
		return nil, fmt.Errorf("storage of %s: %w", k.Plural, err)
	}
	out := map[string]rest.Storage{
		k.Plural: &REST{Store: store, shortNames: k.ShortNames, categories: k.Categories},
	}
	if k.Status != nil {
		status := statusStrategy[T, P]{base}
		out[k.Plural+"/status"] = NewSubresource(store, status, status)
	}
	if k.Customize != nil {
		if err := k.Customize(store, out); err != nil {
			return nil, fmt.Errorf("storage of %s: %w", k.Plural, err)
		}
	}
	return out, nil
}

// attributes are what selectors see of an object.
func (k *Kind[T, P]) attributes(obj runtime.Object) (labels.Set, fields.Set, error) {
	o, ok := obj.(P)
	if !ok {
		return nil, nil, fmt.Errorf("%T is no %s", obj, k.KindName)
	}
	set := fields.Set{}
	if k.Fields != nil {
		set = k.Fields(o)
	}
	set["metadata.name"] = o.GetName()
	if !k.ClusterScoped {
		set["metadata.namespace"] = o.GetNamespace()
	}
	return o.GetLabels(), set, nil
}

func (k *Kind[T, P]) predicate(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
	return storage.SelectionPredicate{Label: label, Field: field, GetAttrs: k.attributes}
}
