package podcertificaterequest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"fmt"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/signer"
)

// The largest sizes, in bytes.
const (
	largestUID   = 128
	largestKey   = 10 << 10
	largestChain = 100 << 10
)

var (
	atSpec = field.NewPath("spec")
	atStub = atSpec.Child("stubPKCS10Request")
)

// validate judges a new request.
func validate(r *podRequest) field.ErrorList {
	spec := &r.Spec
	errs := rules.Finalizers(r)
	errs = append(errs, signer.Name(atSpec.Child("signerName"), spec.SignerName)...)
	errs = append(errs, rules.UserAnnotations(atSpec.Child("unverifiedUserAnnotations"), spec.UnverifiedUserAnnotations)...)
	errs = append(errs, name(atSpec.Child("podName"), spec.PodName)...)
	errs = append(errs, uid(atSpec.Child("podUID"), spec.PodUID)...)
	errs = append(errs, name(atSpec.Child("serviceAccountName"), spec.ServiceAccountName)...)
	errs = append(errs, uid(atSpec.Child("serviceAccountUID"), spec.ServiceAccountUID)...)
	errs = append(errs, name(atSpec.Child("nodeName"), string(spec.NodeName))...)
	errs = append(errs, uid(atSpec.Child("nodeUID"), spec.NodeUID)...)

	at, longest := atSpec.Child("maxExpirationSeconds"), signer.Longest(spec.SignerName)
	if life := spec.MaxExpirationSeconds; life == nil {
		return append(errs, field.Required(at, "the longest time for which the certificate may be valid"))
	} else if *life < signer.ShortestLife || *life > longest {
		errs = append(errs, field.Invalid(at, *life, fmt.Sprintf("must be from %d to %d for this signer", signer.ShortestLife, longest)))
	}
	return append(errs, validateStub(spec.StubPKCS10Request)...)
}

func name(at *field.Path, value string) field.ErrorList {
	return rules.Each(at, value, apivalidation.NameIsDNSSubdomain(value, false))
}

func uid(at *field.Path, value types.UID) field.ErrorList {
	switch {
	case value == "":
		return field.ErrorList{field.Invalid(at, value, "must not be empty")}
	case len(value) > largestUID:
		return field.ErrorList{field.TooLong(at, "", largestUID)}
	}
	return nil
}

// validateStub wants a certificate request that is signed with the key: a proof that the node has it. What else it says, nobody reads.
func validateStub(data []byte) field.ErrorList {
	if len(data) == 0 {
		return field.ErrorList{field.Required(atStub, "a certificate request in PKCS #10 with the key")}
	}
	if len(data) > largestKey {
		return field.ErrorList{field.TooLong(atStub, "", largestKey)}
	}
	stub, err := x509.ParseCertificateRequest(data)
	if err != nil {
		return field.ErrorList{field.Invalid(atStub, "<request>", "must be a certificate request in PKCS #10, DER-encoded")}
	}
	if problem := keyProblem(stub.PublicKey); problem != "" {
		return field.ErrorList{field.Invalid(atStub, "<request>", problem)}
	}
	if err := stub.CheckSignature(); err != nil {
		return field.ErrorList{field.Invalid(atStub, "<request>", "the signature is wrong: "+err.Error())}
	}
	return nil
}

// keyProblem says why no certificate is issued for a key.
func keyProblem(public crypto.PublicKey) string {
	switch key := public.(type) {
	case ed25519.PublicKey:
		return ""
	case *ecdsa.PublicKey:
		if !slices.Contains([]elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()}, key.Curve) {
			return "an ECDSA key must be on the curve P-256, P-384 or P-521"
		}
		return ""
	case *rsa.PublicKey:
		if bits := key.Size() * 8; bits != 3072 && bits != 4096 {
			return fmt.Sprintf("an RSA key must have 3072 or 4096 bits, and this has %d", bits)
		}
		return ""
	}
	return "the key must be Ed25519, ECDSA or RSA"
}

// requestedKey is the key that the certificate must be for.
func requestedKey(spec *certificatesv1.PodCertificateRequestSpec) (crypto.PublicKey, error) {
	stub, err := x509.ParseCertificateRequest(spec.StubPKCS10Request)
	if err != nil {
		return nil, err
	}
	return stub.PublicKey, nil
}
