package ingress

import (
	"fmt"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/apiserver/registry"
)

var columns = []registry.Column[networkingv1.Ingress]{
	{
		Name: "Class", Description: "The name of the IngressClass resource that should be used for additional configuration",
		Cell: func(ing *networkingv1.Ingress) any { return class(ing) },
	},
	{
		Name: "Hosts", Description: "Hosts that incoming requests are matched against before the ingress rule",
		Cell: func(ing *networkingv1.Ingress) any { return hosts(ing.Spec.Rules) },
	},
	{
		Name: "Address", Description: "Address is a list containing ingress points for the load-balancer",
		Cell: func(ing *networkingv1.Ingress) any { return addresses(ing.Status.LoadBalancer.Ingress) },
	},
	{
		Name: "Ports", Description: "Ports of TLS configurations that open",
		Cell: func(ing *networkingv1.Ingress) any { return ports(ing) },
	},
	registry.Age[networkingv1.Ingress](),
}

func class(ing *networkingv1.Ingress) string {
	if ing.Spec.IngressClassName == nil {
		return "<none>"
	}
	return *ing.Spec.IngressClassName
}

// hosts names three of them. The rest is counted in rules, with or without a host, from the fourth on.
func hosts(rules []networkingv1.IngressRule) string {
	const shown = 3
	var names []string
	for _, rule := range rules {
		if len(names) == shown {
			return fmt.Sprintf("%s + %d more...", strings.Join(names, ","), len(rules)-shown)
		}
		if rule.Host != "" {
			names = append(names, rule.Host)
		}
	}
	if len(names) == 0 {
		return "*"
	}
	return strings.Join(names, ",")
}

func addresses(points []networkingv1.IngressLoadBalancerIngress) string {
	var out []string
	for _, p := range points {
		switch {
		case p.IP != "":
			out = append(out, p.IP)
		case p.Hostname != "":
			out = append(out, p.Hostname)
		}
	}
	slices.Sort(out)
	return strings.Join(slices.Compact(out), ",")
}

func ports(ing *networkingv1.Ingress) string {
	if len(ing.Spec.TLS) > 0 {
		return "80, 443"
	}
	return "80"
}
