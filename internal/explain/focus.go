package explain

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/lb/spec"
	"portal/internal/nodereport"
)

// Focus is what nodes are to be asked for a question, beside what they always report.
type Focus struct {
	// Service, NAMESPACE/NAME, is the only one that they report about, and connect to; empty: all, and to none.
	Service string
	nodereport.Attempts
}

// FocusOn decides it, from what the API has.
func FocusOn(e *Evidence, q Question) Focus { return Look(e).focus(q) }

// Starting are Pods of the Service that a question is about which have just become ready and listen nowhere yet: in a moment there is more to say about them.
func (v *View) Starting(q Question) (out []string) {
	namespace, name, _ := strings.Cut(v.focus(q).Service, "/")
	if s := v.Service(namespace, name); s != nil {
		for _, p := range s.Pods {
			if v.starts(p) {
				out = append(out, p.Name)
			}
		}
	}
	return out
}

func (v *View) focus(q Question) (out Focus) {
	switch q.Kind {
	case "service":
		out.about(v, v.Service(q.Namespace, q.Name))
	case "name":
		text, _ := cleanName(q.Name)
		text = strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(text, "."), "."+v.Zone), ".svc")
		parts := strings.Split(text, ".")
		s := v.Service(q.Namespace, parts[len(parts)-1])
		if len(parts) > 1 && v.Service(parts[len(parts)-1], parts[len(parts)-2]) != nil {
			s = v.Service(parts[len(parts)-1], parts[len(parts)-2])
		}
		out.about(v, s)
	case "address":
		addr, port, err := splitAddress(q.Name)
		if err != nil {
			return out
		}
		s, protocol := v.whose(addr, port)
		if s != nil {
			out.about(v, s)
		}
		to := netip.AddrPortFrom(addr, port)
		if port != 0 && protocol == corev1.ProtocolTCP && !slices.Contains(out.Dial, to) {
			out.Dial = append([]netip.AddrPort{to}, out.Dial...)
		}
	}
	return out
}

// whose is the Service at an address, and the protocol of its port there: TCP if there is none.
func (v *View) whose(addr netip.Addr, port uint16) (*Service, corev1.Protocol) {
	protocol := func(s *Service, number func(*corev1.ServicePort) int32) corev1.Protocol {
		for i := range s.Spec.Ports {
			if number(&s.Spec.Ports[i]) == int32(port) {
				return protocolOf(&s.Spec.Ports[i])
			}
		}
		return corev1.ProtocolTCP
	}
	for _, s := range v.order {
		if v.clusterIPs[addr] == s || slices.Contains(s.Spec.ExternalIPs, addr.String()) || slices.Contains(balancerAddresses(s), addr) {
			return s, protocol(s, func(p *corev1.ServicePort) int32 { return p.Port })
		}
	}
	if v.nodeWith(addr) == "" {
		return nil, corev1.ProtocolTCP
	}
	for _, s := range v.order {
		if slices.ContainsFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.NodePort == int32(port) && port != 0 }) {
			return s, protocol(s, func(p *corev1.ServicePort) int32 { return p.NodePort })
		}
	}
	return nil, corev1.ProtocolTCP
}

// nodeWith is the node that has an address, or nothing.
func (v *View) nodeWith(addr netip.Addr) string {
	for name, n := range v.nodes {
		if slices.ContainsFunc(n.Status.Addresses, func(x corev1.NodeAddress) bool { return x.Address == addr.String() }) {
			return name
		}
	}
	return ""
}

func balancerAddresses(s *Service) (out []netip.Addr) {
	for _, in := range s.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(in.IP); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// about has nodes try a Service: its node ports at some nodes and its other addresses, or what it is an alias of.
func (f *Focus) about(v *View, s *Service) {
	if s == nil {
		return
	}
	f.Service = s.Namespace + "/" + s.Name
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		f.Alias, f.As = strings.TrimSuffix(s.Spec.ExternalName, "."), s.Name+"."+s.Namespace
		for i := range s.Spec.Ports {
			if protocolOf(&s.Spec.Ports[i]) == corev1.ProtocolTCP {
				f.Ports = append(f.Ports, uint16(s.Spec.Ports[i].Port))
			}
		}
		if len(f.Ports) == 0 {
			f.Ports = []uint16{80, 443}
		}
		if target := v.aliasTarget(s); target != nil { // no proxy serves an alias
			f.Service = target.Namespace + "/" + target.Name
		}
		return
	}
	var at []netip.Addr
	for _, text := range s.Spec.ExternalIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			at = append(at, a)
		}
	}
	// Where not everybody is let in, nodes need not be.
	if asked, _ := spec.Read(s.Service); len(asked.SourceRanges)+len(asked.SecurityGroups)+len(asked.ExtraSecurityGroups) == 0 {
		at = append(at, balancerAddresses(s)...)
	}
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if protocolOf(p) != corev1.ProtocolTCP {
			continue
		}
		for _, a := range at {
			f.Dial = append(f.Dial, netip.AddrPortFrom(a, uint16(p.Port)))
		}
		if p.NodePort == 0 {
			continue
		}
		for _, a := range v.someNodes() {
			f.Dial = append(f.Dial, netip.AddrPortFrom(a, uint16(p.NodePort)))
		}
	}
}

// aliasTarget is the Service of this cluster that an alias leads to in the end, or nil.
func (v *View) aliasTarget(s *Service) *Service {
	for range 5 {
		k, ok := v.inCluster(strings.TrimSuffix(s.Spec.ExternalName, "."))
		if s = v.services[k]; !ok || s == nil || s.Spec.Type != corev1.ServiceTypeExternalName {
			return s
		}
	}
	return nil
}

// someNodes are the first addresses of a few ready nodes.
func (v *View) someNodes() (out []netip.Addr) {
	const few = 4
	for i := range v.Evidence.Nodes {
		n := &v.Evidence.Nodes[i]
		if !nodeReady(n) || len(out) == few {
			continue
		}
		for _, x := range n.Status.Addresses {
			if a, err := netip.ParseAddr(x.Address); err == nil && x.Type == corev1.NodeInternalIP {
				out = append(out, a)
				break
			}
		}
	}
	return out
}
