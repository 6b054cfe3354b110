// Package spec reads what a Service of type LoadBalancer asks of its balancer: from its annotations, whichever provider they were
// made for, its spec and its ports, to one specification and a list of problems. It is pure: it knows neither pools of addresses nor
// how a balancer works. Nothing else in Portal reads these annotations.
package spec

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Portal's own annotations.
const (
	// PoolAnnotation names the pool to take addresses of.
	PoolAnnotation = "portal.dev/load-balancer-pool"
	// AddressesAnnotation asks for addresses, one of each family; spec.loadBalancerIP holds only one.
	AddressesAnnotation = "portal.dev/load-balancer-ips"
	// ShareAnnotation is the key of an address that several Services share.
	ShareAnnotation = "portal.dev/load-balancer-share"
	// ProxyProtocolVersionAnnotation says which PROXY header endpoints get: "1" or "2".
	ProxyProtocolVersionAnnotation = "portal.dev/proxy-protocol-version"
)

// Reasons of the Events that problems become.
const (
	// InvalidAnnotation: the value is not one of those that are allowed; the annotation has no effect.
	InvalidAnnotation = "InvalidAnnotation"
	// UnknownAnnotation: a key that looks like one for a balancer, and is none that is known.
	UnknownAnnotation = "UnknownAnnotation"
	// IgnoredAnnotation: a valid annotation whose effect makes no sense here, or does not without another one.
	IgnoredAnnotation = "IgnoredAnnotation"
	// InvalidSpec: a field of the Service's spec can't be used.
	InvalidSpec = "InvalidSpec"
)

// Problem is something that is said to the user in an Event. It never keeps a Service from being served.
type Problem struct {
	Reason string
	// Message names the annotation or field, its value and what is allowed.
	Message string
}

// Protocol is what one side of a listener speaks.
type Protocol string

// The protocols of a listener. UDP and SCTP are passed on as packets.
const (
	TCP   Protocol = "tcp"
	SSL   Protocol = "ssl"
	HTTP  Protocol = "http"
	HTTPS Protocol = "https"
	UDP   Protocol = "udp"
	SCTP  Protocol = "sctp"
)

// Encrypted says whether the protocol is spoken over TLS.
func (p Protocol) Encrypted() bool { return p == SSL || p == HTTPS }

// Listener is one port of the Service: what clients speak to the balancer, and the balancer to endpoints.
type Listener struct {
	Name     string
	Protocol corev1.Protocol
	Port     uint16
	NodePort uint16
	// AppProtocol is the port's own hint; annotations come before it.
	AppProtocol      string
	Client, Endpoint Protocol
}

// Proxied says whether the port needs a balancer that ends connections.
func (l Listener) Proxied() bool {
	return l.Client != TCP && l.Client != UDP && l.Client != SCTP || l.Endpoint != l.Client
}

// AccessLog is where and how often access logs are written.
type AccessLog struct {
	Enabled        bool
	Interval       time.Duration
	Bucket, Prefix string
	// Format is elb or json.
	Format string
}

// HealthCheck is how endpoints are probed.
type HealthCheck struct {
	Healthy, Unhealthy int
	Interval, Timeout  time.Duration
	// Protocol is empty if nothing was asked for; Port is "" or "traffic-port" for the port that traffic goes to.
	Protocol, Path, Port string
}

// Balancer is the specification.
type Balancer struct {
	// Internal: an address of an internal pool.
	Internal bool
	// Pool is the name of the pool, empty for any that may be used.
	Pool string
	// PoolFrom is the annotation that named the pool.
	PoolFrom string
	// Addresses are those that were asked for, at most one of each family. AddressesFrom is the field or annotation.
	Addresses     []netip.Addr
	AddressesFrom string
	// Families are the Service's, the primary first; all of them are needed if RequireAll.
	Families   []corev1.IPFamily
	RequireAll bool
	Share      string
	// Local: externalTrafficPolicy is Local.
	Local               bool
	HealthCheckNodePort uint16
	Listeners           []Listener
	// SourceRanges are who may connect; empty: everybody. Groups are named sets of ranges: SecurityGroups instead of these,
	// ExtraSecurityGroups beside them.
	SourceRanges                        []netip.Prefix
	SecurityGroups, ExtraSecurityGroups []string

	// NLB: a network load balancer was asked for.
	NLB                   bool
	TargetGroupAttributes map[string]string

	Certificate       string
	NegotiationPolicy string
	// ProxyProtocol is the version of the PROXY header that endpoints get, 0 for none.
	ProxyProtocol int
	AccessLog     AccessLog
	// Draining is how long connections may stay open when their endpoint goes; DrainingSet if an annotation decided.
	Draining    time.Duration
	DrainingSet bool
	// IdleTimeout ends connections without data either way; 0: not asked for.
	IdleTimeout time.Duration
	// CrossZone is nil if nothing was said.
	CrossZone   *bool
	Tags        map[string]string
	HealthCheck HealthCheck
	// HealthCheckSet: an annotation asked for health checks.
	HealthCheckSet bool

	// Policy is how endpoints are chosen.
	Policy                                Policy
	SlowStart                             time.Duration
	EndpointConnections, EndpointRequests int
	BodyBytes                             int64
	// EndpointCA is a Secret with the CA of endpoints' certificates, EndpointName the name that these are for.
	EndpointCA, EndpointName string
	TrustedProxies           []netip.Prefix
	// Sticky: clients stay at their endpoint, by sessionAffinity or, StickySet, by an attribute alone; AffinityTimeout is for how long.
	Sticky          bool
	StickySet       bool
	AffinityTimeout time.Duration
	// RangesFrom is the annotation that SourceRanges are from, empty if they are the field's, which the proxy enforces.
	RangesFrom string

	// Unknown are keys that look like a load balancer's and are none that is known, sorted.
	Unknown []string
}

// Proxying are the annotations that only a balancer which ends connections can carry out, in words; none: packets are led straight to
// endpoints.
func (b *Balancer) Proxying() (why []string) {
	for _, l := range b.Listeners {
		if l.Proxied() {
			why = append(why, "listeners that speak "+string(l.Client)+" to clients and "+string(l.Endpoint)+" to endpoints")
			break
		}
	}
	add := func(yes bool, what string) {
		if yes {
			why = append(why, what)
		}
	}
	add(b.ProxyProtocol > 0, "the PROXY protocol")
	add(len(b.TrustedProxies) > 0, "PROXY headers of others")
	add(b.AccessLog.Enabled, "access logs")
	add(b.DrainingSet, "connection draining")
	add(b.IdleTimeout > 0, "an idle timeout")
	add(b.CrossZone != nil && !*b.CrossZone, "balancing within zones")
	add(b.HealthCheckSet, "health checks")
	add(b.StickySet, "stickiness")
	// The proxy enforces the field alone, and knows nothing of groups that are allowed beside it. A network load balancer has no groups of its own.
	add(len(b.SourceRanges) > 0 && b.RangesFrom == "" && len(b.SecurityGroups)+len(b.ExtraSecurityGroups) > 0 && !b.NLB, "security groups beside source ranges")
	add(b.Policy.Kind != "" || b.Policy.Hash != "" || len(b.Policy.Weights) > 0, "a policy of balancing")
	add(b.SlowStart > 0 || b.EndpointConnections > 0 || b.EndpointRequests > 0, "limits for endpoints")
	return why
}

// OnClusterIPs says whether connections to the Service's cluster IPs go through the balancer as well.
func (b *Balancer) OnClusterIPs() bool {
	return b.Policy.Kind != "" || b.Policy.Hash != "" || len(b.Policy.Weights) > 0
}
