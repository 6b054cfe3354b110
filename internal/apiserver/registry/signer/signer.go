// Package signer says what the signers of certificates may be called, and who may act for one. It knows no resource: those
// that name a signer ask here.
package signer

import (
	"context"
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Name wants a domain of two labels or more, a slash, and the signer's name there.
func Name(at *field.Path, name string) (errs field.ErrorList) {
	domain, path, found := strings.Cut(name, "/")
	switch {
	case name == "":
		return field.ErrorList{field.Required(at, "who should sign, such as "+certificatesv1.KubeAPIServerClientSignerName)}
	case !found || strings.Contains(path, "/"):
		return field.ErrorList{field.Invalid(at, name, "must be a domain and a name, such as example.com/my-signer")}
	}
	if len(domain) > validation.DNS1123SubdomainMaxLength {
		errs = append(errs, field.TooLong(at, "", validation.DNS1123SubdomainMaxLength))
	}
	labels := strings.Split(domain, ".")
	errs = append(errs, invalidLabel(at, domain, labels, validation.IsDNS1123Label)...)
	if len(labels) < 2 {
		errs = append(errs, field.Invalid(at, domain, "the domain must have a dot"))
	}
	errs = append(errs, invalidLabel(at, path, strings.Split(path, "."), validation.IsDNS1123Subdomain)...)
	// Room for a domain, and for a namespace and a name behind the slash.
	const longest = 2*validation.DNS1123SubdomainMaxLength + validation.DNS1123LabelMaxLength + 2
	if len(name) > longest {
		errs = append(errs, field.TooLong(at, "", longest))
	}
	return errs
}

// invalidLabel says what is wrong with the first label that is.
func invalidLabel(at *field.Path, part string, labels []string, judge func(string) []string) (errs field.ErrorList) {
	for _, label := range labels {
		for _, problem := range judge(label) {
			errs = append(errs, field.Invalid(at, part, fmt.Sprintf("%q: %s", label, problem)))
		}
		if len(errs) > 0 {
			break
		}
	}
	return errs
}

// Kubernetes says whether a signer is in Kubernetes' own domain: such signers are bound by stricter rules.
func Kubernetes(name string) bool {
	domain, _, _ := strings.Cut(name, "/")
	return domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io")
}

// How long a certificate for a Pod may be valid, in seconds.
const (
	ShortestLife          = 60 * 60
	LongestLife           = 91 * 24 * 60 * 60
	LongestLifeKubernetes = 24 * 60 * 60
)

// Longest is how long a certificate of a signer may be valid, in seconds.
func Longest(name string) int32 {
	if Kubernetes(name) {
		return LongestLifeKubernetes
	}
	return LongestLife
}

// Allowed says whether a user may do something for a signer: they need the verb on the signer, or on all of its domain.
func Allowed(ctx context.Context, z authorizer.UnconditionalAuthorizer, who user.Info, verb, signer string) bool {
	domain, _, _ := strings.Cut(signer, "/")
	for _, name := range []string{signer, domain + "/*"} {
		decision, _, _ := z.Authorize(ctx, authorizer.AttributesRecord{
			User: who, Verb: verb, APIGroup: certificatesv1.GroupName, APIVersion: "*", Resource: "signers", Name: name,
			ResourceRequest: true,
		})
		if decision == authorizer.DecisionAllow {
			return true
		}
	}
	return false
}
