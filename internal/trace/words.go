package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"portal/internal/intent"
	"portal/internal/plan"
)

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func frontendText(f *plan.Frontend, asked netip.AddrPort) string {
	port := ""
	if f.ID.Port != "" {
		port = ", port " + f.ID.Port
	}
	what := map[plan.Kind]string{plan.ClusterIP: "the cluster IP", plan.ExternalIP: "an external IP", plan.LoadBalancerIP: "the load balancer's IP", plan.NodePort: "the node port"}[f.Kind]
	return fmt.Sprintf("%s/%s is %s of Service %s%s", asked, f.Protocol, what, f.ID.Service, port)
}

func originText(o plan.Origin) string {
	return [...]string{
		plan.FromPod: "to this node it comes from a Pod", plan.FromNode: "to this node it comes from the node itself",
		plan.FromOutside: "to this node it comes from outside",
	}[o]
}

func prefixText(list []netip.Prefix) string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return strings.Join(out, ", ")
}

// describe names who has an address.
func (w *World) describe(a netip.AddrPort) string {
	if p := w.podAt[a.Addr()]; p != nil {
		return fmt.Sprintf("%s (Pod %s on node %s)", a, p.Key, p.node)
	}
	if n := w.nodeAt[a.Addr()]; n != nil {
		return fmt.Sprintf("%s (node %s)", a, n.Name)
	}
	return fmt.Sprintf("%s (no Pod or node of the cluster)", a)
}

// policy says why the pool is not simply every endpoint.
func (x *walk) policy(f *plan.Frontend, o plan.Origin) {
	e := x.cluster.Entry(f.ID.Service)
	if e == nil || e.Service == nil {
		return
	}
	route := f.Routes[o]
	external := f.Kind != plan.ClusterIP
	switch {
	case !external && e.Service.InternalLocal:
		x.step("policy", "internalTrafficPolicy: Local: only endpoints on node %s", x.at.Name)
	case external && e.Service.ExternalLocal && o == plan.FromOutside:
		x.step("policy", "externalTrafficPolicy: Local: only endpoints on node %s, and the source is kept", x.at.Name)
	case external && e.Service.ExternalLocal:
		x.step("policy", "externalTrafficPolicy: Local is for traffic from outside: from here all endpoints will do")
	}
	all, ready := x.endpoints(e, f.ID)
	inPool := map[netip.AddrPort]bool{}
	for _, p := range route.Pool.Endpoints {
		inPool[p.Addr] = true
	}
	if ready == 0 && len(inPool) > 0 {
		x.step("policy", "no endpoint is ready: those that are terminating but still serve are used")
		return
	}
	if left := ready - len(inPool); left > 0 && !route.Pool.Local {
		x.step("policy", "%s of %d ready ones left out: hints keep traffic near node %s", count(left, "endpoint"), ready, x.at.Name)
	}
	if unready := all - ready; unready > 0 {
		x.step("policy", "%s not ready and left out", count(unready, "endpoint"))
	}
}

// endpoints counts those of a port, all of them and the ready ones.
func (w *World) endpoints(e *intent.Entry, id plan.PortID) (all, ready int) {
	seen := map[netip.AddrPort]bool{}
	for _, s := range e.Slices {
		if s.Family != id.Family {
			continue
		}
		for _, p := range s.Ports {
			if p.Name != id.Port || p.Protocol != id.Protocol || p.Port == 0 {
				continue
			}
			for i := range s.Endpoints {
				at := netip.AddrPortFrom(s.Endpoints[i].Addr, p.Port)
				if s.Endpoints[i].Is(intent.Secondary) || seen[at] {
					continue
				}
				seen[at] = true
				all++
				if s.Endpoints[i].Is(intent.Ready) {
					ready++
				}
			}
		}
	}
	return all, ready
}

// whyNone says why a frontend has no endpoint.
func (w *World) whyNone(f *plan.Frontend) string {
	e := w.cluster.Entry(f.ID.Service)
	if all, _ := w.endpoints(e, f.ID); all > 0 {
		if all == 1 {
			return fmt.Sprintf("the only endpoint of Service %s is not ready", f.ID.Service)
		}
		return fmt.Sprintf("none of the %d endpoints of Service %s is ready", all, f.ID.Service)
	}
	some := slices.ContainsFunc(e.Slices, func(s *intent.Slice) bool { return s.Family == f.ID.Family && len(s.Endpoints) > 0 })
	switch {
	case some:
		return fmt.Sprintf("the endpoints of Service %s have no port %q of %s", f.ID.Service, f.ID.Port, f.ID.Protocol)
	case !e.Service.HasSelector:
		return fmt.Sprintf("Service %s has no endpoints of IPv%d: it has no selector, and nobody has written EndpointSlices for it", f.ID.Service, f.ID.Family)
	}
	return fmt.Sprintf("Service %s has no endpoints of IPv%d: its selector matches no Pod with an address", f.ID.Service, f.ID.Family)
}

// whyDropped says why a packet to a frontend is lost on purpose.
func (x *walk) whyDropped(f *plan.Frontend) string {
	if f.Sources != nil && !slices.ContainsFunc(f.Sources, func(p netip.Prefix) bool { return p.Contains(x.src) }) {
		return fmt.Sprintf("%s is not in loadBalancerSourceRanges of Service %s (%s)", x.src, f.ID.Service, prefixText(f.Sources))
	}
	policy := "externalTrafficPolicy"
	if f.Kind == plan.ClusterIP {
		policy = "internalTrafficPolicy"
	}
	return fmt.Sprintf("%s of Service %s is Local, and node %s has no endpoint of it that is ready", policy, f.ID.Service, x.at.Name)
}

// whyNoPort says which ports an address has instead.
func (x *walk) whyNoPort(a netip.Addr) string {
	var ports []string
	name := ""
	for k, f := range x.snapshot(x.at).Frontends {
		if k.Addr == a && f.Kind == plan.ClusterIP {
			name = f.ID.Service.String()
			ports = append(ports, fmt.Sprintf("%d/%s", k.Port, k.Protocol))
		}
	}
	slices.Sort(ports)
	if name == "" {
		return fmt.Sprintf("the Service with the cluster IP %s has no ports", a)
	}
	x.Service = name
	return fmt.Sprintf("Service %s with the cluster IP %s has no port %d/%s, but %s", name, a, x.dst.Port(), x.protocol, strings.Join(ports, ", "))
}

// whyUnresolved says what there is instead of a name's addresses; empty: nothing like it.
func (w *World) whyUnresolved(tried []string) string {
	for _, full := range tried {
		labels := strings.Split(strings.TrimSuffix(full, "."+w.Zone+"."), ".")
		if len(labels) < 3 || labels[len(labels)-1] != "svc" {
			continue
		}
		key := intent.Key{Namespace: labels[len(labels)-2], Name: labels[len(labels)-3]}
		e := w.cluster.Entry(key)
		if e == nil || e.Service == nil {
			continue
		}
		if e.Service.Headless {
			return fmt.Sprintf("Service %s is headless and has no endpoint that is ready", key)
		}
	}
	for _, full := range tried {
		labels := strings.Split(full, ".")
		for _, k := range w.cluster.Keys(intent.Services) {
			if k.Name == labels[0] {
				return fmt.Sprintf("there is a Service %s, ask for %s.%s", k, k.Name, k.Namespace)
			}
		}
	}
	return ""
}
