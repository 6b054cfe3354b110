// Package account keeps what programs need to reach the API under a name of their own: the ServiceAccount default and the
// ConfigMap kube-root-ca.crt in every namespace, and the tokens in Secrets that ask for one. It issues no token itself: the
// API does.
package account

import (
	"bytes"
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
)

const (
	// DefaultName, RootCAName and TokenName are what --controllers calls the three controllers.
	DefaultName = "serviceaccount"
	RootCAName  = "root-ca-certificate-publisher"
	TokenName   = "serviceaccount-token"

	defaultAccount = "default"
	// RootCAConfigMap is the ConfigMap of the CA in each namespace.
	RootCAConfigMap = "kube-root-ca.crt"

	workers = 4
	// rootCAInterval is how often the CA is compared with what was published.
	rootCAInterval = 5 * time.Second
)

// Deps are what the controllers need.
type Deps struct {
	Client     kubernetes.Interface
	Namespaces cache.SharedIndexInformer
	// Accounts are all ServiceAccounts; ConfigMaps those named RootCAConfigMap; Secrets those of the type of tokens, indexed
	// with IndexByAccount.
	Accounts, ConfigMaps, Secrets cache.SharedIndexInformer
	// RootCA is what verifies the API server's certificate, in PEM; it may change. Empty: not known.
	RootCA func() []byte
}

// Controller works on a queue until it is stopped.
type Controller struct {
	queue *queue.Queue
	// beside runs as long as the queue does.
	beside func(context.Context)
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	var running sync.WaitGroup
	if c.beside != nil {
		running.Go(func() { c.beside(ctx) })
	}
	c.queue.Run(ctx, workers)
	running.Wait()
	return nil
}

// Listed says that the informers have synced.
func (c *Controller) Listed() { c.queue.Listed() }

// perNamespace makes a controller that keeps an object in every namespace that is there to stay. It is checked when the
// namespace changes, and when informer says that an object of that name does.
func perNamespace(controller, object string, deps Deps, informer cache.SharedIndexInformer, ensure func(ctx context.Context, namespace string) error) (*Controller, error) {
	c := &Controller{}
	c.queue = queue.New(queue.Options{Name: controller}, func(ctx context.Context, key queue.Key) (queue.Result, error) {
		if !stays(deps.Namespaces, key.Name) {
			return queue.Result{}, nil
		}
		return queue.Result{}, ignoreGone(ensure(ctx, key.Name))
	})
	_, err := deps.Namespaces.AddEventHandler(onChange(func(ns *corev1.Namespace) { c.queue.Add(queue.Key{Name: ns.Name}) }))
	if err != nil {
		return nil, err
	}
	_, err = informer.AddEventHandler(onChange(func(obj metav1.Object) {
		if obj.GetName() == object {
			c.queue.Add(queue.Key{Name: obj.GetNamespace()})
		}
	}))
	return c, err
}

// onChange calls do for whatever becomes of an object.
func onChange[T any](do func(T)) cache.ResourceEventHandler {
	changed := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		if t, ok := obj.(T); ok {
			do(t)
		}
	}
	return cache.ResourceEventHandlerFuncs{AddFunc: changed, UpdateFunc: func(_, obj any) { changed(obj) }, DeleteFunc: changed}
}

// stays says that a namespace exists and is not on its way out.
func stays(namespaces cache.SharedIndexInformer, name string) bool {
	obj, ok, err := namespaces.GetIndexer().GetByKey(name)
	if err != nil || !ok {
		return false
	}
	ns := obj.(*corev1.Namespace)
	return ns.DeletionTimestamp == nil && ns.Status.Phase != corev1.NamespaceTerminating
}

// ignoreGone leaves out failures that need no retry: the watch brings what happened.
func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return err
}

// NewDefault makes the controller of the ServiceAccount default.
func NewDefault(deps Deps) (*Controller, error) {
	return perNamespace(DefaultName, defaultAccount, deps, deps.Accounts, func(ctx context.Context, namespace string) error {
		if _, ok, err := deps.Accounts.GetIndexer().GetByKey(namespace + "/" + defaultAccount); err != nil || ok {
			return err
		}
		_, err := deps.Client.CoreV1().ServiceAccounts(namespace).Create(ctx,
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: defaultAccount, Namespace: namespace}}, metav1.CreateOptions{})
		return err
	})
}

// NewRootCA makes the controller of the ConfigMap that tells Pods how to verify the API server.
func NewRootCA(deps Deps) (*Controller, error) {
	c, err := perNamespace(RootCAName, RootCAConfigMap, deps, deps.ConfigMaps, func(ctx context.Context, namespace string) error {
		return publishRootCA(ctx, deps, namespace)
	})
	if err != nil {
		return nil, err
	}
	c.beside = func(ctx context.Context) {
		followRootCA(ctx, deps.RootCA, func() {
			for _, name := range deps.Namespaces.GetIndexer().ListKeys() {
				c.queue.Add(queue.Key{Name: name})
			}
		})
	}
	return c, nil
}

// followRootCA calls changed when the CA has.
func followRootCA(ctx context.Context, read func() []byte, changed func()) {
	before := read()
	tick := time.NewTicker(rootCAInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if now := read(); !bytes.Equal(now, before) {
			before = now
			changed()
		}
	}
}

func publishRootCA(ctx context.Context, deps Deps, namespace string) error {
	bundle := string(deps.RootCA())
	if bundle == "" {
		return nil
	}
	want := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Name: RootCAConfigMap, Namespace: namespace,
			Annotations: map[string]string{
				"kubernetes.io/description": "The certificate authority of the API server, for clients inside the cluster.",
			},
		},
		Data: map[string]string{corev1.ServiceAccountRootCAKey: bundle},
	}
	client := deps.Client.CoreV1().ConfigMaps(namespace)
	obj, ok, err := deps.ConfigMaps.GetIndexer().GetByKey(namespace + "/" + RootCAConfigMap)
	if err != nil {
		return err
	}
	if !ok {
		_, err := client.Create(ctx, want, metav1.CreateOptions{})
		return err
	}
	have := obj.(*corev1.ConfigMap)
	if len(have.Data) == 1 && have.Data[corev1.ServiceAccountRootCAKey] == bundle && len(have.BinaryData) == 0 {
		return nil
	}
	if have.Immutable != nil && *have.Immutable { // it comes back when the watch says that it is gone
		return client.Delete(ctx, have.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &have.UID}})
	}
	next := have.DeepCopy()
	next.Data, next.BinaryData = want.Data, nil
	if next.Annotations == nil {
		next.Annotations = want.Annotations
	}
	_, err = client.Update(ctx, next, metav1.UpdateOptions{})
	return err
}
