package spec

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

const (
	beta = "service.beta.kubernetes.io/"
	aws  = beta + "aws-load-balancer-"
)

// reader gathers what a Service's annotations say.
type reader struct {
	svc      *corev1.Service
	out      *Balancer
	problems []Problem

	backend  Protocol // of aws-load-balancer-backend-protocol
	sslPorts string
	// A time-out may be given without draining being turned on.
	drainingOn      bool
	drainingTimeout time.Duration
}

// annotation is one that is known: how its value is read.
type annotation func(r *reader, key, value string)

// Read finds out what a Service asks of its balancer. What is wrong with an annotation is a problem, and the annotation has no effect.
func Read(svc *corev1.Service) (*Balancer, []Problem) {
	r := &reader{svc: svc, out: &Balancer{
		AccessLog:   AccessLog{Interval: time.Hour, Format: "elb"},
		HealthCheck: HealthCheck{Healthy: 2, Unhealthy: 6, Interval: 10 * time.Second, Timeout: 5 * time.Second},
	}}
	r.readSpec()
	for _, key := range slices.Sorted(maps.Keys(svc.Annotations)) {
		value := svc.Annotations[key]
		read := annotations[key]
		if read == nil {
			read = own[key]
		}
		if read != nil {
			read(r, key, value)
			continue
		}
		if looksLikeBalancer(key) {
			r.out.Unknown = append(r.out.Unknown, key)
		}
	}
	if len(r.out.Unknown) > 0 {
		r.problem(UnknownAnnotation, "not known and without effect: %s", strings.Join(r.out.Unknown, ", "))
	}
	r.combine()
	return r.out, r.problems
}

func (r *reader) problem(reason, format string, args ...any) {
	r.problems = append(r.problems, Problem{reason, fmt.Sprintf(format, args...)})
}

// invalid reports a value that is not allowed.
func (r *reader) invalid(key, value, allowed string) {
	r.problem(InvalidAnnotation, "%s: %q is not allowed: it must be %s", key, value, allowed)
}

// looksLikeBalancer: the key is in the way of a provider's annotations for balancers, so its author expects an effect.
func looksLikeBalancer(key string) bool {
	_, name, found := strings.Cut(key, "/")
	if !found {
		return false
	}
	return strings.Contains(name, "load-balancer") || strings.Contains(name, "loadbalancer")
}

func (r *reader) readSpec() {
	s := &r.svc.Spec
	r.out.Families = slices.Clone(s.IPFamilies)
	r.out.RequireAll = s.IPFamilyPolicy != nil && *s.IPFamilyPolicy == corev1.IPFamilyPolicyRequireDualStack
	r.out.Local = s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	r.out.HealthCheckNodePort = uint16(s.HealthCheckNodePort)
	if r.out.AffinityTimeout = 3 * time.Hour; s.SessionAffinity == corev1.ServiceAffinityClientIP {
		r.out.Sticky = true
		if c := s.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			r.out.AffinityTimeout = time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
		}
	}
	if s.LoadBalancerIP != "" {
		a, err := netip.ParseAddr(s.LoadBalancerIP)
		if err != nil {
			r.problem(InvalidSpec, "spec.loadBalancerIP: %q is not an IP address", s.LoadBalancerIP)
		} else {
			r.out.Addresses, r.out.AddressesFrom = []netip.Addr{a.Unmap()}, "spec.loadBalancerIP"
		}
	}
	for i, text := range s.LoadBalancerSourceRanges {
		p, err := netip.ParsePrefix(strings.TrimSpace(text))
		if err != nil {
			r.problem(InvalidSpec, "spec.loadBalancerSourceRanges[%d]: %q is not a prefix like 10.0.0.0/8", i, text)
			continue
		}
		r.out.SourceRanges = append(r.out.SourceRanges, p.Masked())
	}
	for _, p := range s.Ports {
		l := Listener{Name: p.Name, Protocol: p.Protocol, Port: uint16(p.Port), NodePort: uint16(p.NodePort)}
		if p.AppProtocol != nil {
			l.AppProtocol = *p.AppProtocol
		}
		r.out.Listeners = append(r.out.Listeners, l)
	}
}

