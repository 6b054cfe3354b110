// Package apiservice describes apiregistration.k8s.io/v1 APIServices: who serves a version of an API group. It connects to nobody.
package apiservice

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

type apiService = apiregistrationv1.APIService

const (
	maxGroupPriority   = 20_000
	maxVersionPriority = 1_000
)

// New describes APIServices. The default of spec.service.port comes with the type.
func New() registry.Resource {
	return &registry.Kind[apiService, *apiService]{
		Served: apiregistrationv1.SchemeGroupVersion,
		Plural: "apiservices", Singular: "apiservice", KindName: "APIService",
		Categories:    []string{"api-extensions"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &apiregistrationv1.APIServiceList{} },
		ValidName:     path.ValidatePathSegmentName,
		PrepareCreate: func(_ context.Context, s *apiService) {
			s.Status = apiregistrationv1.APIServiceStatus{}
			if s.Spec.Service == nil {
				s.Status.Conditions = []apiregistrationv1.APIServiceCondition{Local()}
			}
		},
		PrepareUpdate: func(_ context.Context, s, old *apiService) { s.Status = old.Status },
		Validate:      func(_ context.Context, s *apiService) field.ErrorList { return validate(s) },
		ValidateUpdate: func(_ context.Context, s, old *apiService) field.ErrorList {
			return append(rules.MetaUpdate(s, old), validate(s)...)
		},
		StrictUpdate: true,
		Reset:        []fieldpath.Path{fieldpath.MakePathOrDie("status")},
		Status: &registry.Status[apiService, *apiService]{
			Prepare: func(_ context.Context, s, old *apiService) {
				s.Spec = old.Spec
				s.Labels, s.Annotations, s.Finalizers, s.OwnerReferences = old.Labels, old.Annotations, old.Finalizers, old.OwnerReferences
			},
			Validate: func(_ context.Context, s, old *apiService) field.ErrorList {
				return append(rules.MetaUpdate(s, old), validateStatus(s)...)
			},
			Reset: []fieldpath.Path{fieldpath.MakePathOrDie("spec"), fieldpath.MakePathOrDie("metadata")},
		},
		Columns: []registry.Column[apiService]{
			{Name: "Service", Description: "The Service whose endpoints serve the group version, or Local.", Cell: service},
			{Name: "Available", Description: "Whether the group version is served, and why not.", Cell: available},
			registry.Age[apiService](),
		},
	}
}

// Local is the condition of a group version that the server serves itself.
func Local() apiregistrationv1.APIServiceCondition {
	return apiregistrationv1.APIServiceCondition{
		Type: apiregistrationv1.Available, Status: apiregistrationv1.ConditionTrue, LastTransitionTime: metav1.Now(),
		Reason: "Local", Message: "this API server serves the group version itself",
	}
}

func validate(s *apiService) (errs field.ErrorList) {
	at, spec := field.NewPath("spec"), &s.Spec
	if want := spec.Version + "." + spec.Group; s.Name != want {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), s.Name, fmt.Sprintf("must be VERSION.GROUP of the spec: %q", want)))
	}
	switch {
	case spec.Group != "":
		errs = append(errs, rules.DNSSubdomain(at.Child("group"), spec.Group)...)
	case spec.Version != "v1":
		errs = append(errs, field.Required(at.Child("group"), "only v1 can be without a group: that is the core API"))
	}
	errs = append(errs, rules.Each(at.Child("version"), spec.Version, validation.IsDNS1035Label(spec.Version))...)
	errs = append(errs, between(at.Child("groupPriorityMinimum"), spec.GroupPriorityMinimum, maxGroupPriority)...)
	errs = append(errs, between(at.Child("versionPriority"), spec.VersionPriority, maxVersionPriority)...)
	if spec.Service == nil {
		return append(errs, validateLocal(at, spec)...)
	}
	return append(errs, validateRemote(at, spec)...)
}

// validateLocal rejects what only says how to connect to somebody else.
func validateLocal(at *field.Path, spec *apiregistrationv1.APIServiceSpec) (errs field.ErrorList) {
	if n := len(spec.CABundle); n > 0 {
		errs = append(errs, field.Invalid(at.Child("caBundle"), fmt.Sprintf("%d bytes", n), "is for a group version with a service"))
	}
	if spec.InsecureSkipTLSVerify {
		errs = append(errs, field.Invalid(at.Child("insecureSkipTLSVerify"), true, "is for a group version with a service"))
	}
	return errs
}

func validateRemote(at *field.Path, spec *apiregistrationv1.APIServiceSpec) (errs field.ErrorList) {
	to := at.Child("service")
	if spec.Service.Namespace == "" {
		errs = append(errs, field.Required(to.Child("namespace"), ""))
	}
	if spec.Service.Name == "" {
		errs = append(errs, field.Required(to.Child("name"), ""))
	}
	if port := spec.Service.Port; port != nil {
		errs = append(errs, rules.Each(to.Child("port"), *port, validation.IsValidPortNum(int(*port)))...)
	}
	if spec.InsecureSkipTLSVerify && len(spec.CABundle) > 0 {
		errs = append(errs, field.Invalid(at.Child("insecureSkipTLSVerify"), true, "can't be combined with caBundle"))
	}
	return errs
}

func between(at *field.Path, n, most int32) field.ErrorList {
	if n >= 1 && n <= most {
		return nil
	}
	return field.ErrorList{field.Invalid(at, n, fmt.Sprintf("must be from 1 to %d", most))}
}

func validateStatus(s *apiService) (errs field.ErrorList) {
	for i, c := range s.Status.Conditions {
		errs = append(errs, rules.OneOf(field.NewPath("status", "conditions").Index(i).Child("status"), c.Status,
			apiregistrationv1.ConditionTrue, apiregistrationv1.ConditionFalse, apiregistrationv1.ConditionUnknown)...)
	}
	return errs
}

func service(s *apiService) any {
	if s.Spec.Service == nil {
		return "Local"
	}
	return s.Spec.Service.Namespace + "/" + s.Spec.Service.Name
}

func available(s *apiService) any {
	for _, c := range s.Status.Conditions {
		switch {
		case c.Type != apiregistrationv1.Available:
		case c.Status == apiregistrationv1.ConditionTrue || c.Reason == "":
			return string(c.Status)
		default:
			return fmt.Sprintf("%s (%s)", c.Status, c.Reason)
		}
	}
	return string(apiregistrationv1.ConditionUnknown)
}
