package explain

import (
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/nodereport"
)

// checkOutside looks at what nodes got at the addresses of the Service that are for the outside: node ports, external IPs, the load balancer's.
func checkOutside(v *View) (out []Finding) {
	failed := map[netip.AddrPort]map[string]string{} // by node
	fine := map[netip.AddrPort][]string{}
	for name, r := range v.Reports {
		if r.Report == nil {
			continue
		}
		for _, d := range r.Tries {
			if d.Error == "" {
				fine[d.To] = append(fine[d.To], name)
				continue
			}
			if failed[d.To] == nil {
				failed[d.To] = map[string]string{}
			}
			failed[d.To][name] = d.Error
		}
	}
	for _, to := range slices.SortedFunc(maps.Keys(failed), netip.AddrPort.Compare) {
		s, _ := v.whose(to.Addr(), to.Port())
		if s == nil || !s.served() {
			continue
		}
		if f, ok := v.shut(s, to, failed[to], fine[to]); ok {
			out = append(out, f)
		}
	}
	return out
}

// shut: an address for the outside at which some or all nodes get no connection.
func (v *View) shut(s *Service, to netip.AddrPort, failed map[string]string, fine []string) (Finding, bool) {
	here := v.nodeWith(to.Addr())
	if !slices.ContainsFunc(s.Spec.Ports, func(p corev1.ServicePort) bool {
		return here != "" && p.NodePort == int32(to.Port()) || here == "" && p.Port == int32(to.Port())
	}) {
		return Finding{}, false // that it has no such port is said elsewhere
	}
	if s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && (here == "" || !v.localTo(s, here)) {
		return Finding{}, false // as the policy says
	}
	r := v.reachFinding(s, failed)
	f := r.Finding
	f.Code, f.Severity = "address-unreachable", Broken
	what := "address " + to.String()
	if here != "" {
		f.Code, f.Node = "node-port-unreachable", here
		what = fmt.Sprintf("node port %d at %s", to.Port(), to.Addr())
	}
	f.Verdict = fmt.Sprintf("%s does not answer at its %s from %s (%s): a firewall or other rules are in the way", s.ref(), what, nodesText(r.nodes), r.why)
	if here != "" {
		f.Verdict += " on node " + here
		f.On = here
	} else {
		f.On = r.nodes[0]
	}
	if len(fine) > 0 {
		f.Severity = Degraded
		slices.Sort(fine)
		f.Evidence = append(f.Evidence, "it answers from "+nodesText(fine))
	}
	f.Fix = []string{"nft list ruleset"}
	return f, true
}

// localTo says whether a Service has a ready endpoint on a node.
func (v *View) localTo(s *Service, node string) bool {
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			if e := &slice.Endpoints[i]; isReady(e) && e.NodeName != nil && *e.NodeName == node {
				return true
			}
		}
	}
	return false
}

// aliased is what is wrong with the target of an alias, by what a node got there.
func (v *View) aliased(f Finding, s *Service, a *nodereport.Alias, node string) (Finding, bool) {
	f.Node = node
	f.Fix = []string{fmt.Sprintf("curl -k --connect-to ::%s: https://%s/", a.Name, a.Name)}
	if a.Unresolved != "" {
		f.Code = "externalname-unknown"
		f.Verdict = fmt.Sprintf("%s points to %s, for which DNS has no address: %s", s.ref(), a.Name, a.Unresolved)
		f.Evidence = []string{"asked by node " + node}
		f.Fix = nil
		return f, true
	}
	for _, answer := range a.Answers {
		switch {
		case answer.Rejected:
			f.Code = "externalname-tls"
			f.Verdict = fmt.Sprintf("%s is an alias of %s, whose server rejects the TLS name %s at port %d, and takes its own", s.ref(), a.Name, a.As, answer.Port)
			f.Fix = []string{fmt.Sprintf("curl https://%s:%d/", a.Name, answer.Port)}
			return f, true
		case answer.Certified != nil && !(answer.Status < 400 && answer.Status > 0 && slices.Equal(answer.Certified, []string{""})):
			f.Code = "externalname-tls"
			f.Verdict = fmt.Sprintf("%s is an alias of %s, whose certificate at port %d is for %s, not for %s: clients that verify it refuse", s.ref(), a.Name, answer.Port, some(answer.Certified), a.As)
			f.Fix = []string{fmt.Sprintf("curl https://%s:%d/", a.Name, answer.Port)}
			return f, true
		case answer.TargetStatus > 0 && answer.TargetStatus < 400 && (answer.Status == 0 || answer.Status >= 400):
			f.Code = "externalname-host"
			got := "closes the connection"
			if answer.Status > 0 {
				got = fmt.Sprintf("answers %d %s", answer.Status, http.StatusText(answer.Status))
			}
			f.Verdict = fmt.Sprintf("%s is an alias of %s, whose server rejects the Host header %s: at port %d it %s, and %d with its own name", s.ref(), a.Name, a.As, answer.Port, got, answer.TargetStatus)
			f.Fix = []string{fmt.Sprintf("curl http://%s:%d/", a.Name, answer.Port)}
			return f, true
		}
	}
	refused := ""
	for _, answer := range a.Answers {
		if answer.Error == "" {
			return Finding{}, false
		}
		refused = fmt.Sprintf("port %d: %s", answer.Port, answer.Error)
	}
	if len(s.Spec.Ports) == 0 || refused == "" {
		return Finding{}, false // which port is meant is not known
	}
	f.Code, f.Fix = "externalname-unreachable", nil
	f.Verdict = fmt.Sprintf("%s is an alias of %s, which can't be reached (%s)", s.ref(), a.Name, refused)
	return f, true
}
