package intent

import (
	"net/netip"
	"time"
)

// Key names a namespaced object.
type Key struct{ Namespace, Name string }

func (k Key) String() string { return k.Namespace + "/" + k.Name }

// Family is an IP family. The zero value means none: a slice of domain names.
type Family uint8

const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	switch {
	case a.Is4(), a.Is4In6():
		return IPv4
	case a.Is6():
		return IPv6
	}
	return 0
}

// Protocol is a transport protocol by its IP protocol number.
type Protocol uint8

const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return ""
}

// ServiceType is how a Service is published.
type ServiceType uint8

const (
	ClusterIP ServiceType = iota
	NodePort
	LoadBalancer
	ExternalName
)

func (t ServiceType) String() string {
	return [...]string{"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"}[t]
}

// Distribution is a Service's preference among its endpoints.
type Distribution uint8

const (
	DistributeAnywhere Distribution = iota
	PreferSameZone
	PreferSameNode
)

// Ingress is one address on which a load balancer announced a Service.
type Ingress struct {
	Addr     netip.Addr // invalid for a balancer known by name
	Hostname string
	// Proxied: the balancer ends the connection itself (ipMode Proxy), so the node must not short-cut to the Service.
	Proxied bool
}

// Port is a port of a Service.
type Port struct {
	Name     string
	Protocol Protocol
	Port     uint16
	NodePort uint16
	// Target is the port on the endpoints as the Service states it, a number or a name: for people; slices rule.
	Target      string
	AppProtocol string
}

// Service is a Service as the node side sees it.
type Service struct {
	Key
	UID  string
	Type ServiceType

	Headless   bool         // spec.clusterIP is None
	ClusterIPs []netip.Addr // primary first; empty when headless or ExternalName
	Families   []Family
	Ports      []Port

	ExternalName string
	ExternalIPs  []netip.Addr
	Ingress      []Ingress
	SourceRanges []netip.Prefix

	InternalLocal       bool // internalTrafficPolicy: Local
	ExternalLocal       bool // externalTrafficPolicy: Local
	HealthCheckNodePort uint16
	// Affinity is how long a client stays with its endpoint; zero: no affinity.
	Affinity        time.Duration
	Distribution    Distribution
	PublishNotReady bool
	HasSelector     bool

	// ProxyName is the label service.kubernetes.io/service-proxy-name: another proxy looks after this Service.
	ProxyName string
	// HeadlessLabel: the label service.kubernetes.io/headless is there.
	HeadlessLabel bool
	// TopologyMode is the annotation service.kubernetes.io/topology-mode (or its older name).
	TopologyMode string

	Created time.Time
}

// Condition is a set of an endpoint's conditions.
type Condition uint8

const (
	Ready Condition = 1 << iota
	Serving
	Terminating
	// Secondary marks a further address of an endpoint that has several: a proxy leaves it out, DNS shows it.
	Secondary
)

// Endpoint is one address behind a Service.
type Endpoint struct {
	Addr     netip.Addr // invalid in a slice of domain names
	Hostname string
	NodeName string
	Zone     string
	// Hints are nil where there are none.
	Hints *Hints
	// Pod names the Pod behind it, where there is one, in the slice's namespace.
	Pod       string
	Condition Condition
}

// Is says whether all of the conditions hold.
func (e *Endpoint) Is(c Condition) bool { return e.Condition&c == c }

// Hints say for whom an endpoint is meant.
type Hints struct{ ForZones, ForNodes []string }

// EndpointPort is a port of all endpoints of a slice.
type EndpointPort struct {
	Name     string
	Protocol Protocol
	Port     uint16 // 0: every port
	// AppProtocol is carried for people.
	AppProtocol string
}

// Slice is an EndpointSlice.
type Slice struct {
	Key
	Service   string // the Service's name, in the same namespace; empty: belongs to none
	Family    Family // 0: Names instead of addresses
	Ports     []EndpointPort
	Endpoints []Endpoint
	// Names are domain names, parallel to Endpoints, in a slice of Family 0.
	Names []string
	// TriggerTime is when the change that led to this state happened, for latency figures; zero where unknown.
	TriggerTime time.Time
	ManagedBy   string
}

// Entry is all that is known about one Service name: the Service, nil while only slices are there, and its slices in
// the order of their names.
type Entry struct {
	Service *Service
	Slices  []*Slice
	// Version is that of the Service's last change, and Versions are those of the slices': each is greater than any before it,
	// so that a reader who remembers the greatest it has seen can tell what is new.
	Version  uint64
	Versions []uint64
}

// Newest is the greatest version of what is there.
func (e *Entry) Newest() uint64 {
	newest := e.Version
	for _, v := range e.Versions {
		newest = max(newest, v)
	}
	return newest
}

// Taint is a node's taint.
type Taint struct{ Key, Value, Effect string }

// NodeAddress is an address of a node, of a type such as InternalIP.
type NodeAddress struct {
	Type string
	Addr netip.Addr
}

// Node is a machine of the cluster.
type Node struct {
	Name      string
	UID       string
	Labels    map[string]string
	Addresses []NodeAddress
	PodCIDRs  []netip.Prefix
	Taints    []Taint
	// Deleting: the node is on its way out.
	Deleting bool
}

// ServiceCIDR is a range that Services' addresses are taken from.
type ServiceCIDR struct {
	Name     string
	Prefixes []netip.Prefix
}

// Pod is a Pod, as far as names need it.
type Pod struct {
	Key
	Addrs []netip.Addr
}

// Namespace is a namespace, by name; labels as far as a selector may ask for them.
type Namespace struct {
	Name   string
	Labels map[string]string
}
