// Package namespace describes v1 Namespaces: their life from Active through Terminating until every finalizer is gone.
// Emptying one, and which may not be deleted, are matters of the controllers and of admission.
package namespace

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// New describes Namespaces.
func New() *registry.Kind[corev1.Namespace, *corev1.Namespace] {
	return &registry.Kind[corev1.Namespace, *corev1.Namespace]{
		Served: corev1.SchemeGroupVersion,
		Plural: "namespaces", Singular: "namespace", KindName: "Namespace",
		ShortNames:       []string{"ns"},
		ClusterScoped:    true,
		NewList:          func() runtime.Object { return &corev1.NamespaceList{} },
		Default:          setDefaults,
		ValidName:        apivalidation.ValidateNamespaceName,
		PrepareCreate:    prepareCreate,
		PrepareUpdate:    prepareUpdate,
		Validate:         validate,
		ValidateUpdate:   validateUpdate,
		Fields:           func(ns *corev1.Namespace) fields.Set { return fields.Set{"status.phase": string(ns.Status.Phase)} },
		SelectableFields: []string{"status.phase"},
		Columns: []registry.Column[corev1.Namespace]{
			{Name: "Status", Description: "Whether the namespace is in use (Active) or going away (Terminating)",
				Cell: func(ns *corev1.Namespace) any { return string(ns.Status.Phase) }},
			registry.Age[corev1.Namespace](),
		},
		Reset:         []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		ReturnDeleted: true,
		Customize:     customize,
	}
}

// setDefaults keeps the label by which selectors find a namespace by name.
func setDefaults(ns *corev1.Namespace) {
	if ns.Name != "" {
		setLabel(ns)
	}
	if ns.Status.Phase == "" {
		ns.Status.Phase = corev1.NamespaceActive
	}
}

func setLabel(ns *corev1.Namespace) {
	if ns.Labels == nil {
		ns.Labels = map[string]string{}
	}
	ns.Labels[corev1.LabelMetadataName] = ns.Name
}

// prepareCreate puts the finalizer in place that holds the namespace until its content is gone. It is no default:
// once removed it must stay removed.
func prepareCreate(_ context.Context, ns *corev1.Namespace) {
	ns.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
	if !slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		ns.Spec.Finalizers = append(ns.Spec.Finalizers, corev1.FinalizerKubernetes)
	}
}

// prepareUpdate leaves finalizers and status to their subresources.
func prepareUpdate(_ context.Context, ns, old *corev1.Namespace) {
	ns.Spec.Finalizers = old.Spec.Finalizers
	ns.Status = old.Status
}

func customize(store *genericregistry.Store, storage map[string]rest.Storage) error {
	// With generateName there was no name to label before validation.
	store.CreateStrategy = rules.Create{RESTCreateStrategy: store.CreateStrategy, Finish: func(obj runtime.Object) { setLabel(obj.(*corev1.Namespace)) }}
	store.ShouldDeleteDuringUpdate = gone
	status := rules.Part[corev1.Namespace, *corev1.Namespace]{
		RESTUpdateStrategy: store.UpdateStrategy,
		Prepare:            func(_ context.Context, ns, old *corev1.Namespace) { ns.Spec = old.Spec },
		Judge:              validateStatus,
		Reset:              reset("spec"),
	}
	finalize := rules.Part[corev1.Namespace, *corev1.Namespace]{
		RESTUpdateStrategy: store.UpdateStrategy,
		Prepare:            func(_ context.Context, ns, old *corev1.Namespace) { ns.Status = old.Status },
		Judge:              validateFinalize,
		Reset:              reset("status"),
	}
	storage["namespaces/status"] = registry.NewSubresource(store, status, status)
	storage["namespaces/finalize"] = finalizeREST{registry.NewSubresource(store, finalize, finalize)}
	storage["namespaces"] = &namespaceREST{main: storage["namespaces"].(main), store: store}
	return nil
}

func reset(path string) map[fieldpath.APIVersion]*fieldpath.Set {
	return map[fieldpath.APIVersion]*fieldpath.Set{"v1": fieldpath.NewSet(fieldpath.MakePathOrDie(path))}
}

// gone says whether an update removed the last thing that held a namespace which was to be deleted.
func gone(ctx context.Context, key string, obj, old runtime.Object) bool {
	return len(obj.(*corev1.Namespace).Spec.Finalizers) == 0 && genericregistry.ShouldDeleteDuringUpdate(ctx, key, obj, old)
}
