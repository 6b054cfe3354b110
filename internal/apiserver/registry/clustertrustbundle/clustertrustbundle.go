// Package clustertrustbundle describes ClusterTrustBundles: certificates of authorities that Pods can mount, of one signer or of
// none. It mounts nothing.
package clustertrustbundle

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"portal/internal/apiserver/registry"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/signer"
)

type bundle = certificatesv1.ClusterTrustBundle

// largest is how many bytes a bundle may have.
const largest = 1 << 20

var (
	atSigner = field.NewPath("spec", "signerName")
	atBundle = field.NewPath("spec", "trustBundle")
)

// New describes certificates.k8s.io/v1 ClusterTrustBundles.
func New() registry.Resource {
	return &registry.Kind[bundle, *bundle]{
		Served: certificatesv1.SchemeGroupVersion,
		Plural: "clustertrustbundles", Singular: "clustertrustbundle", KindName: "ClusterTrustBundle",
		ClusterScoped: true,
		NewList:       func() runtime.Object { return &certificatesv1.ClusterTrustBundleList{} },
		// The name depends on the signer: validate judges it.
		ValidName:        func(string, bool) []string { return nil },
		Validate:         func(_ context.Context, b *bundle) field.ErrorList { return validate(b, nil) },
		ValidateUpdate:   func(_ context.Context, b, old *bundle) field.ErrorList { return validate(b, old) },
		StrictUpdate:     true,
		SelectableFields: []string{"spec.signerName"},
		Fields:           func(b *bundle) fields.Set { return fields.Set{"spec.signerName": b.Spec.SignerName} },
		Columns: []registry.Column[bundle]{
			{Name: "SignerName", Description: certificatesv1.ClusterTrustBundleSpec{}.SwaggerDoc()["signerName"], Cell: func(b *bundle) any {
				if b.Spec.SignerName == "" {
					return "<none>"
				}
				return b.Spec.SignerName
			}},
		},
	}
}

// validate judges a bundle. Certificates that were accepted before are not judged again.
func validate(b, old *bundle) field.ErrorList {
	errs := rules.Meta(b, false, validName(b.Spec.SignerName))
	if b.Spec.SignerName != "" {
		errs = append(errs, signer.Name(atSigner, b.Spec.SignerName)...)
	}
	if old == nil || old.Spec.TrustBundle != b.Spec.TrustBundle {
		errs = append(errs, validateAnchors(b.Spec.TrustBundle)...)
	}
	if old != nil {
		errs = append(errs, rules.MetaUpdate(b, old)...)
		if b.Spec.SignerName != old.Spec.SignerName {
			errs = append(errs, field.Invalid(atSigner, b.Spec.SignerName, "cannot be changed: make another bundle"))
		}
	}
	return errs
}

// validName wants the names of a signer's bundles to begin with the signer's, so that nobody takes them for another's.
func validName(of string) apivalidation.ValidateNameFunc {
	return func(name string, prefix bool) []string {
		if of == "" {
			if strings.Contains(name, ":") {
				return []string{"must have no colon: that is for bundles with a signer"}
			}
			return apivalidation.NameIsDNSSubdomain(name, prefix)
		}
		want := strings.ReplaceAll(of, "/", ":") + ":"
		rest, found := strings.CutPrefix(name, want)
		if !found {
			return []string{fmt.Sprintf("must begin with %s, since the bundle is of the signer %s", want, of)}
		}
		return apivalidation.NameIsDNSSubdomain(rest, prefix)
	}
}

// ValidName says what is wrong with a name by itself: the part before its last colon stands for a signer.
func ValidName(name string) []string {
	of := ""
	if end := strings.LastIndex(name, ":"); end >= 0 {
		of = strings.ReplaceAll(name[:end], ":", "/")
	}
	return validName(of)(name, false)
}

// validateAnchors wants certificates of authorities, each once. Text between them is allowed.
func validateAnchors(text string) (errs field.ErrorList) {
	if len(text) > largest {
		return field.ErrorList{field.TooLong(atBundle, "", largest)}
	}
	invalid := func(format string, args ...any) {
		errs = append(errs, field.Invalid(atBundle, "<certificates>", fmt.Sprintf(format, args...)))
	}
	first := map[string]int{}
	var repeated [][2]int
	rest := []byte(text)
	for i := 0; ; i++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if problem := anchor(block); problem != "" {
			invalid("block %d %s", i, problem)
			continue
		}
		if j, seen := first[string(block.Bytes)]; seen {
			repeated = append(repeated, [2]int{j, i})
			continue
		}
		first[string(block.Bytes)] = i
	}
	switch {
	case len(errs) > 0:
	case len(first) == 0:
		invalid("must hold one PEM certificate or more")
	default:
		for _, pair := range repeated {
			invalid("blocks %d and %d are the same certificate", pair[0], pair[1])
		}
	}
	return errs
}

// anchor says why a block is no certificate of an authority.
func anchor(block *pem.Block) string {
	if block.Type != "CERTIFICATE" {
		return fmt.Sprintf("is of the type %q, not CERTIFICATE", block.Type)
	}
	if len(block.Headers) > 0 {
		return "has headers, which are not allowed"
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	switch {
	case err != nil:
		return "cannot be read: " + err.Error()
	case !cert.IsCA || !cert.BasicConstraintsValid:
		return "is not the certificate of an authority: its basic constraints don't say CA"
	}
	return ""
}

// Guard lets only those write a signer's bundle who have the verb attest on the signer. It is what Kubernetes calls
// ClusterTrustBundleAttest.
type Guard struct {
	*admission.Handler
	Authorizer authorizer.UnconditionalAuthorizer
}

var _ admission.ValidationInterface = Guard{}

// NewGuard makes the guard.
func NewGuard(z authorizer.UnconditionalAuthorizer) Guard {
	return Guard{admission.NewHandler(admission.Create, admission.Update), z}
}

// Validate judges a write.
func (g Guard) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	b, ok := a.GetObject().(*bundle)
	if !ok || b.Spec.SignerName == "" {
		return nil
	}
	if old, ok := a.GetOldObject().(*bundle); ok && onlyOwnership(b, old) {
		return nil
	}
	if !signer.Allowed(ctx, g.Authorizer, a.GetUserInfo(), "attest", b.Spec.SignerName) {
		return admission.NewForbidden(a, fmt.Errorf("it needs the verb \"attest\" on the signer %q", b.Spec.SignerName))
	}
	return nil
}

// onlyOwnership says that a write changes at most what the garbage collector changes.
func onlyOwnership(b, old *bundle) bool {
	same := b.DeepCopy()
	same.OwnerReferences, same.Finalizers, same.ManagedFields = old.OwnerReferences, old.Finalizers, old.ManagedFields
	return equality.Semantic.DeepEqual(same, old)
}