// combine settles what depends on several annotations, in whatever order they were read.
func (r *reader) combine() {
	b := r.out
	if r.drainingOn {
		b.Draining, b.DrainingSet = r.drainingTimeout, true
		if b.Draining == 0 {
			b.Draining = 300 * time.Second // what a classic balancer has if no time is given
		}
	} else if r.drainingTimeout > 0 {
		r.problem(IgnoredAnnotation, "%sconnection-draining-timeout has no effect without %sconnection-draining-enabled: \"true\"", aws, aws)
	}
	if b.HealthCheck.Timeout >= b.HealthCheck.Interval {
		r.problem(InvalidAnnotation, "%shealthcheck-timeout: %d is not allowed: it must be less than the interval, %d; the defaults 5 and 10 are used",
			aws, int(b.HealthCheck.Timeout.Seconds()), int(b.HealthCheck.Interval.Seconds()))
		b.HealthCheck.Timeout, b.HealthCheck.Interval = 5*time.Second, 10*time.Second
	}
	if version, found := r.svc.Annotations[ProxyProtocolVersionAnnotation]; found && b.ProxyProtocol > 0 && version == "2" {
		b.ProxyProtocol = 2
	} else if found && b.ProxyProtocol == 0 {
		r.problem(IgnoredAnnotation, "%s has no effect without %sproxy-protocol: \"*\"", ProxyProtocolVersionAnnotation, aws)
	}
	if b.AccessLog.Enabled && b.AccessLog.Bucket == "" {
		r.problem(IgnoredAnnotation, "%saccess-log-enabled has no effect without %saccess-log-s3-bucket-name", aws, aws)
		b.AccessLog.Enabled = false
	}
	if r.sslPorts != "" && b.Certificate == "" {
		r.problem(IgnoredAnnotation, "%sssl-ports has no effect without %sssl-cert", aws, aws)
	}
	if b.NegotiationPolicy != "" && b.Certificate == "" {
		r.problem(IgnoredAnnotation, "%sssl-negotiation-policy has no effect without %sssl-cert", aws, aws)
	}
	r.targetGroup()
	r.policy()
	r.listeners()
	r.needHTTP()
	r.needTCP()
}

// policy settles what policy, hash and weights mean together.
func (r *reader) policy() {
	p := &r.out.Policy
	hashing := p.Kind == "consistent-hash" || p.Kind == "shard"
	switch {
	case p.Hash != "" && p.Kind == "":
		p.Kind = "consistent-hash"
	case p.Hash != "" && !hashing:
		r.problem(IgnoredAnnotation, "%s has no effect with %s: %q; it is for consistent-hash and shard", HashAnnotation, PolicyAnnotation, p.Kind)
		p.Hash, p.Name = "", ""
	case hashing && p.Hash == "":
		p.Hash = "client"
	}
	if len(p.Weights) > 0 && (p.Kind == "leader" || p.Kind == "shard") {
		r.problem(IgnoredAnnotation, "%s has no effect with %s: %q", WeightsAnnotation, PolicyAnnotation, p.Kind)
		p.Weights = nil
	}
}

// needHTTP: header fields and cookies are only seen where requests are read.
func (r *reader) needHTTP() {
	p := &r.out.Policy
	if p.Hash != "header" && p.Hash != "cookie" {
		return
	}
	for _, l := range r.out.Listeners {
		if l.Client == HTTP || l.Client == HTTPS {
			return
		}
	}
	r.problem(IgnoredAnnotation, "%s: %s:%s has no effect, because no port of the Service is read as HTTP (see %sbackend-protocol and appProtocol); the client's address is used instead", HashAnnotation, p.Hash, p.Name, aws)
	p.Hash, p.Name = "client", ""
}

