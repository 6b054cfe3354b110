// Package review describes resources that are questions: a client creates one, the answer is the object that comes
// back, and nothing is stored. It knows no question by name.
package review

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
)

// Question describes a resource of type T that is asked by creating it.
type Question[T any, P registry.Object[T]] struct {
	Served           schema.GroupVersion
	Plural, Singular string
	Namespaced       bool

	// Validate validates the question.
	Validate func(ctx context.Context, obj P) field.ErrorList
	// Refuse, if there, is asked after Validate, and rejects what is no matter of a single field.
	Refuse func(ctx context.Context, obj P) error
	// Answer gives the object with its answer. It may fill in obj, or make another.
	Answer func(ctx context.Context, obj P) (P, error)
}

var _ registry.Resource = &Question[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}

// GroupVersion is where the resource is served.
func (q *Question[T, P]) GroupVersion() schema.GroupVersion { return q.Served }

// Name is the plural name in URLs.
func (q *Question[T, P]) Name() string { return q.Plural }

// AddToScheme has nothing to teach: a question has no defaults, and there is nothing to select from.
func (q *Question[T, P]) AddToScheme(*runtime.Scheme) error { return nil }

// Storage builds what answers requests. Nothing is stored.
func (q *Question[T, P]) Storage(*runtime.Scheme, generic.RESTOptionsGetter) (map[string]rest.Storage, error) {
	return map[string]rest.Storage{q.Plural: &REST[T, P]{question: q}}, nil
}

// REST answers a Question.
type REST[T any, P registry.Object[T]] struct{ question *Question[T, P] }

var (
	_ rest.Creater              = &REST[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
	_ rest.Scoper               = &REST[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
	_ rest.SingularNameProvider = &REST[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
)

// New gives an empty question.
func (r *REST[T, P]) New() runtime.Object { return P(new(T)) }

// Destroy does nothing: there is no store.
func (r *REST[T, P]) Destroy() {}

// NamespaceScoped says whether the question is asked in a namespace.
func (r *REST[T, P]) NamespaceScoped() bool { return r.question.Namespaced }

// GetSingularName is the name of one question.
func (r *REST[T, P]) GetSingularName() string { return r.question.Singular }

// Create validates the question and answers it.
func (r *REST[T, P]) Create(ctx context.Context, obj runtime.Object, admit rest.ValidateObjectFunc, _ *metav1.CreateOptions) (runtime.Object, error) {
	q, question := r.question, obj.(P)
	if q.Validate != nil {
		if errs := q.Validate(ctx, question); len(errs) > 0 {
			// A question has no name to report, and the reference reports no kind either.
			return nil, apierrors.NewInvalid(schema.GroupKind{Group: q.Served.Group}, "", errs)
		}
	}
	if q.Refuse != nil {
		if err := q.Refuse(ctx, question); err != nil {
			return nil, err
		}
	}
	if admit != nil {
		if err := admit(ctx, obj.DeepCopyObject()); err != nil {
			return nil, err
		}
	}
	return q.Answer(ctx, question)
}
