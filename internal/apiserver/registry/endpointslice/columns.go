package endpointslice

import (
	"fmt"
	"strconv"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"

	"portal/internal/apiserver/registry"
)

func columns() []registry.Column[discoveryv1.EndpointSlice] {
	doc := discoveryv1.EndpointSlice{}.SwaggerDoc()
	return []registry.Column[discoveryv1.EndpointSlice]{
		{Name: "AddressType", Description: doc["addressType"], Cell: func(s *discoveryv1.EndpointSlice) any { return string(s.AddressType) }},
		{Name: "Ports", Description: doc["ports"], Cell: func(s *discoveryv1.EndpointSlice) any { return brief(portNames(s.Ports)) }},
		{Name: "Endpoints", Description: doc["endpoints"], Cell: func(s *discoveryv1.EndpointSlice) any { return brief(addresses(s.Endpoints)) }},
		registry.Age[discoveryv1.EndpointSlice](),
	}
}

func portNames(ports []discoveryv1.EndpointPort) []string {
	out := make([]string, 0, len(ports))
	for _, port := range ports {
		switch {
		case port.Port != nil:
			out = append(out, strconv.Itoa(int(*port.Port)))
		case port.Name != nil:
			out = append(out, *port.Name)
		default:
			out = append(out, "*")
		}
	}
	return out
}

func addresses(endpoints []discoveryv1.Endpoint) []string {
	var out []string
	for _, endpoint := range endpoints {
		out = append(out, endpoint.Addresses...)
	}
	return out
}

// brief shows the first three and how many there are beside them.
func brief(all []string) string {
	const shown = 3
	if len(all) > shown {
		return fmt.Sprintf("%s + %d more...", strings.Join(all[:shown], ","), len(all)-shown)
	}
	if text := strings.Join(all, ","); text != "" {
		return text
	}
	return "<unset>"
}
