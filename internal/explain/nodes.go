package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"portal/internal/nodereport"
	"portal/internal/proxy"
)

func nodeReady(n *corev1.Node) bool {
	c := nodeCondition(n, corev1.NodeReady)
	return c == nil && n.Status.NodeInfo.KubeletVersion == "" || c != nil && c.Status == corev1.ConditionTrue
}

func nodeCondition(n *corev1.Node, t corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == t {
			return &n.Status.Conditions[i]
		}
	}
	return nil
}

// using are the Services with endpoints on a node, and their Pods there.
func (v *View) using(node string) (out []Ref) {
	for _, s := range v.order {
		if slices.ContainsFunc(s.Pods, func(p *corev1.Pod) bool { return p.Spec.NodeName == node && !ended(p) }) {
			out = append(out, s.ref())
		}
	}
	for i := range v.Evidence.Pods {
		if p := &v.Evidence.Pods[i]; p.Spec.NodeName == node && !ended(p) {
			out = append(out, podRef(p))
		}
	}
	return out
}

// checkNodes looks at nodes that are lost, or whose clock is wrong.
func checkNodes(v *View) (out []Finding) {
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		n := v.nodes[name]
		r := Ref{"Node", "", name}
		if !nodeReady(n) {
			out = append(out, v.lostNode(n, r))
			continue
		}
		if c := nodeCondition(n, corev1.NodeNetworkUnavailable); c != nil && c.Status == corev1.ConditionTrue {
			out = append(out, Finding{
				Code: "node-network", Severity: Degraded, Sure: Certain, Object: r, Node: name, Since: since(c.LastTransitionTime.Time), Affects: v.using(name),
				Verdict: fmt.Sprintf("the network of node %s is not set up: %s", name, c.Message), Fix: []string{kubectl("", "describe node %s", name)},
			})
		}
		if f, ok := v.skewed(r); ok {
			out = append(out, f)
		}
	}
	return out
}

func (v *View) lostNode(n *corev1.Node, r Ref) Finding {
	f := Finding{Code: "node-not-ready", Severity: Degraded, Sure: Certain, Object: r, Node: n.Name, Affects: v.using(n.Name)}
	why := "it has never reported"
	if c := nodeCondition(n, corev1.NodeReady); c != nil {
		f.Since = since(c.LastTransitionTime.Time)
		why = strings.TrimSpace(c.Reason + ": " + c.Message)
		if c.Status == corev1.ConditionUnknown {
			why = "it has stopped reporting: " + c.Message
		}
	}
	f.Verdict = fmt.Sprintf("node %s is not ready: %s", n.Name, why)
	if f.Since != nil {
		f.Evidence = append(f.Evidence, fmt.Sprintf("for %s", ago(v.Now.Sub(*f.Since))))
	}
	services := 0
	for _, a := range f.Affects {
		if a.Kind == "Service" {
			services++
		}
	}
	if services > 0 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s have Pods on it", count(services, "Service", "Services")))
	}
	f.Fix = []string{kubectl("", "describe node %s", n.Name)}
	return f
}

// clockLimit is how far clocks may be apart: certificates and Leases go wrong long after that.
const clockLimit = 5 * time.Second

func (v *View) skewed(r Ref) (Finding, bool) {
	report := v.Reports[r.Name]
	if report == nil || report.Report == nil || report.Skew.Abs() < clockLimit {
		return Finding{}, false
	}
	way := "ahead"
	if report.Skew < 0 {
		way = "behind"
	}
	return Finding{
		Code: "clock-skew", Severity: Degraded, Sure: Certain, Object: r, Node: r.Name,
		Verdict: fmt.Sprintf("the clock of node %s is %s %s: Leases, tokens and certificates don't work as they should", r.Name, ago(report.Skew.Abs()), way),
		Fix:     []string{"chronyc makestep"}, On: r.Name,
	}, true
}

// checkProxies looks at each node's proxy as a whole.
func checkProxies(v *View) (out []Finding) {
	for _, name := range slices.Sorted(maps.Keys(v.Reports)) {
		r, n := v.Reports[name], v.nodes[name]
		if n == nil || !nodeReady(n) || !r.Asked {
			continue
		}
		out = append(out, v.proxyOf(name, r)...)
	}
	works := slices.ContainsFunc(slices.Collect(maps.Values(v.Reports)), func(r *NodeReport) bool {
		return r.Unsupported || r.ProxyHealthy() || r.Report != nil && r.Proxy != nil && r.Proxy.Complete
	})
	for i := range out {
		if !works && out[i].Code != "conntrack-full" {
			out[i].Severity = Broken // on no node
		}
	}
	return out
}

