package certificatesigningrequest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"

	"portal/internal/apiserver/registry/registrytest"
	"portal/internal/identity"
)

var clientUsages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}

// pkcs10 is a request for a name in groups, in PEM.
func pkcs10(t *testing.T, name string, groups ...string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: groups}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

func asked(t *testing.T, change ...func(*signingRequest)) *signingRequest {
	t.Helper()
	r := &signingRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pkcs10(t, "ann", "devs"), SignerName: certificatesv1.KubeAPIServerClientSignerName, Usages: clientUsages,
		},
	}
	for _, f := range change {
		f(r)
	}
	return r
}

func TestCreate(t *testing.T) {
	rules := registrytest.For(t, New(), certificatesv1.AddToScheme)
	for _, c := range []struct {
		name   string
		change func(*signingRequest)
		want   []string
	}{
		{"fine", func(*signingRequest) {}, nil},
		{"a name of its own kind", func(r *signingRequest) { r.Name = "Any_Name:1" }, nil},
		{"nothing", func(r *signingRequest) { r.Spec = certificatesv1.CertificateSigningRequestSpec{} },
			[]string{"spec.request FieldValueInvalid", "spec.signerName FieldValueRequired", "spec.usages FieldValueRequired"}},
		{"no PEM", func(r *signingRequest) { r.Spec.Request = []byte("x") }, []string{"spec.request FieldValueInvalid"}},
		{"a certificate's PEM", func(r *signingRequest) {
			r.Spec.Request = []byte(strings.ReplaceAll(string(r.Spec.Request), "CERTIFICATE REQUEST", "CERTIFICATE"))
		}, []string{"spec.request FieldValueInvalid"}},
		{"a usage that is none", func(r *signingRequest) { r.Spec.Usages = []certificatesv1.KeyUsage{"client auth", "fun"} },
			[]string{"spec.usages[1] FieldValueNotSupported"}},
		{"a usage twice", func(r *signingRequest) { r.Spec.Usages = append(slices.Clone(clientUsages), clientUsages[0]) },
			[]string{"spec.usages[2] FieldValueDuplicate"}},
		{"the legacy signer", func(r *signingRequest) { r.Spec.SignerName = legacySigner }, []string{"spec.signerName FieldValueInvalid"}},
		{"a signer without a domain", func(r *signingRequest) { r.Spec.SignerName = "mine" }, []string{"spec.signerName FieldValueInvalid"}},
		{"a signer in a domain of one label", func(r *signingRequest) { r.Spec.SignerName = "com/mine" }, []string{"spec.signerName FieldValueInvalid"}},
		{"a signer in capitals", func(r *signingRequest) { r.Spec.SignerName = "example.com/Mine" }, []string{"spec.signerName FieldValueInvalid"}},
		{"another signer", func(r *signingRequest) { r.Spec.SignerName = "example.com/my.signer" }, nil},
		{"a short life", func(r *signingRequest) { r.Spec.ExpirationSeconds = new(int32(599)) }, []string{"spec.expirationSeconds FieldValueInvalid"}},
		{"the shortest life", func(r *signingRequest) { r.Spec.ExpirationSeconds = new(int32(600)) }, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := rules.Create(t, asked(t, c.change)); !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

// A signature by another key shows that the requestor does not have the key that the certificate would be for.
func TestForgedSignature(t *testing.T) {
	r := asked(t)
	block, _ := pem.Decode(r.Spec.Request)
	block.Bytes[len(block.Bytes)-1] ^= 1
	r.Spec.Request = pem.EncodeToMemory(block)
	if got := registrytest.For(t, New(), certificatesv1.AddToScheme).Create(t, r); !slices.Equal(got, []string{"spec.request FieldValueInvalid"}) {
		t.Errorf("refused for %q", got)
	}
}

// Who asks is whoever sent the request, not whom it names; and nothing is approved at the start.
func TestRequestor(t *testing.T) {
	ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: "ann", UID: "1", Groups: []string{"devs"}, Extra: map[string][]string{"k": {"v"}}})
	r := asked(t, func(r *signingRequest) {
		r.Spec.Username, r.Spec.Groups, r.Spec.UID = "root", []string{user.SystemPrivilegedGroup}, "0"
		r.Spec.Extra = map[string]certificatesv1.ExtraValue{"forged": {"x"}}
		r.Status.Conditions = []condition{{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue}}
		r.Status.Certificate = []byte("x")
	})
	prepareCreate(ctx, r)
	s := r.Spec
	if s.Username != "ann" || s.UID != "1" || !slices.Equal(s.Groups, []string{"devs"}) || len(s.Extra) != 1 || s.Extra["k"][0] != "v" {
		t.Errorf("asked by %q %q %q %v", s.Username, s.UID, s.Groups, s.Extra)
	}
	if len(r.Status.Conditions)+len(r.Status.Certificate) > 0 {
		t.Errorf("begins as %v", r.Status)
	}
	prepareCreate(context.Background(), r)
	if r.Spec.Username != "" || r.Spec.Groups != nil {
		t.Errorf("nobody asked, but %q %q", r.Spec.Username, r.Spec.Groups)
	}
}

// The main resource changes metadata only; the subresources change their part of the status, once.
func TestUpdates(t *testing.T) {
	yes := corev1.ConditionTrue
	approved := condition{Type: certificatesv1.CertificateApproved, Status: yes}
	denied := condition{Type: certificatesv1.CertificateDenied, Status: yes}
	failed := condition{Type: certificatesv1.CertificateFailed, Status: yes}
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: selfSigned(t)})
	type status = certificatesv1.CertificateSigningRequestStatus
	for _, c := range []struct {
		name     string
		may      part
		was, now status
		want     []string
	}{
		{"approve", part{approval: true}, status{}, status{Conditions: []condition{approved}}, nil},
		{"approve through status", part{certificate: true}, status{}, status{Conditions: []condition{approved}}, []string{"status.conditions FieldValueForbidden"}},
		{"approve and deny", part{approval: true}, status{}, status{Conditions: []condition{approved, denied}}, []string{"status.conditions FieldValueInvalid"}},
		{"deny what was approved", part{approval: true}, status{Conditions: []condition{approved}}, status{Conditions: []condition{approved, denied}},
			[]string{"status.conditions FieldValueInvalid"}},
		{"take back", part{approval: true}, status{Conditions: []condition{approved}}, status{}, []string{"status.conditions FieldValueForbidden"}},
		{"take a failure back", part{certificate: true}, status{Conditions: []condition{failed}}, status{}, []string{"status.conditions FieldValueForbidden"}},
		{"approve a little", part{approval: true}, status{}, status{Conditions: []condition{{Type: certificatesv1.CertificateApproved, Status: "False"}}},
			[]string{"status.conditions[0].status FieldValueNotSupported"}},
		{"a condition without anything", part{approval: true}, status{}, status{Conditions: []condition{{}}},
			[]string{"status.conditions[0].status FieldValueRequired", "status.conditions[0].type FieldValueRequired"}},
		{"a condition twice", part{certificate: true}, status{}, status{Conditions: []condition{failed, failed}}, []string{"status.conditions[1].type FieldValueDuplicate"}},
		{"another condition", part{certificate: true}, status{}, status{Conditions: []condition{{Type: "x", Status: "Unknown"}}}, nil},
		{"issue", part{certificate: true}, status{Conditions: []condition{approved}}, status{Conditions: []condition{approved}, Certificate: cert}, nil},
		{"issue through approval", part{approval: true}, status{}, status{Certificate: cert}, []string{"status.certificate FieldValueForbidden"}},
		{"issue again", part{certificate: true}, status{Certificate: cert}, status{Certificate: append(cert, cert...)}, []string{"status.certificate FieldValueForbidden"}},
		{"issue nonsense", part{certificate: true}, status{}, status{Certificate: []byte("x")}, []string{"status.certificate FieldValueInvalid"}},
		{"issue a key", part{certificate: true}, status{}, status{Certificate: pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY"})}, []string{"status.certificate FieldValueInvalid"}},
		{"keep what was wrong", part{certificate: true}, status{Conditions: []condition{approved, denied}},
			status{Conditions: []condition{approved, denied, failed}}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			version := func(r *signingRequest) { r.ResourceVersion = "1" }
			old := asked(t, version, func(r *signingRequest) { r.Status = c.was })
			r := old.DeepCopy()
			r.Status = c.now
			var got []string
			for _, err := range validateUpdate(r, old, c.may) {
				got = append(got, err.Field+" "+string(err.Type))
			}
			slices.Sort(got)
			if !slices.Equal(got, c.want) {
				t.Errorf("refused for %q, want %q", got, c.want)
			}
		})
	}
}

