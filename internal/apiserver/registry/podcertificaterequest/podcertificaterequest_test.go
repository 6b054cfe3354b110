package podcertificaterequest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"slices"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/registry/registrytest"
)

// signers lets only "signer" sign for example.com/signer.
type signers struct{}

func (signers) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() == "signer" && a.GetVerb() == "sign" && a.GetResource() == "signers" && a.GetName() == "example.com/signer" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

type keyed struct {
	key  *ecdsa.PrivateKey
	stub []byte
}

func newKey(t *testing.T, curve elliptic.Curve) keyed {
	t.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	stub, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		t.Fatal(err)
	}
	return keyed{key, stub}
}

func (k keyed) asked(change ...func(*certificatesv1.PodCertificateRequestSpec)) *podRequest {
	r := &podRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r", Namespace: "ns", ResourceVersion: "1"},
		Spec: certificatesv1.PodCertificateRequestSpec{
			SignerName: "example.com/signer", PodName: "p", PodUID: "pod-uid", ServiceAccountName: "sa", ServiceAccountUID: "sa-uid",
			NodeName: "n", NodeUID: "node-uid", MaxExpirationSeconds: new(int32(86400)), StubPKCS10Request: k.stub,
		},
	}
	for _, f := range change {
		f(&r.Spec)
	}
	return r
}

