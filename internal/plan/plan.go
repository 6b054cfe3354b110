package plan

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"portal/internal/intent"
)

// For plans one Service for a node: nil when there is nothing to do for it there.
func For(e *intent.Entry, f *Facts) *Service {
	if e == nil || e.Service == nil {
		return nil
	}
	s := e.Service
	if s.Type == intent.ExternalName || s.Headless || s.ProxyName != f.ProxyName {
		return nil
	}
	p := &planner{service: s, facts: f, out: &Service{Key: s.Key}}
	for _, family := range f.Families {
		if ip, ok := addrOf(s.ClusterIPs, family); ok {
			p.family(family, ip, ofFamily(e.Slices, family))
		}
	}
	if len(p.out.ClusterIPs) == 0 {
		return nil
	}
	p.out.Frontends = unique(p.dropExempt(p.out.Frontends))
	p.checkEverywhere()
	return p.out
}

// checkEverywhere has a Service of one family checked at the node's addresses of the other one too: which of them a balancer asks is its choice.
func (p *planner) checkEverywhere() {
	check := p.out.HealthCheck
	if check == nil || len(p.service.ClusterIPs) != 1 {
		return
	}
	only := check.Endpoints[intent.FamilyOf(p.service.ClusterIPs[0])]
	for _, family := range p.facts.Families {
		check.Endpoints[family] = only
	}
}

// planner collects the plan of one Service.
type planner struct {
	service *intent.Service
	facts   *Facts
	out     *Service
}

// family plans what the Service is in one family. Frontends are of the families that the Service has cluster IPs of:
// an external IP of another family leads nowhere.
func (p *planner) family(family intent.Family, clusterIP netip.Addr, of []*intent.Slice) {
	p.out.ClusterIPs = append(p.out.ClusterIPs, clusterIP)
	where := p.where(family, clusterIP)
	for i := range p.service.Ports {
		p.port(family, &p.service.Ports[i], where, of)
	}
	if port := p.service.HealthCheckNodePort; port != 0 && p.service.ExternalLocal && p.service.Type == intent.LoadBalancer {
		if p.out.HealthCheck == nil {
			p.out.HealthCheck = &HealthCheck{Service: p.service.Key, Port: port, Endpoints: map[intent.Family]int{}}
		}
		p.out.HealthCheck.Endpoints[family] = localReady(of, p.facts.Node)
	}
}

// place is an address of a Service.
type place struct {
	addr    netip.Addr
	kind    Kind
	sources []netip.Prefix
}

// where lists the addresses of the Service in a family, but for node ports.
func (p *planner) where(family intent.Family, clusterIP netip.Addr) []place {
	out := []place{{addr: clusterIP, kind: ClusterIP}}
	var balancers []netip.Addr
	for _, in := range p.service.Ingress {
		// A balancer that ends connections itself must be reached by going to it.
		if intent.FamilyOf(in.Addr) == family && !in.Proxied && p.assignable(in.Addr, "status.loadBalancer.ingress") {
			balancers = append(balancers, in.Addr.Unmap())
		}
	}
	sources := p.sources(family, balancers)
	for _, a := range balancers {
		out = append(out, place{a, LoadBalancerIP, sources})
	}
	for _, a := range p.service.ExternalIPs {
		if intent.FamilyOf(a) == family && p.assignable(a, "spec.externalIPs") {
			out = append(out, place{addr: a.Unmap(), kind: ExternalIP})
		}
	}
	return out
}

// assignable says whether an address can be a Service's. Packets to the others mean something else on every machine.
func (p *planner) assignable(a netip.Addr, field string) bool {
	a = a.Unmap()
	why := ""
	switch {
	case a.IsUnspecified():
		why = "unspecified"
	case a.IsLoopback():
		why = "a loopback address"
	case a.IsMulticast():
		why = "a multicast address"
	case a.IsLinkLocalUnicast():
		why = "a link-local address"
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		why = "the broadcast address"
	default:
		return true
	}
	p.out.Notes = append(p.out.Notes, fmt.Sprintf("%s: %s is %s and not served", field, a, why))
	return false
}

// dropExempt takes out frontends at which the proxy itself reaches the API.
func (p *planner) dropExempt(list []*Frontend) []*Frontend {
	if len(p.facts.Exempt) == 0 {
		return list
	}
	return slices.DeleteFunc(list, func(f *Frontend) bool {
		if f.Kind == ClusterIP || !slices.Contains(p.facts.Exempt, f.FrontendKey) {
			return false
		}
		p.out.Notes = append(p.out.Notes, fmt.Sprintf("%s %s is where this node reaches the API, and not served", f.Kind, f.FrontendKey))
		return true
	})
}