// needTCP: other ports are passed on as packets, so what takes a balancer that ends connections has no effect on a Service that has nothing else.
// Of TLS, HTTP and the PROXY protocol each port says so itself.
func (r *reader) needTCP() {
	for _, l := range r.out.Listeners {
		if l.Client != UDP && l.Client != SCTP {
			return
		}
	}
	b := *r.out
	b.ProxyProtocol, b.SecurityGroups, b.ExtraSecurityGroups = 0, nil, nil // groups hold for packets, too
	if why := b.Proxying(); len(why) > 0 && len(r.out.Listeners) > 0 {
		r.problem(IgnoredAnnotation, "the Service has no TCP port, and others are passed on as packets: annotations that ask for %s have no effect", strings.Join(why, ", "))
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// listeners is the matrix of certificate and protocol. A port with a certificate speaks TLS to clients; http and https are read,
// ssl and tcp passed on; https and ssl speak TLS to endpoints.
func (r *reader) listeners() {
	b := r.out
	encrypted := r.encryptedPorts()
	for i := range b.Listeners {
		l := &b.Listeners[i]
		switch l.Protocol {
		case corev1.ProtocolUDP, corev1.ProtocolSCTP:
			l.Client, l.Endpoint = UDP, UDP
			if l.Protocol == corev1.ProtocolSCTP {
				l.Client, l.Endpoint = SCTP, SCTP
			}
			if encrypted[l.Port] || r.backend != "" && r.backend != TCP || b.ProxyProtocol > 0 {
				r.problem(IgnoredAnnotation, "port %d is %s: annotations that ask for TLS, HTTP or the PROXY protocol have no effect on it", l.Port, l.Protocol)
			}
			continue
		}
		if l.Endpoint = r.backend; l.Endpoint == "" {
			l.Endpoint = r.hinted(l.AppProtocol, encrypted[l.Port])
		}
		read := l.Endpoint == HTTP || l.Endpoint == HTTPS
		switch {
		case read && encrypted[l.Port]:
			l.Client = HTTPS
		case read:
			l.Client = HTTP
		case encrypted[l.Port]:
			l.Client = SSL
		default:
			l.Client = TCP
		}
		if b.NLB && l.Client != SSL && l.Client != TCP {
			r.problem(IgnoredAnnotation, "%sbackend-protocol: %q has no effect on port %d: a network load balancer (%stype: nlb) reads no HTTP", aws, r.backend, l.Port, aws)
			l.Client, l.Endpoint = TCP, TCP
			if encrypted[l.Port] {
				l.Client = SSL
			}
		}
	}
}

// hinted is what endpoints speak if no annotation says so. A hint alone makes no balancer read requests: only where one is at work anyway, for a
// certificate or a policy that looks at requests, does it do so.
func (r *reader) hinted(appProtocol string, encrypted bool) Protocol {
	p := r.out.Policy
	if !encrypted && p.Kind == "" || r.out.NLB {
		return TCP
	}
	switch strings.ToLower(appProtocol) {
	case "http", "grpc", "kubernetes.io/h2c", "kubernetes.io/ws":
		return HTTP
	case "https", "kubernetes.io/wss":
		if encrypted {
			return HTTPS
		}
	}
	return TCP
}

// encryptedPorts are the TCP ports that TLS ends at.
func (r *reader) encryptedPorts() map[uint16]bool {
	out := map[uint16]bool{}
	if r.out.Certificate == "" {
		return out
	}
	all := r.sslPorts == "" || strings.TrimSpace(r.sslPorts) == "*"
	for _, l := range r.out.Listeners {
		if all && l.Protocol != corev1.ProtocolUDP && l.Protocol != corev1.ProtocolSCTP {
			out[l.Port] = true
		}
	}
	if all {
		return out
	}
	for _, text := range strings.Split(r.sslPorts, ",") {
		text = strings.TrimSpace(text)
		i := slices.IndexFunc(r.out.Listeners, func(l Listener) bool {
			return l.Name != "" && l.Name == text || strconv.Itoa(int(l.Port)) == text
		})
		if i < 0 {
			r.problem(InvalidAnnotation, "%sssl-ports: %q is not allowed: it must be *, or the number or name of a port of the Service", aws, text)
			continue
		}
		out[r.out.Listeners[i].Port] = true
	}
	return out
}