func TestCreate(t *testing.T) {
	k := newKey(t, elliptic.P256())
	rules := registrytest.For(t, New(signers{}, time.Now), certificatesv1.AddToScheme)
	type spec = certificatesv1.PodCertificateRequestSpec
	for name, c := range map[string]struct {
		change func(*spec)
		want   []string
	}{
		"fine":                  {func(*spec) {}, nil},
		"a strange signer":      {func(s *spec) { s.SignerName = "signer" }, []string{"spec.signerName FieldValueInvalid"}},
		"no pod":                {func(s *spec) { s.PodName = "" }, []string{"spec.podName FieldValueInvalid"}},
		"no uid":                {func(s *spec) { s.NodeUID = "" }, []string{"spec.nodeUID FieldValueInvalid"}},
		"no life":               {func(s *spec) { s.MaxExpirationSeconds = nil }, []string{"spec.maxExpirationSeconds FieldValueRequired"}},
		"too short a life":      {func(s *spec) { s.MaxExpirationSeconds = new(int32(3599)) }, []string{"spec.maxExpirationSeconds FieldValueInvalid"}},
		"a long life":           {func(s *spec) { s.MaxExpirationSeconds = new(int32(91 * 86400)) }, nil},
		"too long a life":       {func(s *spec) { s.MaxExpirationSeconds = new(int32(91*86400 + 1)) }, []string{"spec.maxExpirationSeconds FieldValueInvalid"}},
		"too long for this one": {func(s *spec) { s.SignerName, s.MaxExpirationSeconds = "kubernetes.io/x", new(int32(86401)) }, []string{"spec.maxExpirationSeconds FieldValueInvalid"}},
		"no key":                {func(s *spec) { s.StubPKCS10Request = nil }, []string{"spec.stubPKCS10Request FieldValueRequired"}},
		"a broken request":      {func(s *spec) { s.StubPKCS10Request = []byte("x") }, []string{"spec.stubPKCS10Request FieldValueInvalid"}},
		"a forged request": {func(s *spec) {
			s.StubPKCS10Request = slices.Clone(k.stub)
			s.StubPKCS10Request[len(s.StubPKCS10Request)-1] ^= 1
		}, []string{"spec.stubPKCS10Request FieldValueInvalid"}},
		"a weak key": {func(s *spec) { s.StubPKCS10Request = newKey(t, elliptic.P224()).stub }, []string{"spec.stubPKCS10Request FieldValueInvalid"}},
		"an annotation without a domain": {func(s *spec) { s.UnverifiedUserAnnotations = map[string]string{"path": "x"} },
			[]string{"spec.unverifiedUserAnnotations FieldValueInvalid"}},
	} {
		t.Run(name, func(t *testing.T) {
			if got := rules.Create(t, k.asked(c.change)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
	if got := rules.Update(t, k.asked(func(s *spec) { s.PodName = "q" }), k.asked()); !slices.Equal(got, []string{"spec FieldValueInvalid"}) {
		t.Errorf("a changed spec is refused for %q", got)
	}
}

// issued is a request with a certificate that a signer made for a key.
func (k keyed) issued(t *testing.T, begin time.Time, life time.Duration, key *ecdsa.PrivateKey) *podRequest {
	t.Helper()
	begin = begin.Truncate(time.Second)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: begin, NotAfter: begin.Add(life)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	r := k.asked()
	at := func(when time.Time) *metav1.Time { return new(metav1.NewTime(when)) }
	r.Status = certificatesv1.PodCertificateRequestStatus{
		Conditions:       []metav1.Condition{{Type: "Issued", Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.Now()}},
		CertificateChain: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		NotBefore:        at(begin), NotAfter: at(begin.Add(life)), BeginRefreshAt: at(begin.Add(20 * time.Minute)),
	}
	return r
}

func TestAnswers(t *testing.T) {
	now := time.Now()
	k, stranger := newKey(t, elliptic.P256()), newKey(t, elliptic.P256())
	fine := k.issued(t, now, time.Hour, k.key)
	denied := func(r *podRequest) *podRequest {
		out := k.asked()
		out.Status = r.Status
		out.Status.Conditions = []metav1.Condition{{Type: "Denied", Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.Now()}}
		return out
	}
	changed := func(change func(*podRequest)) *podRequest {
		out := fine.DeepCopy()
		change(out)
		return out
	}
	for name, c := range map[string]struct {
		obj, old *podRequest
		want     string
	}{
		"issued":                  {fine, k.asked(), ""},
		"denied":                  {denied(&podRequest{}), k.asked(), ""},
		"denied with content":     {denied(fine), k.asked(), "status"},
		"for another key":         {k.issued(t, now, time.Hour, stranger.key), k.asked(), "status.certificateChain"},
		"for too short":           {k.issued(t, now, 50*time.Minute, k.key), k.asked(), "status.certificateChain"},
		"for too long":            {k.issued(t, now, 25*time.Hour, k.key), k.asked(), "status.certificateChain"},
		"from yesterday on":       {k.issued(t, now.Add(-6*time.Minute), time.Hour, k.key), k.asked(), "status.notBefore"},
		"refreshed too early":     {changed(func(r *podRequest) { r.Status.BeginRefreshAt.Time = now }), k.asked(), "status.beginRefreshAt"},
		"refreshed too late":      {changed(func(r *podRequest) { r.Status.BeginRefreshAt.Time = now.Add(time.Hour) }), k.asked(), "status.beginRefreshAt"},
		"another end":             {changed(func(r *podRequest) { r.Status.NotAfter.Time = now.Add(2 * time.Hour) }), k.asked(), "status.notAfter"},
		"without times":           {changed(func(r *podRequest) { r.Status.NotBefore = nil }), k.asked(), "status.notBefore"},
		"without a certificate":   {changed(func(r *podRequest) { r.Status.CertificateChain = "" }), k.asked(), "status.certificateChain"},
		"half":                    {changed(func(r *podRequest) { r.Status.Conditions = nil }), k.asked(), "status"},
		"an unknown condition":    {changed(func(r *podRequest) { r.Status.Conditions[0].Type = "Maybe" }), k.asked(), "status.conditions[0].type"},
		"issued again":            {denied(&podRequest{}), fine, "status"},
		"written again unchanged": {fine.DeepCopy(), fine, ""},
	} {
		t.Run(name, func(t *testing.T) {
			errs := validateStatus(c.obj, c.old, now)
			if got := fieldsOf(errs); c.want == "" && len(got) > 0 || c.want != "" && !slices.Contains(got, c.want) {
				t.Errorf("refused for %v, want %q", errs, c.want)
			}
		})
	}
}

func fieldsOf(errs field.ErrorList) (out []string) {
	for _, err := range errs {
		out = append(out, err.Field)
	}
	return out
}

func TestOnlySignersAnswer(t *testing.T) {
	now := time.Now()
	k := newKey(t, elliptic.P256())
	judge := New(signers{}, func() time.Time { return now }).Status.Validate
	for who, allowed := range map[string]bool{"signer": true, "node": false} {
		ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: who})
		if errs := judge(ctx, k.issued(t, now, time.Hour, k.key), k.asked()); (len(errs) == 0) != allowed {
			t.Errorf("%s: %v", who, errs)
		}
	}
}
