package service

import (
	"encoding/json"
	"math"
	"net/netip"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"

	"portal/internal/alloc"
	"portal/internal/store"
)

// Where claims are kept, below the store's prefix. An address' claim is the IPAddress object itself; a port has none in
// Kubernetes' API, so its claim is a small note of its owner.
const (
	AddressPrefix = "/ipaddresses/"
	PortPrefix    = "/nodeports/"
)

func addressKey(addr netip.Addr) string { return AddressPrefix + addr.String() }

func portKey(port uint16) string { return PortPrefix + strconv.Itoa(int(port)) }

// claimOf reads a claim's key.
func claimOf(key string) (alloc.Claim, bool) {
	if text, ok := strings.CutPrefix(key, AddressPrefix); ok {
		addr, err := netip.ParseAddr(text)
		return alloc.Claim{Addr: addr}, err == nil
	}
	if text, ok := strings.CutPrefix(key, PortPrefix); ok {
		port, err := strconv.ParseUint(text, 10, 16)
		return alloc.Claim{Port: uint16(port)}, err == nil
	}
	return alloc.Claim{}, false
}

// ParseClaim reads the key of a claim; prefix is what stands before it in etcd.
func ParseClaim(prefix, key string) (alloc.Claim, bool) {
	rest, ok := strings.CutPrefix(key, prefix)
	if !ok {
		return alloc.Claim{}, false
	}
	return claimOf(rest)
}

// Owner is what the claim on a port says about who holds it.
type Owner struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid"`
}

// Claimer derives a stored Service's claims. The codec encodes IPAddress objects as the store keeps them.
func Claimer(addresses runtime.Encoder) store.Claimer {
	return func(obj runtime.Object) []store.Claim {
		svc := obj.(*corev1.Service)
		held := Claims(svc)
		out := make([]store.Claim, 0, len(held.Addresses)+len(held.NodePorts)+1)
		for _, addr := range held.Addresses {
			out = append(out, store.Claim{Key: addressKey(addr), Encode: func() ([]byte, error) {
				return runtime.Encode(addresses, NewIPAddress(svc, addr))
			}})
		}
		for _, port := range held.Ports() {
			if port < 1 || port > math.MaxUint16 {
				continue // only somebody who edits etcd can write that, and it is no port
			}
			out = append(out, store.Claim{Key: portKey(uint16(port)), Encode: func() ([]byte, error) {
				return json.Marshal(Owner{Namespace: svc.Namespace, Name: svc.Name, UID: string(svc.UID)})
			}})
		}
		return out
	}
}

// NewIPAddress is the object that claims an address for a Service.
func NewIPAddress(svc *corev1.Service, addr netip.Addr) *networkingv1.IPAddress {
	family := string(corev1.IPv4Protocol)
	if addr.Is6() {
		family = string(corev1.IPv6Protocol)
	}
	return &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{
			Name:              addr.String(),
			UID:               uuid.NewUUID(),
			CreationTimestamp: metav1.Now().Rfc3339Copy(),
			Labels: map[string]string{
				networkingv1.LabelIPAddressFamily: family,
				networkingv1.LabelManagedBy:       "ipallocator.k8s.io",
			},
		},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
			Resource: "services", Namespace: svc.Namespace, Name: svc.Name,
		}},
	}
}
