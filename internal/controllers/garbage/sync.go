package garbage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"

	"portal/internal/controllers/queue"
)

// unsyncedDelay is the shortest time after which it is checked again whether every kind has been listed.
const unsyncedDelay = 100 * time.Millisecond

func (c *Controller) sync(ctx context.Context, key queue.Key) (queue.Result, error) {
	o := c.graph.get(types.UID(key.Name))
	if o == nil {
		return queue.Result{}, nil
	}
	if wait := c.wait(ctx, o); wait > 0 {
		return queue.Result{Again: wait}, nil
	}
	stray := false
	var err error
	if !c.namespaceKnown(o.namespace) {
		stray, err = c.collectStray(ctx, o)
	}
	switch {
	case stray || err != nil:
	case o.deleting && o.orphaning:
		err = c.orphan(ctx, o)
	case o.deleting && o.foreground:
		err = c.finishForeground(ctx, o)
	case o.deleting:
		// Its dependents are synced when it is gone.
	case len(o.owners) > 0:
		err = c.collect(ctx, o)
	}
	if err != nil {
		return queue.Result{}, fmt.Errorf("%s %s/%s: %w", o.resource.Resource, o.namespace, o.name, err)
	}
	return queue.Result{}, nil
}

// wait is how long the sync of an object has to wait for kinds that haven't been listed. What ends only when no dependent is
// left needs all of them. An object with owners needs none, since the API server is asked about each owner that is
// missing; it waits only at the start, so that not every owner has to be asked for.
func (c *Controller) wait(ctx context.Context, o *object) time.Duration {
	if o.deleting && o.orphaning {
		// Without a kind, what is to be orphaned would be deleted as soon as it can be listed.
		return c.unsynced(ctx, math.MaxInt64)
	}
	if c.listed.Load() && !(o.deleting && o.foreground) {
		return 0
	}
	wait := c.unsynced(ctx, c.SyncTimeout)
	if wait == 0 {
		c.listed.Store(true)
	}
	return wait
}

// verdicts are what was found out about an object's owners.
type verdicts struct {
	solid   int
	dropped []types.UID // gone, or going as soon as their dependents are
	waiting bool        // one of the dropped waits for its dependents
}

// collect deletes an object that no owner holds, and takes off it the references that mean nothing any more.
func (c *Controller) collect(ctx context.Context, o *object) error {
	// The cheap check first: most objects are here because they were just created, beside their owner.
	if c.ownersPresent(o) {
		return nil
	}
	client := c.client(o)
	live, err := client.Get(ctx, o.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && live.UID != o.uid {
		return nil // its delete event is on the way
	} else if err != nil {
		return err
	}
	v, err := c.judge(ctx, o, live.OwnerReferences)
	if err != nil || len(live.OwnerReferences) == 0 || len(v.dropped) == 0 {
		return err
	}
	if v.solid > 0 {
		return c.dropOwners(ctx, live, client, v.dropped)
	}
	policy := metav1.DeletePropagationBackground
	switch {
	case slices.Contains(live.Finalizers, metav1.FinalizerOrphanDependents):
		policy = metav1.DeletePropagationOrphan
	case slices.Contains(live.Finalizers, metav1.FinalizerDeleteDependents),
		v.waiting && (len(c.graph.dependentsOf(o.uid)) > 0 || c.unsynced(ctx, c.SyncTimeout) > 0): // it may have dependents of a kind that is new
		policy = metav1.DeletePropagationForeground
	}
	if policy == metav1.DeletePropagationForeground && c.inCircle(o) {
		// Two that wait for each other would wait for ever: this one stops holding up its owners.
		if err := c.unblockOwners(ctx, live, client); err != nil {
			return err
		}
		live.ResourceVersion = ""
	}
	preconditions := metav1.Preconditions{UID: &live.UID}
	if live.ResourceVersion != "" {
		preconditions.ResourceVersion = &live.ResourceVersion // owners may have come since
	}
	err = client.Delete(ctx, o.name, metav1.DeleteOptions{PropagationPolicy: &policy, Preconditions: &preconditions})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (c *Controller) ownersPresent(o *object) bool {
	return !slices.ContainsFunc(o.owners, func(ref metav1.OwnerReference) bool {
		owner := c.graph.get(ref.UID)
		return owner == nil || owner.namespace != "" && owner.namespace != o.namespace || owner.name != ref.Name ||
			owner.deleting && owner.foreground
	})
}

// judge asks the API server about each owner that isn't known: the graph may be behind, and deleting can't be undone.
func (c *Controller) judge(ctx context.Context, o *object, refs []metav1.OwnerReference) (verdicts, error) {
	var v verdicts
	for _, ref := range refs {
		gvr, namespaced, err := c.resourceOf(ref)
		if err != nil {
			return v, err
		}
		if namespaced && o.namespace == "" {
			v.solid++ // can't be: an owner in a namespace. Nothing is deleted for a mistake.
			continue
		}
		var client metadata.ResourceInterface = c.Metadata.Resource(gvr)
		if namespaced {
			client = c.Metadata.Resource(gvr).Namespace(o.namespace)
		}
		owner, err := client.Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) || err == nil && owner.UID != ref.UID:
			v.dropped = append(v.dropped, ref.UID)
		case err != nil:
			return v, err
		case owner.DeletionTimestamp != nil && slices.Contains(owner.Finalizers, metav1.FinalizerDeleteDependents):
			v.dropped = append(v.dropped, ref.UID)
			v.waiting = true
		default:
			v.solid++
		}
	}
	return v, nil
}

