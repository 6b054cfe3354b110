package csr

import (
	"context"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/certificates/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"portal/internal/controllers/queue"
)

// PodCleanerName is what --controllers calls the controller that deletes old PodCertificateRequests.
const PodCleanerName = "podcertificaterequest-cleaner"

// keepPod is how long a request for a Pod's certificate is kept, answered or not: a kubelet that still wants one asks again.
const keepPod = 15 * time.Minute

// PodCleaner deletes PodCertificateRequests that are old.
type PodCleaner struct {
	client kubernetes.Interface
	lister listers.PodCertificateRequestLister
	synced cache.InformerSynced
	queue  *queue.Queue
	clock  clock.WithTicker
}

// NewPodCleaner makes the controller; factory is started by the caller.
func NewPodCleaner(client kubernetes.Interface, factory informers.SharedInformerFactory, clock clock.WithTicker) (*PodCleaner, error) {
	informer := factory.Certificates().V1().PodCertificateRequests()
	c := &PodCleaner{client: client, lister: informer.Lister(), synced: informer.Informer().HasSynced, clock: clock}
	c.queue = queue.New(queue.Options{Name: PodCleanerName, Clock: clock}, c.sync)
	_, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(obj any) {
		if r, ok := obj.(*certificatesv1.PodCertificateRequest); ok {
			c.queue.Add(queue.Key{Namespace: r.Namespace, Name: r.Name})
		}
	}})
	return c, err
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *PodCleaner) Run(ctx context.Context) error {
	if cache.WaitForCacheSync(ctx.Done(), c.synced) {
		c.queue.Listed()
		c.queue.Run(ctx, 1)
	}
	return nil
}

func (c *PodCleaner) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	r, err := c.lister.PodCertificateRequests(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if left := keepPod - c.clock.Since(r.CreationTimestamp.Time); left > 0 {
		return queue.Result{Again: left}, nil
	}
	err = c.client.CertificatesV1().PodCertificateRequests(r.Namespace).Delete(ctx, r.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &r.UID}})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return queue.Result{}, nil
	}
	return queue.Result{Writes: 1}, err
}
