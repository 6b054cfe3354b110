package up

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// kubeDNS is the name of the cluster's DNS Service in every Kubernetes.
const kubeDNS = "kube-dns"

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

// KubeDNS makes sure that the Service kube-dns exists, at the tenth addresses of the ranges unless another Service has
// them, and returns its cluster IPs.
func KubeDNS(ctx context.Context, client kubernetes.Interface, ranges []netip.Prefix, port uint16) ([]netip.Addr, error) {
	services := client.CoreV1().Services(metav1.NamespaceSystem)
	svc, err := services.Get(ctx, kubeDNS, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		svc, err = services.Create(ctx, dnsService(TenthAddresses(ranges), port), metav1.CreateOptions{})
		if apierrors.IsInvalid(err) { // another Service has the address: any will do
			svc, err = services.Create(ctx, dnsService(nil, port), metav1.CreateOptions{})
		}
	}
	if err != nil {
		return nil, fmt.Errorf("service %s: %w", kubeDNS, err)
	}
	var out []netip.Addr
	for _, text := range svc.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, a)
		}
	}
	return out, nil
}

func dnsService(addrs []netip.Addr, port uint16) *corev1.Service {
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: kubeDNS, Namespace: metav1.NamespaceSystem,
			Labels: map[string]string{"k8s-app": kubeDNS, "kubernetes.io/name": "Portal"},
		},
		Spec: corev1.ServiceSpec{
			IPFamilyPolicy: ptr.To(corev1.IPFamilyPolicyPreferDualStack),
			Ports: []corev1.ServicePort{
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, TargetPort: intstr.FromInt32(int32(port))},
				{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53, TargetPort: intstr.FromInt32(int32(port))},
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

// EndpointAddrs are the endpoints behind the DNS server's cluster IPs: an address for each family, in the ranges that Pods
// usually have.
func EndpointAddrs(virtual []netip.Addr) []netip.Addr {
	var out []netip.Addr
	for _, v := range virtual {
		if v.Is4() {
			out = append(out, netip.MustParseAddr("10.244.0.53"))
		} else {
			out = append(out, netip.MustParseAddr("fd00:244::53"))
		}
	}
	return out
}

// DNSEndpoints writes an EndpointSlice for each family with the addresses that the DNS server listens at, for the proxy to
// forward to. A family without addresses has its slice deleted.
func DNSEndpoints(ctx context.Context, client kubernetes.Interface, addrs []netip.Addr, port uint16) error {
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		var endpoints []discoveryv1.Endpoint
		for _, a := range addrs {
			if a.Is4() == (family == discoveryv1.AddressTypeIPv4) {
				endpoints = append(endpoints, discoveryv1.Endpoint{
					Addresses: []string{a.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
				})
			}
		}
		if err := putSlice(ctx, client, family, endpoints, port); err != nil {
			return fmt.Errorf("endpoints of %s: %w", kubeDNS, err)
		}
	}
	return nil
}

func putSlice(ctx context.Context, client kubernetes.Interface, family discoveryv1.AddressType, endpoints []discoveryv1.Endpoint, port uint16) error {
	slicesOf := client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem)
	want := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: kubeDNS + "-" + strings.ToLower(string(family)), Namespace: metav1.NamespaceSystem,
			Labels: map[string]string{discoveryv1.LabelServiceName: kubeDNS, discoveryv1.LabelManagedBy: "portal-up"},
		},
		AddressType: family, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{
			{Name: ptr.To("dns"), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To(int32(port))},
			{Name: ptr.To("dns-tcp"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(int32(port))},
		},
	}
	if len(endpoints) == 0 {
		err := slicesOf.Delete(ctx, want.Name, metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	}
	old, err := slicesOf.Get(ctx, want.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, err = slicesOf.Create(ctx, want, metav1.CreateOptions{})
	case err == nil:
		old.Endpoints, old.Ports, old.Labels = want.Endpoints, want.Ports, want.Labels
		_, err = slicesOf.Update(ctx, old, metav1.UpdateOptions{})
	}
	return err
}

// ResolvConf is the /etc/resolv.conf of a program in a namespace of the cluster.
func ResolvConf(servers []netip.Addr, namespace, zone string) string {
	var b strings.Builder
	for _, a := range servers {
		fmt.Fprintf(&b, "nameserver %s\n", a)
	}
	fmt.Fprintf(&b, "search %s.svc.%s svc.%s %s\noptions ndots:5\n", namespace, zone, zone, zone)
	return b.String()
}
