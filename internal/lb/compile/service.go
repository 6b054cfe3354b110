package compile

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"portal/internal/lb/capture"
	"portal/internal/lb/config"
	"portal/internal/lb/spec"
)

// inClusterIdle is how long a connection to a cluster IP may be idle: programs of a cluster don't expect a balancer between them.
const inClusterIdle = time.Hour

// defaultOutlier takes endpoints out that fail five times in a row.
var defaultOutlier = config.Outlier{Failures: 5, Ejection: 10 * time.Second, MostEjected: 50}

// service compiles one Service, unless the proxy alone serves it.
func (c *compiler) service(svc *corev1.Service) {
	if svc.Spec.Type == corev1.ServiceTypeExternalName || svc.DeletionTimestamp != nil || svc.Namespace+"/"+svc.Name == c.Entry {
		return
	}
	balancer := svc.Spec.Type == corev1.ServiceTypeLoadBalancer && c.Ours(svc)
	if !balancer && !spec.Own(svc) {
		return
	}
	b, problems := spec.Read(svc)
	s := &served{compiler: c, svc: svc, b: b, owner: config.Owner{Kind: "Service", Namespace: svc.Namespace, Name: svc.Name}}
	if balancer {
		s.addresses = published(svc)
		s.filters(len(b.Proxying()) > 0)
		s.nodePorts()
	} else {
		// The controller says what is wrong with those that it gives addresses to.
		for _, p := range problems {
			c.problem(svc, p.Reason, "%s", p.Message)
		}
	}
	if b.OnClusterIPs() {
		s.addresses = append(s.addresses, clusterIPs(svc)...)
	}
	if len(b.Proxying()) == 0 || len(s.addresses) == 0 {
		return
	}
	s.prepare()
	for _, l := range b.Listeners {
		if l.Protocol == corev1.ProtocolTCP || l.Protocol == "" {
			s.listener(l)
		}
	}
}

