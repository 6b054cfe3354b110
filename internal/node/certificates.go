package node

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/internal/node/runtime"
)

const (
	// certificatePatience is how long a Pod's start waits for its certificates before that is said.
	certificatePatience = 3 * time.Second
	// An open request is looked at more and more seldom. One that is this old is given up for another: the API deletes it soon.
	leastCertificatePoll, mostCertificatePoll = 200 * time.Millisecond, 15 * time.Second
	certificateRequestLife                    = 10 * time.Minute
	// certificateRetry is after which time a request that could not be made or looked at is tried again, and refusedRetry one that the
	// signer refused.
	certificateRetry, refusedRetry = 10 * time.Second, 5 * time.Minute
	// leastCertificateAge is how long a certificate is used at least, whatever its signer says about its renewal.
	leastCertificateAge = time.Minute
	mostRenewalJitter   = 5 * time.Minute
	// defaultCertificateLife is asked for where the Pod says nothing.
	defaultCertificateLife = 86400
)

// podCertificates are the keys and certificates of one Pod's volumes. They are in memory and in these volumes only.
type podCertificates struct {
	client kubernetes.Interface
	node   string
	now    func() time.Time

	mu   sync.Mutex
	have map[certificateKey]*podCertificate
}

// certificateKey says which source of a Pod's volumes a certificate is for.
type certificateKey struct {
	volume string
	source int
}

type podCertificate struct {
	*credential // nil: there is none yet
	renew       time.Time
	asked       *certificateRequest // that has not been answered
	// next is when something is to be done again, and err what is wrong.
	next time.Time
	err  error
}

// credential is a key and the certificates for it, both in PEM.
type credential struct {
	key, chain []byte
	leaf       *x509.Certificate
}

type certificateRequest struct {
	name string
	key  crypto.Signer
	at   time.Time
}

// certificateError is why a Pod has no certificate. waiting: its signer has not answered yet.
type certificateError struct {
	signer  string
	waiting bool
	err     error
}

func (e *certificateError) Error() string {
	return fmt.Sprintf("a certificate of the signer %s: %v", e.signer, e.err)
}
func (e *certificateError) Unwrap() error { return e.err }

func newPodCertificates(client kubernetes.Interface, node string) *podCertificates {
	return &podCertificates{client: client, node: node, now: time.Now, have: map[certificateKey]*podCertificate{}}
}

// certificatesOf are the sources of a Pod's volumes that are certificates.
func certificatesOf(pod *corev1.Pod) map[certificateKey]*corev1.PodCertificateProjection {
	out := map[certificateKey]*corev1.PodCertificateProjection{}
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		if v.Projected == nil {
			continue
		}
		for j := range v.Projected.Sources {
			if s := v.Projected.Sources[j].PodCertificate; s != nil {
				out[certificateKey{v.Name, j}] = s
			}
		}
	}
	return out
}

// ready has all certificates of a Pod asked for, and says why one is missing.
func (p *podCertificates) ready(ctx context.Context, pod *corev1.Pod) (err error) {
	for at, s := range certificatesOf(pod) {
		if _, failed := p.get(ctx, pod, at, s); failed != nil && (err == nil || failed.Error() < err.Error()) {
			err = &volumeError{at.volume, failed}
		}
	}
	return err
}

// await is ready after a short wait for signers, most of which answer quickly.
func (p *podCertificates) await(ctx context.Context, pod *corev1.Pod) error {
	for end := time.Now().Add(certificatePatience); ; {
		err := p.ready(ctx, pod)
		var failed *certificateError
		if !errors.As(err, &failed) || !failed.waiting || time.Now().After(end) || !pause(ctx, leastCertificatePoll/2) {
			return err
		}
	}
}

// get is a certificate that is not due yet, or the next one if its signer has issued it. One that can't be renewed is used until it expires.
func (p *podCertificates) get(ctx context.Context, pod *corev1.Pod, at certificateKey, s *corev1.PodCertificateProjection) (*credential, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, now := p.have[at], p.now()
	if c == nil {
		c = &podCertificate{}
		p.have[at] = c
	}
	valid := c.credential != nil && now.Before(c.leaf.NotAfter)
	if valid && now.Before(c.renew) {
		return c.credential, nil
	}
	if !now.Before(c.next) {
		if c.err = p.advance(ctx, pod, s, c); c.err != nil {
			var failed *certificateError
			if !errors.As(c.err, &failed) {
				c.err = &certificateError{signer: s.SignerName, err: c.err}
			}
		}
		valid = c.credential != nil && p.now().Before(c.leaf.NotAfter)
	}
	if valid {
		return c.credential, nil
	}
	return nil, c.err
}

