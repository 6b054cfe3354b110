package service

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// validateAddresses validates clusterIP, clusterIPs, ipFamilies and ipFamilyPolicy, and whether they agree. Allocate asks
// it too: it can settle only what is sound so far.
func validateAddresses(is, was *corev1.ServiceSpec) field.ErrorList {
	if !addressed(is) {
		return nil // all four are forbidden there
	}
	errs := validatePairing(is)
	errs = append(errs, validateFamilies(is)...)
	flaws, readable := validateClusterIPs(is, was)
	errs = append(errs, flaws...)
	if !readable {
		return errs
	}
	return append(errs, validateAgreement(is)...)
}

// validatePairing: clusterIP is the first of clusterIPs, or both are empty.
func validatePairing(is *corev1.ServiceSpec) field.ErrorList {
	path := at("clusterIPs")
	switch {
	case is.ClusterIP == "" && len(is.ClusterIPs) > 0:
		return field.ErrorList{field.Invalid(path, is.ClusterIPs, "clusterIP must be given too: the first of them")}
	case is.ClusterIP != "" && len(is.ClusterIPs) == 0:
		return field.ErrorList{field.Required(path, "must begin with clusterIP")}
	case is.ClusterIP != "" && is.ClusterIPs[0] != is.ClusterIP:
		return field.ErrorList{field.Invalid(path, is.ClusterIPs, "must begin with clusterIP")}
	}
	return nil
}

func validateFamilies(is *corev1.ServiceSpec) (errs field.ErrorList) {
	for i, family := range is.IPFamilies {
		path := at("ipFamilies").Index(i)
		errs = append(errs, rules.OneOf(path, family, corev1.IPv4Protocol, corev1.IPv6Protocol)...)
		if slices.Contains(is.IPFamilies[:i], family) {
			errs = append(errs, field.Duplicate(path, family))
		}
	}
	if is.IPFamilyPolicy != nil {
		errs = append(errs, rules.OneOf(at("ipFamilyPolicy"), *is.IPFamilyPolicy, corev1.IPFamilyPolicyPreferDualStack,
			corev1.IPFamilyPolicyRequireDualStack, corev1.IPFamilyPolicySingleStack)...)
	}
	return errs
}

// validateClusterIPs validates the addresses one by one; readable says that their families can be told.
func validateClusterIPs(is, was *corev1.ServiceSpec) (errs field.ErrorList, readable bool) {
	path := at("clusterIPs")
	var accepted []string
	if was != nil {
		accepted = was.ClusterIPs
	}
	for i, ip := range is.ClusterIPs {
		if i == 0 && ip == corev1.ClusterIPNone {
			if len(is.ClusterIPs) > 1 {
				errs = append(errs, field.Invalid(path, is.ClusterIPs, "None stands alone"))
			}
			continue
		}
		errs = append(errs, rules.IP(path.Index(i), ip, accepted...)...)
	}
	readable = len(errs) == 0
	if len(is.ClusterIPs) > 2 {
		errs = append(errs, field.Invalid(path, is.ClusterIPs, "can hold one address for each IP family: two at most"))
	}
	return errs, readable
}

// validateAgreement validates the addresses against one another and against ipFamilies.
func validateAgreement(is *corev1.ServiceSpec) (errs field.ErrorList) {
	if headless(is) {
		return nil
	}
	path := at("clusterIPs")
	if len(is.ClusterIPs) > 1 {
		families := sets.New[corev1.IPFamily]()
		for _, ip := range is.ClusterIPs {
			families.Insert(familyOf(ip))
		}
		if !families.HasAll(corev1.IPv4Protocol, corev1.IPv6Protocol) {
			errs = append(errs, field.Invalid(path, is.ClusterIPs, "must be addresses of different IP families"))
		}
	}
	for i, ip := range is.ClusterIPs[:min(len(is.ClusterIPs), len(is.IPFamilies))] {
		if other := familyOf(ip); is.IPFamilies[i] == otherFamily(other) {
			errs = append(errs, field.Invalid(path.Index(i), ip, fmt.Sprintf("must be an %s address, as ipFamilies[%d] says", is.IPFamilies[i], i)))
		}
	}
	return errs
}

// validateExternalIPs rejects addresses that are never routed to a node from outside.
func validateExternalIPs(is, was *corev1.ServiceSpec) (errs field.ErrorList) {
	var accepted []string
	if was != nil {
		accepted = was.ExternalIPs
	}
	for i, ip := range is.ExternalIPs {
		path := at("externalIPs").Index(i)
		flaws := rules.IP(path, ip, accepted...)
		if len(flaws) == 0 {
			flaws = rules.EndpointIP(path, ip)
		}
		errs = append(errs, flaws...)
	}
	return errs
}

// validateAddressChange: an address may be added or given up as the second one; what is set stays as it is. An
// ExternalName starts and ends without any.
func validateAddressChange(is, was *corev1.ServiceSpec) field.ErrorList {
	if !addressed(is) || !addressed(was) || headless(is) && headless(was) {
		return nil
	}
	path := at("clusterIPs")
	errs := validateGrowth(is.ClusterIPs, was.ClusterIPs, path.Index)
	return append(errs, validateGivingUp(is, len(is.ClusterIPs), len(was.ClusterIPs), "cluster IP")...)
}

// validateFamilyChange is the same for families, which headless Services may change as they like.
func validateFamilyChange(is, was *corev1.ServiceSpec) field.ErrorList {
	if !addressed(is) || !addressed(was) || headless(is) || headless(was) {
		return nil
	}
	first := at("ipFamilies").Index(0)
	errs := validateGrowth(is.IPFamilies, was.IPFamilies, func(int) *field.Path { return first })
	return append(errs, validateGivingUp(is, len(is.IPFamilies), len(was.IPFamilies), "IP family")...)
}

// validateGrowth lets a list grow and shrink at its end, as long as its first entry stays. path is where a change of
// entry i is reported.
func validateGrowth[T comparable](is, was []T, path func(i int) *field.Path) (errs field.ErrorList) {
	if len(is) == 0 && len(was) > 0 {
		return field.ErrorList{field.Invalid(path(0), is, "can't be given up")}
	}
	compared := len(is)
	if len(is) != len(was) {
		compared = min(1, len(is), len(was))
	}
	for i := range compared {
		if is[i] != was[i] {
			errs = append(errs, field.Invalid(path(i), is, fmt.Sprintf("can't change: was %v", was)))
		}
	}
	return errs
}

// validateGivingUp wants the user to say by policy that one of two is to go.
func validateGivingUp(is *corev1.ServiceSpec, now, before int, what string) field.ErrorList {
	if now != 1 || before < 2 || policy(is) == corev1.IPFamilyPolicySingleStack {
		return nil
	}
	return field.ErrorList{field.Invalid(at("ipFamilyPolicy"), policy(is),
		fmt.Sprintf("must become %q when the second %s is given up", corev1.IPFamilyPolicySingleStack, what))}
}
