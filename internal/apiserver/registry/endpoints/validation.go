package endpoints

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// writer is the label by which the endpoints controller marks what it writes; its addresses are always canonical.
const writer, controller = "endpoints.kubernetes.io/managed-by", "endpoint-controller"

var atSubsets = field.NewPath("subsets")

func validate(_ context.Context, endpoints *corev1.Endpoints) field.ErrorList {
	return append(rules.Finalizers(endpoints), validateSubsets(endpoints)...)
}

func validateSubsets(endpoints *corev1.Endpoints) field.ErrorList {
	var errs field.ErrorList
	for i := range endpoints.Subsets {
		errs = append(errs, validateSubset(atSubsets.Index(i), &endpoints.Subsets[i])...)
	}
	return errs
}

// validateUpdate leaves subsets alone that an update doesn't touch, so that Endpoints from an older, more lenient
// server can still be labelled.
func validateUpdate(_ context.Context, endpoints, old *corev1.Endpoints) field.ErrorList {
	errs := rules.MetaUpdate(endpoints, old)
	errs = append(errs, rules.Meta(endpoints, true, apivalidation.NameIsDNSSubdomain)...)
	if found := validateSubsets(endpoints); len(found) != 0 && !equality.Semantic.DeepEqual(endpoints.Subsets, old.Subsets) {
		errs = append(errs, found...)
	}
	return errs
}

func validateSubset(at *field.Path, subset *corev1.EndpointSubset) field.ErrorList {
	var errs field.ErrorList
	if len(subset.Addresses)+len(subset.NotReadyAddresses) == 0 {
		errs = append(errs, field.Required(at, "a subset needs an address in addresses or notReadyAddresses"))
	}
	for name, list := range lists(subset) {
		for i := range list {
			errs = append(errs, validateAddress(at.Child(name).Index(i), &list[i])...)
		}
	}
	for i := range subset.Ports {
		errs = append(errs, validatePort(at.Child("ports").Index(i), &subset.Ports[i], len(subset.Ports) > 1)...)
	}
	return errs
}

// lists are the addresses of a subset by the field they are in.
func lists(subset *corev1.EndpointSubset) func(func(string, []corev1.EndpointAddress) bool) {
	return func(yield func(string, []corev1.EndpointAddress) bool) {
		_ = yield("addresses", subset.Addresses) && yield("notReadyAddresses", subset.NotReadyAddresses)
	}
}

func validateAddress(at *field.Path, address *corev1.EndpointAddress) field.ErrorList {
	errs := rules.IP(at.Child("ip"), address.IP)
	if address.Hostname != "" {
		errs = append(errs, rules.DNSLabel(at.Child("hostname"), address.Hostname)...)
	}
	if address.NodeName != nil {
		errs = append(errs, rules.NodeName(at.Child("nodeName"), *address.NodeName)...)
	}
	return append(errs, rules.EndpointIP(at.Child("ip"), address.IP)...)
}

func validatePort(at *field.Path, port *corev1.EndpointPort, several bool) field.ErrorList {
	var errs field.ErrorList
	switch {
	case port.Name != "":
		errs = rules.DNSLabel(at.Child("name"), port.Name)
	case several:
		errs = append(errs, field.Required(at.Child("name"), "where there are several ports each needs a name"))
	}
	errs = append(errs, rules.Port(at.Child("port"), int(port.Port))...)
	errs = append(errs, rules.RequiredOneOf(at.Child("protocol"), port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
	if port.AppProtocol != nil {
		errs = append(errs, rules.QualifiedName(at.Child("appProtocol"), *port.AppProtocol)...)
	}
	return errs
}

func warnings(endpoints *corev1.Endpoints, isClusterIP func(netip.Addr) bool) []string {
	if endpoints.Labels[writer] == controller {
		return nil
	}
	var out []string
	for i := range endpoints.Subsets {
		for name, list := range lists(&endpoints.Subsets[i]) {
			for j := range list {
				out = append(out, validation.GetWarningsForIP(atSubsets.Index(i).Child(name).Index(j).Child("ip"), list[j].IP)...)
			}
		}
	}
	return append(out, rules.ClusterIPWarning(func(yield func(*field.Path, string) bool) {
		for i := range endpoints.Subsets {
			for name, list := range lists(&endpoints.Subsets[i]) {
				for j := range list {
					if !yield(atSubsets.Index(i).Child(name).Index(j).Child("ip"), list[j].IP) {
						return
					}
				}
			}
		}
	}, isClusterIP)...)
}
