package apiserver

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"portal/internal/ensure"
)

// writeSlices writes one EndpointSlice for each port and family in use, and removes those no longer needed. The one of
// the usual case, all servers on one port, has the Service's own name, as in Kubernetes.
func (e *serverEndpoints) writeSlices(ctx context.Context, members []netip.AddrPort) error {
	client := e.client.DiscoveryV1().EndpointSlices(metav1.NamespaceDefault)
	list, err := client.List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + defaultName})
	if err != nil {
		return err
	}
	current := map[string]*discoveryv1.EndpointSlice{}
	for i := range list.Items {
		current[list.Items[i].Name] = &list.Items[i]
	}
	for _, want := range slicesOf(members) {
		old := current[want.Name]
		delete(current, want.Name)
		if old == nil { // or it is there, without its label
			if old, err = client.Get(ctx, want.Name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
				old = nil
			} else if err != nil {
				return err
			}
		}
		wrote, err := ensure.Slice(ctx, client, old, want)
		if err := ignoreRace(err); err != nil {
			return err
		}
		if err == nil && wrote && old != nil && !maps.Equal(old.Labels, want.Labels) {
			klog.InfoS("labels of an EndpointSlice of the kubernetes Service were repaired", "slice", want.Name, "had", old.Labels)
		}
	}
	for name := range current {
		if err := ignoreRace(client.Delete(ctx, name, metav1.DeleteOptions{})); err != nil {
			return err
		}
	}
	return nil
}

func slicesOf(members []netip.AddrPort) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	groups := byPort(members)
	for _, port := range sortedPorts(groups) {
		for _, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{
					Name: defaultName, Namespace: metav1.NamespaceDefault,
					Labels: map[string]string{discoveryv1.LabelServiceName: defaultName},
				},
				AddressType: family,
				Ports: []discoveryv1.EndpointPort{{
					Name: ptr.To("https"), Port: ptr.To(int32(port)), Protocol: ptr.To(corev1.ProtocolTCP),
				}},
			}
			for _, addr := range groups[port] {
				if addr.Is4() == (family == discoveryv1.AddressTypeIPv4) {
					slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
						Addresses: []string{addr.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
					})
				}
			}
			if len(slice.Endpoints) == 0 {
				continue
			}
			if len(out) > 0 {
				slice.Name = fmt.Sprintf("%s-%d-%s", defaultName, port, lower(family))
			}
			out = append(out, slice)
		}
	}
	return out
}

func lower(family discoveryv1.AddressType) string {
	if family == discoveryv1.AddressTypeIPv6 {
		return "ipv6"
	}
	return "ipv4"
}
