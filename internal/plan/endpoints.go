package plan

import (
	"net/netip"
	"slices"

	"portal/internal/intent"
)

// candidate is an endpoint of a port before any policy is applied.
type candidate struct {
	at    netip.AddrPort
	local bool
	of    *intent.Endpoint
}

func (c *candidate) ready() bool { return c.of.Is(intent.Ready) }

// terminating: the Pod is terminating but still serves.
func (c *candidate) terminating() bool { return c.of.Is(intent.Serving | intent.Terminating) }

func (c *candidate) forNode(name string) bool {
	return c.of.Hints != nil && slices.Contains(c.of.Hints.ForNodes, name)
}

func (c *candidate) forZone(zone string) bool {
	return c.of.Hints != nil && slices.Contains(c.of.Hints.ForZones, zone)
}

func ofFamily(all []*intent.Slice, family intent.Family) []*intent.Slice {
	var out []*intent.Slice
	for _, s := range all {
		if s.Family == family {
			out = append(out, s)
		}
	}
	return out
}

// candidates finds the endpoints of a port: the ports of Service and slices belong together by name and protocol. The result
// is in order and has each address and port once.
func candidates(of []*intent.Slice, port *intent.Port, family intent.Family, node string) []candidate {
	var out []candidate
	for _, s := range of {
		for i := range s.Ports {
			sp := &s.Ports[i]
			if sp.Name != port.Name || sp.Protocol != port.Protocol || sp.Port == 0 {
				continue
			}
			for j := range s.Endpoints {
				e := &s.Endpoints[j]
				if !usable(e, family) {
					continue
				}
				out = append(out, candidate{netip.AddrPortFrom(e.Addr.Unmap(), sp.Port), isLocal(e, node), e})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b candidate) int { return a.at.Compare(b.at) })
	return merge(out)
}

// merge makes one of neighbours with the same address. While an endpoint moves between slices it is in two, and a new
// Pod may have the address of one that is terminating: the one that is not terminating counts, the last of several.
func merge(list []candidate) []candidate {
	out := list[:0]
	for _, c := range list {
		switch last := len(out) - 1; {
		case last < 0 || out[last].at != c.at:
			out = append(out, c)
		case !c.of.Is(intent.Terminating):
			out[last] = c
		}
	}
	return out
}

func usable(e *intent.Endpoint, family intent.Family) bool {
	return !e.Is(intent.Secondary) && intent.FamilyOf(e.Addr) == family
}

func isLocal(e *intent.Endpoint, node string) bool { return node != "" && e.NodeName == node }

// localReady counts the addresses of ready endpoints on a node, whatever their ports.
func localReady(of []*intent.Slice, node string) int {
	seen := map[netip.Addr]struct{}{}
	for _, s := range of {
		if !slices.ContainsFunc(s.Ports, func(p intent.EndpointPort) bool { return p.Port != 0 }) {
			continue
		}
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; usable(e, s.Family) && isLocal(e, node) && e.Is(intent.Ready) {
				seen[e.Addr.Unmap()] = struct{}{}
			}
		}
	}
	return len(seen)
}

// choice is what the policies can choose from: a pool is nil where there is nothing.
type choice struct {
	cluster, local *Pool
	// podsKnown: this node can tell Pods' traffic of the family.
	podsKnown bool
	// serving is nil for TCP.
	serving []netip.AddrPort
}

// choose applies readiness, the fallback to terminating endpoints, and topology.
func choose(all []candidate, id PortID, f *Facts) choice {
	here := func(c *candidate) bool { return c.local }
	out := choice{
		cluster: pool(id, all, (*candidate).ready, topology(all, f)),
		local:   pool(id, all, (*candidate).ready, here),

		podsKnown: f.Pods.Known(id.Family),
	}
	if out.cluster == nil {
		out.cluster = pool(id, all, (*candidate).terminating)
	}
	if out.local == nil {
		out.local = pool(id, all, (*candidate).terminating, here)
	}
	if out.cluster != nil && out.local != nil && slices.Equal(out.cluster.Endpoints, out.local.Endpoints) {
		out.local = out.cluster
	}
	if id.Protocol != intent.TCP {
		out.serving = []netip.AddrPort{}
		for i := range all {
			if all[i].of.Is(intent.Serving) {
				out.serving = append(out.serving, all[i].at)
			}
		}
	}
	return out
}

