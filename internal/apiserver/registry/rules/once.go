package rules

import (
	"context"

	"k8s.io/apimachinery/pkg/api/operation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
)

// once, embedded in a strategy, tells each mistake once: several rules look at metadata, and some at the rest. The
// library gives a strategy the last word for another purpose, that of rules generated from the types.
type once struct{}

var _ rest.DeclarativeValidationStrategy = once{}

// ValidateDeclaratively drops errors that say the same as an earlier one.
func (once) ValidateDeclaratively(_ context.Context, _, _ runtime.Object, errs field.ErrorList, _ operation.Type,
	_ rest.DeclarativeValidationConfig) field.ErrorList {
	return errs.Filter()
}

// DeclarativeValidationConfig has nothing to say.
func (once) DeclarativeValidationConfig(context.Context, runtime.Object, runtime.Object) rest.DeclarativeValidationConfig {
	return rest.DeclarativeValidationConfig{}
}

// Create is a store's create strategy with parts of it replaced. Functions that are nil are left as they are.
type Create struct {
	rest.RESTCreateStrategy
	once
	// Name makes a name from metadata.generateName.
	Name func(base string) string
	// Finish changes a valid object before it is stored.
	Finish func(obj runtime.Object)
}

// GenerateName asks Name.
func (c Create) GenerateName(base string) string {
	if c.Name != nil {
		return c.Name(base)
	}
	return c.RESTCreateStrategy.GenerateName(base)
}

// Canonicalize asks Finish.
func (c Create) Canonicalize(obj runtime.Object) {
	c.RESTCreateStrategy.Canonicalize(obj)
	if c.Finish != nil {
		c.Finish(obj)
	}
}

// TellOnce makes a create tell each mistake once. Updates that JudgeUpdates judges do so too.
func TellOnce(store *genericregistry.Store) {
	store.CreateStrategy = Create{RESTCreateStrategy: store.CreateStrategy}
}
