package csr

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"slices"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"portal/internal/pki"
)

var usages = []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth}

func nodeRequest(t *testing.T, requestor, name string, change ...func(*signingRequest)) *signingRequest {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: name, Organization: []string{"system:nodes"}},
	}, key)
	if err != nil {
		t.Fatal(err)
	}
	r := &signingRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "r", CreationTimestamp: metav1.Now()},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), Username: requestor,
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName, Usages: usages,
		},
	}
	for _, f := range change {
		f(r)
	}
	return r
}

func approved(r *signingRequest) {
	r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: "True", LastUpdateTime: metav1.Now()}}
}

// api has one request, and allows those permissions to create.
func api(r *signingRequest, allowed ...string) *fake.Clientset {
	client := fake.NewClientset(r)
	client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		review := a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		review.Status.Allowed = review.Spec.User == r.Spec.Username && slices.Contains(allowed, review.Spec.ResourceAttributes.Subresource)
		return true, review, nil
	})
	return client
}

func deps(client *fake.Clientset) Deps {
	return Deps{Client: client, Requests: informers.NewSharedInformerFactory(client, 0).Certificates().V1().CertificateSigningRequests().Informer()}
}

func read(t *testing.T, client *fake.Clientset) *signingRequest {
	t.Helper()
	r, err := client.CertificatesV1().CertificateSigningRequests().Get(t.Context(), "r", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestApprove(t *testing.T) {
	for name, c := range map[string]struct {
		request  *signingRequest
		allowed  []string
		approved bool
	}{
		"a node renews":               {nodeRequest(t, "system:node:n1", "system:node:n1"), []string{"selfnodeclient"}, true},
		"a node asks for another":     {nodeRequest(t, "system:node:n1", "system:node:n2"), []string{"selfnodeclient"}, false},
		"a bootstrapper":              {nodeRequest(t, "boot", "system:node:n1"), []string{"nodeclient"}, true},
		"anybody":                     {nodeRequest(t, "ann", "system:node:n1"), nil, false},
		"a node without a permission": {nodeRequest(t, "system:node:n1", "system:node:n1"), nil, false},
		"no node's name":              {nodeRequest(t, "boot", "admin"), []string{"nodeclient", "selfnodeclient"}, false},
		"another signer": {nodeRequest(t, "boot", "system:node:n1", func(r *signingRequest) {
			r.Spec.SignerName = certificatesv1.KubeAPIServerClientSignerName
		}), []string{"nodeclient"}, false},
		"a serving certificate": {nodeRequest(t, "system:node:n1", "system:node:n1", func(r *signingRequest) {
			r.Spec.SignerName = certificatesv1.KubeletServingSignerName
		}), []string{"nodeclient", "selfnodeclient"}, false},
		"more usages": {nodeRequest(t, "boot", "system:node:n1", func(r *signingRequest) {
			r.Spec.Usages = append(slices.Clone(usages), certificatesv1.UsageServerAuth)
		}), []string{"nodeclient"}, false},
		"denied": {nodeRequest(t, "boot", "system:node:n1", func(r *signingRequest) {
			r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateDenied, Status: "True"}}
		}), []string{"nodeclient"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			client := api(c.request, c.allowed...)
			controller, err := NewApprover(deps(client))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := controller.approve(t.Context(), c.request); err != nil {
				t.Fatal(err)
			}
			if got, _, _ := decided(read(t, client)); got != c.approved {
				t.Errorf("approved %v", got)
			}
			if got, _, _ := decided(c.request); got {
				t.Error("the informer's object was changed")
			}
		})
	}
}

