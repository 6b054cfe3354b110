package garbage

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An API server decides from its cache whether an object may be created in a namespace. With several servers that cache
// can be behind, and an object can appear in a namespace after another server has found it empty and removed it. No
// request reaches such an object through its namespace's life cycle any more, so it is deleted here.

// The informers of an object and of its namespace are not in step: a namespace that is missing gets this long.
const namespaceDelay = 2 * time.Second

// namespaceKnown reports whether an object's namespace is there, or is not needed.
func (c *Controller) namespaceKnown(name string) bool {
	if name == "" {
		return true
	}
	_, known, err := c.Namespaces.GetStore().GetByKey(name)
	return known || err != nil
}

// namespaceGone has the objects checked that are still in a namespace which is gone.
func (c *Controller) namespaceGone(name string) {
	for _, o := range c.graph.inNamespace(name) {
		c.queue.AddAfter(keyOf(o.uid), namespaceDelay)
	}
}

// collectStray deletes an object whose namespace doesn't exist, by the API server's own word; stray reports whether that
// is so.
func (c *Controller) collectStray(ctx context.Context, o *object) (stray bool, err error) {
	_, err = c.Client.CoreV1().Namespaces().Get(ctx, o.namespace, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return false, err
	}
	background, now := metav1.DeletePropagationBackground, int64(0)
	err = c.client(o).Delete(ctx, o.name, metav1.DeleteOptions{
		PropagationPolicy: &background, GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &o.uid},
	})
	return true, ignoreGone(err)
}
