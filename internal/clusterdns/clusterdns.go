// Package clusterdns says how the DNS of a cluster looks in the API: the Service kube-dns, and the annotation by which a Node says
// that it serves names. It is pure: it reads and writes nothing.
package clusterdns

import (
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

const (
	// ServiceName is the name of the cluster's DNS Service in every Kubernetes.
	ServiceName = "kube-dns"
	// Port is where DNS is served, at the Service and at its endpoints.
	Port = 53
	// Annotation of a Node lists the addresses at which the node serves the cluster's names, separated by commas.
	Annotation = "portal.dev/dns"
)

// TenthAddresses are the usual cluster IPs of DNS in a cluster with these service ranges.
func TenthAddresses(ranges []netip.Prefix) []netip.Addr {
	var out []netip.Addr
	for _, r := range ranges {
		a := r.Masked().Addr()
		for range 10 {
			a = a.Next()
		}
		if r.Contains(a) {
			out = append(out, a)
		}
	}
	return out
}

// Service is the Service kube-dns, at the given cluster IPs or, without any, at those that it is given.
func Service(addrs []netip.Addr) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: ServiceName, Namespace: metav1.NamespaceSystem,
			Labels: map[string]string{"k8s-app": ServiceName, "kubernetes.io/name": "Portal"},
		},
		Spec: corev1.ServiceSpec{
			Type:           corev1.ServiceTypeClusterIP,
			IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicyPreferDualStack),
			Ports: []corev1.ServicePort{
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: Port, TargetPort: intstr.FromInt32(Port)},
				{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: Port, TargetPort: intstr.FromInt32(Port)},
			},
		},
	}
	for _, a := range addrs {
		svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, a.String())
	}
	if len(addrs) > 0 {
		svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
	}
	return svc
}

// Addresses are the cluster IPs of a Service.
func Addresses(svc *corev1.Service) (out []netip.Addr) {
	for _, text := range svc.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, a)
		}
	}
	return out
}

// LostAddresses says that a kube-dns is of no use: it is an ExternalName, or headless with no Pods behind it. One that selects Pods is
// somebody's own.
func LostAddresses(svc *corev1.Service) bool {
	return svc.Spec.Type == corev1.ServiceTypeExternalName || svc.Spec.ClusterIP == corev1.ClusterIPNone && len(svc.Spec.Selector) == 0
}

// Repaired is a kube-dns that was an ExternalName, at the given cluster IPs or, without any, at those that it is given. Its selector and
// ports stay.
func Repaired(svc *corev1.Service, addrs []netip.Addr) *corev1.Service {
	svc, spec := svc.DeepCopy(), Service(addrs).Spec
	spec.Selector = svc.Spec.Selector
	if len(svc.Spec.Ports) > 0 {
		spec.Ports = svc.Spec.Ports
	}
	svc.Spec = spec
	return svc
}

// ToExternalName is a headless kube-dns on its way to be Repaired.
func ToExternalName(svc *corev1.Service) *corev1.Service {
	svc = svc.DeepCopy()
	svc.Spec = corev1.ServiceSpec{
		Type: corev1.ServiceTypeExternalName, ExternalName: "kube-dns.invalid", Selector: svc.Spec.Selector, Ports: svc.Spec.Ports,
	}
	return svc
}

// Announcement is the annotation's value for these addresses.
func Announcement(addrs []netip.Addr) string {
	var out []string
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return strings.Join(out, ",")
}

// Announced are the addresses at which a Node says that it serves names. They are among those of the node's Pods, if the Node
// has some: a node speaks for no addresses but its own.
func Announced(node *corev1.Node) (out []netip.Addr) {
	text, ok := node.Annotations[Annotation]
	if !ok {
		return nil
	}
	for _, part := range strings.Split(text, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(part))
		if err == nil && a.Zone() == "" && own(node, a) {
			out = append(out, a.Unmap())
		}
	}
	return out
}

func own(node *corev1.Node, a netip.Addr) bool {
	for _, text := range node.Spec.PodCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil && p.Contains(a.Unmap()) {
			return true
		}
	}
	return len(node.Spec.PodCIDRs) == 0 && !a.IsLoopback() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLinkLocalUnicast()
}
