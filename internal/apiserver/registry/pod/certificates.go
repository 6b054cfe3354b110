package pod

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/clustertrustbundle"
	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/signer"
)

// validateTrust judges a source that is one ClusterTrustBundle, or those of a signer.
func validateTrust(at *field.Path, trust *corev1.ClusterTrustBundleProjection) (errs field.ErrorList) {
	switch {
	case trust.Name != nil && trust.SignerName != nil:
		errs = append(errs, field.Invalid(at, "<source>", "must have either name or signerName"))
	case trust.Name != nil:
		if *trust.Name == "" {
			errs = append(errs, field.Required(at.Child("name"), "the name of a ClusterTrustBundle"))
		}
		errs = append(errs, rules.Each(at.Child("name"), *trust.Name, clustertrustbundle.ValidName(*trust.Name))...)
		if trust.LabelSelector != nil {
			errs = append(errs, field.Invalid(at.Child("labelSelector"), trust.LabelSelector, "selects among a signer's, and must not be beside name"))
		}
	case trust.SignerName != nil:
		errs = append(errs, signer.Name(at.Child("signerName"), *trust.SignerName)...)
		errs = append(errs, metavalidation.ValidateLabelSelector(trust.LabelSelector, metavalidation.LabelSelectorValidationOptions{}, at.Child("labelSelector"))...)
	default:
		errs = append(errs, field.Required(at, "name or signerName"))
	}
	if trust.Path == "" {
		errs = append(errs, field.Required(at.Child("path"), "the file to write"))
	}
	return append(errs, validateFreePath(at.Child("path"), trust.Path)...)
}

// validateCertificate judges a source that is a certificate which the kubelet asks a signer for.
func validateCertificate(at *field.Path, cert *corev1.PodCertificateProjection) field.ErrorList {
	errs := signer.Name(at.Child("signerName"), cert.SignerName)
	errs = append(errs, rules.UserAnnotations(at.Child("userAnnotations"), cert.UserAnnotations)...)
	errs = append(errs, rules.OneOf(at.Child("keyType"), cert.KeyType, "RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519")...)
	if life := cert.MaxExpirationSeconds; life != nil {
		// Kubernetes' conformance tests look for these words.
		limit := func(format string, seconds int32) {
			errs = append(errs, field.Invalid(at.Child("maxExpirationSeconds"), *life, fmt.Sprintf("if provided, maxExpirationSeconds must be "+format, seconds)))
		}
		if *life < signer.ShortestLife {
			limit(">= %d", signer.ShortestLife)
		}
		if longest := signer.Longest(cert.SignerName); *life > longest {
			limit("<= %d", longest)
		}
	}
	none := true
	for _, file := range []struct{ name, path string }{
		{"credentialBundlePath", cert.CredentialBundlePath}, {"keyPath", cert.KeyPath}, {"certificateChainPath", cert.CertificateChainPath},
	} {
		if file.path != "" {
			none = false
			errs = append(errs, validateFreePath(at.Child(file.name), file.path)...)
		}
	}
	if none {
		errs = append(errs, field.Required(at, strings.Join([]string{"credentialBundlePath", "keyPath", "certificateChainPath"}, ", ")+": one or more"))
	}
	return errs
}
