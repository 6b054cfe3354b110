package csr

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/controllers/queue"
)

const (
	// keepDone is how long a request is kept that was issued, denied or failed: long enough to fetch the certificate.
	keepDone = time.Hour
	// keepOpen is how long a request is kept that waits for an approver or for its signer.
	keepOpen = 24 * time.Hour
)

// NewCleaner deletes requests that nobody waits for any more.
func NewCleaner(deps Deps) (*Controller, error) {
	var c *Controller
	c, err := newController(deps, CleanerName, func(ctx context.Context, r *signingRequest) (queue.Result, error) {
		due := dueAt(r)
		if due.IsZero() {
			return queue.Result{}, nil
		}
		if left := due.Sub(c.Clock.Now()); left > 0 {
			return queue.Result{Again: left}, nil
		}
		// Not one that was changed or made anew meanwhile.
		return queue.Result{Writes: 1}, c.Client.CertificatesV1().CertificateSigningRequests().Delete(ctx, r.Name, metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &r.UID, ResourceVersion: &r.ResourceVersion},
		})
	})
	return c, err
}

// dueAt is when a request is to be deleted: the first of the times that its conditions give; zero: never.
func dueAt(r *signingRequest) (due time.Time) {
	sooner := func(since metav1.Time, keep time.Duration) {
		if at := since.Add(keep); !since.IsZero() && (due.IsZero() || at.Before(due)) {
			due = at
		}
	}
	if len(r.Status.Conditions) == 0 {
		sooner(r.CreationTimestamp, keepOpen)
	}
	issued := len(r.Status.Certificate) > 0
	for _, c := range r.Status.Conditions {
		switch {
		case c.Type == certificatesv1.CertificateApproved && !issued:
			sooner(c.LastUpdateTime, keepOpen)
		case c.Type == certificatesv1.CertificateApproved:
			sooner(c.LastUpdateTime, keepDone)
			sooner(expiry(r.Status.Certificate), 0)
		case c.Type == certificatesv1.CertificateDenied || c.Type == certificatesv1.CertificateFailed:
			sooner(c.LastUpdateTime, keepDone)
		}
	}
	return due
}

// expiry is when the certificate expires; zero if it cannot be read.
func expiry(data []byte) metav1.Time {
	block, _ := pem.Decode(data)
	if block == nil {
		return metav1.Time{}
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return metav1.Time{}
	}
	return metav1.NewTime(cert.NotAfter)
}
