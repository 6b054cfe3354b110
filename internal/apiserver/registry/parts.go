package registry

import (
	"context"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// CountChanges makes metadata.generation count the changes of a part of the object.
func CountChanges[T any, P Object[T], S any](k *Kind[T, P], part func(P) *S) *Kind[T, P] {
	k.PrepareCreate = func(_ context.Context, obj P) { obj.SetGeneration(1) }
	k.PrepareUpdate = func(_ context.Context, obj, old P) {
		if !equality.Semantic.DeepEqual(part(obj), part(old)) {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
	return k
}

// SpecAndStatus completes a Kind whose objects have a spec, which users write and whose changes are counted, and a status,
// which is written through the subresource alone. The subresource leaves metadata as it is.
func SpecAndStatus[T any, P Object[T], S, U any](k *Kind[T, P], spec func(P) *S, status func(P) *U,
	validate func(ctx context.Context, obj, old P) field.ErrorList,
) *Kind[T, P] {
	CountChanges(k, spec)
	count := k.PrepareUpdate
	k.PrepareCreate = func(_ context.Context, obj P) {
		*status(obj) = *new(U)
		obj.SetGeneration(1)
	}
	k.PrepareUpdate = func(ctx context.Context, obj, old P) {
		*status(obj) = *status(old)
		count(ctx, obj, old)
	}
	k.Reset = []fieldpath.Path{fieldpath.MakePathOrDie("status")}
	k.Status = &Status[T, P]{
		Prepare: func(_ context.Context, obj, old P) {
			*spec(obj) = *spec(old)
			metav1.ResetObjectMetaForStatus(obj, old)
		},
		Validate: validate,
		Reset:    []fieldpath.Path{fieldpath.MakePathOrDie("spec"), fieldpath.MakePathOrDie("metadata")},
	}
	return k
}
