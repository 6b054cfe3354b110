package service

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"portal/internal/apiserver/registry/rules"
)

const onlyBalancers = "means something to type LoadBalancer only"

func validateBalancer(svc, old *corev1.Service) field.ErrorList {
	is := &svc.Spec
	errs := validateSourceRanges(svc, old)
	switch set := is.AllocateLoadBalancerNodePorts != nil; {
	case set && !balanced(is):
		errs = append(errs, field.Forbidden(at("allocateLoadBalancerNodePorts"), onlyBalancers))
	case !set && balanced(is):
		errs = append(errs, field.Required(at("allocateLoadBalancerNodePorts"), ""))
	}
	return append(errs, validateClass(is)...)
}

// validateSourceRanges validates the field, or else the annotation that came before it.
func validateSourceRanges(svc, old *corev1.Service) field.ErrorList {
	is := &svc.Spec
	value, annotated := svc.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]
	var path *field.Path
	var flaws field.ErrorList
	switch {
	case len(is.LoadBalancerSourceRanges) > 0:
		path = at("LoadBalancerSourceRanges") // with a capital, as Kubernetes reports it
		flaws = validateRanges(is.LoadBalancerSourceRanges, specOf(old), path)
	case annotated:
		path = annotation(corev1.AnnotationLoadBalancerSourceRangesKey)
		flaws = validateAnnotatedRanges(value, old, path)
	default:
		return nil
	}
	if !balanced(is) {
		flaws = append(flaws, field.Forbidden(path, onlyBalancers))
	}
	return flaws
}

// validateRanges: spaces around a range are allowed, since they came over from the annotation.
func validateRanges(ranges []string, was *corev1.ServiceSpec, path *field.Path) (errs field.ErrorList) {
	var accepted []string
	if was != nil {
		for _, r := range was.LoadBalancerSourceRanges {
			accepted = append(accepted, strings.TrimSpace(r))
		}
	}
	for i, r := range ranges {
		errs = append(errs, rules.CIDR(path.Index(i), strings.TrimSpace(r), accepted...)...)
	}
	return errs
}

func validateAnnotatedRanges(value string, old *corev1.Service, path *field.Path) (errs field.ErrorList) {
	unchanged := old != nil && old.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey] == value
	if unchanged || strings.TrimSpace(value) == "" {
		return nil
	}
	for r := range strings.SplitSeq(value, ",") {
		errs = append(errs, rules.CIDR(path, strings.TrimSpace(r))...)
	}
	return errs
}

func validateClass(is *corev1.ServiceSpec) field.ErrorList {
	class, path := is.LoadBalancerClass, at("loadBalancerClass")
	switch {
	case class == nil:
		return nil
	case !balanced(is):
		return field.ErrorList{field.Forbidden(path, onlyBalancers)}
	}
	return rules.QualifiedName(path, *class)
}

// validateClassChange: a load balancer that another implementation has made can't be handed over.
func validateClassChange(is, was *corev1.ServiceSpec) field.ErrorList {
	if !balanced(is) || !balanced(was) || ptr.Equal(is.LoadBalancerClass, was.LoadBalancerClass) {
		return nil
	}
	return field.ErrorList{field.Invalid(at("loadBalancerClass"), is.LoadBalancerClass, "can't change while the type is LoadBalancer")}
}

// ValidateStatus validates a write to the status subresource.
func ValidateStatus(_ context.Context, svc, old *corev1.Service) field.ErrorList {
	errs := rules.Finalizers(svc)
	path := field.NewPath("status", "loadBalancer", "ingress")
	ingress := svc.Status.LoadBalancer.Ingress
	if len(ingress) > 0 && !balanced(&svc.Spec) {
		return append(errs, field.Forbidden(path, onlyBalancers))
	}
	var accepted []string
	for i := range old.Status.LoadBalancer.Ingress {
		accepted = append(accepted, old.Status.LoadBalancer.Ingress[i].IP)
	}
	for i := range ingress {
		errs = append(errs, validateIngress(&ingress[i], accepted, path.Index(i))...)
	}
	return errs
}

func validateIngress(in *corev1.LoadBalancerIngress, accepted []string, path *field.Path) (errs field.ErrorList) {
	if in.IP != "" {
		errs = append(errs, rules.IP(path.Child("ip"), in.IP, accepted...)...)
		if len(errs) == 0 && !slices.Contains(accepted, in.IP) {
			errs = append(errs, rules.BalancerIP(path.Child("ip"), in.IP)...)
		}
	}
	switch mode := path.Child("ipMode"); {
	case in.IP == "" && in.IPMode != nil:
		errs = append(errs, field.Forbidden(mode, "means nothing without ip"))
	case in.IP != "" && in.IPMode == nil:
		errs = append(errs, field.Required(mode, "goes with ip"))
	case in.IPMode != nil:
		errs = append(errs, rules.OneOf(mode, *in.IPMode, corev1.LoadBalancerIPModeProxy, corev1.LoadBalancerIPModeVIP)...)
	}
	if in.Hostname != "" {
		errs = append(errs, rules.DNSSubdomain(path.Child("hostname"), in.Hostname)...)
		if _, isIP := parseAddress(in.Hostname); isIP {
			errs = append(errs, field.Invalid(path.Child("hostname"), in.Hostname, "must be a DNS name: an address belongs into ip"))
		}
	}
	return errs
}
