// Package ingress describes Ingresses: which host and path of HTTP traffic goes to which Service. It serves none of
// that traffic.
package ingress

import (
	"context"
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// classAnnotation named the class before there was a field for it.
const classAnnotation = "kubernetes.io/ingress.class"

// New describes networking.k8s.io/v1 Ingresses.
func New() registry.Resource {
	return &registry.Kind[networkingv1.Ingress, *networkingv1.Ingress]{
		Served:         networkingv1.SchemeGroupVersion,
		Plural:         "ingresses",
		Singular:       "ingress",
		KindName:       "Ingress",
		ShortNames:     []string{"ing"},
		NewList:        func() runtime.Object { return &networkingv1.IngressList{} },
		PrepareCreate:  prepareCreate,
		PrepareUpdate:  prepareUpdate,
		Validate:       validateNew,
		ValidateUpdate: validateUpdate,
		Warnings:       warnings,
		Columns:        columns,
		Reset:          []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Customize: func(store *genericregistry.Store, storage map[string]rest.Storage) error {
			status := newStatus(store.UpdateStrategy)
			storage["ingresses/status"] = registry.NewSubresource(store, status, status)
			return nil
		},
	}
}

func prepareCreate(_ context.Context, ing *networkingv1.Ingress) {
	ing.Status = networkingv1.IngressStatus{}
	ing.Generation = 1
}

func prepareUpdate(_ context.Context, ing, old *networkingv1.Ingress) {
	ing.Status = old.Status
	if !equality.Semantic.DeepEqual(ing.Spec, old.Spec) {
		ing.Generation = old.Generation + 1
	}
}

// warnings tell a new Ingress that uses the annotation alone; an old one is left in peace.
func warnings(_ context.Context, ing, old *networkingv1.Ingress) []string {
	if _, annotated := ing.Annotations[classAnnotation]; old != nil || !annotated || ing.Spec.IngressClassName != nil {
		return nil
	}
	return []string{fmt.Sprintf("metadata.annotations[%s]: deprecated; name the class in spec.ingressClassName", classAnnotation)}
}

// status is how the status subresource is updated: the addresses under which an Ingress can be reached.
type status struct {
	rules.Part[networkingv1.Ingress, *networkingv1.Ingress]
}

func newStatus(main rest.RESTUpdateStrategy) status {
	return status{rules.Part[networkingv1.Ingress, *networkingv1.Ingress]{
		RESTUpdateStrategy: main,
		Prepare:            func(_ context.Context, ing, old *networkingv1.Ingress) { ing.Spec = old.Spec },
		Judge:              validateStatus,
		Reset: map[fieldpath.APIVersion]*fieldpath.Set{
			fieldpath.APIVersion(networkingv1.SchemeGroupVersion.String()): fieldpath.NewSet(fieldpath.MakePathOrDie("spec")),
		},
	}}
}

// WarningsOnUpdate tells of addresses that are not written as everybody else writes them.
func (status) WarningsOnUpdate(_ context.Context, obj, _ runtime.Object) []string {
	var out []string
	for i, point := range obj.(*networkingv1.Ingress).Status.LoadBalancer.Ingress {
		if point.IP != "" {
			out = append(out, utilvalidation.GetWarningsForIP(statusPath.Index(i), point.IP)...)
		}
	}
	return out
}

var statusPath = field.NewPath("status", "loadBalancer", "ingress")
