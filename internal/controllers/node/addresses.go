package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"portal/internal/controllers/queue"
)

// seen notes the parts that a node has, or has it given some.
func (c *Controller) seen(node *corev1.Node) {
	if len(c.pools) == 0 {
		return
	}
	if len(node.Spec.PodCIDRs) == 0 {
		if node.DeletionTimestamp == nil {
			c.queue.Add(queue.Key{Name: node.Name})
		}
		return
	}
	for prefix, rival := range c.occupy(node) {
		c.Recorder.Eventf(node, corev1.EventTypeWarning, "CIDRConflict", "spec.podCIDRs: %s overlaps addresses of %s", prefix, rival)
	}
}

// occupy notes the parts that a node has, and gives those of which somebody else has some. What was reserved for the node is
// not free for a moment in between.
func (c *Controller) occupy(node *corev1.Node) map[netip.Prefix]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unreserve(node.Name)
	rivals := map[netip.Prefix]string{}
	c.each(node, func(p *pool, prefix netip.Prefix) {
		if rival := p.occupy(prefix, node.Name); rival != "" {
			rivals[prefix] = rival
		}
	})
	return rivals
}

func (c *Controller) gone(node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unreserve(node.Name)
	c.each(node, func(p *pool, prefix netip.Prefix) { p.release(prefix, node.Name) })
}

// each calls a function for the parts that a node has. It is called with the lock held.
func (c *Controller) each(node *corev1.Node, do func(*pool, netip.Prefix)) {
	for _, text := range node.Spec.PodCIDRs {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			continue
		}
		for _, p := range c.pools {
			do(p, prefix.Masked())
		}
	}
}

func (c *Controller) syncCIDR(ctx context.Context, key queue.Key) (queue.Result, error) {
	node, err := c.nodes.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return queue.Result{}, nil
	} else if err != nil {
		return queue.Result{}, err
	}
	if len(node.Spec.PodCIDRs) > 0 || node.DeletionTimestamp != nil {
		return queue.Result{}, nil
	}
	parts, err := c.allocate(node.Name)
	if err != nil {
		c.Recorder.Eventf(node, corev1.EventTypeWarning, "CIDRNotAvailable", "%v", err)
		return queue.Result{}, err
	}
	if err := c.assign(ctx, node, parts); err != nil {
		return queue.Result{}, fmt.Errorf("giving node %s its Pod CIDRs: %w", node.Name, err)
	}
	return queue.Result{}, nil
}

// allocate reserves a node's parts. They stay reserved until the node is seen with its parts or is gone: a write that
// failed may have happened all the same, and is retried with the same ones.
func (c *Controller) allocate(owner string) ([]netip.Prefix, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if parts := c.reserved[owner]; parts != nil {
		return parts, nil
	}
	var parts []netip.Prefix
	for _, p := range c.pools {
		part, err := p.allocate(owner)
		if err != nil {
			for i, got := range parts {
				c.pools[i].release(got, owner)
			}
			return nil, err
		}
		parts = append(parts, part)
	}
	c.reserved[owner] = parts
	return parts, nil
}

// unreserve gives back what was reserved for a node. It is called with the lock held.
func (c *Controller) unreserve(owner string) {
	for i, part := range c.reserved[owner] {
		c.pools[i].release(part, owner)
	}
	delete(c.reserved, owner)
}

func (c *Controller) assign(ctx context.Context, node *corev1.Node, parts []netip.Prefix) error {
	texts := make([]string, len(parts))
	for i, part := range parts {
		texts[i] = part.String()
	}
	patch, err := json.Marshal(map[string]any{
		// The version: somebody may have given the node its addresses since it was read.
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"podCIDR": texts[0], "podCIDRs": texts},
	})
	if err != nil {
		return err
	}
	_, err = c.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}
