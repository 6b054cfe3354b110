package rules

import (
	"context"

	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

// JudgeUpdates makes judge alone decide about updates of a store's resource, metadata included. Some resources need
// that: what they already hold is not judged again, or an update has rules that replace those of a create.
func JudgeUpdates[T any, P registry.Object[T]](store *genericregistry.Store, judge func(ctx context.Context, obj, old P) field.ErrorList) {
	store.UpdateStrategy = judged[T, P]{RESTUpdateStrategy: store.UpdateStrategy, judge: judge}
}

type judged[T any, P registry.Object[T]] struct {
	rest.RESTUpdateStrategy
	registry.Once
	judge func(ctx context.Context, obj, old P) field.ErrorList
}

func (j judged[T, P]) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	return j.judge(ctx, obj.(P), old.(P))
}

// Meta judges the metadata of an object by itself.
func Meta(obj metav1.Object, namespaced bool, name validation.ValidateNameFunc) field.ErrorList {
	return append(validation.ValidateObjectMetaAccessor(obj, namespaced, name, field.NewPath("metadata")), Finalizers(obj)...)
}

// MetaUpdate judges what an update does to an object's metadata.
func MetaUpdate(obj, old metav1.Object) field.ErrorList {
	return append(validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")), Finalizers(obj)...)
}
