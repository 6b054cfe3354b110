package rules

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// NativeResource says whether a resource's name has no domain or Kubernetes' own.
func NativeResource(name corev1.ResourceName) bool {
	return !strings.Contains(string(name), "/") || strings.Contains(string(name), corev1.ResourceDefaultNamespacePrefix)
}

// ExtendedResource says whether a resource is one that a device or an administrator adds to a node.
func ExtendedResource(name corev1.ResourceName) bool {
	return !NativeResource(name) && !strings.HasPrefix(string(name), corev1.DefaultResourceRequestsPrefix) &&
		len(validation.IsQualifiedName(corev1.DefaultResourceRequestsPrefix+string(name))) == 0
}

// countable are the resources without a domain that come in whole numbers.
var countable = map[corev1.ResourceName]bool{
	corev1.ResourcePods: true, corev1.ResourceQuotas: true, corev1.ResourceServices: true,
	corev1.ResourceReplicationControllers: true, corev1.ResourceSecrets: true, corev1.ResourceConfigMaps: true,
	corev1.ResourcePersistentVolumeClaims: true, corev1.ResourceServicesNodePorts: true,
	corev1.ResourceServicesLoadBalancers: true,
}

// Quantity wants an amount of a resource that there can be.
func Quantity(at *field.Path, name corev1.ResourceName, quantity resource.Quantity) field.ErrorList {
	var errs field.ErrorList
	if quantity.Sign() < 0 {
		errs = append(errs, field.Invalid(at, quantity.String(), "must not be negative"))
	}
	if (countable[name] || ExtendedResource(name)) && quantity.MilliValue()%1000 != 0 {
		errs = append(errs, field.Invalid(at, quantity.String(), "must be a whole number"))
	}
	return errs
}