func (c *Controller) inCircle(o *object) bool {
	return slices.ContainsFunc(c.graph.dependentsOf(o.uid), func(d *object) bool { return d.deleting && d.foreground })
}

// orphan removes the references of an object's dependents to it, then its finalizer.
func (c *Controller) orphan(ctx context.Context, o *object) error {
	var errs []error
	for _, dependent := range c.graph.dependentsOf(o.uid) {
		client := c.client(dependent)
		live, err := client.Get(ctx, dependent.name, metav1.GetOptions{})
		if err == nil && live.UID == dependent.uid {
			err = c.dropOwners(ctx, live, client, []types.UID{o.uid})
		}
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("orphaning %s: %w", dependent.name, err))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	return c.removeFinalizer(ctx, o, metav1.FinalizerOrphanDependents)
}

// finishForeground removes an object's finalizer when no dependent blocks it any more. Those that are left are being
// deleted already.
func (c *Controller) finishForeground(ctx context.Context, o *object) error {
	for _, dependent := range c.graph.dependentsOf(o.uid) {
		if dependent.blocks(o.uid) {
			return nil
		}
	}
	return c.removeFinalizer(ctx, o, metav1.FinalizerDeleteDependents)
}

func (c *Controller) removeFinalizer(ctx context.Context, o *object, finalizer string) error {
	client := c.client(o)
	live, err := client.Get(ctx, o.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && live.UID != o.uid {
		return nil
	} else if err != nil {
		return err
	}
	finalizers := slices.DeleteFunc(slices.Clone(live.Finalizers), func(f string) bool { return f == finalizer })
	if len(finalizers) == len(live.Finalizers) {
		return nil
	}
	return patch(ctx, client, live, map[string]any{"finalizers": finalizers})
}

func (c *Controller) dropOwners(ctx context.Context, live *metav1.PartialObjectMetadata, client metadata.ResourceInterface, owners []types.UID) error {
	refs := slices.DeleteFunc(slices.Clone(live.OwnerReferences), func(r metav1.OwnerReference) bool { return slices.Contains(owners, r.UID) })
	if len(refs) == len(live.OwnerReferences) {
		return nil
	}
	return patch(ctx, client, live, map[string]any{"ownerReferences": refs})
}

func (c *Controller) unblockOwners(ctx context.Context, live *metav1.PartialObjectMetadata, client metadata.ResourceInterface) error {
	refs := slices.Clone(live.OwnerReferences)
	for i := range refs {
		refs[i].BlockOwnerDeletion = nil
	}
	return patch(ctx, client, live, map[string]any{"ownerReferences": refs})
}

// patch replaces parts of an object's metadata, if the object is still the one that was read.
func patch(ctx context.Context, client metadata.ResourceInterface, live *metav1.PartialObjectMetadata, meta map[string]any) error {
	meta["uid"], meta["resourceVersion"] = live.UID, live.ResourceVersion
	data, err := json.Marshal(map[string]any{"metadata": meta})
	if err != nil {
		return err
	}
	_, err = client.Patch(ctx, live.Name, types.MergePatchType, data, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (c *Controller) client(o *object) metadata.ResourceInterface {
	if o.namespace == "" {
		return c.Metadata.Resource(o.resource)
	}
	return c.Metadata.Resource(o.resource).Namespace(o.namespace)
}
