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
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/internal/clusterdns"
	"portal/internal/clusterdns/publish"
	"portal/internal/ensure"
)

// KubeDNS makes sure that the Service kube-dns exists and has cluster IPs, the tenth addresses of the ranges unless another Service has
// them, and returns these.
func KubeDNS(ctx context.Context, client kubernetes.Interface, ranges []netip.Prefix) ([]netip.Addr, error) {
	svc, err := ensureService(ctx, client, clusterdns.TenthAddresses(ranges), nil)
	if err != nil {
		return nil, fmt.Errorf("service %s: %w", clusterdns.ServiceName, err)
	}
	addrs := clusterdns.Addresses(svc)
	if len(addrs) == 0 {
		return nil, fmt.Errorf("service %s/%s is headless and selects Pods: start with --dns none if these serve DNS, or delete it",
			metav1.NamespaceSystem, clusterdns.ServiceName)
	}
	return addrs, nil
}

// ensureService creates or repairs kube-dns where needed, at the first of the choices of addresses that can be had.
func ensureService(ctx context.Context, client kubernetes.Interface, choices ...[]netip.Addr) (*corev1.Service, error) {
	services := client.CoreV1().Services(metav1.NamespaceSystem)
	svc, err := services.Get(ctx, clusterdns.ServiceName, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		svc = nil
	case err != nil:
		return nil, err
	}
	return publish.Service(ctx, services, svc, choices...)
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
func DNSEndpoints(ctx context.Context, client kubernetes.Interface, addrs []netip.Addr) error {
	for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		var endpoints []discoveryv1.Endpoint
		for _, a := range addrs {
			if a.Is4() == (family == discoveryv1.AddressTypeIPv4) {
				endpoints = append(endpoints, discoveryv1.Endpoint{
					Addresses: []string{a.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
				})
			}
		}
		if err := putSlice(ctx, client, family, endpoints); err != nil {
			return fmt.Errorf("endpoints of %s: %w", clusterdns.ServiceName, err)
		}
	}
	return nil
}

func putSlice(ctx context.Context, client kubernetes.Interface, family discoveryv1.AddressType, endpoints []discoveryv1.Endpoint) error {
	slicesOf := client.DiscoveryV1().EndpointSlices(metav1.NamespaceSystem)
	want := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: clusterdns.ServiceName + "-" + strings.ToLower(string(family)), Namespace: metav1.NamespaceSystem,
			Labels: map[string]string{discoveryv1.LabelServiceName: clusterdns.ServiceName, discoveryv1.LabelManagedBy: "portal-up"},
		},
		AddressType: family, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{
			{Name: ptr.To("dns"), Protocol: ptr.To(corev1.ProtocolUDP), Port: ptr.To[int32](clusterdns.Port)},
			{Name: ptr.To("dns-tcp"), Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To[int32](clusterdns.Port)},
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
	if apierrors.IsNotFound(err) {
		old, err = nil, nil
	}
	if err == nil {
		_, err = ensure.Slice(ctx, slicesOf, old, want)
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
