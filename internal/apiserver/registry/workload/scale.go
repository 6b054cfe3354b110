package workload

import (
	"context"
	"errors"
	"fmt"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// Scaling says how a resource is scaled.
type Scaling[P any] struct {
	// Replicas is where the number that is wanted is.
	Replicas func(P) **int32
	// Status is how many there are.
	Status func(P) int32
	// Selector selects the Pods that are counted.
	Selector func(P) *metav1.LabelSelector
}

// NewScale answers reads and updates of a scale subresource: how many Pods are wanted, and nothing else of the object.
func NewScale[T any, P registry.Object[T]](store *genericregistry.Store, version schema.GroupVersion, scaling Scaling[P]) rest.Storage {
	return &scaleREST[T, P]{
		TableConvertor: registry.Table(
			registry.Column[autoscalingv1.Scale]{Name: "Desired", Type: "integer", Description: autoscalingv1.ScaleSpec{}.SwaggerDoc()["replicas"],
				Cell: func(s *autoscalingv1.Scale) any { return int64(s.Spec.Replicas) }},
			registry.Column[autoscalingv1.Scale]{Name: "Available", Type: "integer", Description: autoscalingv1.ScaleStatus{}.SwaggerDoc()["replicas"],
				Cell: func(s *autoscalingv1.Scale) any { return int64(s.Status.Replicas) }},
			registry.Age[autoscalingv1.Scale]()),
		store: store, version: version, scaling: scaling,
	}
}

// SelectorText is a label selector as one string.
func SelectorText(selector *metav1.LabelSelector) (string, error) {
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return "", err
	}
	return s.String(), nil
}

type scaleREST[T any, P registry.Object[T]] struct {
	rest.TableConvertor
	store   *genericregistry.Store
	version schema.GroupVersion
	scaling Scaling[P]
}

var (
	_ rest.Patcher                  = &scaleREST[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
	_ rest.GroupVersionKindProvider = &scaleREST[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
	_ rest.Storage                  = &scaleREST[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]{}
)

// GroupVersionKind is of another group than the resource.
func (r *scaleREST[T, P]) GroupVersionKind(schema.GroupVersion) schema.GroupVersionKind {
	return autoscalingv1.SchemeGroupVersion.WithKind("Scale")
}

// New returns an empty Scale.
func (r *scaleREST[T, P]) New() runtime.Object { return &autoscalingv1.Scale{} }

// Destroy does nothing: the main resource owns the store.
func (r *scaleREST[T, P]) Destroy() {}

// Get reads the scale of an object.
func (r *scaleREST[T, P]) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	obj, err := r.store.Get(ctx, name, options)
	if err != nil {
		return nil, err
	}
	return r.scale(obj.(P))
}

// Update scales an object. It never creates.
func (r *scaleREST[T, P]) Update(ctx context.Context, name string, obj rest.UpdatedObjectInfo, _ rest.ValidateObjectFunc,
	allowed rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	judge := func(ctx context.Context, obj, old runtime.Object) error {
		if allowed == nil {
			return nil
		}
		now, err := r.scale(obj.(P))
		if err != nil {
			return err
		}
		before, err := r.scale(old.(P))
		if err != nil {
			return err
		}
		return allowed(ctx, now, before)
	}
	never := func(context.Context, runtime.Object) error { return errors.New("a scale cannot be created") }
	written, _, err := r.store.Update(ctx, name, &scaleUpdate[T, P]{rest: r, request: obj}, never, judge, false, options)
	if err != nil {
		return nil, false, err
	}
	scale, err := r.scale(written.(P))
	return scale, false, err
}

func (r *scaleREST[T, P]) scale(obj P) (*autoscalingv1.Scale, error) {
	selector, err := SelectorText(r.scaling.Selector(obj))
	if err != nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("spec.selector: %v", err))
	}
	scale := &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{
			Name: obj.GetName(), Namespace: obj.GetNamespace(), UID: obj.GetUID(),
			ResourceVersion: obj.GetResourceVersion(), CreationTimestamp: obj.GetCreationTimestamp(),
		},
		Status: autoscalingv1.ScaleStatus{Replicas: r.scaling.Status(obj), Selector: selector},
	}
	if replicas := *r.scaling.Replicas(obj); replicas != nil {
		scale.Spec.Replicas = *replicas
	}
	return scale, nil
}

// scaleUpdate turns the change of a Scale into one of the object.
type scaleUpdate[T any, P registry.Object[T]] struct {
	rest    *scaleREST[T, P]
	request rest.UpdatedObjectInfo
}

// Preconditions are those of the request.
func (u *scaleUpdate[T, P]) Preconditions() *metav1.Preconditions { return u.request.Preconditions() }

// UpdatedObject is the object as it is, with the number of the Scale that was sent.
func (u *scaleUpdate[T, P]) UpdatedObject(ctx context.Context, old runtime.Object) (runtime.Object, error) {
	obj, ok := old.DeepCopyObject().(P)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("%T cannot be scaled", old))
	}
	before, err := u.rest.scale(obj)
	if err != nil {
		return nil, err
	}
	version := u.rest.version
	owners := managedfields.NewScaleHandler(obj.GetManagedFields(), version,
		managedfields.ResourcePathMappings{version.String(): fieldpath.MakePathOrDie("spec", "replicas")})
	if before.ManagedFields, err = owners.ToSubresource(); err != nil {
		return nil, err
	}
	sent, err := u.request.UpdatedObject(ctx, before)
	if err != nil {
		return nil, err
	}
	scale, ok := sent.(*autoscalingv1.Scale)
	if !ok || scale == nil {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("a Scale is wanted, not %T", sent))
	}
	errs := apivalidation.ValidateObjectMeta(&scale.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, rules.NotNegative(At.Child("replicas"), int64(scale.Spec.Replicas))...)
	if len(errs) > 0 {
		return nil, apierrors.NewInvalid(autoscalingv1.SchemeGroupVersion.WithKind("Scale").GroupKind(), scale.Name, errs)
	}
	if scale.UID != "" && scale.UID != obj.GetUID() {
		resource := u.rest.store.DefaultQualifiedResource
		resource.Resource += "/scale"
		return nil, apierrors.NewConflict(resource, obj.GetName(), fmt.Errorf("it has the UID %s, not %s", obj.GetUID(), scale.UID))
	}
	*u.rest.scaling.Replicas(obj) = &scale.Spec.Replicas
	obj.SetResourceVersion(scale.ResourceVersion)
	entries, err := owners.ToParent(scale.ManagedFields)
	if err != nil {
		return nil, err
	}
	obj.SetManagedFields(entries)
	return obj, nil
}
