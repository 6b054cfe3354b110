package service

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"portal/internal/apiserver/registry"
)

const none = "<none>"

// columns are what `kubectl get services` shows.
func columns() []registry.Column[corev1.Service] {
	about := corev1.ServiceSpec{}.SwaggerDoc()
	return []registry.Column[corev1.Service]{
		{Name: "Type", Description: about["type"], Cell: func(svc *corev1.Service) any { return string(svc.Spec.Type) }},
		{Name: "Cluster-IP", Description: about["clusterIP"], Cell: clusterIPCell},
		{Name: "External-IP", Description: about["externalIPs"], Cell: externalIPCell},
		{Name: "Port(s)", Description: about["ports"], Cell: portsCell},
		registry.Age[corev1.Service](),
		{Name: "Selector", Wide: true, Description: about["selector"], Cell: func(svc *corev1.Service) any {
			return labels.FormatLabels(svc.Spec.Selector)
		}},
	}
}

func clusterIPCell(svc *corev1.Service) any {
	if len(svc.Spec.ClusterIPs) == 0 {
		return none
	}
	return svc.Spec.ClusterIPs[0]
}

// externalIPCell shows where the Service is found from outside: a load balancer's addresses first, then those that
// users route themselves.
func externalIPCell(svc *corev1.Service) any {
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return svc.Spec.ExternalName
	}
	var where []string
	if balanced(&svc.Spec) {
		where = balancerAddresses(svc)
	}
	where = append(where, svc.Spec.ExternalIPs...)
	switch {
	case len(where) > 0:
		return strings.Join(where, ",")
	case balanced(&svc.Spec):
		return "<pending>"
	default:
		return none
	}
}

// balancerAddresses are sorted: providers report them in any order.
func balancerAddresses(svc *corev1.Service) []string {
	var out []string
	for _, in := range svc.Status.LoadBalancer.Ingress {
		switch {
		case in.IP != "":
			out = append(out, in.IP)
		case in.Hostname != "":
			out = append(out, in.Hostname)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func portsCell(svc *corev1.Service) any {
	if len(svc.Spec.Ports) == 0 {
		return none
	}
	cells := make([]string, 0, len(svc.Spec.Ports))
	for _, p := range svc.Spec.Ports {
		if p.NodePort > 0 {
			cells = append(cells, fmt.Sprintf("%d:%d/%s", p.Port, p.NodePort, p.Protocol))
		} else {
			cells = append(cells, fmt.Sprintf("%d/%s", p.Port, p.Protocol))
		}
	}
	return strings.Join(cells, ",")
}

// selectable are what field selectors can select Services by, beside name and namespace.
func selectable(svc *corev1.Service) fields.Set {
	return fields.Set{"spec.clusterIP": svc.Spec.ClusterIP, "spec.type": string(svc.Spec.Type)}
}