// TestApproveComponent: a node has the identities of its own machine's parts, and nobody a part's without the permission for it. What is
// not allowed is denied.
func TestApproveComponent(t *testing.T) {
	part := func(requestor, name, group string) *signingRequest {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: []string{group}}}, key)
		if err != nil {
			t.Fatal(err)
		}
		return nodeRequest(t, requestor, "", func(r *signingRequest) {
			r.Spec.SignerName, r.Spec.Request = "portal.dev/component-client", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
		})
	}
	const proxies, names = "system:portal:proxies", "system:portal:dns"
	for name, c := range map[string]struct {
		request  *signingRequest
		allowed  string
		approved bool
	}{
		"a node for its proxy":             {part("system:node:n1", "system:portal:proxy:n1", proxies), "machinecomponentclient", true},
		"a node for its DNS":               {part("system:node:n1", "system:portal:dns:n1", names), "machinecomponentclient", true},
		"a node for its load balancer":     {part("system:node:n1", "system:portal:lb:n1", "system:portal:lb"), "machinelbclient", true},
		"every node for a load balancer":   {part("system:node:n1", "system:portal:lb:n1", "system:portal:lb"), "machinecomponentclient", false},
		"a node for another's proxy":       {part("system:node:n1", "system:portal:proxy:n2", proxies), "machinecomponentclient", false},
		"a node without the permission":    {part("system:node:n1", "system:portal:proxy:n1", proxies), "nodeclient", false},
		"somebody else":                    {part("system:portal:dns:n1", "system:portal:proxy:n1", proxies), "machinecomponentclient", false},
		"a proxy renews":                   {part("system:portal:proxy:n1", "system:portal:proxy:n1", proxies), "selfcomponentclient", true},
		"a proxy for another":              {part("system:portal:proxy:n1", "system:portal:proxy:n2", proxies), "selfcomponentclient", false},
		"a token":                          {part("system:bootstrap:abcdef", "system:portal:proxy:n1", proxies), "proxyclient", true},
		"a token of another role":          {part("system:bootstrap:abcdef", "system:portal:dns:n1", names), "proxyclient", false},
		"a node for a proxy in its groups": {part("system:node:n1", "system:portal:proxy:n1", "system:masters"), "machinecomponentclient", false},
	} {
		t.Run(name, func(t *testing.T) {
			client := api(c.request, c.allowed)
			controller, err := NewApprover(deps(client))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := controller.approve(t.Context(), c.request); err != nil {
				t.Fatal(err)
			}
			if yes, no, _ := decided(read(t, client)); yes != c.approved || no == c.approved {
				t.Errorf("approved %v, denied %v", yes, no)
			}
		})
	}
}

// A request that nobody may have approved is looked at again, ever less often.
func TestApproveLater(t *testing.T) {
	for age, want := range map[time.Duration]time.Duration{0: time.Second, time.Minute: 30 * time.Second, 5 * time.Hour: 10 * time.Minute} {
		r := nodeRequest(t, "boot", "system:node:n1", func(r *signingRequest) { r.CreationTimestamp = metav1.NewTime(time.Now().Add(-age)) })
		controller, err := NewApprover(deps(api(r)))
		if err != nil {
			t.Fatal(err)
		}
		result, err := controller.approve(t.Context(), r)
		if err != nil || result.Again.Round(time.Second) != want {
			t.Errorf("a request of the age %s: again in %s, want %s (%v)", age, result.Again, want, err)
		}
	}
}

func TestSign(t *testing.T) {
	authority, err := pki.Open(t.TempDir(), pki.DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	sign := func(r *signingRequest) *signingRequest {
		t.Helper()
		client := api(r)
		controller, err := NewSigner(deps(client), authority, 24*time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := controller.sign(t.Context(), r, authority, 24*time.Hour); err != nil {
			t.Fatal(err)
		}
		return read(t, client)
	}
	certificate := func(r *signingRequest) *x509.Certificate {
		t.Helper()
		certs, err := pki.ParseCertificates(r.Status.Certificate)
		if err != nil {
			t.Fatalf("%v: %v", r.Status, err)
		}
		return certs[0]
	}
	for name, r := range map[string]*signingRequest{
		"undecided": nodeRequest(t, "x", "system:node:n1"),
		"both": nodeRequest(t, "x", "system:node:n1", approved, func(r *signingRequest) {
			r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: certificatesv1.CertificateDenied})
		}),
		"another signer's": nodeRequest(t, "x", "system:node:n1", approved, func(r *signingRequest) { r.Spec.SignerName = "example.com/x" }),
	} {
		if got := sign(r); len(got.Status.Certificate) > 0 || len(got.Status.Conditions) != len(r.Status.Conditions) {
			t.Errorf("%s: %v", name, got.Status)
		}
	}
	if got := sign(nodeRequest(t, "x", "admin", approved)); len(got.Status.Certificate) > 0 || got.Status.Conditions[1].Type != certificatesv1.CertificateFailed ||
		got.Status.Conditions[1].Reason != "SignerValidationFailure" {
		t.Errorf("a node's certificate for admin: %v", got.Status)
	}
	for name, c := range map[string]struct {
		asked *int32
		want  time.Duration
	}{
		"no life asked for": {nil, 24 * time.Hour}, "an hour": {new(int32(3600)), time.Hour}, "too long": {new(int32(1 << 30)), 24 * time.Hour},
		"too short": {new(int32(1)), 10 * time.Minute},
	} {
		cert := certificate(sign(nodeRequest(t, "x", "system:node:n1", approved, func(r *signingRequest) { r.Spec.ExpirationSeconds = c.asked })))
		if left := time.Until(cert.NotAfter); left > c.want || left < c.want-time.Minute {
			t.Errorf("%s: valid for %s, want %s", name, left, c.want)
		}
		if cert.Subject.CommonName != "system:node:n1" || cert.IsCA || cert.NotBefore.After(time.Now()) {
			t.Errorf("%s: %v", name, cert.Subject)
		}
	}
	// The CA of the moment signs.
	if _, err := authority.Rotate(true); err != nil {
		t.Fatal(err)
	}
	if err := certificate(sign(nodeRequest(t, "x", "system:node:n1", approved))).CheckSignatureFrom(authority.Own()[0]); err != nil {
		t.Errorf("not signed by the new CA: %v", err)
	}
	if _, err := NewSigner(Deps{}, nil, 0); err == nil {
		t.Error("a signer without a CA")
	}
}

