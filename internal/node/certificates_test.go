package node

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

const testSigner = "example.com/signer"

// signed is a chain of PEM for the key that was asked for, with text between the certificates.
func signed(t *testing.T, r *certificatesv1.PodCertificateRequest, begin, end time.Time) string {
	t.Helper()
	stub, err := x509.ParseCertificateRequest(r.Spec.StubPKCS10Request)
	if err == nil {
		err = stub.CheckSignature()
	}
	if err != nil {
		t.Fatal(err)
	}
	ca, err := generateKey("ED25519")
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: begin, NotAfter: end}
	der, err := x509.CreateCertificate(rand.Reader, template, template, stub.PublicKey, ca)
	if err != nil {
		t.Fatal(err)
	}
	return "the leaf\n" + string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Headers: map[string]string{"a": "b"}, Bytes: der})) + "and its issuer\n" + pemOf("issuer")
}

// signerWorld is an API with a Pod that wants certificates, and a clock.
type signerWorld struct {
	t      *testing.T
	client *fake.Clientset
	pod    *corev1.Pod
	now    time.Time
	certs  *podCertificates
}

func newSignerWorld(t *testing.T, s ...corev1.PodCertificateProjection) *signerWorld {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"}, Spec: corev1.PodSpec{ServiceAccountName: "sa"}}
	for i := range s {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: fmt.Sprint("v", i), VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			Sources: []corev1.VolumeProjection{{PodCertificate: &s[i]}},
		}}})
	}
	w := &signerWorld{t: t, pod: pod, now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	w.client = fake.NewClientset(
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", UID: "nu"}}, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "sa", UID: "su"}},
	)
	made := 0
	w.client.PrependReactor("create", "podcertificaterequests", func(a ktesting.Action) (bool, runtime.Object, error) {
		made++
		r := a.(ktesting.CreateAction).GetObject().(*certificatesv1.PodCertificateRequest)
		r.Name = fmt.Sprint(r.GenerateName, made) // the API does so
		return false, nil, nil
	})
	w.certs = w.begin()
	return w
}

func (w *signerWorld) begin() *podCertificates {
	p := newPodCertificates(w.client, "n")
	p.now = func() time.Time { return w.now }
	return p
}

func (w *signerWorld) requests() []certificatesv1.PodCertificateRequest {
	list, err := w.client.CertificatesV1().PodCertificateRequests("ns").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b certificatesv1.PodCertificateRequest) int { return strings.Compare(a.Name, b.Name) })
	return list.Items
}

