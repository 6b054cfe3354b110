package endpoints

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/endpointslice"
	endpointsliceutil "k8s.io/endpointslice/util"
	netutils "k8s.io/utils/net"

	"portal/internal/controllers/membership"
	"portal/internal/controllers/subsets"
)

// Subsets are what the Pods of a Service make of its Endpoints, packed.
func Subsets(svc *corev1.Service, pods []*corev1.Pod) []corev1.EndpointSubset {
	loose := make([]corev1.EndpointSubset, 0, len(pods))
	for _, pod := range pods {
		// A Pod that is being deleted is published only with publishNotReadyAddresses.
		if !endpointsliceutil.ShouldPodBeInEndpoints(pod, svc.Spec.PublishNotReadyAddresses) {
			continue
		}
		address, ok := addressFor(svc, pod)
		if !ok {
			continue
		}
		ports := portsFor(svc, pod)
		if len(ports) == 0 && !(len(svc.Spec.Ports) == 0 && svc.Spec.ClusterIP == corev1.ClusterIPNone) {
			continue
		}
		subset := corev1.EndpointSubset{Ports: ports}
		if svc.Spec.PublishNotReadyAddresses || membership.Ready(pod) {
			subset.Addresses = []corev1.EndpointAddress{address}
		} else {
			subset.NotReadyAddresses = []corev1.EndpointAddress{address}
		}
		loose = append(loose, subset)
	}
	return subsets.Pack(loose)
}

// portsFor resolves a Service's target ports in one Pod; a port that the Pod doesn't name is left out.
func portsFor(svc *corev1.Service, pod *corev1.Pod) []corev1.EndpointPort {
	var ports []corev1.EndpointPort
	for i := range svc.Spec.Ports {
		port := &svc.Spec.Ports[i]
		number, err := endpointslice.FindPort(pod, port)
		if err != nil {
			continue
		}
		ports = append(ports, corev1.EndpointPort{
			Name: port.Name, Port: int32(number), Protocol: port.Protocol, AppProtocol: port.AppProtocol,
		})
	}
	return ports
}

func addressFor(svc *corev1.Service, pod *corev1.Pod) (corev1.EndpointAddress, bool) {
	ip, ok := addressOf(pod, wantsIPv6(svc, pod))
	if !ok {
		return corev1.EndpointAddress{}, false
	}
	address := corev1.EndpointAddress{
		IP: ip,
		TargetRef: &corev1.ObjectReference{
			Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		},
	}
	if pod.Spec.NodeName != "" { // a Pod that somebody runs elsewhere need not have one
		address.NodeName = &pod.Spec.NodeName
	}
	if endpointsliceutil.ShouldSetHostname(pod, svc) {
		address.Hostname = pod.Spec.Hostname
	}
	return address, true
}

// wantsIPv6 reports whether a Service's Endpoints are of IPv6: its first family decides. A Service from before there were
// families has the one of its cluster IP, or without one that of the Pod.
func wantsIPv6(svc *corev1.Service, pod *corev1.Pod) bool {
	switch {
	case len(svc.Spec.IPFamilies) > 0:
		return svc.Spec.IPFamilies[0] == corev1.IPv6Protocol
	case svc.Spec.ClusterIP != "" && svc.Spec.ClusterIP != corev1.ClusterIPNone:
		return strings.Contains(svc.Spec.ClusterIP, ":")
	default:
		return strings.Contains(pod.Status.PodIP, ":")
	}
}

// addressOf is a Pod's first address of a family, in its usual spelling.
func addressOf(pod *corev1.Pod, ipv6 bool) (string, bool) {
	for i := range pod.Status.PodIPs {
		if ip := netutils.ParseIPSloppy(pod.Status.PodIPs[i].IP); ip != nil && netutils.IsIPv6(ip) == ipv6 {
			return ip.String(), true
		}
	}
	return "", false
}
