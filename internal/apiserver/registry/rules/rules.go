// Package rules holds checks that several resources share: names, addresses, ports. Each gives one error for each
// thing that is wrong, at the path it was handed. It knows no resource.
package rules

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"
)

// Each turns the complaints of a string check into errors at path.
func Each(path *field.Path, value any, complaints []string) field.ErrorList {
	var errs field.ErrorList
	for _, complaint := range complaints {
		errs = append(errs, field.Invalid(path, value, complaint))
	}
	return errs
}

// DNSLabel wants a DNS-1123 label.
func DNSLabel(path *field.Path, value string) field.ErrorList {
	return Each(path, value, validation.IsDNS1123Label(value))
}

// DNSSubdomain wants a DNS-1123 subdomain.
func DNSSubdomain(path *field.Path, value string) field.ErrorList {
	return Each(path, value, validation.IsDNS1123Subdomain(value))
}

// NodeName wants what a Node may be called.
func NodeName(path *field.Path, value string) field.ErrorList {
	return Each(path, value, apivalidation.NameIsDNSSubdomain(value, false))
}

// QualifiedName wants a name with an optional prefix: "http", "example.com/my-protocol".
func QualifiedName(path *field.Path, value string) field.ErrorList {
	return Each(path, value, validation.IsQualifiedName(value))
}

// LabelValue wants what a label may be set to.
func LabelValue(path *field.Path, value string) field.ErrorList {
	return Each(path, value, validation.IsValidLabelValue(value))
}

// Port wants a number from 1 to 65535.
func Port(path *field.Path, value int) field.ErrorList {
	return Each(path, value, validation.IsValidPortNum(value))
}

// NotNegative wants zero or more.
func NotNegative(path *field.Path, value int64) field.ErrorList {
	if value >= 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(path, value, "must not be negative")}
}

// IP wants an address that every program reads alike: no leading zeros, no IPv4 dressed up as IPv6. Values that the
// object already had are left alone, however they are written.
func IP(path *field.Path, value string, had ...string) field.ErrorList {
	return validation.IsValidIPForLegacyField(path, value, true, had)
}

// CIDR wants a network that every program reads alike. Values that the object already had are left alone.
func CIDR(path *field.Path, value string, had ...string) field.ErrorList {
	return validation.IsValidCIDRForLegacyField(path, value, true, had)
}

// OneOf wants one of the listed values.
func OneOf[S ~string](path *field.Path, value S, allowed ...S) field.ErrorList {
	if slices.Contains(allowed, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, value, allowed)}
}

// RequiredOneOf wants one of the listed values, and says so differently when there is none at all.
func RequiredOneOf[S ~string](path *field.Path, value S, allowed ...S) field.ErrorList {
	if value == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	return OneOf(path, value, allowed...)
}

// unfit are the addresses that traffic cannot be sent to across a network, and what to call them. Multicast beyond the
// link is not among them: the API has always taken it.
var unfit = []struct {
	is  func(netip.Addr) bool
	why string
}{
	{netip.Addr.IsUnspecified, "must be an address of something: this one means \"any address\""},
	{netip.Addr.IsLoopback, "must be reachable from other machines: loopback (127.0.0.0/8, ::1/128) is not"},
	{netip.Addr.IsLinkLocalUnicast, "must be reachable across networks: link-local (169.254.0.0/16, fe80::/10) is not"},
	{netip.Addr.IsLinkLocalMulticast, "must be reachable across networks: link-local multicast (224.0.0.0/24, ff02::/16) is not"},
}

// EndpointIP rejects addresses that no endpoint can have. It reads addresses generously: how they are written is for
// IP to validate.
func EndpointIP(path *field.Path, value string) field.ErrorList {
	ip, ok := netip.AddrFromSlice(utilnet.ParseIPSloppy(value))
	if !ok {
		return field.ErrorList{field.Invalid(path, value, "must be an IP address, such as 10.9.8.7 or 2001:db8::ffff")}
	}
	var errs field.ErrorList
	for _, u := range unfit {
		if u.is(ip.Unmap()) {
			errs = append(errs, field.Invalid(path, value, u.why))
		}
	}
	return errs
}

