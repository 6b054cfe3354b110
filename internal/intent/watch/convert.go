package watch

import (
	"math"
	"net/netip"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"portal/internal/intent"
)

// Service strips a Service to intent.
func Service(s *corev1.Service) *intent.Service {
	spec := &s.Spec
	out := &intent.Service{
		Key:                 intent.Key{Namespace: intern(s.Namespace), Name: s.Name},
		UID:                 string(s.UID),
		Type:                serviceType(spec.Type),
		Headless:            spec.ClusterIP == corev1.ClusterIPNone,
		ExternalName:        spec.ExternalName,
		ExternalIPs:         addrs(spec.ExternalIPs),
		SourceRanges:        prefixes(spec.LoadBalancerSourceRanges),
		InternalLocal:       spec.InternalTrafficPolicy != nil && *spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal,
		ExternalLocal:       spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		HealthCheckNodePort: portOrNone(spec.HealthCheckNodePort),
		PublishNotReady:     spec.PublishNotReadyAddresses,
		HasSelector:         len(spec.Selector) > 0,
		ProxyName:           s.Labels["service.kubernetes.io/service-proxy-name"],
		TopologyMode:        topologyMode(s.Annotations),
		Created:             s.CreationTimestamp.Time,
	}
	_, out.HeadlessLabel = s.Labels[corev1.IsHeadlessService]
	ips := spec.ClusterIPs
	if len(ips) == 0 && spec.ClusterIP != "" {
		ips = []string{spec.ClusterIP}
	}
	out.ClusterIPs = addrs(ips)
	for _, f := range spec.IPFamilies {
		out.Families = append(out.Families, family(string(f)))
	}
	if spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		out.Affinity = time.Duration(corev1.DefaultClientIPServiceAffinitySeconds) * time.Second
		if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			out.Affinity = time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
		}
	}
	if d := spec.TrafficDistribution; d != nil {
		switch *d {
		case corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone:
			out.Distribution = intent.PreferSameZone
		case corev1.ServiceTrafficDistributionPreferSameNode:
			out.Distribution = intent.PreferSameNode
		}
	}
	out.Ports = servicePorts(spec.Ports)
	out.Ingress = ingress(s.Status.LoadBalancer.Ingress)
	return out
}

func servicePorts(ports []corev1.ServicePort) []intent.Port {
	var out []intent.Port
	for i := range ports {
		p := &ports[i]
		if portOrNone(p.Port) == 0 {
			continue
		}
		port := intent.Port{
			Name: intern(p.Name), Protocol: protocol(p.Protocol), Port: uint16(p.Port), NodePort: portOrNone(p.NodePort),
			Target: intern(p.TargetPort.String()),
		}
		if p.AppProtocol != nil {
			port.AppProtocol = intern(*p.AppProtocol)
		}
		out = append(out, port)
	}
	return out
}

func ingress(list []corev1.LoadBalancerIngress) []intent.Ingress {
	var out []intent.Ingress
	for _, i := range list {
		a, _ := netip.ParseAddr(i.IP)
		out = append(out, intent.Ingress{
			Addr: a, Hostname: i.Hostname,
			Proxied: i.IPMode != nil && *i.IPMode == corev1.LoadBalancerIPModeProxy,
		})
	}
	return out
}

func topologyMode(annotations map[string]string) string {
	if v, ok := annotations[corev1.DeprecatedAnnotationTopologyAwareHints]; ok {
		return v
	}
	return annotations[corev1.AnnotationTopologyMode]
}

// Slice strips an EndpointSlice to intent.
func Slice(s *discoveryv1.EndpointSlice) *intent.Slice {
	out := &intent.Slice{
		Key:       intent.Key{Namespace: intern(s.Namespace), Name: s.Name},
		Service:   beginning(s.Name, s.Labels[discoveryv1.LabelServiceName]),
		Family:    family(string(s.AddressType)),
		ManagedBy: intern(s.Labels[discoveryv1.LabelManagedBy]),
	}
	if t, err := time.Parse(time.RFC3339Nano, s.Annotations[corev1.EndpointsLastChangeTriggerTime]); err == nil {
		out.TriggerTime = t
	}
	for i := range s.Ports {
		p := &s.Ports[i]
		port := intent.EndpointPort{Protocol: intent.TCP}
		if p.Name != nil {
			port.Name = intern(*p.Name)
		}
		if p.Protocol != nil {
			port.Protocol = protocol(*p.Protocol)
		}
		if p.Port != nil {
			if port.Port = portOrNone(*p.Port); port.Port == 0 {
				continue // none means every port, which this is not
			}
		}
		if p.AppProtocol != nil {
			port.AppProtocol = intern(*p.AppProtocol)
		}
		out.Ports = append(out.Ports, port)
	}
	out.Endpoints = make([]intent.Endpoint, 0, len(s.Endpoints))
	for i := range s.Endpoints {
		addEndpoint(out, &s.Endpoints[i])
	}
	return out
}

