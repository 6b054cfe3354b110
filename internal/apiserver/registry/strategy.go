package registry

import (
	"context"

	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// strategy answers the questions k8s.io/apiserver asks about a resource with what its Kind says.
type strategy[T any, P Object[T]] struct {
	runtime.ObjectTyper
	names.NameGenerator
	Once
	kind *Kind[T, P]
}

var (
	_ rest.RESTCreateStrategy  = strategy[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
	_ rest.RESTUpdateStrategy  = strategy[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
	_ rest.ResetFieldsStrategy = strategy[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
)

func (s strategy[T, P]) NamespaceScoped() bool { return !s.kind.ClusterScoped }

func (s strategy[T, P]) AllowCreateOnUpdate(context.Context) bool { return s.kind.CreateOnUpdate }

func (s strategy[T, P]) AllowUnconditionalUpdate(context.Context) bool { return !s.kind.StrictUpdate }

func (s strategy[T, P]) Canonicalize(runtime.Object) {}

func (s strategy[T, P]) PrepareForCreate(ctx context.Context, obj runtime.Object) {
	if s.kind.PrepareCreate != nil {
		s.kind.PrepareCreate(ctx, obj.(P))
	}
}

func (s strategy[T, P]) PrepareForUpdate(ctx context.Context, obj, old runtime.Object) {
	if s.kind.PrepareUpdate != nil {
		s.kind.PrepareUpdate(ctx, obj.(P), old.(P))
	}
}

// MaxKeys is how many keys a map of an object may have. Server-side apply sorts every key of a map into a list, one by one.
const MaxKeys = 10_000

// CountKeys rejects a map with more than MaxKeys keys.
func CountKeys[V any](path *field.Path, keys map[string]V) field.ErrorList {
	if len(keys) <= MaxKeys {
		return nil
	}
	return field.ErrorList{field.TooMany(path, len(keys), MaxKeys)}
}

func countMetaKeys(obj metav1.Object) field.ErrorList {
	meta := field.NewPath("metadata")
	return append(CountKeys(meta.Child("labels"), obj.GetLabels()), CountKeys(meta.Child("annotations"), obj.GetAnnotations())...)
}

func (s strategy[T, P]) Validate(ctx context.Context, obj runtime.Object) field.ErrorList {
	o := obj.(P)
	if errs := countMetaKeys(o); len(errs) > 0 {
		return errs
	}
	errs := s.kind.validateMeta(o)
	if s.kind.Validate != nil {
		errs = append(errs, s.kind.Validate(ctx, o)...)
	}
	return errs
}

func (s strategy[T, P]) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	if s.kind.ValidateUpdate == nil {
		return s.Validate(ctx, obj)
	}
	if errs := countMetaKeys(obj.(P)); len(errs) > 0 {
		return errs
	}
	return s.kind.ValidateUpdate(ctx, obj.(P), old.(P))
}

func (s strategy[T, P]) WarningsOnCreate(ctx context.Context, obj runtime.Object) []string {
	if s.kind.Warnings == nil {
		return nil
	}
	return s.kind.Warnings(ctx, obj.(P), nil)
}

func (s strategy[T, P]) WarningsOnUpdate(ctx context.Context, obj, old runtime.Object) []string {
	if s.kind.Warnings == nil {
		return nil
	}
	return s.kind.Warnings(ctx, obj.(P), old.(P))
}

// GetResetFields tells server-side apply which fields a request to the main resource cannot own.
func (s strategy[T, P]) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.kind.resetSet(s.kind.Reset)
}

// gracefulStrategy is a strategy whose deletes may only mark the object first.
type gracefulStrategy[T any, P Object[T]] struct {
	strategy[T, P]
	rest.RESTGracefulDeleteStrategy
}

// statusStrategy is a strategy for the status subresource.
type statusStrategy[T any, P Object[T]] struct{ strategy[T, P] }

func (s statusStrategy[T, P]) AllowCreateOnUpdate(context.Context) bool { return false }

func (s statusStrategy[T, P]) PrepareForUpdate(ctx context.Context, obj, old runtime.Object) {
	s.kind.Status.Prepare(ctx, obj.(P), old.(P))
}

func (s statusStrategy[T, P]) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	if s.kind.Status.Validate == nil {
		return nil
	}
	return s.kind.Status.Validate(ctx, obj.(P), old.(P))
}

func (s statusStrategy[T, P]) WarningsOnUpdate(ctx context.Context, obj, old runtime.Object) []string {
	if s.kind.Status.Warnings == nil {
		return nil
	}
	return s.kind.Status.Warnings(ctx, obj.(P), old.(P))
}

func (s statusStrategy[T, P]) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.kind.resetSet(s.kind.Status.Reset)
}

func (k *Kind[T, P]) validateMeta(obj P) field.ErrorList {
	valid := k.ValidName
	if valid == nil {
		valid = validation.NameIsDNSSubdomain
	}
	return validation.ValidateObjectMetaAccessor(obj, !k.ClusterScoped, valid, field.NewPath("metadata"))
}

func (k *Kind[T, P]) resetSet(paths []fieldpath.Path) map[fieldpath.APIVersion]*fieldpath.Set {
	if len(paths) == 0 {
		return nil
	}
	out := map[fieldpath.APIVersion]*fieldpath.Set{}
	for _, version := range append([]schema.GroupVersion{k.Served}, k.AlsoServed...) {
		out[fieldpath.APIVersion(version.String())] = fieldpath.NewSet(paths...)
	}
	return out
}
