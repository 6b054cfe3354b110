package endpointslice

import (
	"context"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// written are the controllers that write addresses canonically: their many slices are not looked through.
var written = map[string]bool{
	"endpointslice-controller.k8s.io":          true,
	"endpointslicemirroring-controller.k8s.io": true,
}

func warnings(_ context.Context, slice, old *discoveryv1.EndpointSlice) []string {
	var out []string
	if old == nil && slice.AddressType == discoveryv1.AddressTypeFQDN {
		out = append(out, "addressType: FQDN is deprecated, nothing routes to such endpoints")
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
	return out
}