// advance does what is to be done next: it makes a request, or looks whether it was answered.
func (p *podCertificates) advance(ctx context.Context, pod *corev1.Pod, s *corev1.PodCertificateProjection, c *podCertificate) (err error) {
	c.next = p.now().Add(certificateRetry)
	if c.asked != nil && p.now().Sub(c.asked.at) > certificateRequestLife {
		c.asked = nil
	}
	if c.asked == nil {
		if c.asked, err = p.ask(ctx, pod, s); err != nil {
			return err
		}
	}
	answer, err := p.look(ctx, pod.Namespace, c.asked.name)
	if err != nil {
		return err
	}
	asked, now := c.asked, p.now()
	switch kind, why := answerOf(answer); kind {
	case "":
		if answer == nil {
			c.asked, c.next = nil, now.Add(leastCertificatePoll)
		} else {
			c.next = now.Add(pollDelay(now.Sub(asked.at)))
		}
		return &certificateError{s.SignerName, true, fmt.Errorf("PodCertificateRequest %s has not been answered", asked.name)}
	case certificatesv1.PodCertificateRequestConditionTypeIssued:
		c.asked = nil
		next, err := newCredential(asked.key, []byte(answer.Status.CertificateChain))
		if err != nil {
			c.next = now.Add(refusedRetry)
			return fmt.Errorf("PodCertificateRequest %s: %w", asked.name, err)
		}
		begin := middle(next.leaf)
		if t := answer.Status.BeginRefreshAt; t != nil {
			begin = t.Time
		}
		c.credential, c.renew, c.next = next, renewalOf(begin, next.leaf.NotAfter, mathrand.Float64()), now.Add(leastCertificateAge)
		return nil
	default:
		c.asked, c.next = nil, now.Add(refusedRetry)
		return fmt.Errorf("PodCertificateRequest %s is %s: %s; another is made in %s", asked.name, kind, why, refusedRetry)
	}
}

// pollDelay is when a request is looked at next that has waited for so long.
func pollDelay(waited time.Duration) time.Duration {
	return min(max(waited/4, leastCertificatePoll), mostCertificatePoll)
}

// middle is when a certificate is renewed of which nothing else is known: earlier than most signers say.
func middle(leaf *x509.Certificate) time.Time {
	return leaf.NotBefore.Add(leaf.NotAfter.Sub(leaf.NotBefore) / 2)
}

// renewalOf is when a certificate is renewed: a little after its signer says, so that not all are at once. part is from 0 to 1.
func renewalOf(begin, expires time.Time, part float64) time.Time {
	most := min(max(expires.Sub(begin)/10, 0), mostRenewalJitter)
	return begin.Add(time.Duration(part * float64(most)))
}

// answerOf is how a signer has answered, and why; "": it has not.
func answerOf(r *certificatesv1.PodCertificateRequest) (kind, why string) {
	if r == nil {
		return "", ""
	}
	for _, c := range r.Status.Conditions {
		switch c.Type {
		case certificatesv1.PodCertificateRequestConditionTypeIssued, certificatesv1.PodCertificateRequestConditionTypeDenied, certificatesv1.PodCertificateRequestConditionTypeFailed:
			if c.Status == metav1.ConditionTrue {
				return c.Type, c.Reason + ": " + c.Message
			}
		}
	}
	return "", ""
}

// ask makes a request with a new key.
func (p *podCertificates) ask(ctx context.Context, pod *corev1.Pod, s *corev1.PodCertificateProjection) (*certificateRequest, error) {
	node, err := p.client.CoreV1().Nodes().Get(ctx, p.node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	var account *corev1.ServiceAccount
	if err := patiently(ctx, func() (err error) {
		account, err = p.client.CoreV1().ServiceAccounts(pod.Namespace).Get(ctx, pod.Spec.ServiceAccountName, metav1.GetOptions{})
		return err
	}); err != nil {
		return nil, err
	}
	key, err := generateKey(s.KeyType)
	if err != nil {
		return nil, err
	}
	stub, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key) // which proves that it has the key
	if err != nil {
		return nil, err
	}
	r := &certificatesv1.PodCertificateRequest{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, GenerateName: pod.Name + "-",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}},
		},
		Spec: certificatesv1.PodCertificateRequestSpec{
			SignerName: s.SignerName, PodName: pod.Name, PodUID: pod.UID, ServiceAccountName: account.Name, ServiceAccountUID: account.UID,
			NodeName: types.NodeName(p.node), NodeUID: node.UID, MaxExpirationSeconds: ptr.To(ptr.Deref(s.MaxExpirationSeconds, defaultCertificateLife)),
			StubPKCS10Request: stub, UnverifiedUserAnnotations: s.UserAnnotations,
		},
	}
	asked := p.now()
	var made *certificatesv1.PodCertificateRequest
	if err := patiently(ctx, func() (err error) {
		made, err = p.client.CertificatesV1().PodCertificateRequests(pod.Namespace).Create(ctx, r, metav1.CreateOptions{})
		return err
	}); err != nil {
		return nil, err
	}
	return &certificateRequest{name: made.Name, key: key, at: asked}, nil
}

