// Package registry turns the description of a resource (its names, defaults, rules and columns) into REST storage on
// k8s.io/apiserver. It knows no resource by name: each lives in a folder of its own below this one and is a Kind.
package registry

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"
)

// Object is what a pointer to an API type can do.
type Object[T any] interface {
	*T
	runtime.Object
	metav1.Object
}

// Resource is a described resource as the server sees it, whatever its Go type.
type Resource interface {
	// GroupVersion is where the resource is served.
	GroupVersion() schema.GroupVersion
	// Name is the plural name in URLs, e.g. "services".
	Name() string
	// AddToScheme teaches the scheme this resource's defaults and the fields that can be selected by.
	AddToScheme(scheme *runtime.Scheme) error
	// Storage builds what answers requests, by path: "services", "services/status".
	Storage(scheme *runtime.Scheme, getter generic.RESTOptionsGetter) (map[string]rest.Storage, error)
}

// Kind describes a resource whose objects are of type T. Functions that are nil are skipped; all of them except
// the Prepare and Default ones must leave their arguments alone.
type Kind[T any, P Object[T]] struct {
	// Served says group and version; Plural, Singular, Kind and ShortNames are what people type.
	Served schema.GroupVersion
	// AlsoServed are other versions that the same storage serves.
	AlsoServed []schema.GroupVersion
	// StoredGroup is the group under which objects are stored and errors speak of them; nil: that of Served.
	StoredGroup      *string
	Plural, Singular string
	KindName         string
	ShortNames       []string
	Categories       []string
	ClusterScoped    bool

	NewList func() runtime.Object

	// Default fills what the user left out. It runs on decoding: on create, on update and on reading from the store.
	Default func(P)

	// ValidName validates metadata.name; nil means a DNS-1123 subdomain. With prefix it validates metadata.generateName.
	ValidName func(name string, prefix bool) []string

	// PrepareCreate and PrepareUpdate drop what a user may not set and carry over what they may not change.
	PrepareCreate func(ctx context.Context, obj P)
	PrepareUpdate func(ctx context.Context, obj, old P)

	// Validate validates a new object, whose metadata the registry has validated. ValidateUpdate alone validates an update, metadata
	// included: what an object already has is often not validated again. Without it, updates are validated like new objects.
	Validate       func(ctx context.Context, obj P) field.ErrorList
	ValidateUpdate func(ctx context.Context, obj, old P) field.ErrorList

	// Warnings are sent to the user with a successful response; old is nil on create.
	Warnings func(ctx context.Context, obj, old P) []string

	// Fields are what field selectors can select by, beside metadata.name and metadata.namespace.
	Fields func(P) fields.Set
	// SelectableFields are the keys of what Fields gives.
	SelectableFields []string

	// Columns are what `kubectl get` shows between the name and the end of the line.
	Columns []Column[T]

	// Status, if there, makes a status subresource.
	Status *Status[T, P]

	// Reset are the fields that server-side apply must not own here, because Prepare drops them.
	Reset []fieldpath.Path

	// StrictUpdate makes resourceVersion mandatory in an update; without it an update without one always wins.
	StrictUpdate bool
	// CreateOnUpdate lets a PUT to a name that doesn't exist create it.
	CreateOnUpdate bool
	// ReturnDeleted answers a delete with the object instead of a Status.
	ReturnDeleted bool
	// TTL in seconds, after which the store forgets the object; 0 keeps it.
	TTL func(P) uint64

	// Graceful, if there, decides whether a delete only marks the object (Pods).
	Graceful rest.RESTGracefulDeleteStrategy

	// Customize may change the finished store and add subresources.
	Customize func(store *genericregistry.Store, storage map[string]rest.Storage) error
}

// Status describes a resource's status subresource.
type Status[T any, P Object[T]] struct {
	// Prepare carries over from old everything that is not status.
	Prepare func(ctx context.Context, obj, old P)
	// Validate validates the new status.
	Validate func(ctx context.Context, obj, old P) field.ErrorList
	// Warnings are sent to the user with a successful response; nil: there are none.
	Warnings func(ctx context.Context, obj, old P) []string
	// Reset are the fields that server-side apply must not own through the subresource.
	Reset []fieldpath.Path
}

// Column is one column of a table.
type Column[T any] struct {
	Name string
	// Type and Format as in OpenAPI: "string", "integer", "date"; "" means string.
	Type, Format string
	Description  string
	// Wide columns are shown by -o wide only.
	Wide bool
	Cell func(*T) any
}

var _ Resource = &Kind[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}

// GroupVersion is where the resource is served.
func (k *Kind[T, P]) GroupVersion() schema.GroupVersion { return k.Served }

// Name is the plural name in URLs.
func (k *Kind[T, P]) Name() string { return k.Plural }

func (k *Kind[T, P]) newObject() P { return P(new(T)) }
