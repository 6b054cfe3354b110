// Package csr looks after CertificateSigningRequests: it approves those of nodes that may have a certificate, has approved ones
// signed, and deletes them when nobody needs them any more. What a signer signs is decided in portal/internal/csr.
package csr

import (
	"context"
	"errors"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/certificates/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
)

// The names that --controllers calls them.
const (
	ApproverName = "csr-approving"
	SignerName   = "csr-signing"
	CleanerName  = "csr-cleaner"
)

// Deps are what the controllers need.
type Deps struct {
	Client   kubernetes.Interface
	Requests cache.SharedIndexInformer
	Clock    clock.WithTicker // the wall clock if nil

	// Nodes and Endpoints are for approving nodes' serving certificates, which none are without. ServerHosts are the API server's names and
	// addresses, where they are known.
	Nodes, Endpoints cache.SharedIndexInformer
	ServerHosts      func() []string
}

type signingRequest = certificatesv1.CertificateSigningRequest

// Controller does one thing to every request.
type Controller struct {
	Deps
	requests listers.CertificateSigningRequestLister
	queue    *queue.Queue
}

// newController makes a controller that calls handle for every request that is there, and whenever one changes. The object is
// the informer's: handle must not change it.
func newController(deps Deps, name string, handle func(context.Context, *signingRequest) (queue.Result, error)) (*Controller, error) {
	if deps.Clock == nil {
		deps.Clock = clock.RealClock{}
	}
	c := &Controller{Deps: deps, requests: listers.NewCertificateSigningRequestLister(deps.Requests.GetIndexer())}
	c.queue = queue.New(queue.Options{Name: name, Clock: deps.Clock}, func(ctx context.Context, key queue.Key) (queue.Result, error) {
		r, err := c.requests.Get(key.Name)
		if apierrors.IsNotFound(err) {
			return queue.Result{}, nil
		}
		if err != nil {
			return queue.Result{}, err
		}
		result, err := handle(ctx, r)
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			return queue.Result{}, nil // the watch brings it as it is now
		}
		return result, err
	})
	add := func(obj any) { c.queue.Add(queue.Key{Name: obj.(*signingRequest).Name}) }
	_, err := deps.Requests.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: add, UpdateFunc: func(_, obj any) { add(obj) },
	})
	return c, err
}

// Run works until ctx ends.
func (c *Controller) Run(ctx context.Context) error {
	c.queue.Run(ctx, 2)
	return nil
}

// decided says how far a request is.
func decided(r *signingRequest) (approved, denied, failed bool) {
	for _, c := range r.Status.Conditions {
		switch c.Type {
		case certificatesv1.CertificateApproved:
			approved = true
		case certificatesv1.CertificateDenied:
			denied = true
		case certificatesv1.CertificateFailed:
			failed = true
		}
	}
	return approved, denied, failed
}

// age is how old something is; nothing is of no age.
func (c *Controller) age(since time.Time) time.Duration {
	if since.IsZero() {
		return 0
	}
	return c.Clock.Since(since)
}

var errNoSigner = errors.New("there is no certificate authority to sign with")
