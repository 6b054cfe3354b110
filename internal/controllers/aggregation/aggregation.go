// Package aggregation keeps the rules of ClusterRoles that aggregate others what their selectors ask for. What the rules
// are is decided in portal/internal/rbac.
package aggregation

import (
	"context"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/rbac/v1"
	"k8s.io/client-go/tools/cache"

	"portal/internal/controllers/queue"
	"portal/internal/rbac"
)

// Name is what --controllers calls it.
const Name = "clusterrole-aggregation"

// Controller writes the rules of aggregated ClusterRoles.
type Controller struct {
	client   kubernetes.Interface
	informer cache.SharedIndexInformer
	roles    listers.ClusterRoleLister
	queue    *queue.Queue
}

// New makes the controller. The factory must be started before it runs, or while it does.
func New(client kubernetes.Interface, factory informers.SharedInformerFactory) (*Controller, error) {
	roles := factory.Rbac().V1().ClusterRoles()
	c := &Controller{client: client, informer: roles.Informer(), roles: roles.Lister()}
	c.queue = queue.New(queue.Options{Name: Name}, c.sync)
	// A role's rules or labels may matter to any aggregated role, and there are few of these.
	_, err := c.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { c.enqueue() }, UpdateFunc: func(_, _ any) { c.enqueue() }, DeleteFunc: func(any) { c.enqueue() },
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

func (c *Controller) enqueue() {
	all, err := c.roles.List(labels.Everything())
	if err != nil {
		return
	}
	for _, r := range all {
		if r.AggregationRule != nil {
			c.queue.Add(queue.Key{Name: r.Name})
		}
	}
}

// sync writes a role's rules if they are not what its selectors ask for.
func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	role, err := c.roles.Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && role.AggregationRule == nil {
		return queue.Result{}, nil
	}
	if err != nil {
		return queue.Result{}, err
	}
	all, err := c.roles.List(labels.Everything())
	if err != nil {
		return queue.Result{}, err
	}
	rules, err := rbac.Aggregate(role, all)
	if err != nil || equality.Semantic.DeepEqual(rules, role.Rules) {
		return queue.Result{}, err
	}
	next := &rbacv1.ClusterRole{TypeMeta: role.TypeMeta, ObjectMeta: *role.ObjectMeta.DeepCopy(), AggregationRule: role.AggregationRule, Rules: rules}
	if _, err := c.client.RbacV1().ClusterRoles().Update(ctx, next, metav1.UpdateOptions{}); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
		return queue.Result{}, err
	}
	// After a conflict or deletion the watch brings the role as it is now, and its key back.
	return queue.Result{Writes: 1}, nil
}
