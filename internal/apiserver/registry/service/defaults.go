package service

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// Default fills what the user left out. It knows nothing of the cluster: families, addresses and node ports come
// with Allocate.
func Default(svc *corev1.Service) {
	spec := &svc.Spec
	if spec.Type == "" {
		spec.Type = corev1.ServiceTypeClusterIP
	}
	for i := range spec.Ports {
		defaultPort(&spec.Ports[i])
	}
	defaultAffinity(spec)
	defaultTraffic(spec)
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		defaultBalancer(spec, &svc.Status)
	}
}

func defaultPort(port *corev1.ServicePort) {
	if port.Protocol == "" {
		port.Protocol = corev1.ProtocolTCP
	}
	if port.TargetPort == intstr.FromInt32(0) || port.TargetPort == intstr.FromString("") {
		port.TargetPort = intstr.FromInt32(port.Port)
	}
}

func defaultAffinity(spec *corev1.ServiceSpec) {
	if spec.SessionAffinity == "" {
		spec.SessionAffinity = corev1.ServiceAffinityNone
	}
	switch config := spec.SessionAffinityConfig; spec.SessionAffinity {
	case corev1.ServiceAffinityNone:
		spec.SessionAffinityConfig = nil
	case corev1.ServiceAffinityClientIP:
		if config == nil || config.ClientIP == nil || config.ClientIP.TimeoutSeconds == nil {
			spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
				ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(corev1.DefaultClientIPServiceAffinitySeconds)},
			}
		}
	}
}

func defaultTraffic(spec *corev1.ServiceSpec) {
	if spec.ExternalTrafficPolicy == "" && facesOutside(spec) {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
	}
	if spec.InternalTrafficPolicy == nil && (opensNodePorts(spec) || spec.Type == corev1.ServiceTypeClusterIP) {
		spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyCluster)
	}
}

func defaultBalancer(spec *corev1.ServiceSpec, status *corev1.ServiceStatus) {
	if spec.AllocateLoadBalancerNodePorts == nil {
		spec.AllocateLoadBalancerNodePorts = ptr.To(true)
	}
	for i := range status.LoadBalancer.Ingress {
		if in := &status.LoadBalancer.Ingress[i]; in.IP != "" && in.IPMode == nil {
			in.IPMode = ptr.To(corev1.LoadBalancerIPModeVIP)
		}
	}
}
