package audit

import (
	"net/netip"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"

	"portal/internal/alloc"
	"portal/internal/apiserver/registry/service"
	"portal/internal/store"
)

// Where Services and ranges are kept; claims are where the service registry says.
const (
	servicePrefix = store.Prefix + "/services/specs/"
	addressPrefix = store.Prefix + service.AddressPrefix
	portPrefix    = store.Prefix + service.PortPrefix
	rangePrefix   = store.Prefix + "/servicecidrs/"
)

// Snapshot is what etcd held at one revision, as far as claims are concerned.
type Snapshot struct {
	Revision int64
	Services []Service
	Claims   []Claim
	// Ranges are those of all ServiceCIDRs, ready or not: an address in one that is going away is in its place.
	Ranges []netip.Prefix
	// LostRanges are ServiceCIDRs that can't be read.
	LostRanges []Unreadable
	// NodePorts is the range of node ports.
	NodePorts utilnet.PortRange
}

// Service is a stored Service, or what stands in the place of one.
type Service struct {
	Key string
	// Created and Modified are revisions.
	Created, Modified int64
	Owner             service.Owner
	Held              service.Held
	// Invalid are cluster IPs that are no addresses.
	Invalid []string
	// Flaw says why the Service can't be read. What it holds is not known then.
	Flaw string
}

// Claim is a stored claim on an address or a port, or what stands in the place of one.
type Claim struct {
	// On is what is claimed; the zero Claim if the key doesn't say.
	On       alloc.Claim
	Key      string
	Modified int64
	// Owner is the Service that the claim names, if Parent is empty. Claims on addresses name no UID.
	Owner service.Owner
	// Parent is what an IPAddress was made for that is no Service, as people write it.
	Parent string
	// Managed claims were written by an API server, and not by a user who reserves an address.
	Managed bool
	// Labelled claims have all labels that their kind and address ask for.
	Labelled bool
	// Flaw says why the claim can't be read.
	Flaw string
	// UID is that of the IPAddress.
	UID types.UID
}

// Unreadable is something stored that is not what should be there.
type Unreadable struct{ Key, Flaw string }

// isPort tells claims on ports from those on addresses, readable or not.
func (c *Claim) isPort() bool { return strings.HasPrefix(c.Key, portPrefix) }

// names says that the claim names a Service. An IPAddress has no room for the UID; a port's claim must have it right.
func (c *Claim) names(svc *Service) bool {
	if c.Parent != "" || c.Flaw != "" || nameOf(c.Owner) != nameOf(svc.Owner) {
		return false
	}
	return !c.isPort() || c.Owner.UID == svc.Owner.UID
}

func nameOf(o service.Owner) types.NamespacedName {
	return types.NamespacedName{Namespace: o.Namespace, Name: o.Name}
}

// keyOf is where a claim is kept.
func keyOf(on alloc.Claim) string {
	if on.Addr.IsValid() {
		return addressPrefix + on.Addr.String()
	}
	return portPrefix + strconv.Itoa(int(on.Port))
}

// textOf is a claim as people write it.
func textOf(on alloc.Claim) string {
	if on.Addr.IsValid() {
		return on.Addr.String()
	}
	return "port " + strconv.Itoa(int(on.Port))
}
