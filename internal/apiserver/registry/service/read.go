package service

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// OnRead completes a stored Service as it comes from the store. Objects written by an old Kubernetes say neither
// clusterIPs nor ipFamilies; others say internalTrafficPolicy for an ExternalName, where it means nothing. families
// are those that the cluster has; the first is the default.
func OnRead(svc *corev1.Service, families []corev1.IPFamily) {
	spec := &svc.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		spec.InternalTrafficPolicy = nil
	}
	pairAddresses(spec, nil)
	if !addressed(spec) || len(spec.IPFamilies) > 0 {
		return
	}
	switch first := defaultFamily(families); {
	case selectorlessHeadless(spec):
		spec.IPFamilies = []corev1.IPFamily{first, otherFamily(first)}
	case spec.ClusterIP == corev1.ClusterIPNone:
		spec.IPFamilies = []corev1.IPFamily{first}
	default:
		for _, ip := range spec.ClusterIPs {
			spec.IPFamilies = append(spec.IPFamilies, familyOf(ip))
		}
	}
	switch len(spec.IPFamilies) {
	case 1:
		spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicySingleStack)
	case 2:
		spec.IPFamilyPolicy = ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	}
}

// keepAllocated gives an update back what was once chosen for the Service and the user didn't repeat: whoever sends
// the manifest that it was created from again means no change.
func keepAllocated(is, was *corev1.ServiceSpec) {
	if addressed(was) && addressed(is) {
		if is.ClusterIP == "" {
			is.ClusterIP = was.ClusterIP
		}
		if len(is.ClusterIPs) == 0 {
			is.ClusterIPs = slices.Clone(was.ClusterIPs)
		}
	}
	if wantsNodePorts(was) && wantsNodePorts(is) {
		keepNodePorts(is, was)
	}
	if healthChecked(was) && healthChecked(is) && is.HealthCheckNodePort == 0 {
		is.HealthCheckNodePort = was.HealthCheckNodePort
	}
}

// keepNodePorts finds a port again by its name. A number that the user has since given to any port isn't handed back.
func keepNodePorts(is, was *corev1.ServiceSpec) {
	spoken := nodePorts(is)
	byName := make(map[string]int32, len(was.Ports))
	for i := range was.Ports {
		byName[was.Ports[i].Name] = was.Ports[i].NodePort
	}
	for i := range is.Ports {
		if port := &is.Ports[i]; port.NodePort == 0 && !slices.Contains(spoken, byName[port.Name]) {
			port.NodePort = byName[port.Name]
		}
	}
}

// pairAddresses makes clusterIP and clusterIPs agree where a client that knows only the older field wrote the one
// without the other. It guesses only where one guess is possible: validation rejects the rest.
func pairAddresses(is, was *corev1.ServiceSpec) {
	if was == nil {
		if is.ClusterIP != "" && len(is.ClusterIPs) == 0 {
			is.ClusterIPs = []string{is.ClusterIP}
		}
		return
	}
	changed := is.ClusterIP != was.ClusterIP
	if !changed && len(is.ClusterIPs) == 0 {
		is.ClusterIPs = slices.Clone(was.ClusterIPs)
	}
	if !changed || !slices.Equal(is.ClusterIPs, was.ClusterIPs) {
		return
	}
	// Only clusterIP was changed, so clusterIPs is what the client had read and not looked at.
	if is.ClusterIP == "" {
		is.ClusterIPs = nil
	} else {
		is.ClusterIPs = []string{is.ClusterIP}
	}
}
