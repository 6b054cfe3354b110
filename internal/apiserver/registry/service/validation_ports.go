package service

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

func validatePorts(is *corev1.ServiceSpec) field.ErrorList {
	type served struct {
		protocol corev1.Protocol
		number   int32
	}
	var errs field.ErrorList
	if len(is.Ports) == 0 && addressed(is) && !headless(is) {
		errs = append(errs, field.Required(at("ports"), "a Service with a cluster IP serves at least one port"))
	}
	names, ports := sets.New[string](), sets.New[served]()
	for i := range is.Ports {
		port, path := &is.Ports[i], at("ports").Index(i)
		errs = append(errs, validatePort(port, path)...)
		switch {
		case port.Name == "" && len(is.Ports) > 1:
			errs = append(errs, field.Required(path.Child("name"), "each of several ports needs a name"))
		case port.Name != "" && names.Has(port.Name):
			errs = append(errs, field.Duplicate(path.Child("name"), port.Name))
		}
		names.Insert(port.Name)
		key := served{port.Protocol, port.Port}
		if ports.Has(key) {
			errs = append(errs, field.Duplicate(path, corev1.ServicePort{Protocol: port.Protocol, Port: port.Port}))
		}
		ports.Insert(key)
	}
	return errs
}

func validatePort(port *corev1.ServicePort, path *field.Path) field.ErrorList {
	errs := rules.Port(path.Child("port"), int(port.Port))
	errs = append(errs, rules.RequiredOneOf(path.Child("protocol"), port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
	if port.Name != "" {
		errs = append(errs, rules.DNSLabel(path.Child("name"), port.Name)...)
	}
	if target := port.TargetPort; target.Type == intstr.String {
		errs = append(errs, rules.Each(path.Child("targetPort"), target.StrVal, validation.IsValidPortName(target.StrVal))...)
	} else {
		errs = append(errs, rules.Port(path.Child("targetPort"), int(target.IntVal))...)
	}
	if port.AppProtocol != nil {
		errs = append(errs, rules.QualifiedName(path.Child("appProtocol"), *port.AppProtocol)...)
	}
	return errs
}

// validateNodePorts validates only how they go together: whether a number can be had was settled in Allocate.
func validateNodePorts(is *corev1.ServiceSpec) (errs field.ErrorList) {
	type open struct {
		protocol corev1.Protocol
		number   int32
	}
	seen := sets.New[open]()
	for i := range is.Ports {
		port, path := &is.Ports[i], at("ports").Index(i).Child("nodePort")
		if port.NodePort == 0 {
			continue
		}
		if is.Type == corev1.ServiceTypeClusterIP {
			errs = append(errs, field.Forbidden(path, "type ClusterIP has no node ports: use NodePort or LoadBalancer"))
		}
		key := open{port.Protocol, port.NodePort}
		if seen.Has(key) {
			errs = append(errs, field.Duplicate(path, port.NodePort))
		}
		seen.Insert(key)
	}
	return errs
}
