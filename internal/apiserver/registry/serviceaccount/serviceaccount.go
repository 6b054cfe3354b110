// Package serviceaccount describes ServiceAccounts, names that programs act under: the resource, requests for tokens, and
// the admission that gives Pods their account. What a token is stands in tokens.
package serviceaccount

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

// enforceMountable once limited a ServiceAccount's Pods to the Secrets it lists.
const enforceMountable = "kubernetes.io/enforce-mountable-secrets"

// New describes core/v1 ServiceAccounts. Without tokens no one can ask for any.
func New(tokens *Tokens) registry.Resource {
	return &registry.Kind[corev1.ServiceAccount, *corev1.ServiceAccount]{
		Served:         corev1.SchemeGroupVersion,
		Plural:         "serviceaccounts",
		Singular:       "serviceaccount",
		KindName:       "ServiceAccount",
		ShortNames:     []string{"sa"},
		NewList:        func() runtime.Object { return &corev1.ServiceAccountList{} },
		ValidName:      validation.ValidateServiceAccountName,
		PrepareCreate:  func(_ context.Context, s *corev1.ServiceAccount) { keepNames(s) },
		PrepareUpdate:  func(_ context.Context, s, _ *corev1.ServiceAccount) { keepNames(s) },
		Validate:       validate,
		Warnings:       warnings,
		ReturnDeleted:  true,
		Columns:        []registry.Column[corev1.ServiceAccount]{registry.Age[corev1.ServiceAccount]()},
		ValidateUpdate: func(ctx context.Context, s, _ *corev1.ServiceAccount) field.ErrorList { return validate(ctx, s) },
		Customize: func(_ *genericregistry.Store, storage map[string]rest.Storage) error {
			if tokens != nil {
				storage["serviceaccounts/token"] = tokenREST{tokens}
			}
			return nil
		},
	}
}

// keepNames leaves only the names of the Secrets: a ServiceAccount reaches those of its own namespace and no others,
// whatever a reference says.
func keepNames(s *corev1.ServiceAccount) {
	for i := range s.Secrets {
		s.Secrets[i] = corev1.ObjectReference{Name: s.Secrets[i].Name}
	}
}

// validate has no rules beside those for metadata: what a ServiceAccount refers to may come later.
func validate(_ context.Context, s *corev1.ServiceAccount) field.ErrorList {
	return rules.Finalizers(s)
}

// warnings tell of the annotation when it is new, not each time it is carried along.
func warnings(_ context.Context, s, old *corev1.ServiceAccount) []string {
	if old != nil {
		if _, had := old.Annotations[enforceMountable]; had {
			return nil
		}
	}
	if _, has := s.Annotations[enforceMountable]; !has {
		return nil
	}
	return []string{fmt.Sprintf("metadata.annotations[%s]: deprecated since v1.32; keep Secrets apart with namespaces instead", enforceMountable)}
}
