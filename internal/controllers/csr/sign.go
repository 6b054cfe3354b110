package csr

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"portal/internal/controllers/queue"
	"portal/internal/csr"
)

// shortest is the shortest life that a request can ask for.
const shortest = 10 * time.Minute

// Authority signs with the CA of the moment, and answers with PEM.
type Authority interface {
	Sign(wanted *x509.Certificate, key crypto.PublicKey, life time.Duration) ([]byte, error)
}

// NewSigner has approved requests signed that are for one of the cluster's own signers. life is how long a certificate is valid
// whose request doesn't ask for less.
func NewSigner(deps Deps, authority Authority, life time.Duration) (*Controller, error) {
	if authority == nil {
		return nil, errNoSigner
	}
	var c *Controller
	c, err := newController(deps, SignerName, func(ctx context.Context, r *signingRequest) (queue.Result, error) {
		return c.sign(ctx, r, authority, life)
	})
	return c, err
}

func (c *Controller) sign(ctx context.Context, r *signingRequest, authority Authority, life time.Duration) (queue.Result, error) {
	approved, denied, failed := decided(r)
	if !approved || denied || failed || len(r.Status.Certificate) > 0 || !slices.Contains(csr.Signers(), r.Spec.SignerName) {
		return queue.Result{}, nil
	}
	out := r.DeepCopy()
	request, err := csr.Parse(r.Spec.Request)
	if err == nil {
		err = csr.Signable(r.Spec.SignerName, request, r.Spec.Usages)
	}
	var template *x509.Certificate
	if err == nil {
		template, err = csr.Template(request, r.Spec.Usages)
	}
	if err != nil {
		out.Status.Conditions = append(out.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateFailed, Status: corev1.ConditionTrue, Reason: "SignerValidationFailure", Message: err.Error(),
		})
		return c.update(ctx, out)
	}
	if asked := r.Spec.ExpirationSeconds; asked != nil {
		life = min(life, max(time.Duration(*asked)*time.Second, shortest))
	}
	if out.Status.Certificate, err = authority.Sign(template, request.PublicKey, life); err != nil {
		return queue.Result{}, fmt.Errorf("sign: %w", err)
	}
	result, err := c.update(ctx, out)
	if err == nil {
		klog.FromContext(ctx).Info("certificate signed", "request", r.Name, "signer", r.Spec.SignerName, "subject", request.Subject.String(),
			"requestor", r.Spec.Username)
	}
	return result, err
}

func (c *Controller) update(ctx context.Context, r *signingRequest) (queue.Result, error) {
	_, err := c.Client.CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, r, metav1.UpdateOptions{})
	return queue.Result{Writes: 1}, err
}
