package service

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// PrepareCreate drops what only the server may say.
func PrepareCreate(_ context.Context, svc *corev1.Service) {
	svc.Status = corev1.ServiceStatus{}
}

// PrepareUpdate keeps the old status and lets go of what the Service's new shape has no use for.
func PrepareUpdate(_ context.Context, svc, old *corev1.Service) {
	svc.Status = *old.Status.DeepCopy()
	dropUnused(&svc.Spec, &old.Spec)
	if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		svc.Status.LoadBalancer = corev1.LoadBalancerStatus{}
	}
}

// PrepareStatus lets a write to the status subresource change no more than status and metadata.
func PrepareStatus(_ context.Context, svc, old *corev1.Service) {
	svc.Spec = *old.Spec.DeepCopy()
}

// dropUnused clears a field when the old shape of the Service used it, the new one doesn't, and the user left it as
// it was: it may well have been filled in for them. What they changed stays, and is rejected by validation.
func dropUnused(is, was *corev1.ServiceSpec) {
	for _, f := range []struct {
		used      func(*corev1.ServiceSpec) bool
		untouched bool
		clear     func()
	}{
		{
			addressed, is.ClusterIP == was.ClusterIP && slices.Equal(is.ClusterIPs, was.ClusterIPs),
			func() { is.ClusterIP, is.ClusterIPs = "", nil },
		},
		{addressed, slices.Equal(is.IPFamilies, was.IPFamilies), func() { is.IPFamilies = nil }},
		{addressed, policy(is) == policy(was), func() { is.IPFamilyPolicy = nil }},
		{opensNodePorts, subset(nodePorts(is), nodePorts(was)), func() {
			for i := range is.Ports {
				is.Ports[i].NodePort = 0
			}
		}},
		{healthChecked, is.HealthCheckNodePort == was.HealthCheckNodePort, func() { is.HealthCheckNodePort = 0 }},
		{
			balanced, ptr.Equal(is.AllocateLoadBalancerNodePorts, was.AllocateLoadBalancerNodePorts),
			func() { is.AllocateLoadBalancerNodePorts = nil },
		},
		{balanced, ptr.Equal(is.LoadBalancerClass, was.LoadBalancerClass), func() { is.LoadBalancerClass = nil }},
		{facesOutside, is.ExternalTrafficPolicy == was.ExternalTrafficPolicy, func() { is.ExternalTrafficPolicy = "" }},
	} {
		if f.used(was) && !f.used(is) && f.untouched {
			f.clear()
		}
	}
}

func balanced(s *corev1.ServiceSpec) bool { return s.Type == corev1.ServiceTypeLoadBalancer }

func subset(some, all []int32) bool {
	return !slices.ContainsFunc(some, func(n int32) bool { return !slices.Contains(all, n) })
}
