// Package certificatesigningrequest describes certificates.k8s.io/v1 CertificateSigningRequests: what users ask a signer to
// sign, who asked, and whether it was approved.
package certificatesigningrequest

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/csr"
)

type (
	signingRequest = certificatesv1.CertificateSigningRequest
	condition      = certificatesv1.CertificateSigningRequestCondition
)

// New describes CertificateSigningRequests.
func New() *registry.Kind[signingRequest, *signingRequest] {
	spec, conditions := fieldpath.MakePathOrDie("spec"), fieldpath.MakePathOrDie("status", "conditions")
	return &registry.Kind[signingRequest, *signingRequest]{
		Served: certificatesv1.SchemeGroupVersion,
		Plural: "certificatesigningrequests", Singular: "certificatesigningrequest", KindName: "CertificateSigningRequest",
		ShortNames:    []string{"csr"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &certificatesv1.CertificateSigningRequestList{} },
		ValidName:     func(string, bool) []string { return nil },
		PrepareCreate: prepareCreate,
		PrepareUpdate: func(_ context.Context, r, old *signingRequest) { r.Spec, r.Status = old.Spec, old.Status },
		Validate:      validateCreate,
		ValidateUpdate: func(_ context.Context, r, old *signingRequest) field.ErrorList {
			return validateUpdate(r, old, part{})
		},
		SelectableFields: []string{"spec.signerName"},
		Fields:           func(r *signingRequest) fields.Set { return fields.Set{"spec.signerName": r.Spec.SignerName} },
		Reset:            []fieldpath.Path{spec, fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[signingRequest, *signingRequest]{
			Prepare: prepareStatus,
			Validate: func(_ context.Context, r, old *signingRequest) field.ErrorList {
				return validateUpdate(r, old, part{certificate: true})
			},
			Reset: []fieldpath.Path{spec, conditions},
		},
		Columns: columns(),
		Customize: func(store *genericregistry.Store, storage map[string]rest.Storage) error {
			approval := rules.Part[signingRequest, *signingRequest]{
				RESTUpdateStrategy: store.UpdateStrategy,
				Prepare:            prepareApproval,
				Judge: func(_ context.Context, r, old *signingRequest) field.ErrorList {
					return validateUpdate(r, old, part{approval: true})
				},
				Reset: map[fieldpath.APIVersion]*fieldpath.Set{
					fieldpath.APIVersion(certificatesv1.SchemeGroupVersion.String()): fieldpath.NewSet(spec, fieldpath.MakePathOrDie("status", "certificate")),
				},
			}
			storage["certificatesigningrequests/approval"] = registry.NewSubresource(store, approval, approval)
			return nil
		},
	}
}

// prepareCreate writes down who asks, whatever the request says, and that nothing is approved yet.
func prepareCreate(ctx context.Context, r *signingRequest) {
	r.Spec.Username, r.Spec.UID, r.Spec.Groups, r.Spec.Extra = "", "", nil, nil
	r.Status = certificatesv1.CertificateSigningRequestStatus{}
	who, ok := request.UserFrom(ctx)
	if !ok {
		return
	}
	r.Spec.Username, r.Spec.UID, r.Spec.Groups = who.GetName(), who.GetUID(), who.GetGroups()
	if extra := who.GetExtra(); len(extra) > 0 {
		r.Spec.Extra = make(map[string]certificatesv1.ExtraValue, len(extra))
		for key, values := range extra {
			r.Spec.Extra[key] = values
		}
	}
}

// prepareStatus keeps what only an approver may write as it was, if the update has as many of each: another number is
// rejected when it is validated.
func prepareStatus(_ context.Context, r, old *signingRequest) {
	r.Spec = old.Spec
	for _, approval := range approvals {
		was, is := find(old, approval), find(r, approval)
		if len(was) != len(is) {
			continue
		}
		for i := range is {
			*is[i] = *was[i].DeepCopy()
		}
	}
	stamp(r, old)
}

func prepareApproval(_ context.Context, r, old *signingRequest) {
	stamp(r, old)
	r.Spec, r.Status.Certificate = old.Spec, old.Status.Certificate
}

// stamp fills in when each condition was written and since when it has its status.
func stamp(r, old *signingRequest) {
	now := metav1.Now()
	for i := range r.Status.Conditions {
		c := &r.Status.Conditions[i]
		if c.LastUpdateTime.IsZero() {
			c.LastUpdateTime = now
		}
		if !c.LastTransitionTime.IsZero() {
			continue
		}
		c.LastTransitionTime = now
		for _, was := range find(old, c.Type) {
			if was.Status == c.Status && !was.LastTransitionTime.IsZero() {
				c.LastTransitionTime = was.LastTransitionTime
				break
			}
		}
	}
}

// find returns the conditions of a type.
func find(r *signingRequest, of certificatesv1.RequestConditionType) (out []*condition) {
	for i := range r.Status.Conditions {
		if r.Status.Conditions[i].Type == of {
			out = append(out, &r.Status.Conditions[i])
		}
	}
	return out
}

func columns() []registry.Column[signingRequest] {
	doc := certificatesv1.CertificateSigningRequestSpec{}.SwaggerDoc()
	return []registry.Column[signingRequest]{
		registry.Age[signingRequest](),
		{Name: "SignerName", Description: doc["signerName"], Cell: func(r *signingRequest) any {
			if r.Spec.SignerName == "" {
				return "<none>"
			}
			return r.Spec.SignerName
		}},
		{Name: "Requestor", Description: doc["request"], Cell: func(r *signingRequest) any { return r.Spec.Username }},
		{Name: "RequestedDuration", Description: doc["expirationSeconds"], Cell: func(r *signingRequest) any {
			if r.Spec.ExpirationSeconds == nil {
				return "<none>"
			}
			return duration.HumanDuration(time.Duration(*r.Spec.ExpirationSeconds) * time.Second)
		}},
		{Name: "Condition", Description: certificatesv1.CertificateSigningRequestStatus{}.SwaggerDoc()["conditions"], Cell: state},
	}
}

// state is how far a request has come.
func state(r *signingRequest) any {
	out := "Pending"
	switch {
	case csr.Has(r, certificatesv1.CertificateDenied):
		out = "Denied"
	case csr.Has(r, certificatesv1.CertificateApproved):
		out = "Approved"
	}
	if csr.Has(r, certificatesv1.CertificateFailed) {
		out += ",Failed"
	}
	if len(r.Status.Certificate) > 0 {
		out += ",Issued"
	}
	return out
}