func published(svc *corev1.Service) (out []netip.Addr) {
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

func clusterIPs(svc *corev1.Service) (out []netip.Addr) {
	for _, text := range svc.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// served is a Service on its way through the compiler.
type served struct {
	*compiler
	svc       *corev1.Service
	b         *spec.Balancer
	owner     config.Owner
	addresses []netip.Addr

	certificate string // its name, empty if it can't be used
	policy      TLSPolicy
	verify      *config.EndpointTLS
	// blind: what endpoints' certificates are to be verified with is missing, so they are not spoken to.
	blind bool
}

// prepare settles what is the same for all listeners.
func (s *served) prepare() {
	encrypted := func(p func(spec.Listener) spec.Protocol) bool {
		return slices.ContainsFunc(s.b.Listeners, func(l spec.Listener) bool { return p(l).Encrypted() })
	}
	if encrypted(func(l spec.Listener) spec.Protocol { return l.Client }) {
		s.certificate = s.findCertificate()
		s.policy = s.findPolicy()
	}
	if encrypted(func(l spec.Listener) spec.Protocol { return l.Endpoint }) {
		s.verify, s.blind = s.endpointCA()
	}
}

// listener makes the listeners of one port, one for each address.
func (s *served) listener(l spec.Listener) {
	for _, a := range s.addresses {
		at := netip.AddrPortFrom(a, l.Port)
		// What is spoken over TLS, or begins with a header that endpoints expect, must not go around the balancer.
		strict := l.Client.Encrypted() || l.Endpoint.Encrypted() || s.b.ProxyProtocol > 0
		s.out.Capture.Ports = append(s.out.Capture.Ports, capture.Port{Address: at, Strict: strict})
		if l.Client.Encrypted() && s.certificate == "" || l.Endpoint.Encrypted() && s.blind {
			continue
		}
		s.out.Config.Listeners = append(s.out.Config.Listeners, s.listenerAt(l, at))
	}
}

func (s *served) listenerAt(l spec.Listener, at netip.AddrPort) config.Listener {
	out := config.Listener{
		Name: fmt.Sprintf("%s/%s/%s", s.svc.Namespace, s.svc.Name, at), Owner: s.owner, Address: at,
		Protocol: config.Protocol(l.Client), TrustedProxies: s.b.TrustedProxies, IdleTimeout: s.b.IdleTimeout, Tags: s.b.Tags,
		Limits: config.Limits{BodyBytes: s.b.BodyBytes}, AccessLog: s.accessLog(),
	}
	if out.IdleTimeout == 0 && s.isClusterIP(at.Addr()) {
		out.IdleTimeout = inClusterIdle
	}
	if l.Client.Encrypted() {
		out.TLS = &config.TLS{Certificates: []string{s.certificate}, MinVersion: s.policy.Min, MaxVersion: s.policy.Max, CipherSuites: s.policy.Suites}
	}
	pool := s.pool(l, at.Addr())
	if out.Protocol.Parsed() {
		out.Routes = []config.Route{{Pool: pool, Owner: s.owner}}
	} else {
		out.Pool = pool
	}
	return out
}

// pool makes the pool of a port for listeners of one family and with the same traffic policy, and returns its name.
func (s *served) pool(l spec.Listener, at netip.Addr) string {
	family, near := "IPv4", everywhere
	if at.Is6() {
		family = "IPv6"
	}
	inside := s.isClusterIP(at)
	switch policy := s.svc.Spec.InternalTrafficPolicy; {
	case inside && policy != nil && *policy == corev1.ServiceInternalTrafficPolicyLocal:
		near = onlyHere
	case !inside && s.b.Local:
		near = hereFirst
	}
	name := fmt.Sprintf("%s/%s/%d/%s", s.svc.Namespace, s.svc.Name, l.Port, family)
	if near == onlyHere {
		name += "/internal"
	} else if near == everywhere && s.b.Local {
		name += "/cluster"
	}
	if s.out.Config.Pools[name] != nil {
		return name
	}
	p := s.poolOf(s.svc, s.b, l.Name, l.Port, at.Is6(), near)
	if p.Protocol = config.Protocol(l.Endpoint); p.Protocol == config.HTTP && speaksH2(l.AppProtocol) {
		p.Protocol = config.H2C
	}
	p.TLS, p.ProxyProtocol = s.verify, s.b.ProxyProtocol
	if !p.Protocol.Encrypted() {
		p.TLS = nil
	}
	p.HealthCheck = s.healthCheck()
	s.out.Config.Pools[name] = p
	return name
}

func (s *served) isClusterIP(a netip.Addr) bool { return slices.Contains(clusterIPs(s.svc), a) }

func speaksH2(appProtocol string) bool {
	switch strings.ToLower(appProtocol) {
	case "kubernetes.io/h2c", "grpc":
		return true
	}
	return false
}

// poolOf is what pools of Services have in common, whether a listener or a route leads to them.
func (c *compiler) poolOf(svc *corev1.Service, b *spec.Balancer, portName string, port uint16, six bool, near locality) *config.Pool {
	p := &config.Pool{
		Owner: config.Owner{Kind: "Service", Namespace: svc.Namespace, Name: svc.Name}, Port: portName,
		Endpoints: c.endpoints(svc, b, portName, six, near),
		Policy:    config.Policy{Kind: config.PolicyKind(b.Policy.Kind), Hash: config.HashOf(b.Policy.Hash), Name: b.Policy.Name},
		// Endpoints of the same zone come first, unless somebody wants all of them.
		PreferZone: b.CrossZone == nil && b.Policy.Kind == "" || b.CrossZone != nil && !*b.CrossZone, SlowStart: b.SlowStart,
		ConnectTimeout: config.DefaultConnectTimeout, Retries: config.DefaultRetries, Outlier: &defaultOutlier,
		EndpointConnections: b.EndpointConnections, EndpointRequests: b.EndpointRequests,
	}
	if p.Port == "" {
		p.Port = strconv.Itoa(int(port))
	}
	if b.Sticky {
		p.Affinity = b.AffinityTimeout
	}
	if b.DrainingSet {
		if p.Draining = b.Draining; p.Draining == 0 {
			p.Draining = -1
		}
	}
	return p
}

func (s *served) healthCheck() *config.HealthCheck {
	h := s.b.HealthCheck
	if !s.b.HealthCheckSet {
		return nil // the API says who is ready
	}
	out := &config.HealthCheck{
		Protocol: config.Protocol(h.Protocol), Path: h.Path, Healthy: h.Healthy, Unhealthy: h.Unhealthy, Interval: h.Interval, Timeout: h.Timeout,
	}
	if out.Protocol == "" {
		out.Protocol = config.TCP
		if h.Path != "" {
			out.Protocol = config.HTTP
		}
	}
	if out.Protocol.Parsed() && out.Path == "" {
		out.Path = "/"
	}
	if n, err := strconv.ParseUint(h.Port, 10, 16); err == nil {
		out.Port = uint16(n)
	}
	return out
}

func (s *served) accessLog() *config.AccessLog {
	a := s.b.AccessLog
	if !a.Enabled {
		return nil
	}
	url := s.Buckets[a.Bucket]
	if url == "" {
		url = "s3://" + a.Bucket
	}
	return &config.AccessLog{URL: url, Prefix: a.Prefix, Interval: a.Interval, Format: a.Format, Balancer: BalancerName(s.svc)}
}

// BalancerName is what a cloud would call the balancer.
func BalancerName(svc *corev1.Service) string {
	name := "a" + strings.ReplaceAll(string(svc.UID), "-", "")
	return name[:min(len(name), 32)]
}

// protocolNumber is that of a port.
func protocolNumber(p corev1.Protocol) byte {
	switch p {
	case corev1.ProtocolUDP:
		return unix.IPPROTO_UDP
	case corev1.ProtocolSCTP:
		return unix.IPPROTO_SCTP
	}
	return unix.IPPROTO_TCP
}
