// Package policystatus tells the authors of ValidatingAdmissionPolicies, in their status, which expressions don't fit the types that
// they are about. How expressions are checked is k8s.io/apiserver's; the policies work whatever the status says.
package policystatus

import (
	"context"
	"errors"
	"sync"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/cel/openapi/resolver"
	apply "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/admissionregistration/v1"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/validation/spec"

	"portal/internal/controllers/queue"
)

// Name is what --controllers calls it, and the manager of the fields that it writes.
const Name = "validatingadmissionpolicy-status"

// Controller writes the status of ValidatingAdmissionPolicies.
type Controller struct {
	client   kubernetes.Interface
	informer cache.SharedIndexInformer
	policies listers.ValidatingAdmissionPolicyLister
	queue    *queue.Queue
	kinds    meta.RESTMapper
	schemas  resolver.SchemaResolver
}

// New makes the controller. The factory must be started before it runs, or while it does.
func New(client kubernetes.Interface, factory informers.SharedInformerFactory) (*Controller, error) {
	policies := factory.Admissionregistration().V1().ValidatingAdmissionPolicies()
	c := &Controller{
		client: client, informer: policies.Informer(), policies: policies.Lister(),
		kinds:   restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client.Discovery())),
		schemas: &resolver.ClientDiscoveryResolver{Discovery: client.Discovery()},
	}
	c.queue = queue.New(queue.Options{Name: Name}, c.sync)
	_, err := c.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: c.enqueue, UpdateFunc: func(_, obj any) { c.enqueue(obj) },
	})
	return c, err
}

// Run works until ctx ends, and returns when all it started has ended.
func (c *Controller) Run(ctx context.Context) error {
	if cache.WaitForCacheSync(ctx.Done(), c.informer.HasSynced) {
		c.queue.Run(ctx, 1)
	}
	return nil
}

func (c *Controller) enqueue(obj any) {
	if p, ok := obj.(*admissionregistrationv1.ValidatingAdmissionPolicy); ok {
		c.queue.Add(queue.Key{Name: p.Name})
	}
}

// sync checks a policy whose spec has changed since it was last checked.
func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	policy, err := c.policies.Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && policy.Generation <= policy.Status.ObservedGeneration {
		return queue.Result{}, nil
	}
	if err != nil {
		return queue.Result{}, err
	}
	schemas := &remembering{from: c.schemas, known: map[schema.GroupVersionKind]*spec.Schema{}}
	checker := validating.TypeChecker{SchemaResolver: schemas, RestMapper: c.kinds}
	checked := apply.TypeChecking()
	for _, w := range checker.Check(policy) {
		checked.WithExpressionWarnings(apply.ExpressionWarning().WithFieldRef(w.FieldRef).WithWarning(w.Warning))
	}
	// The checker passes over types that it could not read. A policy must not look checked because the API was away.
	if err := schemas.err; err != nil {
		return queue.Result{}, err
	}
	status := apply.ValidatingAdmissionPolicyStatus().WithObservedGeneration(policy.Generation).WithTypeChecking(checked)
	_, err = c.client.AdmissionregistrationV1().ValidatingAdmissionPolicies().ApplyStatus(ctx,
		apply.ValidatingAdmissionPolicy(policy.Name).WithStatus(status), metav1.ApplyOptions{FieldManager: Name, Force: true})
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	}
	return queue.Result{Writes: 1}, err
}

// remembering reads each type once for a policy, and keeps the error of one that could not be read.
type remembering struct {
	from  resolver.SchemaResolver
	mu    sync.Mutex
	known map[schema.GroupVersionKind]*spec.Schema
	err   error
}

// ResolveSchema is the schema of a kind.
func (r *remembering) ResolveSchema(kind schema.GroupVersionKind) (*spec.Schema, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s, ok := r.known[kind]; ok {
		return s, nil
	}
	s, err := r.from.ResolveSchema(kind)
	if err == nil {
		r.known[kind] = s
	} else if !errors.Is(err, resolver.ErrSchemaNotFound) {
		r.err = err
	}
	return s, err
}
