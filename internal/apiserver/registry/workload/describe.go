package workload

import (
	"context"
	"reflect"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/pod"
	"portal/internal/apiserver/registry/rules"
)

// Parts say where the spec and the status of a workload are, and how they are judged.
type Parts[T any, P registry.Object[T], S, U any] struct {
	Spec   func(P) *S
	Status func(P) *U
	// Template is in the spec. It may be nil.
	Template     func(*S) *corev1.PodTemplateSpec
	ValidateSpec func(*S) field.ErrorList
	// ValidateChange, if not nil, judges what an update changes.
	ValidateChange func(now, before *S) field.ErrorList
	ValidateStatus func(now, before *U) field.ErrorList
	// Scaling, if not nil, makes a scale subresource.
	Scaling *Scaling[P]
}

// Describe completes the description of a workload by what is the same for all of them. What it says already, stays.
func Describe[T any, P registry.Object[T], S, U any](kind *registry.Kind[T, P], parts Parts[T, P, S, U]) registry.Resource {
	kind.Categories = []string{"all"}
	kind.Reset = []fieldpath.Path{fieldpath.MakePathOrDie("status")}
	kind.PrepareCreate = or(kind.PrepareCreate, parts.prepareCreate)
	kind.PrepareUpdate = or(kind.PrepareUpdate, parts.prepareUpdate)
	kind.Validate = or(kind.Validate, parts.validate)
	kind.ValidateUpdate = or(kind.ValidateUpdate, parts.validateUpdate)
	kind.Warnings = or(kind.Warnings, parts.warnings)
	if kind.Status == nil {
		kind.Status = &registry.Status[T, P]{}
	}
	status := kind.Status
	status.Prepare = or(status.Prepare, func(_ context.Context, obj, old P) { *parts.Spec(obj) = *parts.Spec(old) })
	status.Validate = or(status.Validate, parts.validateStatus)
	status.Reset = append(status.Reset, fieldpath.MakePathOrDie("spec"))
	if parts.Scaling != nil {
		customize := or(kind.Customize, func(*genericregistry.Store, map[string]rest.Storage) error { return nil })
		kind.Customize = func(store *genericregistry.Store, storage map[string]rest.Storage) error {
			storage[kind.Plural+"/scale"] = NewScale[T, P](store, kind.Served, *parts.Scaling)
			return customize(store, storage)
		}
	}
	return kind
}

// or is the function of a workload's own, or the usual one if it has none.
func or[F any](own, usual F) F {
	if reflect.ValueOf(own).IsNil() {
		return usual
	}
	return own
}

func (p Parts[T, P, S, U]) template(obj P) *corev1.PodTemplateSpec { return p.Template(p.Spec(obj)) }

func (p Parts[T, P, S, U]) prepareTemplate(obj P) {
	if template := p.template(obj); template != nil {
		pod.PrepareTemplate(template)
	}
}

func (p Parts[T, P, S, U]) prepareCreate(_ context.Context, obj P) {
	*p.Status(obj) = *new(U)
	obj.SetGeneration(1)
	p.prepareTemplate(obj)
}

func (p Parts[T, P, S, U]) prepareUpdate(_ context.Context, obj, old P) {
	*p.Status(obj) = *p.Status(old)
	p.prepareTemplate(obj)
	if Changed(p.Spec(obj), p.Spec(old)) {
		obj.SetGeneration(old.GetGeneration() + 1)
	}
}

func (p Parts[T, P, S, U]) validate(_ context.Context, obj P) field.ErrorList {
	return append(rules.Finalizers(obj), p.ValidateSpec(p.Spec(obj))...)
}

func (p Parts[T, P, S, U]) validateUpdate(_ context.Context, obj, old P) field.ErrorList {
	errs := append(rules.MetaUpdate(obj, old), p.ValidateSpec(p.Spec(obj))...)
	if p.ValidateChange != nil {
		errs = append(errs, p.ValidateChange(p.Spec(obj), p.Spec(old))...)
	}
	return errs
}

func (p Parts[T, P, S, U]) validateStatus(_ context.Context, obj, old P) field.ErrorList {
	return append(rules.MetaUpdate(obj, old), p.ValidateStatus(p.Status(obj), p.Status(old))...)
}

func (p Parts[T, P, S, U]) warnings(ctx context.Context, obj, old P) []string {
	if old != nil {
		return Warnings(ctx, p.template(obj), p.template(old))
	}
	return append(NameWarning(obj), Warnings(ctx, p.template(obj), nil)...)
}
