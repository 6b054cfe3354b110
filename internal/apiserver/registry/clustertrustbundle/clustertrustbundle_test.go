package clustertrustbundle

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"portal/internal/apiserver/registry/registrytest"
)

// certificate is a self-signed one, in PEM.
func certificate(t *testing.T, authority bool) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "c"}, IsCA: authority, BasicConstraintsValid: true,
		NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func made(name, signer, trust string) *bundle {
	return &bundle{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.ClusterTrustBundleSpec{SignerName: signer, TrustBundle: trust}}
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), certificatesv1.AddToScheme)
	ca, other, leaf := certificate(t, true), certificate(t, true), certificate(t, false)
	badTrust, badName := []string{"spec.trustBundle FieldValueInvalid"}, []string{"metadata.name FieldValueInvalid"}
	for name, c := range map[string]struct {
		bundle *bundle
		want   []string
	}{
		"of no signer":        {made("roots", "", ca), nil},
		"of a signer":         {made("example.com:signer:roots", "example.com/signer", ca+"some text\n"+other), nil},
		"named as a signer's": {made("example.com:signer:roots", "", ca), badName},
		"named as another's":  {made("example.com:other:roots", "example.com/signer", ca), badName},
		"of a strange signer": {made("signer:roots", "signer", ca), []string{"spec.signerName FieldValueInvalid"}},
		"empty":               {made("roots", "", ""), badTrust},
		"no authority":        {made("roots", "", leaf), badTrust},
		"twice the same":      {made("roots", "", ca+other+ca), badTrust},
		"a key":               {made("roots", "", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), badTrust},
		"too large":           {made("roots", "", ca+string(make([]byte, largest))), []string{"spec.trustBundle FieldValueTooLong"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := rules.Create(t, c.bundle); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func TestUpdate(t *testing.T) {
	rules := registrytest.For(t, New(), certificatesv1.AddToScheme)
	ca, other := certificate(t, true), certificate(t, true)
	old := made("example.com:signer:roots", "example.com/signer", ca)
	if got := rules.Update(t, made(old.Name, old.Spec.SignerName, other), old); got != nil {
		t.Errorf("other certificates are refused for %q", got)
	}
	if got := rules.Update(t, made(old.Name, "example.com/other", ca), old); !slices.Contains(got, "spec.signerName FieldValueInvalid") {
		t.Errorf("another signer is refused for %q", got)
	}
	broken := made("roots", "", "stored by another version")
	if got := rules.Update(t, made("roots", "", broken.Spec.TrustBundle), broken); got != nil {
		t.Errorf("what was stored is judged again: %q", got)
	}
}

// attests lets only ann attest for one signer.
type attests struct{}

func (attests) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() == "ann" && a.GetVerb() == "attest" && a.GetResource() == "signers" && a.GetName() == "example.com/signer" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func TestOnlyAttestersWrite(t *testing.T) {
	guard := NewGuard(attests{})
	with, without := made("example.com:signer:roots", "example.com/signer", "x"), made("roots", "", "x")
	owned := with.DeepCopy()
	owned.OwnerReferences = []metav1.OwnerReference{{Name: "o"}}
	for name, c := range map[string]struct {
		who     string
		obj     *bundle
		old     *bundle
		allowed bool
	}{
		"an attester creates":        {"ann", with, nil, true},
		"another creates":            {"bob", with, nil, false},
		"another creates an own one": {"bob", without, nil, true},
		"another updates":            {"bob", made(with.Name, with.Spec.SignerName, "y"), with, false},
		"a collector changes owners": {"bob", owned, with, true},
	} {
		t.Run(name, func(t *testing.T) {
			op := admission.Create
			attributes := admission.NewAttributesRecord(c.obj, nil, certificatesv1.SchemeGroupVersion.WithKind("ClusterTrustBundle"), "", c.obj.Name,
				certificatesv1.SchemeGroupVersion.WithResource("clustertrustbundles"), "", op, nil, false, &user.DefaultInfo{Name: c.who})
			if c.old != nil {
				attributes = admission.NewAttributesRecord(c.obj, c.old, certificatesv1.SchemeGroupVersion.WithKind("ClusterTrustBundle"), "", c.obj.Name,
					certificatesv1.SchemeGroupVersion.WithResource("clustertrustbundles"), "", admission.Update, nil, false, &user.DefaultInfo{Name: c.who})
			}
			if err := guard.Validate(t.Context(), attributes, nil); (err == nil) != c.allowed {
				t.Errorf("%v", err)
			}
		})
	}
}
