package service

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// settleFamilies makes ipFamilyPolicy and ipFamilies say what the Service will have on a cluster with the families
// has, or reports what can't be had. Addresses come after, one for each family.
func settleFamilies(is, was *corev1.ServiceSpec, has []corev1.IPFamily) field.ErrorList {
	if !addressed(is) || restingPreference(is, was) {
		return nil
	}
	if is.IPFamilyPolicy == nil {
		is.IPFamilyPolicy = ptr.To(impliedPolicy(is, was))
	}
	// Nothing can be inferred from fields that are wrong by themselves.
	if errs := validateAddresses(is, was); len(errs) > 0 {
		return errs
	}
	errs := shrink(is, was)
	errs = append(errs, fitPolicy(is)...)
	errs = append(errs, inferFamilies(is, has)...)
	if len(errs) > 0 {
		return errs
	}
	if selectorlessHeadless(is) {
		// Its endpoints may have families that the cluster itself hasn't.
		fillFamilies(is, has, true)
		return nil
	}
	if errs := fitCluster(is, has); len(errs) > 0 {
		return errs
	}
	fillFamilies(is, has, len(has) > 1)
	return nil
}

// restingPreference says that nothing about families changed in a Service that only prefers two. It keeps what it
// has then, even if the cluster has gained or lost a family since: an unrelated update must not add or free addresses.
func restingPreference(is, was *corev1.ServiceSpec) bool {
	const prefer = corev1.IPFamilyPolicyPreferDualStack
	return was != nil && is.Type == was.Type &&
		(opensNodePorts(is) || is.Type == corev1.ServiceTypeClusterIP) &&
		policy(is) == prefer && (was.IPFamilyPolicy == nil || policy(was) == prefer) &&
		slices.Equal(is.ClusterIPs, was.ClusterIPs) && slices.Equal(is.IPFamilies, was.IPFamilies)
}

// impliedPolicy is what a user means who gives no policy: on an update what it was, so that nothing grows or shrinks
// unasked.
func impliedPolicy(is, was *corev1.ServiceSpec) corev1.IPFamilyPolicy {
	switch {
	case was != nil && was.IPFamilyPolicy != nil:
		return *was.IPFamilyPolicy
	case selectorlessHeadless(is):
		return corev1.IPFamilyPolicyRequireDualStack
	default:
		return corev1.IPFamilyPolicySingleStack
	}
}

// shrink takes the second family and address from a Service whose policy has become SingleStack, unless the user
// said what remains. With another policy, fewer of either is a contradiction.
func shrink(is, was *corev1.ServiceSpec) (errs field.ErrorList) {
	if was == nil {
		return nil
	}
	if policy(is) == corev1.IPFamilyPolicySingleStack {
		if len(is.ClusterIPs) > 1 && slices.Equal(is.ClusterIPs, was.ClusterIPs) {
			is.ClusterIPs = is.ClusterIPs[:1:1]
		}
		if len(is.IPFamilies) > 1 && slices.Equal(is.IPFamilies, was.IPFamilies) {
			is.IPFamilies = is.IPFamilies[:1:1]
		}
		return nil
	}
	refuse := func(what string) {
		errs = append(errs, field.Invalid(at("ipFamilyPolicy"), policy(is),
			fmt.Sprintf("must become %q when the second %s is given up", corev1.IPFamilyPolicySingleStack, what)))
	}
	if n := len(is.ClusterIPs); n > 0 && n < len(was.ClusterIPs) {
		refuse("cluster IP")
	}
	if n := len(is.IPFamilies); n > 0 && n < len(was.IPFamilies) {
		refuse("IP family")
	}
	return errs
}

// fitPolicy rejects two of anything under SingleStack.
func fitPolicy(is *corev1.ServiceSpec) (errs field.ErrorList) {
	if policy(is) != corev1.IPFamilyPolicySingleStack {
		return nil
	}
	refuse := func(what string) {
		errs = append(errs, field.Invalid(at("ipFamilyPolicy"), policy(is), fmt.Sprintf("must be %q or %q when %s has two entries",
			corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack, what)))
	}
	if len(is.ClusterIPs) == 2 {
		refuse("clusterIPs")
	}
	if len(is.IPFamilies) == 2 {
		refuse("ipFamilies")
	}
	return errs
}

// inferFamilies adds the families of addresses that were given without one.
func inferFamilies(is *corev1.ServiceSpec, has []corev1.IPFamily) (errs field.ErrorList) {
	if headless(is) {
		return nil
	}
	for i := len(is.IPFamilies); i < len(is.ClusterIPs); i++ {
		family := familyOf(is.ClusterIPs[i])
		if !slices.Contains(has, family) {
			errs = append(errs, field.Invalid(at("clusterIPs").Index(i), is.ClusterIPs[i], notInCluster(family, has)))
			continue
		}
		is.IPFamilies = append(is.IPFamilies, family)
	}
	return errs
}

// fitCluster rejects what the cluster hasn't got.
func fitCluster(is *corev1.ServiceSpec, has []corev1.IPFamily) (errs field.ErrorList) {
	if len(has) == 0 {
		return field.ErrorList{field.Invalid(at("clusterIPs"), is.ClusterIPs, "this cluster has no address range for Services")}
	}
	if policy(is) == corev1.IPFamilyPolicyRequireDualStack && len(has) < 2 {
		errs = append(errs, field.Invalid(at("ipFamilyPolicy"), policy(is),
			fmt.Sprintf("this cluster has only %v addresses for Services", has)))
	}
	for i, family := range is.IPFamilies {
		if !slices.Contains(has, family) {
			errs = append(errs, field.Invalid(at("ipFamilies").Index(i), family, notInCluster(family, has)))
		}
	}
	return errs
}

// fillFamilies starts with the cluster's default where the user named no family, and adds the second one where the
// policy allows it and two can be had.
func fillFamilies(is *corev1.ServiceSpec, has []corev1.IPFamily, two bool) {
	if len(is.IPFamilies) == 0 {
		is.IPFamilies = []corev1.IPFamily{defaultFamily(has)}
	}
	if two && len(is.IPFamilies) == 1 && policy(is) != corev1.IPFamilyPolicySingleStack {
		is.IPFamilies = []corev1.IPFamily{is.IPFamilies[0], otherFamily(is.IPFamilies[0])}
	}
}

// defaultFamily is the cluster's first; a cluster that has none yet counts as an IPv4 one.
func defaultFamily(has []corev1.IPFamily) corev1.IPFamily {
	if len(has) == 0 {
		return corev1.IPv4Protocol
	}
	return has[0]
}

func notInCluster(family corev1.IPFamily, has []corev1.IPFamily) string {
	return fmt.Sprintf("this cluster has no %s addresses for Services, only %v", family, has)
}
