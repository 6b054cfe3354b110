package noderestriction

import (
	"cmp"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"

	"portal/internal/identity"
)

// The objects of balancers in kube-system: roles can't say that a name begins with something, and names of others' Leases there are those
// of leaders.
const (
	balancerLease  = "portal-lb" // the leader's; with a hyphen and a machine's name, that machine's own
	balancerClaims = "portal-lb-claims"
	// balancerEntry is the Service whose addresses Ingresses share.
	balancerEntry = "portal-ingress"
)

// classLease are the Leases of leaders for other classes than the default.
var classLease = regexp.MustCompile(`^portal-lb\.[0-9a-f]{16}$`)

// cleanup is the finalizer of Services that have a load balancer.
const cleanup = "service.kubernetes.io/load-balancer-cleanup"

// balancer narrows what a machine's balancer may write to the Lease of the leader, its own, the claims, the addresses of
// Services and Ingresses, and the Service that the latter share.
func balancer(a admission.Attributes) error {
	user := a.GetUserInfo()
	if !slices.Contains(user.GetGroups(), identity.LB.Group()) {
		return nil
	}
	machine, ok := strings.CutPrefix(user.GetName(), identity.LB.User(""))
	if !ok || machine == "" {
		return forbid(a, "the user name %q does not say which machine's balancer this is", user.GetName())
	}
	name := nameOf(a)
	switch resource := a.GetResource().GroupResource(); {
	case resource.Group == coordinationv1.GroupName && resource.Resource == "leases":
		if own := balancerLease + "-" + machine; a.GetNamespace() != metav1.NamespaceSystem || name != balancerLease && name != own && !classLease.MatchString(name) {
			return forbid(a, "a balancer writes the Leases %s and %s in %s only", balancerLease, own, metav1.NamespaceSystem)
		}
	case resource == corev1.Resource("configmaps"):
		if a.GetNamespace() != metav1.NamespaceSystem || name != balancerClaims {
			return forbid(a, "a balancer writes the ConfigMap %s in %s only", balancerClaims, metav1.NamespaceSystem)
		}
	case resource == corev1.Resource("services") && a.GetSubresource() == "status":
		return balancedService(a)
	case resource == corev1.Resource("services") && a.GetSubresource() == "":
		return entryService(a, name)
	case resource == networkingv1.Resource("ingresses") && a.GetSubresource() == "status":
		return balancedIngress(a)
	}
	return nil
}

// entryService lets a balancer make the Service whose addresses Ingresses share, and no other: one that leads nowhere but to balancers.
func entryService(a admission.Attributes, name string) error {
	svc, ok := a.GetObject().(*corev1.Service)
	if !ok || a.GetOperation() != admission.Create || a.GetNamespace() != metav1.NamespaceSystem || name != balancerEntry {
		return forbid(a, "a balancer makes the Service %s in %s only", balancerEntry, metav1.NamespaceSystem)
	}
	s := &svc.Spec
	if s.Type != corev1.ServiceTypeLoadBalancer || len(s.Selector)+len(s.ExternalIPs)+len(svc.OwnerReferences)+len(svc.Finalizers)+len(svc.Annotations) > 0 || s.ExternalName != "" {
		return forbid(a, "a balancer makes the Service %s of type LoadBalancer, without a selector, external addresses, annotations, owners or finalizers", balancerEntry)
	}
	return nil
}

// balancedIngress lets a balancer write an Ingress' addresses.
func balancedIngress(a admission.Attributes) error {
	now, ok := a.GetObject().(*networkingv1.Ingress)
	before, had := a.GetOldObject().(*networkingv1.Ingress)
	if !ok || !had {
		return forbid(a, "a balancer changes the status of Ingresses that are there")
	}
	next, last := now.ObjectMeta.DeepCopy(), before.ObjectMeta.DeepCopy()
	for _, meta := range []*metav1.ObjectMeta{next, last} {
		meta.ManagedFields, meta.ResourceVersion, meta.Generation = nil, "", 0
	}
	if !equality.Semantic.DeepEqual(next, last) {
		return forbid(a, "a balancer changes nothing of an Ingress' metadata")
	}
	for _, ingress := range now.Status.LoadBalancer.Ingress {
		addr, err := netip.ParseAddr(ingress.IP)
		if err != nil || !addr.IsGlobalUnicast() || ingress.Hostname != "" {
			return forbid(a, "status.loadBalancer.ingress: a balancer gives addresses that a machine can have, not %q", cmp.Or(ingress.Hostname, ingress.IP))
		}
	}
	return nil
}

// balancedService lets a balancer write a Service's addresses and its finalizer. A status write could change the rest of the metadata,
// too: owners, and with them what the garbage collector deletes.
func balancedService(a admission.Attributes) error {
	now, ok := a.GetObject().(*corev1.Service)
	before, had := a.GetOldObject().(*corev1.Service)
	if !ok || !had {
		return forbid(a, "a balancer changes the status of Services that are there")
	}
	next, last := now.ObjectMeta.DeepCopy(), before.ObjectMeta.DeepCopy()
	for _, meta := range []*metav1.ObjectMeta{next, last} {
		meta.ManagedFields, meta.ResourceVersion, meta.Generation = nil, "", 0
		meta.Finalizers = slices.DeleteFunc(meta.Finalizers, func(f string) bool { return f == cleanup })
	}
	if !equality.Semantic.DeepEqual(next, last) {
		return forbid(a, "of a Service's metadata, a balancer changes the finalizer %s only", cleanup)
	}
	for _, ingress := range now.Status.LoadBalancer.Ingress {
		addr, err := netip.ParseAddr(ingress.IP)
		if err != nil || !addr.IsGlobalUnicast() || ingress.Hostname != "" {
			return forbid(a, "status.loadBalancer.ingress: a balancer gives addresses that a machine can have, not %q", cmp.Or(ingress.Hostname, ingress.IP))
		}
	}
	if !equality.Semantic.DeepEqual(now.Status.Conditions, before.Status.Conditions) {
		return forbid(a, "of a Service's status, a balancer changes loadBalancer only")
	}
	return nil
}