func selfSigned(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{}, &x509.Certificate{}, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

// What an approver decided stays as it was when the signer writes, times included, and times are filled in.
func TestStatusKeepsDecisions(t *testing.T) {
	then := metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))
	old := asked(t, func(r *signingRequest) {
		r.Status.Conditions = []condition{{Type: certificatesv1.CertificateApproved, Status: "True", Reason: "Good", LastUpdateTime: then, LastTransitionTime: then}}
	})
	r := old.DeepCopy()
	r.Spec.SignerName = "example.com/other"
	r.Status.Conditions[0].Reason = "Bad"
	r.Status.Conditions = append(r.Status.Conditions, condition{Type: "New", Status: "True"})
	prepareStatus(t.Context(), r, old)
	if r.Spec.SignerName != old.Spec.SignerName || r.Status.Conditions[0] != old.Status.Conditions[0] {
		t.Errorf("changed to %v %v", r.Spec.SignerName, r.Status.Conditions[0])
	}
	if added := r.Status.Conditions[1]; added.LastUpdateTime.IsZero() || added.LastTransitionTime.IsZero() {
		t.Errorf("no times in %v", added)
	}
}

func TestColumns(t *testing.T) {
	rules := registrytest.For(t, New(), certificatesv1.AddToScheme)
	r := asked(t, func(r *signingRequest) { r.Spec.Username = "ann" })
	if row := rules.Row(t, r); row["Condition"] != "Pending" || row["Requestor"] != "ann" || row["RequestedDuration"] != "<none>" ||
		row["SignerName"] != certificatesv1.KubeAPIServerClientSignerName {
		t.Errorf("row is %v", row)
	}
	r.Spec.ExpirationSeconds = new(int32(3600))
	r.Status = certificatesv1.CertificateSigningRequestStatus{Conditions: []condition{{Type: certificatesv1.CertificateApproved}}, Certificate: []byte("x")}
	if row := rules.Row(t, r); row["Condition"] != "Approved,Issued" || row["RequestedDuration"] != "60m" {
		t.Errorf("row is %v", row)
	}
	r.Status = certificatesv1.CertificateSigningRequestStatus{Conditions: []condition{{Type: certificatesv1.CertificateDenied}, {Type: certificatesv1.CertificateFailed}}}
	if row := rules.Row(t, r); row["Condition"] != "Denied,Failed" {
		t.Errorf("row is %v", row)
	}
}

