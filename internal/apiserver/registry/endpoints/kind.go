// Package endpoints describes v1 Endpoints, the older way to say where the backends of a Service are. They are kept
// as they were written: bringing them into canonical form is for their writers (package subsets).
package endpoints

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"portal/internal/apiserver/registry"
)

// New describes Endpoints. The warning that they are deprecated comes from the library, by way of their Go type.
func New(isClusterIP func(netip.Addr) bool) *registry.Kind[corev1.Endpoints, *corev1.Endpoints] {
	return &registry.Kind[corev1.Endpoints, *corev1.Endpoints]{
		Served: corev1.SchemeGroupVersion,
		Plural: "endpoints", Singular: "endpoints", KindName: "Endpoints",
		ShortNames: []string{"ep"},
		NewList:    func() runtime.Object { return &corev1.EndpointsList{} },
		Default:    setDefaults,
		Validate:   validate,
		Warnings: func(_ context.Context, endpoints, _ *corev1.Endpoints) []string {
			return warnings(endpoints, isClusterIP)
		},
		Columns:        columns(),
		CreateOnUpdate: true,
		ValidateUpdate: validateUpdate,
	}
}

// setDefaults makes a port without a protocol TCP.
func setDefaults(endpoints *corev1.Endpoints) {
	for i := range endpoints.Subsets {
		ports := endpoints.Subsets[i].Ports
		for j := range ports {
			if ports[j].Protocol == "" {
				ports[j].Protocol = corev1.ProtocolTCP
			}
		}
	}
}
