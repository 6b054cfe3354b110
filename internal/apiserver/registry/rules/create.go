package rules

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

// Create is a store's create strategy with parts of it replaced. Functions that are nil are left as they are.
type Create struct {
	rest.RESTCreateStrategy
	registry.Once
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
