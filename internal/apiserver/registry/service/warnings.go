package service

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// Warnings are about what is accepted, but deprecated, without effect, or written in a way that others may read
// differently.
func Warnings(_ context.Context, svc, _ *corev1.Service) []string {
	spec := &svc.Spec
	return append(uselessWarnings(svc), spellingWarnings(spec)...)
}

// StatusWarnings are about addresses of balancers that are written in such a way.
func StatusWarnings(_ context.Context, svc, _ *corev1.Service) (out []string) {
	path := field.NewPath("status", "loadBalancer", "ingress")
	for i, in := range svc.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			out = append(out, validation.GetWarningsForIP(path.Index(i), in.IP)...)
		}
	}
	return out
}

func uselessWarnings(svc *corev1.Service) (out []string) {
	spec := &svc.Spec
	_, hints := svc.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	named := spec.Type == corev1.ServiceTypeExternalName
	bare := spec.Type == corev1.ServiceTypeClusterIP && spec.ClusterIP == corev1.ClusterIPNone
	outside := len(spec.ExternalIPs) > 0
	for _, w := range []struct {
		when bool
		text string
	}{
		{hints, fmt.Sprintf("the annotation %s is deprecated: use %s", corev1.DeprecatedAnnotationTopologyAwareHints, corev1.AnnotationTopologyMode)},
		{bare && spec.LoadBalancerIP != "", "spec.loadBalancerIP has no effect on a headless Service"},
		{bare && outside, "spec.externalIPs has no effect on a headless Service"},
		{bare && spec.SessionAffinity != corev1.ServiceAffinityNone, "spec.sessionAffinity has no effect on a headless Service"},
		{outside && !bare && !named, "spec.externalIPs is deprecated, and some clusters don't serve it any more"},
		{outside && named, "spec.externalIPs has no effect on a Service of type ExternalName"},
		{!named && spec.ExternalName != "", "spec.externalName has an effect on a Service of type ExternalName only"},
		{
			ptr.Deref(spec.TrafficDistribution, "") == corev1.ServiceTrafficDistributionPreferClose,
			fmt.Sprintf("spec.trafficDistribution %s is deprecated: use %s", corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone),
		},
	} {
		if w.when {
			out = append(out, w.text)
		}
	}
	return out
}

// spellingWarnings name the form of an address or range that everybody reads alike. loadBalancerIP is never validated
// and may be anything.
func spellingWarnings(spec *corev1.ServiceSpec) (out []string) {
	address := func(path *field.Path, ip string) {
		if _, ok := parseAddress(ip); ok {
			out = append(out, validation.GetWarningsForIP(path, ip)...)
		}
	}
	for i, ip := range spec.ClusterIPs {
		address(at("clusterIPs").Index(i), ip)
	}
	for i, ip := range spec.ExternalIPs {
		address(at("externalIPs").Index(i), ip)
	}
	address(at("loadBalancerIP"), spec.LoadBalancerIP)
	for i, r := range spec.LoadBalancerSourceRanges {
		out = append(out, validation.GetWarningsForCIDR(at("loadBalancerSourceRanges").Index(i), strings.TrimSpace(r))...)
	}
	return out
}
