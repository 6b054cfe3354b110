package endpointslice

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"portal/internal/apiserver/registry/rules"
)

// How much a slice may hold.
const (
	maxEndpoints = 1000
	maxAddresses = 100
	maxPorts     = 20000
	maxTopology  = 16
	maxHints     = 8
)

var (
	atType      = field.NewPath("addressType")
	atPorts     = field.NewPath("ports")
	atEndpoints = field.NewPath("endpoints")
)

func validate(_ context.Context, slice *discoveryv1.EndpointSlice) field.ErrorList {
	errs := rules.Finalizers(slice)
	errs = append(errs, validateType(slice.AddressType)...)
	errs = append(errs, validatePorts(slice.Ports)...)
	return append(errs, validateEndpoints(slice)...)
}

func validateType(kind discoveryv1.AddressType) field.ErrorList {
	return rules.RequiredOneOf(atType, kind, discoveryv1.AddressTypeFQDN, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6)
}

// validateUpdate validates only what an update changes, so that a slice from an older, more lenient server can still be
// labelled.
func validateUpdate(_ context.Context, slice, old *discoveryv1.EndpointSlice) field.ErrorList {
	errs := rules.Meta(slice, true, apivalidation.NameIsDNSSubdomain)
	errs = append(errs, validateType(slice.AddressType)...)
	if slice.AddressType != old.AddressType {
		errs = append(errs, field.Invalid(atType, slice.AddressType, "cannot be changed: make another slice"))
	}
	errs = append(errs, validatePorts(slice.Ports)...)
	if found := validateEndpoints(slice); len(found) != 0 && !equality.Semantic.DeepEqual(slice.Endpoints, old.Endpoints) {
		errs = append(errs, found...)
	}
	return errs
}

func validatePorts(ports []discoveryv1.EndpointPort) field.ErrorList {
	if len(ports) > maxPorts {
		return field.ErrorList{field.TooMany(atPorts, len(ports), maxPorts)}
	}
	var errs field.ErrorList
	names := map[string]bool{}
	for i, port := range ports {
		at := atPorts.Index(i)
		if *port.Name != "" {
			errs = append(errs, rules.DNSLabel(at.Child("name"), *port.Name)...)
		}
		if names[*port.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), *port.Name))
		}
		names[*port.Name] = true
		errs = append(errs, rules.OneOf(at.Child("protocol"), *port.Protocol, corev1.ProtocolSCTP, corev1.ProtocolTCP, corev1.ProtocolUDP)...)
		if port.AppProtocol != nil {
			errs = append(errs, rules.QualifiedName(at.Child("appProtocol"), *port.AppProtocol)...)
		}
	}
	return errs
}

func validateEndpoints(slice *discoveryv1.EndpointSlice) field.ErrorList {
	var errs field.ErrorList
	for i := range slice.Endpoints {
		errs = append(errs, validateCount(atEndpoints.Index(i).Child("addresses"), len(slice.Endpoints[i].Addresses))...)
	}
	// A slice with far too many gets one error, instead of one for each wrong endpoint.
	if len(slice.Endpoints) > maxEndpoints {
		return append(errs, field.TooMany(atEndpoints, len(slice.Endpoints), maxEndpoints))
	}
	for i := range slice.Endpoints {
		errs = append(errs, validateEndpoint(atEndpoints.Index(i), &slice.Endpoints[i], slice.AddressType)...)
	}
	return errs
}

func validateCount(at *field.Path, addresses int) field.ErrorList {
	switch {
	case addresses == 0:
		return field.ErrorList{field.Required(at, "at least one address")}
	case addresses > maxAddresses:
		return field.ErrorList{field.TooMany(at, addresses, maxAddresses)}
	}
	return nil
}

func validateEndpoint(at *field.Path, endpoint *discoveryv1.Endpoint, addressType discoveryv1.AddressType) field.ErrorList {
	var errs field.ErrorList
	addresses := at.Child("addresses")
	for i, address := range endpoint.Addresses {
		switch addressType {
		case discoveryv1.AddressTypeIPv4:
			errs = append(errs, validateIP(addresses, i, address, rules.IP(addresses.Index(i), address), netip.Addr.Is4, "IPv4")...)
		case discoveryv1.AddressTypeIPv6:
			errs = append(errs, validateIP(addresses, i, address, validation.IsValidIP(addresses.Index(i), address), netip.Addr.Is6, "IPv6")...)
		case discoveryv1.AddressTypeFQDN:
			errs = append(errs, validation.IsFullyQualifiedDomainName(addresses.Index(i), address)...)
		}
	}
	if endpoint.NodeName != nil {
		errs = append(errs, rules.NodeName(at.Child("nodeName"), *endpoint.NodeName)...)
	}
	if topology := at.Child("deprecatedTopology"); len(endpoint.DeprecatedTopology) > 0 {
		if len(endpoint.DeprecatedTopology) > maxTopology {
			errs = append(errs, field.TooMany(topology, len(endpoint.DeprecatedTopology), maxTopology))
		}
		errs = append(errs, metavalidation.ValidateLabels(endpoint.DeprecatedTopology, topology)...)
	}
	if endpoint.Hostname != nil {
		errs = append(errs, rules.DNSLabel(at.Child("hostname"), *endpoint.Hostname)...)
	}
	if endpoint.Hints != nil {
		errs = append(errs, validateHints(at.Child("hints"), endpoint.Hints)...)
	}
	return errs
}

// validateIP validates the i-th address: first whether it is written properly, then its family, then whether an endpoint
// can have it. A wrong family is an error of the list, because it is the list that has one.
func validateIP(list *field.Path, i int, address string, written field.ErrorList, family func(netip.Addr) bool, name string) field.ErrorList {
	if len(written) > 0 {
		return written
	}
	var errs field.ErrorList
	if ip, err := netip.ParseAddr(address); err == nil && !family(ip) {
		errs = append(errs, field.Invalid(list, address, "must be an "+name+" address, as addressType says"))
	}
	return append(errs, rules.EndpointIP(list.Index(i), address)...)
}

// validateHints stops at a list that is too long.
func validateHints(at *field.Path, hints *discoveryv1.EndpointHints) field.ErrorList {
	zones := make([]string, len(hints.ForZones))
	for i, zone := range hints.ForZones {
		zones[i] = zone.Name
	}
	nodes := make([]string, len(hints.ForNodes))
	for i, node := range hints.ForNodes {
		nodes[i] = node.Name
	}
	errs, ok := validateNames(at.Child("forZones"), zones, rules.LabelValue)
	if !ok {
		return errs
	}
	more, _ := validateNames(at.Child("forNodes"), nodes, rules.NodeName)
	return append(errs, more...)
}

func validateNames(at *field.Path, names []string, judge func(*field.Path, string) field.ErrorList) (field.ErrorList, bool) {
	if len(names) > maxHints {
		return field.ErrorList{field.TooMany(at, len(names), maxHints)}, false
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, name := range names {
		path := at.Index(i).Child("name")
		if seen[name] {
			errs = append(errs, field.Duplicate(path, name))
		}
		seen[name] = true
		errs = append(errs, judge(path, name)...)
	}
	return errs, true
}
