package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/clusterdns"
	"portal/internal/nodereport"
)

// checkReach looks at what nodes got when they connected to the Service that was asked about.
func checkReach(v *View) (out []Finding) {
	failed := map[netip.AddrPort]map[string]string{} // by node
	fine := map[netip.AddrPort]int{}
	frontends := map[netip.AddrPort]bool{}
	allReached := map[string]bool{}
	for name, r := range v.Reports {
		if r.Report == nil {
			continue
		}
		allReached[name] = true
		for _, d := range r.Dials {
			if d.Error == "" {
				fine[d.To]++
				continue
			}
			frontends[d.To] = d.Frontend
			allReached[name] = allReached[name] && d.Frontend
			if failed[d.To] == nil {
				failed[d.To] = map[string]string{}
			}
			failed[d.To][name] = d.Error
		}
	}
	for _, to := range slices.SortedFunc(maps.Keys(failed), netip.AddrPort.Compare) {
		if !frontends[to] {
			out = append(out, v.unreachable(to, failed[to], fine[to])...)
			continue
		}
		// A Service whose endpoints are reached from a node, and that is not itself.
		maps.DeleteFunc(failed[to], func(name, _ string) bool { return !allReached[name] })
		if s := v.clusterIPs[to.Addr()]; s != nil && len(failed[to]) > 0 {
			f := v.reachFinding(s, failed[to])
			f.Code, f.Severity = "service-unreachable", Broken
			f.Verdict = fmt.Sprintf("%s does not answer at %s from %s (%s), though its endpoints do: rules or a firewall there are in the way", s.ref(), to, nodesText(f.nodes), f.why)
			f.Fix, f.On = []string{"nft list ruleset"}, f.nodes[0]
			out = append(out, f.Finding)
		}
	}
	out = alike(out)
	if slices.ContainsFunc(slices.Collect(maps.Keys(fine)), func(to netip.AddrPort) bool { return v.clusterIPs[to.Addr()] == nil }) {
		return out
	}
	for i := range out {
		out[i].Severity = Broken // no node reaches any endpoint
	}
	return out
}

// alike makes one finding of those that say the same of several addresses of one Service.
func alike(all []Finding) (out []Finding) {
	type sort struct {
		code string
		Ref
	}
	first := map[sort]int{}
	more := map[int]int{}
	for _, f := range all {
		i, ok := first[sort{f.Code, f.Object}]
		if !ok {
			first[sort{f.Code, f.Object}] = len(out)
			out = append(out, f)
			continue
		}
		more[i]++
		out[i].Evidence = limit(append(out[i].Evidence, f.Verdict))
		out[i].Affects = append(out[i].Affects, f.Affects...)
		out[i].Severity = max(out[i].Severity, f.Severity)
	}
	for i, n := range more {
		out[i].Verdict += fmt.Sprintf("; the same of %d more of its addresses", n)
	}
	return out
}

type reachFinding struct {
	Finding
	nodes []string
	why   string
}

func (v *View) reachFinding(s *Service, failed map[string]string) reachFinding {
	f := reachFinding{Finding: Finding{Sure: Certain, Object: s.ref()}, nodes: slices.Sorted(maps.Keys(failed))}
	f.why = failed[f.nodes[0]]
	for _, n := range f.nodes {
		f.Evidence = append(f.Evidence, fmt.Sprintf("from node %s: %s", n, failed[n]))
	}
	f.Evidence = limit(f.Evidence)
	return f
}