// pool makes a pool of the candidates that pass all filters.
func pool(id PortID, all []candidate, filters ...func(*candidate) bool) *Pool {
	p := &Pool{ID: id, Local: true}
next:
	for i := range all {
		c := &all[i]
		for _, pass := range filters {
			if !pass(c) {
				continue next
			}
		}
		p.Endpoints = append(p.Endpoints, Endpoint{c.at, c.local})
		p.Local = p.Local && c.local
	}
	if len(p.Endpoints) == 0 {
		return nil
	}
	return p
}

// topology is the filter that hints ask for: endpoints for this node, or for its zone. Hints count only when every ready
// endpoint has one of the sort and at least one is meant for us; else a node could be left without endpoints.
func topology(all []candidate, f *Facts) func(*candidate) bool {
	var ready, nodeHints, zoneHints, forNode, forZone int
	for i := range all {
		c := &all[i]
		if !c.ready() {
			continue
		}
		ready++
		if h := c.of.Hints; h != nil {
			nodeHints += min(len(h.ForNodes), 1)
			zoneHints += min(len(h.ForZones), 1)
		}
		if c.forNode(f.Node) {
			forNode++
		}
		if c.forZone(f.Zone) {
			forZone++
		}
	}
	switch {
	case nodeHints == ready && forNode > 0:
		return func(c *candidate) bool { return c.forNode(f.Node) }
	case zoneHints == ready && forZone > 0:
		return func(c *candidate) bool { return c.forZone(f.Zone) }
	}
	return func(*candidate) bool { return true }
}

// any says whether there is an endpoint anywhere in the cluster.
func (c *choice) any() bool { return c.cluster != nil || c.local != nil }

// route leads to a pool. Without one it rejects when no endpoint could answer, and drops when one elsewhere could: with an external policy a
// balancer in front then tries another node, and with internalTrafficPolicy Local it is what kube-proxy does.
func (c *choice) route(p *Pool, masquerade bool) Route {
	switch {
	case p != nil:
		return Route{Forward, masquerade, p}
	case c.any():
		return Route{Verdict: Drop}
	}
	return Route{Verdict: Reject}
}

// internal are the routes to the cluster IP.
func (c *choice) internal(s *intent.Service, f *Facts) (out [Origins]Route) {
	p := c.cluster
	if s.InternalLocal {
		p = c.local
	}
	// A client that is known not to be a Pod may be anywhere: answers to it must come back through this node. Where Pods can't
	// be recognised, nothing is rewritten.
	others := f.MasqueradeAll || c.podsKnown
	out[FromPod] = c.route(p, f.MasqueradeAll)
	out[FromOutside] = c.route(p, others)
	out[FromNode] = out[FromOutside]
	if !f.MasqueradeAll && p.within(f.Temporary) {
		// What never leaves the node finds its way back. A node without a network of its own has no address to rewrite it to, and
		// the kernel would drop it.
		out[FromNode] = c.route(p, false)
	}
	return out
}

// within says whether all endpoints are at some addresses.
func (p *Pool) within(addrs []netip.Addr) bool {
	if p == nil || len(addrs) == 0 {
		return false
	}
	return !slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return !slices.Contains(addrs, e.Addr.Addr()) })
}

// external are the routes to all other addresses.
func (c *choice) external(s *intent.Service) (out [Origins]Route) {
	if !s.ExternalLocal {
		r := c.route(c.cluster, true)
		return [Origins]Route{r, r, r}
	}
	out[FromOutside] = c.route(c.local, false)
	// What is sent from here would go up to the balancer and come back in somewhere: it takes a short cut to all
	// endpoints. The node's own packets may bear the balancer's address as their source, so that is rewritten.
	out[FromNode] = c.route(c.cluster, true)
	out[FromPod] = out[FromOutside]
	if c.podsKnown {
		out[FromPod] = c.route(c.cluster, false)
	}
	return out
}