func addEndpoint(out *intent.Slice, e *discoveryv1.Endpoint) {
	end := intent.Endpoint{
		Hostname: value(e.Hostname), NodeName: intern(value(e.NodeName)), Zone: intern(value(e.Zone)),
		Condition: conditions(&e.Conditions),
	}
	if e.TargetRef != nil && e.TargetRef.Kind == "Pod" {
		end.Pod = e.TargetRef.Name
	}
	if h := e.Hints; h != nil && len(h.ForZones)+len(h.ForNodes) > 0 {
		end.Hints = &intent.Hints{}
		for _, z := range h.ForZones {
			end.Hints.ForZones = append(end.Hints.ForZones, intern(z.Name))
		}
		for _, n := range h.ForNodes {
			end.Hints.ForNodes = append(end.Hints.ForNodes, intern(n.Name))
		}
	}
	for i, address := range e.Addresses {
		one := end
		if i > 0 {
			one.Condition |= intent.Secondary
		}
		if out.Family == 0 {
			out.Names = append(out.Names, address)
		} else if a, err := netip.ParseAddr(address); err == nil {
			one.Addr = a
		} else {
			continue
		}
		out.Endpoints = append(out.Endpoints, one)
	}
}

// conditions follows kube-proxy's rule for what is left out: an unknown ready is ready, an unknown serving serves.
func conditions(c *discoveryv1.EndpointConditions) (out intent.Condition) {
	if c.Ready == nil || *c.Ready {
		out |= intent.Ready
	}
	if c.Serving == nil || *c.Serving {
		out |= intent.Serving
	}
	if c.Terminating != nil && *c.Terminating {
		out |= intent.Terminating
	}
	return out
}

// Node strips a node to intent.
func Node(n *corev1.Node) *intent.Node {
	out := &intent.Node{Name: n.Name, UID: string(n.UID), Labels: n.Labels, Deleting: n.DeletionTimestamp != nil}
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil {
			out.Addresses = append(out.Addresses, intent.NodeAddress{Type: string(a.Type), Addr: addr})
		}
	}
	cidrs := n.Spec.PodCIDRs
	if len(cidrs) == 0 && n.Spec.PodCIDR != "" {
		cidrs = []string{n.Spec.PodCIDR}
	}
	out.PodCIDRs = prefixes(cidrs)
	for _, t := range n.Spec.Taints {
		out.Taints = append(out.Taints, intent.Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
	}
	return out
}

// Pod strips a Pod to intent: nil for one whose addresses are not its own to be named by, because it uses the node's or
// has ended.
func Pod(p *corev1.Pod) *intent.Pod {
	if p.Spec.HostNetwork || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return nil
	}
	out := &intent.Pod{Key: intent.Key{Namespace: intern(p.Namespace), Name: p.Name}}
	for _, ip := range p.Status.PodIPs {
		out.Addrs = append(out.Addrs, addrs([]string{ip.IP})...)
	}
	if len(out.Addrs) == 0 {
		out.Addrs = addrs([]string{p.Status.PodIP})
	}
	if len(out.Addrs) == 0 {
		return nil
	}
	return out
}

// Namespace strips a namespace to intent.
func Namespace(n *corev1.Namespace) *intent.Namespace {
	return &intent.Namespace{Name: intern(n.Name), Labels: n.Labels}
}

// ServiceCIDR strips a range to intent.
func ServiceCIDR(r *networkingv1.ServiceCIDR) *intent.ServiceCIDR {
	return &intent.ServiceCIDR{Name: r.Name, Prefixes: prefixes(r.Spec.CIDRs)}
}

func serviceType(t corev1.ServiceType) intent.ServiceType {
	switch t {
	case corev1.ServiceTypeNodePort:
		return intent.NodePort
	case corev1.ServiceTypeLoadBalancer:
		return intent.LoadBalancer
	case corev1.ServiceTypeExternalName:
		return intent.ExternalName
	}
	return intent.ClusterIP
}

func protocol(p corev1.Protocol) intent.Protocol {
	switch p {
	case corev1.ProtocolUDP:
		return intent.UDP
	case corev1.ProtocolSCTP:
		return intent.SCTP
	}
	return intent.TCP
}

func family(s string) intent.Family {
	switch s {
	case "IPv4":
		return intent.IPv4
	case "IPv6":
		return intent.IPv6
	}
	return 0
}

// addrs parses what parses: the API has let in nothing else but "None".
func addrs(list []string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		if a, err := netip.ParseAddr(s); err == nil {
			out = append(out, a)
		}
	}
	return out
}

// prefixes parses CIDRs, around which the API allows blanks.
func prefixes(list []string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		if p, err := netip.ParsePrefix(strings.TrimSpace(s)); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// portOrNone returns a port, or 0 for a number that is none: not every API validates what others wrote.
func portOrNone(n int32) uint16 {
	if n < 1 || n > math.MaxUint16 {
		return 0
	}
	return uint16(n)
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// beginning returns s, as a part of whole where that begins with it: slices are mostly named after their Service, and the
// two then share memory.
func beginning(whole, s string) string {
	if strings.HasPrefix(whole, s) {
		return whole[:len(s)]
	}
	return s
}

// intern shares one copy of strings that come by the thousand: namespaces, nodes, zones, port names.
func intern(s string) string {
	if s == "" {
		return ""
	}
	return unique.Make(s).Value()
}
