// Package ipaddress describes networking.k8s.io/v1 IPAddresses: each is the claim of an object on one address.
package ipaddress

import (
	"context"
	"net/netip"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
)

var atParent = field.NewPath("spec", "parentRef")

// New describes IPAddresses. reserved are the addresses that only the API's own Service can claim, which it does without
// creating the object by a request; nil reserves none.
func New(reserved func(netip.Addr) bool) *registry.Kind[networkingv1.IPAddress, *networkingv1.IPAddress] {
	return &registry.Kind[networkingv1.IPAddress, *networkingv1.IPAddress]{
		Served: networkingv1.SchemeGroupVersion,
		Plural: "ipaddresses", Singular: "ipaddress", KindName: "IPAddress",
		ShortNames:    []string{"ip"},
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &networkingv1.IPAddressList{} },
		ValidName:     validName,
		Validate: func(_ context.Context, ip *networkingv1.IPAddress) field.ErrorList {
			return append(validateCreate(ip), validateReserved(ip, reserved)...)
		},
		ValidateUpdate: validateUpdate,
		Columns: []registry.Column[networkingv1.IPAddress]{
			{Name: "ParentRef", Description: networkingv1.IPAddressSpec{}.SwaggerDoc()["parentRef"],
				Cell: func(ip *networkingv1.IPAddress) any { return parent(ip.Spec.ParentRef) }},
			registry.Age[networkingv1.IPAddress](),
		},
		Customize: func(store *genericregistry.Store, _ map[string]rest.Storage) error {
			// generateName is taken as it is: there is nothing random about an address.
			store.CreateStrategy = rules.Create{RESTCreateStrategy: store.CreateStrategy, Name: func(base string) string { return base }}
			return nil
		},
	}
}

// validName wants an address in the one way that it is written: the name is what makes a claim the only one.
func validName(name string, _ bool) []string {
	var complaints []string
	for _, err := range validation.IsValidIP(nil, name) {
		complaints = append(complaints, err.Detail)
	}
	return complaints
}

func validateCreate(ip *networkingv1.IPAddress) field.ErrorList {
	return append(rules.Finalizers(ip), validateParent(ip.Spec.ParentRef)...)
}

func validateReserved(ip *networkingv1.IPAddress, reserved func(netip.Addr) bool) field.ErrorList {
	addr, err := netip.ParseAddr(ip.Name)
	if reserved == nil || err != nil || !reserved(addr) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata", "name"), ip.Name,
		"is reserved for the Service kubernetes in the namespace default")}
}

func validateParent(ref *networkingv1.ParentReference) field.ErrorList {
	if ref == nil {
		return field.ErrorList{field.Required(atParent, "whose address this is")}
	}
	var errs field.ErrorList
	if ref.Group != "" {
		errs = append(errs, rules.DNSSubdomain(atParent.Child("group"), ref.Group)...)
	}
	for _, part := range []struct {
		name, value string
		required    bool
	}{{"resource", ref.Resource, true}, {"name", ref.Name, true}, {"namespace", ref.Namespace, false}} {
		switch {
		case part.value != "":
			errs = append(errs, rules.Each(atParent.Child(part.name), part.value, content.IsPathSegmentName(part.value))...)
		case part.required:
			errs = append(errs, field.Required(atParent.Child(part.name), ""))
		}
	}
	return errs
}

// validateUpdate keeps the owner: an address changes hands by being let go and taken.
func validateUpdate(_ context.Context, ip, old *networkingv1.IPAddress) field.ErrorList {
	errs := rules.Meta(ip, false, validName)
	errs = append(errs, validateParent(ip.Spec.ParentRef)...)
	errs = append(errs, rules.MetaUpdate(ip, old)...)
	if !equality.Semantic.DeepEqual(ip.Spec.ParentRef, old.Spec.ParentRef) {
		errs = append(errs, field.Invalid(atParent, ip.Spec.ParentRef, "cannot be changed"))
	}
	return errs
}

func parent(ref *networkingv1.ParentReference) string {
	if ref == nil {
		return "<none>"
	}
	text := strings.ToLower(schema.GroupResource{Group: ref.Group, Resource: ref.Resource}.String())
	if ref.Namespace != "" {
		text += "/" + ref.Namespace
	}
	return text + "/" + ref.Name
}
