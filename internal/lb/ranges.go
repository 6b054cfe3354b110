package lb

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/lb/pool"
	"portal/internal/servicerange"
)

// rangesRetry is how often an API that does not have ServiceCIDRs, or lets nobody read them, is asked again.
const rangesRetry = time.Minute

// followRanges keeps the ranges of Services known until ctx ends. unreadable is set if the API says that it has none to read, as Kubernetes before 1.33.
func (b *Balancer) followRanges(ctx context.Context, unreadable *atomic.Bool) {
	for {
		_, err := b.client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{Limit: 1})
		wait := time.Second
		switch {
		case err == nil:
			b.ranges.run(ctx)
			return
		case apierrors.IsNotFound(err), apierrors.IsForbidden(err):
			if !unreadable.Swap(true) {
				b.Log.Info("the ranges of Services can't be read: whether pools overlap them is not checked", "err", err)
			}
			wait = rangesRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

// podRanges are those of a Node's Pods.
func podRanges(node *corev1.Node) []string {
	if len(node.Spec.PodCIDRs) == 0 && node.Spec.PodCIDR != "" {
		return []string{node.Spec.PodCIDR}
	}
	return node.Spec.PodCIDRs
}

// reservedRanges are those of Services and of Nodes' Pods that pools have addresses of. Nobody gets one, even while it is free: some Service or Pod will have it.
// A Service that has one keeps it.
func (b *Balancer) reservedRanges() (out []pool.Reserved) {
	var all []pool.Reserved
	for _, object := range b.ranges.List() {
		if cidr, ok := object.(*networkingv1.ServiceCIDR); ok {
			for _, p := range servicerange.Prefixes(cidr) {
				all = append(all, pool.Reserved{Prefix: p, What: "the Service range"})
			}
		}
	}
	for _, object := range b.nodes.List() {
		node, ok := object.(*corev1.Node)
		if !ok {
			continue
		}
		for _, text := range podRanges(node) {
			if p, err := netip.ParsePrefix(text); err == nil {
				all = append(all, pool.Reserved{Prefix: p.Masked(), What: "the Pod range of Node " + node.Name})
			}
		}
	}
	pools, _ := b.allPools()
	overlaps := map[string]bool{}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range all {
		for _, p := range pools {
			i, _, found := p.Overlap([]pool.Reserved{r})
			if !found {
				continue
			}
			if !slices.Contains(out, r) {
				out = append(out, r)
			}
			key := p.Name + " " + r.String()
			if overlaps[key] = true; !b.overlaps[key] {
				b.Log.Warn("addresses of a pool are not given to Services", "pool", p.Name, "why", pool.OverlapError(p.Ranges[i], r))
			}
		}
	}
	b.overlaps = overlaps
	slices.SortFunc(out, func(x, y pool.Reserved) int { return strings.Compare(x.String(), y.String()) })
	return out
}
