package service

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Choice is one request's hold on addresses and ports. The caller owns it and lets go of what was not stored. An error
// says why a wish can't be met: out of range, taken, or nothing free.
type Choice interface {
	// Families are those that the cluster has addresses of; the first is the default.
	Families() []corev1.IPFamily
	// Address is a free address.
	Address(family corev1.IPFamily) (string, error)
	// TakeAddress is for an address that the user asked for, in their spelling.
	TakeAddress(family corev1.IPFamily, ip string) error
	// NodePort is a free port of the node-port range.
	NodePort() (int32, error)
	// TakeNodePort is for a node port or health-check port that the user asked for.
	TakeNodePort(port int32) error
}

// Allocate gives a Service what the cluster has to give: families, then an address of each, node ports, and a port for
// health checks. before is the stored Service, completed on the way as OnRead does; it is nil on creation.
//
// It comes before preparing and validating, which look at the outcome; so it meets unchecked input, and settles first
// what an update left unsaid. What it reports ends the request: later steps would only report what follows from it.
func Allocate(after, before *corev1.Service, choice Choice) field.ErrorList {
	is, was := &after.Spec, specOf(before)
	if before != nil {
		OnRead(before, choice.Families())
		keepAllocated(is, was)
	}
	pairAddresses(is, was)
	if errs := settleFamilies(is, was, choice.Families()); len(errs) > 0 {
		return errs
	}
	if errs := allocateAddresses(after, before, choice); len(errs) > 0 {
		return errs
	}
	return newPortRequest(is, before, choice).settle()
}

// allocateAddresses fills clusterIPs with an address for each family. On an update it does so only for a Service that
// had none because it was an ExternalName, and for the second family of one that becomes dual-stack: any other change
// is not allowed, and left to validation.
func allocateAddresses(after, before *corev1.Service, choice Choice) field.ErrorList {
	is, was := &after.Spec, specOf(before)
	first := 0
	switch {
	case !addressed(is):
		return nil
	case was == nil || !addressed(was):
		if headless(is) {
			return nil
		}
	case restingPreference(is, was), headless(was), len(was.IPFamilies) != 1, len(is.IPFamilies) != 2:
		return nil
	default:
		first = 1
	}
	is.ClusterIPs = slices.Clone(is.ClusterIPs)
	for i := first; i < len(is.IPFamilies); i++ {
		for i >= len(is.ClusterIPs) {
			is.ClusterIPs = append(is.ClusterIPs, "")
		}
		ip, err := oneAddress(after, is.IPFamilies[i], is.ClusterIPs[i], choice)
		if err != nil {
			return field.ErrorList{field.Invalid(at("clusterIPs"), is.ClusterIPs, err.Error())}
		}
		is.ClusterIPs[i] = ip
	}
	if first == 0 {
		is.ClusterIP = is.ClusterIPs[0]
	}
	return nil
}

// oneAddress takes the address asked for, or any where none was.
func oneAddress(svc *corev1.Service, family corev1.IPFamily, asked string, choice Choice) (string, error) {
	// The claim on an address says whose it is.
	if svc.Name == "" {
		return "", fmt.Errorf("an address can be claimed only by a Service with a name: set metadata.name or metadata.generateName")
	}
	if flaws := content.IsPathSegmentName(svc.Name); len(flaws) > 0 {
		return "", fmt.Errorf("an address can't be claimed by a Service named %q: the name %s", svc.Name, flaws[0])
	}
	if asked != "" {
		if err := choice.TakeAddress(family, asked); err != nil {
			return "", fmt.Errorf("%s can't be had: %w", asked, err)
		}
		return asked, nil
	}
	ip, err := choice.Address(family)
	if err != nil {
		return "", fmt.Errorf("no %s address can be had: %w", family, err)
	}
	return ip, nil
}
