package apiserver

import (
	"context"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	genericserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/tools/cache"

	"portal/internal/servicerange"
)

// clusterRanges are those of the default ServiceCIDR: those of the flags until it has been read, and the last that were
// known while it is away.
func (s *Server) clusterRanges() []netip.Prefix {
	if known := s.ranges.Load(); known != nil {
		return *known
	}
	return s.opts.ranges
}

// reserved says that an address belongs to the kubernetes Service and to nobody else: the first of each of the cluster's own
// ranges. Pods and certificates know the API by it.
func (s *Server) reserved(addr netip.Addr) bool {
	return slices.ContainsFunc(s.clusterRanges(), func(p netip.Prefix) bool { return p.Addr().Next() == addr.Unmap() })
}

// serviceAddress says that an address is in a range of cluster IPs.
func (s *Server) serviceAddress(addr netip.Addr) bool {
	return slices.ContainsFunc(s.allocator.Ranges(), func(p netip.Prefix) bool { return p.Contains(addr.Unmap()) })
}

// followServiceCIDRs keeps the allocator's ranges those of the ServiceCIDR objects, until the server ends. It returns when
// they have been read, or with an error when first ends before that.
func (s *Server) followServiceCIDRs(hook genericserver.PostStartHookContext, first context.Context) error {
	informer := s.factory.Networking().V1().ServiceCIDRs()
	update := func(any) {
		list, err := informer.Lister().List(labels.Everything())
		if err != nil {
			return
		}
		if own := ownRanges(list); len(own) > 0 && !slices.Equal(own, s.clusterRanges()) {
			s.ranges.Store(&own)
			s.certs.serve(s.hosts())
		}
		s.allocator.SetRanges(usableRanges(list, s.clusterRanges()))
	}
	handler, err := informer.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: update, UpdateFunc: func(_, now any) { update(now) }, DeleteFunc: update,
	})
	if err != nil {
		return err
	}
	s.factory.Start(hook.Done())
	if !cache.WaitForCacheSync(first.Done(), handler.HasSynced) {
		return first.Err()
	}
	return nil
}

// ownRanges are the prefixes of the default ServiceCIDR, where it exists.
func ownRanges(list []*networkingv1.ServiceCIDR) []netip.Prefix {
	for _, cidr := range list {
		if cidr.Name == defaultName {
			return servicerange.Prefixes(cidr)
		}
	}
	return nil
}

// usableRanges are own, which no ordinary call can take away, and the prefixes of the ServiceCIDRs that are neither being
// deleted nor said to be not ready, the oldest first, so that a cluster's own range is used up before those added to it.
func usableRanges(list []*networkingv1.ServiceCIDR, own []netip.Prefix) []netip.Prefix {
	list = slices.Clone(list)
	slices.SortFunc(list, func(a, b *networkingv1.ServiceCIDR) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	out := slices.Clone(own)
	for _, cidr := range list {
		ready := meta.FindStatusCondition(cidr.Status.Conditions, networkingv1.ServiceCIDRConditionReady)
		if cidr.DeletionTimestamp != nil || ready != nil && ready.Status != metav1.ConditionTrue {
			continue
		}
		for _, p := range servicerange.Prefixes(cidr) {
			if !slices.Contains(out, p) {
				out = append(out, p)
			}
		}
	}
	return out
}

func familyOf(addr netip.Addr) corev1.IPFamily {
	if addr.Is4() {
		return corev1.IPv4Protocol
	}
	return corev1.IPv6Protocol
}
