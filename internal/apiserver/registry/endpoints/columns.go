package endpoints

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/apiserver/registry"
)

func columns() []registry.Column[corev1.Endpoints] {
	return []registry.Column[corev1.Endpoints]{
		{Name: "Endpoints", Description: corev1.Endpoints{}.SwaggerDoc()["subsets"], Cell: func(e *corev1.Endpoints) any { return brief(e) }},
		registry.Age[corev1.Endpoints](),
	}
}

// brief shows the first three ready addresses with their ports, and how many there are beside them.
func brief(endpoints *corev1.Endpoints) string {
	if len(endpoints.Subsets) == 0 {
		return "<none>"
	}
	const shown = 3
	var list []string
	total := 0
	show := func(addresses []corev1.EndpointAddress, text func(ip string) string) {
		total += len(addresses)
		for i := 0; i < len(addresses) && len(list) < shown; i++ {
			list = append(list, text(addresses[i].IP))
		}
	}
	for i := range endpoints.Subsets {
		subset := &endpoints.Subsets[i]
		if len(subset.Ports) == 0 {
			show(subset.Addresses, func(ip string) string { return ip })
		}
		for _, port := range subset.Ports {
			show(subset.Addresses, func(ip string) string { return net.JoinHostPort(ip, strconv.Itoa(int(port.Port))) })
		}
	}
	text := strings.Join(list, ",")
	if total > shown {
		text += fmt.Sprintf(" + %d more...", total-shown)
	}
	return text
}