func (v *View) proxyOf(name string, r *NodeReport) (out []Finding) {
	base := Finding{Severity: Degraded, Sure: Certain, Object: Ref{"Node", "", name}, Node: name}
	add := func(code, verdict string, fix ...string) *Finding {
		f := base
		f.Code, f.Verdict, f.Fix = code, verdict, fix
		out = append(out, f)
		return &out[len(out)-1]
	}
	if r.Report == nil || r.Proxy == nil {
		if f, ok := v.noProxy(base, name, r); ok {
			out = append(out, f)
		}
		return out
	}
	p := r.Proxy
	switch {
	case !p.Complete:
		add("proxy-not-synced", fmt.Sprintf("the proxy of node %s has not read everything from the API yet: it programs nothing, and what it programmed before may be stale", name), kubectl("", "describe node %s", name))
	case p.Failures > 0 && p.LastErrorAt.After(p.LastSync):
		f := add("proxy-failing", fmt.Sprintf("the proxy of node %s can't program the kernel: %s", name, firstLine(p.LastError)))
		f.Severity, f.Since = Broken, since(p.LastErrorAt)
	}
	if len(p.Foreign) > 0 {
		var what []string
		for _, l := range p.Foreign {
			what = append(what, l.String())
		}
		f := add("proxy-foreign", fmt.Sprintf("node %s has rules of another proxy besides Portal's: %s: Services may be led to endpoints that are gone", name, strings.Join(what, ", ")), "portal proxy --cleanup-foreign")
		f.Sure, f.On = Likely, name
	}
	if !p.LastDriftAt.IsZero() && v.Now.Sub(p.LastDriftAt) < 5*time.Minute {
		f := add("proxy-drift", fmt.Sprintf("somebody changes the rules of the proxy on node %s: %s", name, firstLine(p.LastDrift)))
		f.Since = since(p.LastDriftAt)
		f.Evidence = []string{fmt.Sprintf("%s since the proxy started; it restores them", count(p.Drifts, "change", "changes"))}
		if v.Now.Sub(p.LastDriftAt) > time.Minute {
			f.Severity = Notice // they have been right since
		}
	}
	if r.Conntrack != nil && r.Conntrack.Max > 0 && r.Conntrack.Count*100 >= r.Conntrack.Max*90 {
		f := add("conntrack-full", fmt.Sprintf("the table of connections of node %s is full: %d of %d: new connections to Services are dropped", name, r.Conntrack.Count, r.Conntrack.Max),
			fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d", r.Conntrack.Max*2))
		f.On = name
		if r.Conntrack.Count >= r.Conntrack.Max*98/100 {
			f.Severity = Broken
		}
	}
	return out
}

// noProxy: a node that says nothing about its proxy.
func (v *View) noProxy(f Finding, name string, r *NodeReport) (Finding, bool) {
	f.Code = "proxy-unreachable"
	switch {
	case r.ProxyHealthy():
		return f, false // another proxy than Portal's, and it is well
	case r.Health != 0:
		f.Code = "proxy-unhealthy"
		f.Verdict = fmt.Sprintf("the proxy of node %s says that it is not healthy: %s", name, firstLine(r.HealthBody))
		f.Fix = []string{kubectl("", "get --raw /api/v1/nodes/http:%s:10256/proxy/healthz", name)}
		return f, true
	case r.Report != nil:
		f.Sure = Likely
		why := r.ProxyNote
		if why == "" {
			why = "it does not run"
		}
		f.Verdict = fmt.Sprintf("no proxy answers on node %s: %s: Services can't be reached from there", name, why)
		f.Fix = []string{"portal proxy"}
		f.Evidence, f.On = []string{fmt.Sprintf("http://%s:10256/healthz: %s", name, r.HealthErr)}, name
		return f, true
	case r.HealthErr != "" && !r.Unsupported && r.Err != "":
		f.Sure = Likely
		f.Verdict = fmt.Sprintf("node %s does not answer: neither its agent nor its proxy can be reached, though the API has it as ready", name)
		f.Evidence = []string{r.Err, r.HealthErr}
		f.Fix = []string{kubectl("", "describe node %s", name)}
		return f, true
	}
	return f, false
}

// checkHosts reports settings of machines because of which packets are lost.
func checkHosts(v *View) (out []Finding) {
	for _, name := range slices.Sorted(maps.Keys(v.Reports)) {
		r := v.Reports[name]
		if r.Report == nil || r.Proxy == nil {
			continue
		}
		for _, p := range r.Proxy.Problems {
			f := Finding{Code: "host-setting", Severity: Degraded, Sure: Certain, Object: Ref{"Node", "", name}, Node: name, Field: p.Name}
			f.Verdict = fmt.Sprintf("on node %s %s", name, p.Message)
			switch {
			case p.Lost:
				f.Severity, f.Affects = Broken, v.using(name)
			case v.losesPackets(name):
				f.Severity, f.Sure, f.Affects = Broken, Likely, v.using(name)
				f.Evidence = append(f.Evidence, "connections to Services from there, or to Pods there, get no answer")
			default:
				f.Sure = Possible
				f.Severity = Notice
			}
			// What is said beside a command is no part of it.
			command, aside, _ := strings.Cut(p.Fix, " (")
			if aside != "" {
				f.Evidence = append(f.Evidence, strings.TrimSuffix(aside, ")"))
			}
			f.Fix = []string{command}
			if _, after, ok := strings.Cut(command, "or: "); ok {
				f.Fix = []string{after}
			}
			f.On = name
			out = append(out, f)
		}
	}
	return out
}

// losesPackets says whether connections from a node, or to Pods on it, got no answer.
func (v *View) losesPackets(node string) bool {
	for name, r := range v.Reports {
		if r.Report == nil {
			continue
		}
		for _, d := range append(slices.Clone(r.Dials), r.Tries...) {
			p := v.podIPs[d.To.Addr()]
			if d.Error == nodereport.TimedOut && (name == node || p != nil && p.Spec.NodeName == node) {
				return true
			}
		}
	}
	return false
}

// checkServedByProxy compares each node's frontends with the Services.
func checkServedByProxy(v *View) (out []Finding) {
	type missing struct{ nodes, refused, stale, notes []string }
	found := map[*Service]*missing{}
	of := func(s *Service) *missing {
		if found[s] == nil {
			found[s] = &missing{}
		}
		return found[s]
	}
	for _, name := range slices.Sorted(maps.Keys(v.Reports)) {
		r := v.Reports[name]
		if r.Report == nil || r.Proxy == nil || !r.Proxy.Complete {
			continue
		}
		served := v.frontends(r.Proxy)
		for _, note := range r.Proxy.Notes {
			if s := v.Service(note.Namespace, note.Service); s != nil && !slices.Contains(of(s).notes, note.Message) {
				of(s).notes = append(of(s).notes, note.Message)
			}
		}
		for _, s := range v.subjects {
			if !r.reports(s) {
				continue
			}
			if !s.proxied() || v.Now.Sub(s.CreationTimestamp.Time) < settle || s.leftOut() {
				continue
			}
			state := served[Key{s.Namespace, s.Name}]
			switch {
			case state.frontends == 0 && len(s.Spec.Ports) > 0:
				of(s).nodes = append(of(s).nodes, name)
			case state.refused != "":
				of(s).refused = append(of(s).refused, name+": "+state.refused)
			default:
				if gone := v.differs(s, state.endpoints); gone != "" {
					of(s).stale = append(of(s).stale, name+": "+gone)
				}
			}
		}
	}
	for _, s := range v.subjects {
		if m := found[s]; m != nil {
			out = append(out, v.unserved(s, m.nodes, m.refused, m.stale, m.notes)...)
		}
	}
	return out
}

// servedState is what a node serves of a Service.
type servedState struct {
	frontends int
	refused   string
	endpoints map[netip.Addr]bool
}

func (v *View) frontends(p *proxy.State) map[Key]servedState {
	out := map[Key]servedState{}
	for i := range p.Frontends {
		f := &p.Frontends[i]
		k := Key{f.Namespace, f.Service}
		s := out[k]
		s.frontends++
		if f.Refused != "" {
			s.refused = f.Refused
		}
		for _, route := range f.Routes {
			if route.Pool == nil || *route.Pool >= len(p.Pools) {
				continue
			}
			if s.endpoints == nil {
				s.endpoints = map[netip.Addr]bool{}
			}
			for _, e := range p.Pools[*route.Pool].Endpoints {
				s.endpoints[e.Addr()] = true
			}
		}
		out[k] = s
	}
	return out
}

// differs says which endpoint a node leads to that is in no slice any more.
func (v *View) differs(s *Service, led map[netip.Addr]bool) string {
	if len(led) == 0 {
		return ""
	}
	known := map[netip.Addr]bool{}
	for _, slice := range s.Slices {
		for i := range slice.Endpoints {
			for _, text := range slice.Endpoints[i].Addresses {
				if a, err := netip.ParseAddr(text); err == nil {
					known[a.Unmap()] = true
				}
			}
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(led), netip.Addr.Compare) { // so that the same is said each time
		if !known[a.Unmap()] {
			return fmt.Sprintf("it still leads to %s", a)
		}
	}
	return ""
}

func (v *View) unserved(s *Service, nodes, refused, stale, notes []string) (out []Finding) {
	f := Finding{Severity: Broken, Sure: Certain, Object: s.ref()}
	if len(refused) > 0 {
		one := f
		one.Code, one.Evidence = "frontend-refused", refused
		one.Verdict = fmt.Sprintf("%s is not served on %s: the kernel refuses its rules: %s", s.ref(), count(len(refused), "node", "nodes"), refused[0])
		out = append(out, one)
	}
	if len(nodes) > 0 {
		one := f
		one.Code, one.Evidence = "frontend-missing", []string{"not among the frontends of: " + some(nodes)}
		one.Verdict = fmt.Sprintf("%s is not served by the proxy of %s, which has listed everything", s.ref(), nodesText(nodes))
		out = append(out, one)
	}
	if len(stale) > 0 {
		one := f
		one.Code, one.Severity, one.Evidence = "proxy-stale", Degraded, stale
		one.Verdict = fmt.Sprintf("%s: the proxy on %s is behind: %s", s.ref(), count(len(stale), "node", "nodes"), stale[0])
		out = append(out, one)
	}
	for _, note := range notes {
		one := f
		one.Code, one.Severity = "proxy-note", Degraded
		one.Verdict = fmt.Sprintf("%s is not served as it asks: %s", s.ref(), note)
		out = append(out, one)
	}
	return out
}