// sources are the prefixes from which the load balancer's addresses may be used; nil: all.
func (p *planner) sources(family intent.Family, balancers []netip.Addr) []netip.Prefix {
	var out []netip.Prefix
	node, hasNode := addrOf(p.facts.Addrs, family)
	nodeToo := false
	for _, r := range p.service.SourceRanges {
		if intent.FamilyOf(r.Addr()) != family {
			continue
		}
		if r.Bits() == 0 {
			return nil
		}
		out = append(out, r)
		nodeToo = nodeToo || hasNode && r.Contains(node)
	}
	if nodeToo {
		// A balancer's address is often put on the node itself, and is then the source of what the node sends to it.
		for _, a := range balancers {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return outermost(out)
}

// outermost sorts prefixes and leaves out those that others contain, so that the rest don't overlap.
func outermost(list []netip.Prefix) []netip.Prefix {
	slices.SortFunc(list, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	out := list[:0]
	for _, p := range list {
		// A prefix sorts behind those that contain it, and two prefixes overlap only if one contains the other.
		if len(out) == 0 || !out[len(out)-1].Contains(p.Addr()) {
			out = append(out, p)
		}
	}
	return out
}

// port plans one port of the Service in one family.
func (p *planner) port(family intent.Family, port *intent.Port, where []place, of []*intent.Slice) {
	id := PortID{p.service.Key, port.Name, port.Protocol, family}
	c := choose(candidates(of, port, family, p.facts.Node), id, p.facts)
	if c.serving != nil {
		p.out.Serving = append(p.out.Serving, Serving{id, c.serving})
	}
	internal := c.internal(p.service, p.facts)
	external := c.external(p.service)
	add := func(at place, number uint16, routes [Origins]Route) {
		p.out.Frontends = append(p.out.Frontends, &Frontend{
			FrontendKey: FrontendKey{at.addr, family, port.Protocol, number}, ID: id, Kind: at.kind,
			Affinity: p.service.Affinity, Sources: at.sources, Routes: routes,
		})
	}
	for _, at := range where {
		if at.kind == ClusterIP {
			add(at, port.Port, internal)
		} else {
			add(at, port.Port, external)
		}
	}
	if port.NodePort != 0 {
		add(place{kind: NodePort}, port.NodePort, external)
	}
	p.lost(family, internal, external, port.NodePort != 0 || len(where) > 1)
}

func (p *planner) lost(family intent.Family, internal, external [Origins]Route, reachable bool) {
	l := p.out.Lost[family]
	if internal[FromOutside].Verdict == Drop {
		l.Internal++
	}
	if reachable && external[FromOutside].Verdict == Drop {
		l.External++
	}
	if l == (Lost{}) {
		return
	}
	if p.out.Lost == nil {
		p.out.Lost = map[intent.Family]Lost{}
	}
	p.out.Lost[family] = l
}

// unique sorts frontends and keeps, of several with one key, the one that comes first in rank: an address may be given
// as external IP and be the balancer's at once.
func unique(list []*Frontend) []*Frontend {
	slices.SortStableFunc(list, func(a, b *Frontend) int {
		return cmp.Or(a.FrontendKey.Compare(b.FrontendKey), cmp.Compare(a.Kind.rank(), b.Kind.rank()))
	})
	return slices.CompactFunc(list, func(a, b *Frontend) bool { return a.FrontendKey == b.FrontendKey })
}

// rank orders the kinds in which an address can be claimed twice. Source ranges hold for a balancer's address, so it may
// not be opened by naming it as external IP too.
func (k Kind) rank() int {
	return [...]int{ClusterIP: 0, LoadBalancerIP: 1, ExternalIP: 2, NodePort: 3}[k]
}

// Compare orders keys by family, address, protocol and port.
func (k FrontendKey) Compare(o FrontendKey) int {
	return cmp.Or(cmp.Compare(k.Family, o.Family), k.Addr.Compare(o.Addr), cmp.Compare(k.Protocol, o.Protocol), cmp.Compare(k.Port, o.Port))
}

func addrOf(list []netip.Addr, family intent.Family) (netip.Addr, bool) {
	for _, a := range list {
		if intent.FamilyOf(a) == family {
			return a.Unmap(), true
		}
	}
	return netip.Addr{}, false
}
