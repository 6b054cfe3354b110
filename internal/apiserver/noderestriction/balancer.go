package noderestriction

import (
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"

	"portal/internal/identity"
)

// The objects of balancers in kube-system: roles can't say that a name begins with something, and names of others' Leases there are those
// of leaders.
const (
	balancerLease  = "portal-lb" // the leader's; with a hyphen and a machine's name, that machine's own
	balancerClaims = "portal-lb-claims"
)

// balancer narrows what a machine's balancer may write to the Lease of the leader, its own, and the claims.
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
		if own := balancerLease + "-" + machine; a.GetNamespace() != metav1.NamespaceSystem || name != balancerLease && name != own {
			return forbid(a, "a balancer writes the Leases %s and %s in %s only", balancerLease, own, metav1.NamespaceSystem)
		}
	case resource == corev1.Resource("configmaps"):
		if a.GetNamespace() != metav1.NamespaceSystem || name != balancerClaims {
			return forbid(a, "a balancer writes the ConfigMap %s in %s only", balancerClaims, metav1.NamespaceSystem)
		}
	}
	return nil
}
