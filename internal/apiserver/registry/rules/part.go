package rules

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
)

// Part is how a subresource updates its part of an object.
type Part[T any, P registry.Object[T]] struct {
	// RESTUpdateStrategy is that of the main resource: it gives what the others don't replace.
	rest.RESTUpdateStrategy
	registry.Once
	// Prepare carries over from old everything that is not this part.
	Prepare func(ctx context.Context, obj, old P)
	// Judge is asked alone, and so validates metadata too.
	Judge func(ctx context.Context, obj, old P) field.ErrorList
	// Reset are the fields, by version, that server-side apply must not own here.
	Reset map[fieldpath.APIVersion]*fieldpath.Set
}

// AllowCreateOnUpdate says no: a part of nothing cannot be made.
func (p Part[T, P]) AllowCreateOnUpdate(context.Context) bool { return false }

// PrepareForUpdate asks Prepare.
func (p Part[T, P]) PrepareForUpdate(ctx context.Context, obj, old runtime.Object) {
	p.Prepare(ctx, obj.(P), old.(P))
}

// ValidateUpdate asks Judge.
func (p Part[T, P]) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	return p.Judge(ctx, obj.(P), old.(P))
}

// WarningsOnUpdate has none: who writes a part need not hear of the rest.
func (p Part[T, P]) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}

// GetResetFields gives Reset.
func (p Part[T, P]) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set { return p.Reset }
