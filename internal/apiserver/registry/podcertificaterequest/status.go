package podcertificaterequest

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/mail"
	"slices"
	"strings"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

var (
	atStatus     = field.NewPath("status")
	atConditions = atStatus.Child("conditions")
	atChain      = atStatus.Child("certificateChain")
	atNotBefore  = atStatus.Child("notBefore")
	atNotAfter   = atStatus.Child("notAfter")
	atRefresh    = atStatus.Child("beginRefreshAt")

	// answers are the conditions with which a signer answers.
	answers = []string{
		certificatesv1.PodCertificateRequestConditionTypeIssued, certificatesv1.PodCertificateRequestConditionTypeDenied,
		certificatesv1.PodCertificateRequestConditionTypeFailed,
	}
)

const (
	skew     = 5 * time.Minute  // between a signer's clock and this server's
	margin   = 10 * time.Minute // between a certificate's ends and its renewal
	shortest = time.Hour        // a certificate is valid at least this long
)

// answered is how a signer answered, or "".
func answered(r *podRequest) string {
	for _, c := range r.Status.Conditions {
		if slices.Contains(answers, c.Type) && c.Status == metav1.ConditionTrue {
			return c.Type
		}
	}
	return ""
}

// validateStatus judges an answer. A request is answered once; nothing else is written into the status.
func validateStatus(r, old *podRequest, now time.Time) field.ErrorList {
	if errs := rules.MetaUpdate(r, old); len(errs) > 0 {
		return errs
	}
	if errs := validateConditions(r.Status.Conditions); len(errs) > 0 {
		return errs
	}
	refuse := func(why string) field.ErrorList { return field.ErrorList{field.Invalid(atStatus, "<status>", why)} }
	same := equality.Semantic.DeepEqual(r.Status, old.Status)
	switch answer := answered(r); {
	case same:
		return nil
	case answered(old) != "":
		return refuse("cannot be changed: the request has been answered")
	case answer == "":
		return refuse("cannot be changed without a condition Issued, Denied or Failed")
	case answer == certificatesv1.PodCertificateRequestConditionTypeIssued:
		return validateIssued(r, now)
	case !equality.Semantic.DeepEqual(r.Status, certificatesv1.PodCertificateRequestStatus{Conditions: r.Status.Conditions}):
		return refuse("must have nothing but conditions where the request is " + strings.ToLower(answer))
	}
	return nil
}

func validateConditions(conditions []metav1.Condition) (errs field.ErrorList) {
	found := 0
	for i, c := range conditions {
		at := atConditions.Index(i)
		if !slices.Contains(answers, c.Type) {
			errs = append(errs, field.NotSupported(at.Child("type"), c.Type, answers))
			continue
		}
		if found++; found > 1 {
			errs = append(errs, field.Invalid(at.Child("type"), c.Type, "a request has one answer: Issued, Denied or Failed"))
		}
		if c.Status != metav1.ConditionTrue {
			errs = append(errs, field.NotSupported(at.Child("status"), c.Status, []metav1.ConditionStatus{metav1.ConditionTrue}))
		}
	}
	return append(errs, metavalidation.ValidateConditions(conditions, atConditions)...)
}

// validateIssued wants a certificate for the key that was asked for, and times that are the certificate's.
func validateIssued(r *podRequest, now time.Time) field.ErrorList {
	if len(r.Status.CertificateChain) > largestChain {
		return field.ErrorList{field.TooLong(atChain, "", largestChain)}
	}
	leaf, err := readChain([]byte(r.Status.CertificateChain))
	if err != nil {
		return field.ErrorList{field.Invalid(atChain, "<certificates>", err.Error())}
	}
	errs := validateNames(leaf)
	wanted, err := requestedKey(&r.Spec)
	if err != nil {
		return append(errs, field.Invalid(atSpec, "<key>", err.Error()))
	}
	if key, ok := wanted.(interface{ Equal(crypto.PublicKey) bool }); !ok || !key.Equal(leaf.PublicKey) {
		errs = append(errs, field.Invalid(atChain, "<certificates>", "the first certificate must be for the key that was asked for"))
	}
	if len(errs) > 0 {
		return errs
	}
	return validateTimes(r, leaf, now)
}

// readChain reads certificates, of which the first is the Pod's.
func readChain(data []byte) (leaf *x509.Certificate, err error) {
	for {
		var block *pem.Block
		if block, data = pem.Decode(data); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("holds PEM of the type %q", block.Type)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		if leaf == nil {
			leaf = cert
		}
	}
	if leaf == nil {
		return nil, errors.New("must be one PEM certificate or more")
	}
	return leaf, nil
}

// validateNames refuses names that programs read in different ways.
func validateNames(leaf *x509.Certificate) (errs field.ErrorList) {
	for _, name := range leaf.DNSNames {
		if name == "" || strings.Contains(name, "..") || strings.HasPrefix(name, ".") || strings.HasSuffix(name, ".") {
			errs = append(errs, field.Invalid(atChain, name, "is no DNS name: each label needs a character"))
		}
	}
	for _, address := range leaf.EmailAddresses {
		if _, err := mail.ParseAddress(address); err != nil {
			errs = append(errs, field.Invalid(atChain, address, "is no e-mail address"))
		}
	}
	return errs
}

func validateTimes(r *podRequest, leaf *x509.Certificate, now time.Time) (errs field.ErrorList) {
	status := &r.Status
	for _, moment := range []struct {
		at   *field.Path
		when *metav1.Time
	}{{atNotBefore, status.NotBefore}, {atNotAfter, status.NotAfter}, {atRefresh, status.BeginRefreshAt}} {
		if moment.when == nil {
			errs = append(errs, field.Required(moment.at, "belongs to an issued certificate"))
		}
	}
	if len(errs) > 0 {
		return errs
	}
	life, longest := leaf.NotAfter.Sub(leaf.NotBefore), time.Duration(*r.Spec.MaxExpirationSeconds)*time.Second
	begin, end, refresh := status.NotBefore.Time, status.NotAfter.Time, status.BeginRefreshAt.Time
	one := func(at *field.Path, value any, why string) field.ErrorList {
		return field.ErrorList{field.Invalid(at, value, why)}
	}
	switch {
	case !begin.Equal(leaf.NotBefore):
		return one(atNotBefore, begin, "must be the certificate's: "+leaf.NotBefore.String())
	case now.Sub(begin).Abs() >= skew:
		return one(atNotBefore, begin, fmt.Sprintf("must be within %s of this server's time", skew))
	case !end.Equal(leaf.NotAfter):
		return one(atNotAfter, end, "must be the certificate's: "+leaf.NotAfter.String())
	case life < shortest:
		return one(atChain, life.String(), fmt.Sprintf("the certificate must be valid for at least %s", shortest))
	case life > longest:
		return one(atChain, life.String(), fmt.Sprintf("the certificate must be valid for at most spec.maxExpirationSeconds, %s", longest))
	case refresh.Before(begin.Add(margin)):
		return one(atRefresh, refresh, fmt.Sprintf("must be %s or more after notBefore", margin))
	case refresh.After(end.Add(-margin)):
		return one(atRefresh, refresh, fmt.Sprintf("must be %s or more before notAfter", margin))
	}
	return nil
}