// answer answers the latest request.
func (w *signerWorld) answer(kind, message string, status certificatesv1.PodCertificateRequestStatus) {
	w.t.Helper()
	list := w.requests()
	r := &list[len(list)-1]
	status.Conditions = []metav1.Condition{{Type: kind, Status: metav1.ConditionTrue, Reason: "Because", Message: message}}
	r.Status = status
	if _, err := w.client.CertificatesV1().PodCertificateRequests("ns").UpdateStatus(w.t.Context(), r, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// issue answers the latest request with a certificate for a day that is to be renewed after so long.
func (w *signerWorld) issue(refresh time.Duration) {
	w.t.Helper()
	list := w.requests()
	w.answer("Issued", "", certificatesv1.PodCertificateRequestStatus{
		CertificateChain: signed(w.t, &list[len(list)-1], w.now, w.now.Add(24*time.Hour)), BeginRefreshAt: ptr.To(metav1.NewTime(w.now.Add(refresh))),
	})
}

// files are what the Pod's first volume has now.
func (w *signerWorld) files(p *podCertificates) (map[string]file, error) {
	return (&Agent{}).files(w.t.Context(), w.pod, &w.pod.Spec.Volumes[0], fileSources{certificates: p})
}

// TestPodCertificate: a certificate is asked for in the Pod's name, put in its volume when it was issued, used until it is to be renewed,
// renewed with another key, and kept while the signer refuses.
func TestPodCertificate(t *testing.T) {
	w := newSignerWorld(t, corev1.PodCertificateProjection{
		SignerName: testSigner, KeyType: "ECDSAP256", CredentialBundlePath: "both.pem", KeyPath: "key.pem", CertificateChainPath: "chain.pem",
		MaxExpirationSeconds: ptr.To[int32](7200), UserAnnotations: map[string]string{"example.com/a": "b"},
	})
	var failed *certificateError
	if err := w.certs.ready(t.Context(), w.pod); !errors.As(err, &failed) || !failed.waiting || !strings.Contains(err.Error(), testSigner) || !strings.Contains(err.Error(), "p-1") {
		t.Fatalf("before it is issued: %v", err)
	}
	list := w.requests()
	if len(list) != 1 {
		t.Fatalf("%d requests", len(list))
	}
	spec := list[0].Spec
	if spec.SignerName != testSigner || spec.PodName != "p" || spec.PodUID != "u" || spec.ServiceAccountName != "sa" || spec.ServiceAccountUID != "su" || spec.NodeName != "n" ||
		spec.NodeUID != "nu" || *spec.MaxExpirationSeconds != 7200 || spec.UnverifiedUserAnnotations["example.com/a"] != "b" || list[0].OwnerReferences[0].UID != "u" {
		t.Errorf("asked: %+v", list[0])
	}
	w.issue(12 * time.Hour)
	if err := w.certs.ready(t.Context(), w.pod); err == nil {
		t.Error("an open request is looked at all the time")
	}
	w.now = w.now.Add(leastCertificatePoll)
	first, err := w.files(w.certs)
	if err != nil {
		t.Fatal(err)
	}
	both, key, chain := first["both.pem"], first["key.pem"], first["chain.pem"]
	if !bytes.Equal(both.data, slices.Concat(key.data, chain.data)) || both.mode != 0o600 || key.mode != 0o600 {
		t.Errorf("%v", first)
	}
	if text := string(chain.data); strings.Contains(text, "issuer\n-") || strings.Contains(text, "a: b") || !strings.HasSuffix(text, pemOf("issuer")) || len(certificatesIn(chain.data)) != 2 {
		t.Errorf("the chain:\n%s", text)
	}
	if block, rest := pem.Decode(key.data); block == nil || block.Type != "PRIVATE KEY" || len(rest) > 0 {
		t.Error("the key file is not a key")
	}

	same := func(want map[string]file) {
		t.Helper()
		got, err := w.files(w.certs)
		if err != nil || !bytes.Equal(got["both.pem"].data, want["both.pem"].data) {
			t.Errorf("the certificate changed, %v", err)
		}
	}
	w.now = w.now.Add(11 * time.Hour)
	same(first)
	if due := w.certs.due(); due.Before(w.now) || due.After(w.now.Add(time.Hour+mostRenewalJitter)) || len(w.requests()) != 1 {
		t.Errorf("due at %s, %d requests", due, len(w.requests()))
	}
	w.now = w.certs.due()
	same(first) // until there is another one
	if len(w.requests()) != 2 || bytes.Equal(w.requests()[1].Spec.StubPKCS10Request, spec.StubPKCS10Request) {
		t.Errorf("%d requests", len(w.requests()))
	}
	w.answer("Denied", "not again", certificatesv1.PodCertificateRequestStatus{})
	w.now = w.certs.due()
	same(first)
	if err := w.certs.problem(); err == nil || !strings.Contains(err.Error(), "not again") {
		t.Errorf("denied: %v", err)
	}
	if due := w.certs.due(); due != w.now.Add(refusedRetry) {
		t.Errorf("asked again at %s", due)
	}
	w.now = w.certs.due()
	same(first)
	w.issue(12 * time.Hour)
	w.now = w.certs.due()
	second, err := w.files(w.certs)
	if err != nil || bytes.Equal(second["key.pem"].data, key.data) || w.certs.problem() != nil {
		t.Errorf("not renewed: %v, %v", err, w.certs.problem())
	}

	// A new agent goes on with what is in the volume.
	next := w.begin()
	next.adopt(certificateKey{"v0", 0}, w.pod.Spec.Volumes[0].Projected.Sources[0].PodCertificate, func(path string) []byte { return second[path].data })
	if got, err := w.files(next); err != nil || !bytes.Equal(got["both.pem"].data, second["both.pem"].data) || len(w.requests()) != 3 {
		t.Errorf("%v, %d requests", err, len(w.requests()))
	}
	if due := next.due(); due.Before(w.now.Add(11*time.Hour)) || due.After(w.now.Add(13*time.Hour)) {
		t.Errorf("an adopted one is renewed at %s", due)
	}
	w.now = w.now.Add(25 * time.Hour)
	if _, err := w.files(next); !errors.As(err, &failed) {
		t.Errorf("after it has expired: %v", err)
	}
}

// TestCertificateNotIssued: what a signer refuses, what is no certificate for the key, and what nobody answers.
func TestCertificateNotIssued(t *testing.T) {
	begin := func() *signerWorld {
		w := newSignerWorld(t, corev1.PodCertificateProjection{SignerName: testSigner, KeyType: "ED25519", KeyPath: "k", CertificateChainPath: "c"})
		_ = w.certs.ready(t.Context(), w.pod)
		return w
	}
	look := func(w *signerWorld) error {
		w.now = w.certs.due()
		return w.certs.ready(t.Context(), w.pod)
	}
	other := newSignerWorld(t, corev1.PodCertificateProjection{SignerName: testSigner, KeyType: "ECDSAP384", KeyPath: "k"})
	_ = other.certs.ready(t.Context(), other.pod)
	foreign := signed(t, &other.requests()[0], other.now, other.now.Add(time.Hour))
	for want, answer := range map[string]func(w *signerWorld){
		"Denied: Because: no ed25519":   func(w *signerWorld) { w.answer("Denied", "no ed25519", certificatesv1.PodCertificateRequestStatus{}) },
		"Failed: Because: out of order": func(w *signerWorld) { w.answer("Failed", "out of order", certificatesv1.PodCertificateRequestStatus{}) },
		"is not for the key": func(w *signerWorld) {
			w.answer("Issued", "", certificatesv1.PodCertificateRequestStatus{CertificateChain: foreign})
		},
		"there is no certificate": func(w *signerWorld) { w.answer("Issued", "", certificatesv1.PodCertificateRequestStatus{}) },
	} {
		w := begin()
		answer(w)
		err := look(w)
		var failed *certificateError
		var volume *volumeError
		if err == nil || !strings.Contains(err.Error(), want) || !errors.As(err, &failed) || failed.waiting || !errors.As(err, &volume) || volume.volume != "v0" {
			t.Errorf("%s: %v", want, err)
		}
		if due := w.certs.due(); due != w.now.Add(refusedRetry) {
			t.Errorf("%s: asked again at %s", want, due)
		}
		if again := w.certs.ready(t.Context(), w.pod); again == nil || again.Error() != err.Error() || len(w.requests()) != 1 {
			t.Errorf("%s: then %v, %d requests", want, again, len(w.requests()))
		}
	}
	w := begin()
	looks := 0
	for len(w.requests()) == 1 {
		if looks++; looks > 1000 {
			t.Fatal("a request that nobody answers is never given up")
		}
		_ = look(w)
	}
	if age := w.now.Sub(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)); age < certificateRequestLife || age > certificateRequestLife+mostCertificatePoll || looks > 100 {
		t.Errorf("given up after %s and %d looks", age, looks)
	}
}

// TestCertificateKeys: a node makes the keys that the API allows.
func TestCertificateKeys(t *testing.T) {
	for kind, want := range map[string]x509.PublicKeyAlgorithm{
		"RSA3072": x509.RSA, "RSA4096": x509.RSA, "ECDSAP256": x509.ECDSA, "ECDSAP384": x509.ECDSA, "ECDSAP521": x509.ECDSA, "ED25519": x509.Ed25519,
	} {
		w := newSignerWorld(t, corev1.PodCertificateProjection{SignerName: testSigner, KeyType: kind, KeyPath: "k", CertificateChainPath: "c"})
		_ = w.certs.ready(t.Context(), w.pod)
		stub, err := x509.ParseCertificateRequest(w.requests()[0].Spec.StubPKCS10Request)
		if err != nil || stub.PublicKeyAlgorithm != want || len(stub.Subject.Names) > 0 || *w.requests()[0].Spec.MaxExpirationSeconds != defaultCertificateLife {
			t.Errorf("%s: %+v, %v", kind, stub, err)
			continue
		}
		w.issue(time.Hour)
		w.now = w.certs.due()
		if _, err := w.files(w.certs); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if _, err := generateKey("RSA2048"); err == nil {
		t.Error("a key of an unknown kind is made")
	}
}

// TestAdoptCertificate: what can't be used of an earlier agent's files is asked for anew.
func TestAdoptCertificate(t *testing.T) {
	w := newSignerWorld(t, corev1.PodCertificateProjection{SignerName: testSigner, KeyType: "ED25519", KeyPath: "k", CertificateChainPath: "c"})
	_ = w.certs.ready(t.Context(), w.pod)
	w.issue(time.Hour)
	w.now = w.certs.due()
	good, err := w.files(w.certs)
	if err != nil {
		t.Fatal(err)
	}
	key, chain := good["k"].data, good["c"].data
	for name, c := range map[string]struct {
		key, chain []byte
		adopted    bool
	}{
		"both": {key, chain, true}, "no key": {nil, chain, false}, "no chain": {key, nil, false}, "nothing": {nil, nil, false},
		"another's chain": {key, []byte(pemOf("x")), false}, "half a key": {key[:len(key)/2], chain, false},
	} {
		p := w.begin()
		p.adopt(certificateKey{"v0", 0}, w.pod.Spec.Volumes[0].Projected.Sources[0].PodCertificate, func(path string) []byte { return map[string][]byte{"k": c.key, "c": c.chain}[path] })
		if due := p.due(); (due == w.now) == c.adopted {
			t.Errorf("%s: due at %s", name, due)
		}
		if _, err := w.files(p); (err == nil) != c.adopted {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCertificateTimes(t *testing.T) {
	begin := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		life time.Duration
		part float64
		want time.Duration
	}{
		{time.Hour, 0, 0}, {10 * time.Minute, 0.5, 30 * time.Second}, {24 * time.Hour, 1, mostRenewalJitter}, {-time.Hour, 1, 0},
	} {
		if got := renewalOf(begin, begin.Add(c.life), c.part).Sub(begin); got != c.want {
			t.Errorf("%v: %s", c, got)
		}
	}
	for waited, want := range map[time.Duration]time.Duration{0: leastCertificatePoll, 4 * time.Second: time.Second, time.Hour: mostCertificatePoll} {
		if got := pollDelay(waited); got != want {
			t.Errorf("after %s: %s", waited, got)
		}
	}
}

// TestAwaitCertificate: a Pod's start waits a moment for a signer that is about to answer, and not for one that refuses.
func TestAwaitCertificate(t *testing.T) {
	w := newSignerWorld(t, corev1.PodCertificateProjection{SignerName: testSigner, KeyType: "ED25519", KeyPath: "k"})
	w.certs.now = time.Now
	asked := make(chan struct{})
	w.client.PrependReactor("list", "podcertificaterequests", func(ktesting.Action) (bool, runtime.Object, error) {
		select {
		case <-asked:
		default:
			close(asked)
		}
		return false, nil, nil
	})
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { done <- w.certs.await(ctx, w.pod) }()
	<-asked
	w.answer("Denied", "no", certificatesv1.PodCertificateRequestStatus{})
	if err := <-done; err == nil || !strings.Contains(err.Error(), "Denied") {
		t.Errorf("%v", err)
	}
}
