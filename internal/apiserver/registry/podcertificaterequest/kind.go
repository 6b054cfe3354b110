// Package podcertificaterequest describes PodCertificateRequests: a node asks a signer for a certificate in the name of one of its
// Pods, and the signer answers in the status, once. It signs nothing.
package podcertificaterequest

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/signer"
)

type podRequest = certificatesv1.PodCertificateRequest

// New describes certificates.k8s.io/v1 PodCertificateRequests. now is the time by which a new certificate is judged.
func New(z authorizer.UnconditionalAuthorizer, now func() time.Time) *registry.Kind[podRequest, *podRequest] {
	return &registry.Kind[podRequest, *podRequest]{
		Served: certificatesv1.SchemeGroupVersion,
		Plural: "podcertificaterequests", Singular: "podcertificaterequest", KindName: "PodCertificateRequest",
		NewList:       func() runtime.Object { return &certificatesv1.PodCertificateRequestList{} },
		PrepareCreate: func(_ context.Context, r *podRequest) { r.Status = certificatesv1.PodCertificateRequestStatus{} },
		PrepareUpdate: func(_ context.Context, r, old *podRequest) { r.Status = old.Status },
		Validate:      func(_ context.Context, r *podRequest) field.ErrorList { return validate(r) },
		ValidateUpdate: func(_ context.Context, r, old *podRequest) field.ErrorList {
			errs := rules.MetaUpdate(r, old)
			if !equality.Semantic.DeepEqual(r.Spec, old.Spec) {
				errs = append(errs, field.Invalid(atSpec, "<spec>", "cannot be changed: make another request"))
			}
			return errs
		},
		StrictUpdate:     true,
		SelectableFields: []string{"spec.signerName", "spec.podName", "spec.nodeName"},
		Fields: func(r *podRequest) fields.Set {
			return fields.Set{"spec.signerName": r.Spec.SignerName, "spec.podName": r.Spec.PodName, "spec.nodeName": string(r.Spec.NodeName)}
		},
		Reset: []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[podRequest, *podRequest]{
			Prepare: func(_ context.Context, r, old *podRequest) {
				r.Spec = old.Spec
				metav1.ResetObjectMetaForStatus(&r.ObjectMeta, &old.ObjectMeta)
			},
			Validate: func(ctx context.Context, r, old *podRequest) field.ErrorList {
				if errs := validateStatus(r, old, now()); len(errs) > 0 {
					return errs
				}
				return maySign(ctx, z, r, old)
			},
			Reset: []fieldpath.Path{fieldpath.MakePathOrDie("metadata"), fieldpath.MakePathOrDie("spec")},
		},
		Columns: columns(),
	}
}

// maySign lets only those answer a request who have the verb sign on its signer.
func maySign(ctx context.Context, z authorizer.UnconditionalAuthorizer, r, old *podRequest) field.ErrorList {
	if equality.Semantic.DeepEqual(r.Status, old.Status) {
		return nil
	}
	at, name := atSpec.Child("signerName"), old.Spec.SignerName
	who, ok := request.UserFrom(ctx)
	if !ok {
		return field.ErrorList{field.InternalError(at, fmt.Errorf("the request has no user"))}
	}
	if !signer.Allowed(ctx, z, who, "sign", name) {
		return field.ErrorList{field.Forbidden(at, fmt.Sprintf("user %q needs the verb \"sign\" on the signer %q", who.GetName(), name))}
	}
	return nil
}

func columns() []registry.Column[podRequest] {
	doc := certificatesv1.PodCertificateRequestSpec{}.SwaggerDoc()
	return []registry.Column[podRequest]{
		{Name: "PodName", Description: doc["podName"], Cell: func(r *podRequest) any { return r.Spec.PodName }},
		{Name: "ServiceAccountName", Description: doc["serviceAccountName"], Cell: func(r *podRequest) any { return r.Spec.ServiceAccountName }},
		{Name: "NodeName", Description: doc["nodeName"], Cell: func(r *podRequest) any { return string(r.Spec.NodeName) }},
		{Name: "SignerName", Description: doc["signerName"], Cell: func(r *podRequest) any { return r.Spec.SignerName }},
		{Name: "State", Description: "Whether the request is pending, or how it was answered", Cell: func(r *podRequest) any {
			if answer := answered(r); answer != "" {
				return answer
			}
			return "Pending"
		}},
		{Name: "UnverifiedUserAnnotations", Description: doc["unverifiedUserAnnotations"], Wide: true,
			Cell: func(r *podRequest) any { return labels.FormatLabels(r.Spec.UnverifiedUserAnnotations) }},
	}
}