// ClusterIPWarning warns of the first of an object's endpoints that is in a range of cluster IPs: it would be another
// Service, and no proxy sends traffic from one Service on to the next.
func ClusterIPWarning(addresses iter.Seq2[*field.Path, string], isClusterIP func(netip.Addr) bool) []string {
	if isClusterIP == nil {
		return nil
	}
	for path, address := range addresses {
		if ip, ok := netip.AddrFromSlice(utilnet.ParseIPSloppy(address)); ok && isClusterIP(ip.Unmap()) {
			return []string{fmt.Sprintf("%s: %s is in a range of cluster IPs; traffic is not forwarded from one Service to another", path, address)}
		}
	}
	return nil
}

// BalancerIP rejects addresses at which no load balancer can be: those that EndpointIP rejects, and all multicast. A proxy
// that took them for a Service's would capture traffic of the machine itself.
func BalancerIP(path *field.Path, value string) field.ErrorList {
	if errs := EndpointIP(path, value); len(errs) > 0 {
		return errs[:1]
	}
	if ip, ok := netip.AddrFromSlice(utilnet.ParseIPSloppy(value)); ok && ip.Unmap().IsMulticast() {
		return field.ErrorList{field.Invalid(path, value, "must be the address of one load balancer: multicast (224.0.0.0/4, ff00::/8) is not")}
	}
	return nil
}

// LabelName wants what a label may be called.
func LabelName(path *field.Path, value string) field.ErrorList {
	return metavalidation.ValidateLabelName(value, path)
}

// TaintEffect wants one of the things that a taint does.
func TaintEffect(path *field.Path, effect corev1.TaintEffect) field.ErrorList {
	return OneOf(path, effect, corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)
}

// OnePerFamily wants at most one address or network of each IP family. A text that is of none is reported a second time
// here, as the API does.
func OnePerFamily(path *field.Path, values []string, family func(string) utilnet.IPFamily) field.ErrorList {
	if len(values) < 2 {
		return nil
	}
	var errs field.ErrorList
	families := map[utilnet.IPFamily]int{}
	for _, value := range values {
		families[family(value)]++
	}
	if families[utilnet.IPFamilyUnknown] > 0 {
		errs = append(errs, field.InternalError(path, errors.New("the IP family of some values cannot be determined")))
	}
	if len(values) > 2 || families[utilnet.IPv4] != 1 || families[utilnet.IPv6] != 1 {
		errs = append(errs, field.Invalid(path, values, "must be at most one of each IP family"))
	}
	return errs
}

// Finalizers wants finalizers to have a domain, but for the few that are older than that rule.
func Finalizers(obj metav1.Object) field.ErrorList {
	var errs field.ErrorList
	for i, name := range obj.GetFinalizers() {
		errs = append(errs, Finalizer(field.NewPath("metadata", "finalizers").Index(i), name)...)
	}
	return errs
}

// Finalizer wants a name with a domain, or one of the few that are older than that rule.
func Finalizer(path *field.Path, name string) field.ErrorList {
	switch name {
	case string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents:
		return nil
	}
	if strings.Contains(name, "/") {
		return nil
	}
	return field.ErrorList{field.Invalid(path, name, "must have a domain, such as example.com/"+name+", or be \"kubernetes\", \"orphan\" or \"foregroundDeletion\"")}
}

// UserAnnotations wants keys with a domain, in any case of letters, and not more than annotations may hold.
func UserAnnotations(path *field.Path, annotations map[string]string) field.ErrorList {
	var errs field.ErrorList
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		errs = append(errs, validation.IsDomainPrefixedKey(path, strings.ToLower(key))...)
	}
	if apivalidation.ValidateAnnotationsSize(annotations) != nil {
		errs = append(errs, field.TooLong(path, "", apivalidation.TotalAnnotationSizeLimitB))
	}
	return errs
}
