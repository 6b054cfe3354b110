package service

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

func validateTraffic(is *corev1.ServiceSpec) field.ErrorList {
	errs := validateExternalTraffic(is)
	errs = append(errs, validateHealthPort(is)...)
	errs = append(errs, validateInternalTraffic(is)...)
	if is.TrafficDistribution != nil {
		errs = append(errs, rules.OneOf(at("trafficDistribution"), *is.TrafficDistribution,
			corev1.ServiceTrafficDistributionPreferClose,
			corev1.ServiceTrafficDistributionPreferSameNode,
			corev1.ServiceTrafficDistributionPreferSameZone)...)
	}
	return errs
}

func validateExternalTraffic(is *corev1.ServiceSpec) field.ErrorList {
	path := at("externalTrafficPolicy")
	if facesOutside(is) {
		return rules.RequiredOneOf(path, is.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	}
	if is.ExternalTrafficPolicy != "" {
		return field.ErrorList{field.Invalid(path, is.ExternalTrafficPolicy, "means nothing to a Service that can't be reached from outside")}
	}
	return nil
}

func validateHealthPort(is *corev1.ServiceSpec) field.ErrorList {
	path, port := at("healthCheckNodePort"), is.HealthCheckNodePort
	switch checked := healthChecked(is); {
	case checked && port == 0:
		return field.ErrorList{field.Required(path, "")}
	case checked:
		return rules.Port(path, int(port))
	case port != 0:
		return field.ErrorList{field.Invalid(path, port, "goes with type LoadBalancer and externalTrafficPolicy Local only")}
	}
	return nil
}

// validateInternalTraffic tolerates the policy on an ExternalName, where it has no effect: Kubernetes always has.
func validateInternalTraffic(is *corev1.ServiceSpec) field.ErrorList {
	path := at("internalTrafficPolicy")
	if is.InternalTrafficPolicy != nil {
		return rules.OneOf(path, *is.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	}
	if opensNodePorts(is) || is.Type == corev1.ServiceTypeClusterIP {
		return field.ErrorList{field.Required(path, "")}
	}
	return nil
}
