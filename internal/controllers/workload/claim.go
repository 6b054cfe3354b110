package workload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Claim is how an owner comes to own what its selector selects.
type Claim struct {
	Owner    metav1.Object
	Kind     schema.GroupVersionKind
	Selector labels.Selector
	// Live reads the owner from the API server, not from a cache: one that is gone must adopt nothing.
	Live func(ctx context.Context) (metav1.Object, error)
	// Patch changes the metadata of an object.
	Patch func(ctx context.Context, name string, patch []byte) error
	// Fit, if not nil, says which orphans are worth adopting.
	Fit func(metav1.Object) bool
	// Finalizer, if not "", is one that the owner's objects have.
	Finalizer string

	once sync.Once
	err  error
}

// Sort gives the objects that are the owner's: those that have it as their controller, and orphans that it adopts now.
// Objects that its selector no longer selects are released.
func Sort[T metav1.Object](ctx context.Context, c *Claim, objects []T) (mine []T, err error) {
	var failed []error
	for _, obj := range objects {
		ok, err := c.own(ctx, obj)
		if err != nil {
			failed = append(failed, err)
		} else if ok {
			mine = append(mine, obj)
		}
	}
	return mine, errors.Join(failed...)
}

func (c *Claim) own(ctx context.Context, obj metav1.Object) (bool, error) {
	owner := metav1.GetControllerOfNoCopy(obj)
	selected := c.Selector.Matches(labels.Set(obj.GetLabels()))
	ending := c.Owner.GetDeletionTimestamp() != nil
	switch {
	case owner != nil && owner.UID != c.Owner.GetUID():
		return false, nil
	case owner != nil && selected:
		return true, nil
	case owner != nil && ending:
		return false, nil
	case owner != nil:
		return false, c.release(ctx, obj)
	case ending || !selected || obj.GetDeletionTimestamp() != nil || c.Fit != nil && !c.Fit(obj):
		return false, nil
	}
	return c.adopt(ctx, obj)
}

func (c *Claim) adopt(ctx context.Context, obj metav1.Object) (bool, error) {
	c.once.Do(func() {
		now, err := c.Live(ctx)
		switch {
		case err != nil:
			c.err = fmt.Errorf("%s %s adopts nothing: %w", c.Kind.Kind, c.Owner.GetName(), err)
		case now.GetUID() != c.Owner.GetUID():
			c.err = fmt.Errorf("%s %s adopts nothing: another one has its name now", c.Kind.Kind, c.Owner.GetName())
		case now.GetDeletionTimestamp() != nil:
			c.err = fmt.Errorf("%s %s adopts nothing: it is being deleted", c.Kind.Kind, c.Owner.GetName())
		}
	})
	if c.err != nil {
		return false, c.err
	}
	err := c.patch(ctx, obj, metav1.NewControllerRef(c.Owner, c.Kind), "finalizers")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
		return false, nil // it is gone, or somebody else was faster
	}
	return err == nil, err
}

func (c *Claim) release(ctx context.Context, obj metav1.Object) error {
	err := c.patch(ctx, obj, map[string]any{"$patch": "delete", "uid": c.Owner.GetUID()}, "$deleteFromPrimitiveList/finalizers")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
		return nil
	}
	return err
}

// patch changes the owners of an object, and whether it has the finalizer, if it is still the same one.
func (c *Claim) patch(ctx context.Context, obj metav1.Object, owner any, finalizers string) error {
	metadata := map[string]any{"uid": obj.GetUID(), "ownerReferences": []any{owner}}
	if c.Finalizer != "" {
		metadata[finalizers] = []string{c.Finalizer}
	}
	data, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return err
	}
	return c.Patch(ctx, obj.GetName(), data)
}

// UID of an object's controller; "" if it has none.
func ControllerUID(obj metav1.Object) types.UID {
	if owner := metav1.GetControllerOfNoCopy(obj); owner != nil {
		return owner.UID
	}
	return ""
}