// signers are what everybody may do for which signer.
type signers map[string]string

func (s signers) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetResource() == "signers" && a.GetAPIGroup() == certificatesv1.GroupName && s[a.GetName()] == a.GetVerb() {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func TestGuard(t *testing.T) {
	g := NewGuard(signers{"example.com/a": "approve", "example.com/s": "sign", "example.org/*": "approve"})
	signer := func(name string) *signingRequest {
		return asked(t, func(r *signingRequest) { r.Spec.SignerName = name })
	}
	decide := func(r *signingRequest) *signingRequest {
		r = r.DeepCopy()
		r.Status.Conditions = []condition{{Type: "x", Status: "True"}}
		return r
	}
	for _, c := range []struct {
		name, subresource string
		op                admission.Operation
		obj, old          *signingRequest
		allowed           bool
	}{
		{"ask", "", admission.Create, signer("example.com/a"), nil, true},
		{"ask as a master", "", admission.Create, asked(t, func(r *signingRequest) { r.Spec.Request = pkcs10(t, "eve", "devs", user.SystemPrivilegedGroup) }), nil, false},
		{"ask as the front proxy", "", admission.Create, asked(t, func(r *signingRequest) { r.Spec.Request = pkcs10(t, identity.FrontProxy) }), nil, false},
		{"ask another signer as a master", "", admission.Create, asked(t, func(r *signingRequest) {
			r.Spec.Request, r.Spec.SignerName = pkcs10(t, "eve", user.SystemPrivilegedGroup), "example.com/a"
		}), nil, true},
		{"approve", "approval", admission.Update, decide(signer("example.com/a")), signer("example.com/a"), true},
		{"approve in a domain", "approval", admission.Update, decide(signer("example.org/any")), signer("example.org/any"), true},
		{"approve for a signer", "approval", admission.Update, decide(signer("example.com/s")), signer("example.com/s"), false},
		{"approve with another signer's name", "approval", admission.Update, signer("example.com/a"), signer("example.com/s"), false},
		{"sign", "status", admission.Update, decide(signer("example.com/s")), signer("example.com/s"), true},
		{"sign as an approver", "status", admission.Update, decide(signer("example.com/a")), signer("example.com/a"), false},
		{"write the same status", "status", admission.Update, signer("example.com/a"), signer("example.com/a"), true},
		{"label", "", admission.Update, signer("example.com/x"), signer("example.com/x"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := admission.NewAttributesRecord(c.obj, c.old, certificatesv1.SchemeGroupVersion.WithKind("CertificateSigningRequest"), "", "r",
				certificatesv1.SchemeGroupVersion.WithResource("certificatesigningrequests"), c.subresource, c.op, nil, false, &user.DefaultInfo{Name: "ann"})
			if err := g.Validate(t.Context(), a, nil); (err == nil) != c.allowed {
				t.Errorf("%v", err)
			}
		})
	}
}
