package compile

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/lb/capture"
	"portal/internal/lb/spec"
)

// filters are who may use the Service's addresses; captured: its TCP ports are led to the balancing process. Where the proxy enforces spec.loadBalancerSourceRanges itself and nothing else is asked for, it does so
// alone.
func (s *served) filters(captured bool) {
	b := s.b
	groups := len(b.SecurityGroups)+len(b.ExtraSecurityGroups) > 0
	if len(b.SourceRanges) == 0 && !groups {
		return
	}
	allowed, everybody := s.allowed()
	for _, l := range b.Listeners {
		l4 := !captured || protocolNumber(l.Protocol) != protocolNumber(corev1.ProtocolTCP)
		if l4 && b.RangesFrom == "" && len(b.SourceRanges) > 0 {
			if len(b.ExtraSecurityGroups) > 0 && !everybody {
				s.problem(s.svc, spec.IgnoredAnnotation, "port %d is passed on as packets: whom a security group allows must be in spec.loadBalancerSourceRanges as well", l.Port)
			}
			if !groups {
				continue
			}
		}
		if everybody {
			continue
		}
		for _, a := range s.addresses {
			if of := func(p netip.Prefix) bool { return p.Addr().Is6() == a.Is6() }; !groups && !slices.ContainsFunc(allowed, of) {
				continue // ranges of one family say nothing about the other, as in the proxy
			}
			s.out.Capture.Filters = append(s.out.Capture.Filters, capture.Filter{Address: a, Protocol: protocolNumber(l.Protocol), Port: l.Port, Allowed: allowed})
		}
	}
}

// allowed are the prefixes that may use the Service: those of its security groups or of its source ranges, and those of extra groups.
func (s *served) allowed() (out []netip.Prefix, everybody bool) {
	b := s.b
	if len(b.SecurityGroups) > 0 {
		out = s.groups(b.SecurityGroups)
	} else {
		out = append(out, b.SourceRanges...)
		everybody = len(b.SourceRanges) == 0
	}
	return append(out, s.groups(b.ExtraSecurityGroups)...), everybody
}

func (s *served) groups(names []string) (out []netip.Prefix) {
	for _, name := range names {
		text, found := s.Groups[name]
		if !found {
			s.problem(s.svc, SecurityGroupNotFound, "the ConfigMap %s has no security group %s: it allows nobody", GroupsName, name)
			continue
		}
		list, err := ParseGroup(text)
		if err != "" {
			s.problem(s.svc, SecurityGroupNotFound, "the security group %s of the ConfigMap %s can't be used: %s; it allows nobody", name, GroupsName, err)
			continue
		}
		out = append(out, list...)
	}
	return out
}

// GroupsName and CertificatesName are ConfigMaps in kube-system, as they are named to users.
const (
	GroupsName       = "kube-system/portal-lb-security-groups"
	CertificatesName = "kube-system/portal-lb-certificates"
)

// ParseGroup reads a security group: prefixes and addresses, with commas or white space between them. problem is empty, or what is wrong.
func ParseGroup(text string) (out []netip.Prefix, problem string) {
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' || r == '\r' }) {
		if a, err := netip.ParseAddr(word); err == nil && a.Zone() == "" {
			out = append(out, netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(word)
		if err != nil {
			return nil, "\"" + word + "\" is no prefix like 192.0.2.0/24"
		}
		out = append(out, p.Masked())
	}
	return out, ""
}

// nodePorts are the node's firewall rules for a network load balancer.
func (s *served) nodePorts() {
	if !s.b.NLB {
		return
	}
	n := capture.NodePorts{Name: BalancerName(s.svc), HealthPort: s.b.HealthCheckNodePort, Balancers: s.Balancers, Clients: s.b.SourceRanges}
	for _, l := range s.b.Listeners {
		if l.NodePort != 0 {
			n.Ports = append(n.Ports, capture.NodePort{Protocol: protocolNumber(l.Protocol), Port: l.NodePort})
		}
	}
	if len(n.Ports) > 0 {
		s.out.Capture.NLB = append(s.out.Capture.NLB, n)
	}
}
