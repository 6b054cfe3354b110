package endpointslice

import (
	"fmt"
	"net/netip"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// written are the controllers that write addresses canonically: their many slices are not looked through.
var written = map[string]bool{
	"endpointslice-controller.k8s.io":          true,
	"endpointslicemirroring-controller.k8s.io": true,
}

func warnings(slice, old *discoveryv1.EndpointSlice, isClusterIP func(netip.Addr) bool) []string {
	var out []string
	if old == nil && slice.AddressType == discoveryv1.AddressTypeFQDN {
		out = append(out, "addressType: FQDN is deprecated, nothing routes to such endpoints")
	}
	for i, port := range slice.Ports {
		// Kubernetes takes any number here, and a test recorded from it does too. No program can connect to it.
		if port.Port != nil && (*port.Port < 1 || *port.Port > 65535) {
			out = append(out, fmt.Sprintf("%s: %d is not a port (1 to 65535), and is served by nothing", atPorts.Index(i).Child("port"), *port.Port))
		}
	}
	if written[slice.Labels[discoveryv1.LabelManagedBy]] || slice.AddressType == discoveryv1.AddressTypeFQDN {
		return out
	}
	for i := range slice.Endpoints {
		at := atEndpoints.Index(i).Child("addresses")
		for j, address := range slice.Endpoints[i].Addresses {
			out = append(out, validation.GetWarningsForIP(at.Index(j), address)...)
		}
	}
	return append(out, rules.ClusterIPWarning(func(yield func(*field.Path, string) bool) {
		for i := range slice.Endpoints {
			for j, address := range slice.Endpoints[i].Addresses {
				if !yield(atEndpoints.Index(i).Child("addresses").Index(j), address) {
					return
				}
			}
		}
	}, isClusterIP)...)
}