// look reads a request; nil: it is gone. A node may read its own only, and has to say so.
func (p *podCertificates) look(ctx context.Context, namespace, name string) (*certificatesv1.PodCertificateRequest, error) {
	list, err := p.client.CertificatesV1().PodCertificateRequests(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.Set{"metadata.name": name, "spec.nodeName": p.node}.AsSelector().String(),
	})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if list.Items[i].Name == name {
			return &list.Items[i], nil
		}
	}
	return nil, nil
}

func generateKey(kind string) (crypto.Signer, error) {
	switch kind {
	case "RSA3072":
		return rsa.GenerateKey(rand.Reader, 3072)
	case "RSA4096":
		return rsa.GenerateKey(rand.Reader, 4096)
	case "ECDSAP256":
		return ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case "ECDSAP384":
		return ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	case "ECDSAP521":
		return ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	case "ED25519":
		_, key, err := ed25519.GenerateKey(rand.Reader)
		return key, err
	}
	return nil, fmt.Errorf("podCertificate.keyType %q: this node does not know it", kind)
}

// newCredential checks that certificates are for a key.
func newCredential(key crypto.Signer, chain []byte) (*credential, error) {
	list := certificatesIn(chain)
	if len(list) == 0 {
		return nil, errors.New("there is no certificate")
	}
	leaf, err := x509.ParseCertificate(list[0])
	if err != nil {
		return nil, err
	}
	if public, ok := key.Public().(interface{ Equal(crypto.PublicKey) bool }); !ok || !public.Equal(leaf.PublicKey) {
		return nil, errors.New("the certificate is not for the key")
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return &credential{pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), encodeCertificates(list), leaf}, nil
}

// put adds the files of a source.
func (c *credential) put(out map[string]file, s *corev1.PodCertificateProjection, m os.FileMode) {
	for path, data := range map[string][]byte{s.CredentialBundlePath: slices.Concat(c.key, c.chain), s.KeyPath: c.key, s.CertificateChainPath: c.chain} {
		if path != "" {
			out[path] = file{data, m}
		}
	}
}

// adopt takes over what an earlier agent wrote to a volume. When that was to be renewed is not known any more: it is in the middle of its
// life. Where not both key and certificates were written, and where they have expired, others are asked for.
func (p *podCertificates) adopt(at certificateKey, s *corev1.PodCertificateProjection, read func(path string) []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.have[at] != nil {
		return
	}
	c := &podCertificate{next: p.now()}
	p.have[at] = c
	text := slices.Concat(read(s.KeyPath), read(s.CertificateChainPath))
	if s.CredentialBundlePath != "" {
		text = read(s.CredentialBundlePath)
	}
	block, chain := pem.Decode(text)
	if block == nil || block.Type != "PRIVATE KEY" {
		return
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return
	}
	if signer, ok := key.(crypto.Signer); ok {
		if have, err := newCredential(signer, chain); err == nil {
			c.credential, c.renew = have, renewalOf(middle(have.leaf), have.leaf.NotAfter, mathrand.Float64())
		}
	}
}

// due is when the next thing is to be done; zero: there are no certificates.
func (p *podCertificates) due() (next time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.have {
		at := c.next
		if c.credential != nil && c.renew.After(at) {
			at = c.renew
		}
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	return next
}

// problem is why a certificate is not renewed that Pods still use.
func (p *podCertificates) problem() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.have {
		var failed *certificateError
		if c.credential != nil && errors.As(c.err, &failed) && !failed.waiting {
			return fmt.Errorf("%w; the Pod goes on with the one that it has, which expires at %s", c.err, c.leaf.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	return nil
}

// adoptCertificates takes over the certificates that are in a Pod's volumes.
func (w *worker) adoptCertificates(pod *corev1.Pod, sandbox *runtime.Pod) {
	for at, s := range certificatesOf(pod) {
		w.certificates.adopt(at, s, func(path string) []byte {
			if path, err := filePath(path); err == nil {
				data, _ := os.ReadFile(filepath.Join(sandbox.Inside(w.agent.volume(pod, at.volume)), dataLink, path))
				return data
			}
			return nil
		})
	}
}
