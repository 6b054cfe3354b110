package registry

import (
	"context"

	"k8s.io/apimachinery/pkg/api/operation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
)

// Once, embedded in a strategy, tells each mistake once: several rules look at metadata, and some at the rest. The
// library gives a strategy the last word for another purpose, that of rules generated from the types.
type Once struct{}

var _ rest.DeclarativeValidationStrategy = Once{}

// ValidateDeclaratively drops errors that say the same as an earlier one.
func (Once) ValidateDeclaratively(_ context.Context, _, _ runtime.Object, errs field.ErrorList, _ operation.Type,
	_ rest.DeclarativeValidationConfig) field.ErrorList {
	return errs.Filter()
}

// DeclarativeValidationConfig has nothing to say.
func (Once) DeclarativeValidationConfig(context.Context, runtime.Object, runtime.Object) rest.DeclarativeValidationConfig {
	return rest.DeclarativeValidationConfig{}
}
