package certificatesigningrequest

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
	"portal/internal/apiserver/registry/signer"
	"portal/internal/csr"
)

// legacySigner signed whatever it was asked for, in API versions that are not served.
const legacySigner = "kubernetes.io/legacy-unknown"

var (
	// approvals are the conditions that only an approver may write; final ones are never taken back.
	approvals = []certificatesv1.RequestConditionType{certificatesv1.CertificateApproved, certificatesv1.CertificateDenied}
	final     = append(slices.Clone(approvals), certificatesv1.CertificateFailed)

	// opposites of a decision exclude it.
	opposites = map[certificatesv1.RequestConditionType]certificatesv1.RequestConditionType{
		certificatesv1.CertificateApproved: certificatesv1.CertificateDenied,
		certificatesv1.CertificateDenied:   certificatesv1.CertificateApproved,
	}

	atSpec       = field.NewPath("spec")
	atConditions = field.NewPath("status", "conditions")
)

func validateCreate(_ context.Context, r *signingRequest) field.ErrorList {
	errs := rules.Finalizers(r)
	if _, err := csr.Parse(r.Spec.Request); err != nil {
		errs = append(errs, field.Invalid(atSpec.Child("request"), r.Spec.Request, err.Error()))
	}
	errs = append(errs, validateUsages(r.Spec.Usages)...)
	errs = append(errs, validateSigner(r.Spec.SignerName)...)
	if life := r.Spec.ExpirationSeconds; life != nil && *life < 600 {
		errs = append(errs, field.Invalid(atSpec.Child("expirationSeconds"), *life, "must be at least 600"))
	}
	return errs
}

func validateUsages(usages []certificatesv1.KeyUsage) (errs field.ErrorList) {
	at := atSpec.Child("usages")
	if len(usages) == 0 {
		return field.ErrorList{field.Required(at, "what the certificate is for, such as \"client auth\"")}
	}
	for i, u := range usages {
		if !csr.KnownUsage(u) {
			errs = append(errs, field.NotSupported(at.Index(i), u, csr.KnownUsages()))
		}
	}
	for i, u := range usages {
		if slices.Contains(usages[:i], u) {
			errs = append(errs, field.Duplicate(at.Index(i), u))
		}
	}
	return errs
}

// validateSigner wants the name of a signer that there can be.
func validateSigner(name string) field.ErrorList {
	at := atSpec.Child("signerName")
	if name == legacySigner {
		return field.ErrorList{field.Invalid(at, name, "does not exist in this version of the API")}
	}
	return signer.Name(at, name)
}

// part is what an update may write.
type part struct{ approval, certificate bool }

// validateUpdate validates what an update changed. The spec cannot change.
func validateUpdate(r, old *signingRequest, may part) field.ErrorList {
	errs := rules.MetaUpdate(r, old)
	if !equality.Semantic.DeepEqual(r.Status.Conditions, old.Status.Conditions) {
		errs = append(errs, validateConditions(r, old)...)
		errs = append(errs, validateFinal(r, old, may)...)
	}
	if !bytes.Equal(r.Status.Certificate, old.Status.Certificate) {
		errs = append(errs, validateCertificate(r, old, may)...)
	}
	return errs
}

// validateConditions validates the conditions by themselves. What was wrong before may stay wrong: it must be possible to
// write such a request.
func validateConditions(r, old *signingRequest) (errs field.ErrorList) {
	was := flawsOf(old.Status.Conditions)
	seen := map[certificatesv1.RequestConditionType]bool{}
	for i, c := range r.Status.Conditions {
		at := atConditions.Index(i)
		if c.Type == "" && !was.untyped {
			errs = append(errs, field.Required(at.Child("type"), "what the condition is about"))
		}
		allowed := []corev1.ConditionStatus{corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown}
		if slices.Contains(final, c.Type) {
			allowed = []corev1.ConditionStatus{corev1.ConditionTrue}
		}
		switch {
		case c.Status == "":
			errs = append(errs, field.Required(at.Child("status"), fmt.Sprintf("one of %v", allowed)))
		case !slices.Contains(allowed, c.Status):
			errs = append(errs, field.NotSupported(at.Child("status"), c.Status, allowed))
		}
		if opposite := opposites[c.Type]; opposite != "" && seen[opposite] && !was.both {
			errs = append(errs, field.Invalid(atConditions, c.Type, "a request is either approved or denied"))
		}
		if seen[c.Type] && !was.repeated {
			errs = append(errs, field.Duplicate(at.Child("type"), c.Type))
		}
		seen[c.Type] = true
	}
	return errs
}

// flaws are what is wrong with conditions that another version stored.
type flaws struct{ untyped, both, repeated bool }

func flawsOf(conditions []condition) (f flaws) {
	seen := map[certificatesv1.RequestConditionType]bool{}
	for _, c := range conditions {
		f.untyped = f.untyped || c.Type == ""
		f.repeated = f.repeated || seen[c.Type]
		seen[c.Type] = true
	}
	f.both = seen[certificatesv1.CertificateApproved] && seen[certificatesv1.CertificateDenied]
	return f
}

// validateFinal keeps decisions: they are not taken back, and only an approver makes them.
func validateFinal(r, old *signingRequest, may part) (errs field.ErrorList) {
	for _, kind := range final {
		if len(find(r, kind)) < len(find(old, kind)) {
			errs = append(errs, field.Forbidden(atConditions, fmt.Sprintf("%s cannot be taken back", kind)))
		}
	}
	if may.approval {
		return errs
	}
	for _, kind := range approvals {
		was, is := find(old, kind), find(r, kind)
		if len(is) >= len(was) && !equality.Semantic.DeepEqual(was, is) {
			errs = append(errs, field.Forbidden(atConditions, fmt.Sprintf("%s is written through the subresource approval", kind)))
		}
	}
	return errs
}

func validateCertificate(r, old *signingRequest, may part) (errs field.ErrorList) {
	at := field.NewPath("status", "certificate")
	switch {
	case !may.certificate:
		errs = append(errs, field.Forbidden(at, "is written through the subresource status"))
	case len(old.Status.Certificate) > 0:
		errs = append(errs, field.Forbidden(at, "cannot be changed: make another request"))
	}
	if err := parseChain(r.Status.Certificate); err != nil {
		errs = append(errs, field.Invalid(at, "<certificate data>", err.Error()))
	}
	return errs
}

// parseChain wants PEM certificates and nothing else; no data is none.
func parseChain(data []byte) error {
	for found := false; len(data) > 0; found = true {
		block, rest := pem.Decode(data)
		switch {
		case block == nil && found:
			return nil
		case block == nil:
			return errors.New("must be one PEM certificate or more")
		case block.Type != "CERTIFICATE":
			return fmt.Errorf("holds PEM of the type %q", block.Type)
		case len(block.Headers) > 0:
			return errors.New("PEM headers are not allowed")
		}
		if certs, err := x509.ParseCertificates(block.Bytes); err != nil {
			return err
		} else if len(certs) == 0 {
			return errors.New("holds PEM without a certificate")
		}
		data = rest
	}
	return nil
}
