// Package externalpod knows Pods that stand for something that Portal does not run: how they are recognised, and where their addresses
// are. It is pure; the API server, nodes and the command line agree on it.
package externalpod

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

const (
	// RuntimeClass is the class of such Pods.
	RuntimeClass = "external"
	// AddressesAnnotation has their addresses, separated by commas: at most one of each family, the primary one first.
	AddressesAnnotation = "portal.dev/external-addresses"
	// Image is what their containers have for an image, and is never looked for.
	Image = "external"
)

// Is says whether a Pod stands for something external.
func Is(pod *corev1.Pod) bool {
	return pod.Spec.RuntimeClassName != nil && *pod.Spec.RuntimeClassName == RuntimeClass
}

// Addresses are a Pod's.
func Addresses(pod *corev1.Pod) ([]netip.Addr, error) {
	text, ok := pod.Annotations[AddressesAnnotation]
	if !ok {
		return nil, fmt.Errorf("metadata.annotations[%s]: is required with runtimeClassName %s: the addresses of what the Pod stands for", AddressesAnnotation, RuntimeClass)
	}
	out, err := ParseAddresses(text)
	if err != nil {
		return nil, fmt.Errorf("metadata.annotations[%s]: %w", AddressesAnnotation, err)
	}
	return out, nil
}

// ParseAddresses reads a list of addresses: one, or one of each family.
func ParseAddresses(text string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, part := range strings.Split(text, ",") {
		part = strings.TrimSpace(part)
		a, err := netip.ParseAddr(part)
		if err != nil {
			return nil, fmt.Errorf("%q is no IP address", part)
		}
		if err := usable(a); err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	if len(out) > 2 || len(out) == 2 && out[0].Is4() == out[1].Is4() {
		return nil, errors.New("has more than one address of a family")
	}
	return out, nil
}

// usable rejects addresses at which nothing can be that others reach.
func usable(a netip.Addr) error {
	switch {
	case a.Is4In6():
		return fmt.Errorf("%s: write an IPv4 address as such: %s", a, a.Unmap())
	case a.Zone() != "":
		return fmt.Errorf("%s: an address with a zone means something on one machine only", a)
	case a.IsUnspecified():
		return fmt.Errorf("%s: means any address, and is that of nothing", a)
	case a.IsLoopback():
		return fmt.Errorf("%s: is a loopback address, which other machines can't reach", a)
	case a.IsLinkLocalUnicast():
		return fmt.Errorf("%s: is a link-local address, which other networks can't reach", a)
	case a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("%s: is the address of a group, not of one server", a)
	}
	return nil
}