// unreachable: an endpoint that some or all nodes can't connect to.
func (v *View) unreachable(to netip.AddrPort, failed map[string]string, fine int) (out []Finding) {
	s := v.withEndpoint(to.Addr())
	if s == nil {
		return nil
	}
	f := v.reachFinding(s, failed)
	f.Code, f.Severity = "endpoint-unreachable", Degraded
	if ready, _ := s.endpoints(); ready <= 1 {
		f.Severity = Broken
	}
	who := to.String()
	if p := v.podIPs[to.Addr()]; p != nil {
		who = fmt.Sprintf("%s (Pod %s on node %s)", to, p.Name, p.Spec.NodeName)
		f.Affects = []Ref{podRef(p)}
		f.Fix = []string{kubectl(p.Namespace, "describe pod %s", p.Name)}
	} else {
		f.Fix = []string{kubectl(s.Namespace, "get endpointslices -l kubernetes.io/service-name=%s -o yaml", s.Name)}
	}
	switch {
	case fine > 0:
		f.Verdict = fmt.Sprintf("%s: the endpoint %s can't be reached from %s (%s), and can from others: the network between nodes, or a firewall", s.ref(), who, nodesText(f.nodes), f.why)
	case f.why == nodereport.Refused && v.onlyForIPv6(to):
		p := v.podIPs[to.Addr()]
		f.Code = "listens-other-family"
		f.Verdict = fmt.Sprintf("%s gets no answer by IPv4: in Pod %s the process listens at [::]:%d for IPv6 alone (IPV6_V6ONLY)", s.ref(), p.Name, to.Port())
		f.Fix = v.forBoth(p, int32(to.Port()))
	case f.why == nodereport.Refused:
		f.Verdict = fmt.Sprintf("%s: the endpoint %s refuses connections: nothing listens there", s.ref(), who)
	default:
		f.Verdict = fmt.Sprintf("%s: the endpoint %s can't be reached from any node: %s", s.ref(), who, f.why)
	}
	return []Finding{f.Finding}
}

// onlyForIPv6: an IPv4 address refuses, and a process listens at all addresses of IPv6.
func (v *View) onlyForIPv6(to netip.AddrPort) bool {
	p := v.podIPs[to.Addr()]
	if p == nil || !to.Addr().Unmap().Is4() {
		return false
	}
	sockets, _ := v.sockets(p)
	return slices.Contains(sockets, nodereport.Socket{Protocol: "TCP", Address: netip.IPv6Unspecified(), Port: to.Port()})
}

// forBoth changes an argument that says to listen at all addresses of IPv6 to one that says all of IPv4.
func (v *View) forBoth(p *corev1.Pod, port int32) []string {
	if fix := v.changeListen(p, port, [][2]string{{"[::]", "0.0.0.0"}, {"::", "0.0.0.0"}}); fix != nil {
		return fix
	}
	return showCommand(p)
}

// withEndpoint is the Service that nodes were asked about, by one of its endpoints.
func (v *View) withEndpoint(a netip.Addr) *Service {
	for _, r := range v.Reports {
		if r.Report == nil || r.Proxy == nil || len(r.Dials) == 0 {
			continue
		}
		for i := range r.Proxy.Frontends {
			f := &r.Proxy.Frontends[i]
			for _, route := range f.Routes {
				if route.Pool == nil || *route.Pool >= len(r.Proxy.Pools) {
					continue
				}
				if slices.ContainsFunc(r.Proxy.Pools[*route.Pool].Endpoints, func(e netip.AddrPort) bool { return e.Addr() == a }) {
					return v.Service(f.Namespace, f.Service)
				}
			}
		}
	}
	return nil
}

// checkLookups looks at what nodes got from the cluster's DNS.
func checkLookups(v *View) []Finding {
	failed := map[string]string{}
	var server netip.AddrPort
	asked := 0
	for name, r := range v.Reports {
		if r.Report == nil || r.Lookup == nil {
			continue
		}
		asked++
		if r.Lookup.Error != "" {
			failed[name], server = r.Lookup.Error, r.Lookup.Server
		}
	}
	if len(failed) == 0 {
		return nil
	}
	f := Finding{Code: "dns-unreachable", Severity: Degraded, Sure: Certain, Object: Ref{"Service", "kube-system", clusterdns.ServiceName}}
	nodes := slices.Sorted(maps.Keys(failed))
	if len(failed) == asked {
		f.Severity = Broken
	}
	f.Verdict = fmt.Sprintf("the cluster's DNS (%s) does not resolve names for %s: %s", server, nodesText(nodes), failed[nodes[0]])
	for _, n := range nodes {
		f.Evidence = append(f.Evidence, fmt.Sprintf("from node %s: %s", n, failed[n]))
	}
	f.Evidence = limit(f.Evidence)
	f.Fix = []string{"portal explain service kube-dns -n kube-system"}
	return []Finding{f}
}
