// Package endpointslice describes discovery.k8s.io/v1 EndpointSlices: where the backends of a Service are.
package endpointslice

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"

	"portal/internal/apiserver/registry"
)

// New describes EndpointSlices.
func New(isClusterIP func(netip.Addr) bool) *registry.Kind[discoveryv1.EndpointSlice, *discoveryv1.EndpointSlice] {
	return &registry.Kind[discoveryv1.EndpointSlice, *discoveryv1.EndpointSlice]{
		Served: discoveryv1.SchemeGroupVersion,
		Plural: "endpointslices", Singular: "endpointslice", KindName: "EndpointSlice",
		NewList:       func() runtime.Object { return &discoveryv1.EndpointSliceList{} },
		Default:       setDefaults,
		PrepareCreate: prepareCreate,
		PrepareUpdate: prepareUpdate,
		Validate:      validate,
		Warnings: func(_ context.Context, slice, old *discoveryv1.EndpointSlice) []string {
			return warnings(slice, old, isClusterIP)
		},
		Columns:        columns(),
		ValidateUpdate: validateUpdate,
	}
}

// setDefaults lets a port without a name be the unnamed one, and one without a protocol be TCP.
func setDefaults(slice *discoveryv1.EndpointSlice) {
	for i := range slice.Ports {
		port := &slice.Ports[i]
		if port.Name == nil {
			port.Name = new(string)
		}
		if port.Protocol == nil {
			tcp := corev1.ProtocolTCP
			port.Protocol = &tcp
		}
	}
}

func prepareCreate(_ context.Context, slice *discoveryv1.EndpointSlice) {
	slice.Generation = 1
	dropTopology(slice, nil)
}

// prepareUpdate counts a generation for every change but one of metadata other than labels: consumers find the slices
// of a Service by label, so labels mean something here.
func prepareUpdate(_ context.Context, slice, old *discoveryv1.EndpointSlice) {
	if !equality.Semantic.DeepEqual(slice.Labels, old.Labels) || slice.AddressType != old.AddressType ||
		!equality.Semantic.DeepEqual(slice.Endpoints, old.Endpoints) || !equality.Semantic.DeepEqual(slice.Ports, old.Ports) {
		slice.Generation = old.Generation + 1
	}
	dropTopology(slice, old)
}

// dropTopology clears deprecatedTopology, which v1 only shows and never takes. A node that old knew by the host name
// in there and that the new object gives in no other way becomes its nodeName.
func dropTopology(slice, old *discoveryv1.EndpointSlice) {
	known := map[string]bool{}
	if old != nil {
		if equality.Semantic.DeepEqual(slice.Endpoints, old.Endpoints) {
			return
		}
		for _, endpoint := range old.Endpoints {
			known[endpoint.DeprecatedTopology[corev1.LabelHostname]] = true
		}
		delete(known, "")
	}
	for i := range slice.Endpoints {
		endpoint := &slice.Endpoints[i]
		node := endpoint.DeprecatedTopology[corev1.LabelHostname]
		if endpoint.NodeName == nil && known[node] && len(apivalidation.NameIsDNSSubdomain(node, false)) == 0 {
			endpoint.NodeName = &node
		}
		endpoint.DeprecatedTopology = nil
	}
}
