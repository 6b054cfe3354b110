package service

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// Validate validates a new Service as Allocate and PrepareCreate leave it.
func Validate(_ context.Context, svc *corev1.Service) field.ErrorList {
	return validate(svc, nil)
}

// ValidateUpdate validates an update: what it makes of the Service, and what it changes.
func ValidateUpdate(_ context.Context, svc, old *corev1.Service) field.ErrorList {
	return append(validateChange(svc, old), validate(svc, old)...)
}

// validate validates a Service by itself. old is nil on creation; a value that was accepted once, under older and looser
// rules, may stay.
func validate(svc, old *corev1.Service) field.ErrorList {
	is, was := &svc.Spec, specOf(old)
	var errs field.ErrorList
	for _, more := range []field.ErrorList{
		validateType(is),
		validatePorts(is),
		validateSelector(is),
		validateAffinity(is),
		validateAddresses(is, was),
		validateExternalIPs(is, was),
		validateNodePorts(is),
		validateBalancer(svc, old),
		validateTraffic(is),
		validateTopology(svc),
		rules.Finalizers(svc),
	} {
		errs = append(errs, more...)
	}
	return errs
}

// validateChange validates what is different from old.
func validateChange(svc, old *corev1.Service) field.ErrorList {
	is, was := &svc.Spec, &old.Spec
	errs := validateAddressChange(is, was)
	errs = append(errs, validateFamilyChange(is, was)...)
	errs = append(errs, validateClassChange(is, was)...)
	if healthChecked(is) && healthChecked(was) && is.HealthCheckNodePort != was.HealthCheckNodePort {
		errs = append(errs, field.Forbidden(at("healthCheckNodePort"), "can't change while the Service is health-checked"))
	}
	return errs
}

func validateType(is *corev1.ServiceSpec) field.ErrorList {
	errs := rules.RequiredOneOf(at("type"), is.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeExternalName,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort)
	if opensNodePorts(is) && headless(is) {
		errs = append(errs, field.Invalid(at("clusterIPs").Index(0), is.ClusterIPs[0], "can't be None for type "+string(is.Type)))
	}
	if is.Type == corev1.ServiceTypeExternalName {
		errs = append(errs, validateExternalName(is)...)
	}
	return errs
}

func validateExternalName(is *corev1.ServiceSpec) (errs field.ErrorList) {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"clusterIPs", len(is.ClusterIPs) > 0},
		{"ipFamilies", len(is.IPFamilies) > 0},
		{"ipFamilyPolicy", is.IPFamilyPolicy != nil},
	} {
		if f.set {
			errs = append(errs, field.Forbidden(at(f.name), "means nothing to type ExternalName"))
		}
	}
	name := is.ExternalName
	if n := len(name); n > 0 && name[n-1] == '.' {
		name = name[:n-1] // a name may be written as fully qualified
	}
	if name == "" {
		return append(errs, field.Required(at("externalName"), "type ExternalName needs the DNS name it stands for"))
	}
	return append(errs, rules.DNSSubdomain(at("externalName"), name)...)
}

func validateSelector(is *corev1.ServiceSpec) field.ErrorList {
	return metav1validation.ValidateLabels(is.Selector, at("selector"))
}

func validateAffinity(is *corev1.ServiceSpec) field.ErrorList {
	errs := rules.RequiredOneOf(at("sessionAffinity"), is.SessionAffinity, corev1.ServiceAffinityClientIP, corev1.ServiceAffinityNone)
	config, path := is.SessionAffinityConfig, at("sessionAffinityConfig")
	switch {
	case is.SessionAffinity == corev1.ServiceAffinityNone && config != nil:
		return append(errs, field.Forbidden(path, "means nothing without session affinity"))
	case is.SessionAffinity != corev1.ServiceAffinityClientIP:
		return errs
	case config == nil:
		return append(errs, field.Required(path, "goes with sessionAffinity ClientIP"))
	case config.ClientIP == nil:
		return append(errs, field.Required(path.Child("clientIP"), "goes with sessionAffinity ClientIP"))
	case config.ClientIP.TimeoutSeconds == nil:
		return append(errs, field.Required(path.Child("clientIP", "timeoutSeconds"), "goes with sessionAffinity ClientIP"))
	}
	const day = 24 * 60 * 60
	if seconds := *config.ClientIP.TimeoutSeconds; seconds < 1 || seconds > day {
		errs = append(errs, field.Invalid(path.Child("clientIP", "timeoutSeconds"), seconds, validation.InclusiveRangeError(1, day)))
	}
	return errs
}

// validateTopology: the annotation has an old name and a new one, which must not contradict each other.
func validateTopology(svc *corev1.Service) field.ErrorList {
	hints, old := svc.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	mode, now := svc.Annotations[corev1.AnnotationTopologyMode]
	if !old || !now || hints == mode {
		return nil
	}
	return field.ErrorList{field.Invalid(annotation(corev1.AnnotationTopologyMode), mode,
		"must be the same as the annotation "+corev1.DeprecatedAnnotationTopologyAwareHints)}
}

func annotation(key string) *field.Path { return field.NewPath("metadata", "annotations").Key(key) }