func TestClean(t *testing.T) {
	now := time.Now()
	ago := func(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }
	with := func(kind certificatesv1.RequestConditionType, since metav1.Time) func(*signingRequest) {
		return func(r *signingRequest) {
			r.Status.Conditions = append(r.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: kind, LastUpdateTime: since})
		}
	}
	issued := func(r *signingRequest) { r.Status.Certificate = []byte("unreadable") }
	for name, c := range map[string]struct {
		change []func(*signingRequest)
		want   time.Duration // from now; 0: never
	}{
		"undecided":           {nil, 23 * time.Hour},
		"approved, unsigned":  {[]func(*signingRequest){with(certificatesv1.CertificateApproved, ago(time.Minute))}, 24*time.Hour - time.Minute},
		"issued":              {[]func(*signingRequest){with(certificatesv1.CertificateApproved, ago(time.Minute)), issued}, 59 * time.Minute},
		"denied":              {[]func(*signingRequest){with(certificatesv1.CertificateDenied, ago(2*time.Hour))}, -time.Hour},
		"failed":              {[]func(*signingRequest){with(certificatesv1.CertificateApproved, ago(0)), with(certificatesv1.CertificateFailed, ago(0))}, time.Hour},
		"of another's making": {[]func(*signingRequest){with("Other", ago(0))}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := nodeRequest(t, "x", "system:node:n1", append(c.change, func(r *signingRequest) { r.CreationTimestamp = ago(time.Hour) })...)
			due := dueAt(r)
			if c.want == 0 {
				if !due.IsZero() {
					t.Errorf("due at %s", due)
				}
				return
			}
			if got := due.Sub(now).Round(time.Second); got != c.want {
				t.Errorf("due in %s, want %s", got, c.want)
			}
		})
	}
	authority, err := pki.Open(t.TempDir(), pki.DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	r := nodeRequest(t, "x", "system:node:n1", with(certificatesv1.CertificateApproved, ago(0)))
	if r.Status.Certificate, err = authority.Sign(&x509.Certificate{}, key.Public(), time.Minute); err != nil {
		t.Fatal(err)
	}
	if got := dueAt(r).Sub(now); got > time.Minute+time.Second {
		t.Errorf("a certificate of a minute is kept for %s", got)
	}
}

// TestControllers: from a request to its certificate to its end, by the three controllers together.
func TestControllers(t *testing.T) {
	authority, err := pki.Open(t.TempDir(), pki.DefaultLifetimes())
	if err != nil {
		t.Fatal(err)
	}
	r := nodeRequest(t, "boot", "system:node:n1")
	client := api(r, "nodeclient")
	d := deps(client)
	var all []*Controller
	for _, make := range []func() (*Controller, error){
		func() (*Controller, error) { return NewApprover(d) },
		func() (*Controller, error) { return NewSigner(d, authority, time.Hour) },
		func() (*Controller, error) { return NewCleaner(d) },
	} {
		c, err := make()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, len(all)+1)
	go func() { d.Requests.RunWithContext(ctx); ended <- nil }()
	for _, c := range all {
		go func() { ended <- c.Run(ctx) }()
	}
	for end := time.Now().Add(20 * time.Second); len(read(t, client).Status.Certificate) == 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no certificate: %v", read(t, client).Status)
		}
	}
	stop()
	for range len(all) + 1 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}
