package explain

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"portal/internal/reports"
)

// slowStart is how long a part may take to start.
const slowStart = 2 * time.Minute

var partNames = map[string]string{reports.Proxy: "proxy", reports.DNS: "DNS server", reports.LB: "load balancer", reports.Agent: "agent"}

// checkParts looks at what parts of nodes say about themselves in the API. A node that has been asked says the same of its proxy, with details.
func checkParts(v *View) (out []Finding) {
	for i := range v.Parts {
		r := &v.Parts[i]
		n := v.nodes[r.Node]
		if n == nil && v.sees("nodes") || n != nil && !nodeReady(n) || v.detailed(r) {
			continue
		}
		if f, ok := v.partState(r); ok {
			out = append(out, f)
		} else if f, ok := v.lagging(r); ok {
			out = append(out, f)
		}
	}
	slices.SortStableFunc(out, func(a, b Finding) int { return cmp.Compare(a.Node, b.Node) })
	return out
}

// detailed says whether the node itself was asked about this part, and answered.
func (v *View) detailed(r *reports.Report) bool {
	asked := v.Reports[r.Node]
	return r.Part == reports.Proxy && asked != nil && asked.Report != nil && asked.Proxy != nil
}

func (v *View) partState(r *reports.Report) (Finding, bool) {
	s := &r.Status
	f := Finding{Severity: Degraded, Sure: Certain, Object: Ref{"Node", "", r.Node}, Node: r.Node, Since: since(s.Since.Time), Fix: []string{kubectl("", "get nodereport %s -o yaml", r.Name)}}
	who := fmt.Sprintf("the %s of node %s", cmp.Or(partNames[r.Part], r.Part), r.Node)
	switch {
	case s.State == reports.Failing:
		f.Code, f.Verdict = r.Part+"-failing", fmt.Sprintf("%s fails: %s", who, s.Message)
		if r.Part == reports.Proxy {
			f.Severity = Broken
		}
	case s.Conntrack != nil && s.Conntrack.Percent >= 90:
		f.Code, f.On = "conntrack-full", r.Node
		f.Verdict = fmt.Sprintf("the table of connections of node %s is full: %d of %d: new connections to Services are dropped", r.Node, s.Conntrack.Count, s.Conntrack.Max)
		f.Fix = []string{fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d", s.Conntrack.Max*2)}
	case s.State == reports.Degraded:
		f.Code, f.Verdict = r.Part+"-degraded", fmt.Sprintf("%s: %s", who, s.Message)
	case s.State == reports.Starting && v.Now.Sub(s.Since.Time) > slowStart:
		f.Code, f.Verdict = r.Part+"-not-synced", fmt.Sprintf("%s has been starting for %s: it %s", who, ago(v.Now.Sub(s.Since.Time)), s.Message)
	default:
		return f, false
	}
	if s.LastError != nil && s.State != reports.Running {
		f.Evidence = append(f.Evidence, fmt.Sprintf("%s ago: %s", ago(v.Now.Sub(s.LastError.Time.Time)), s.LastError.Message))
	}
	if s.Refused != nil {
		f.Evidence = append(f.Evidence, s.Refused.Some...)
	}
	f.Evidence = append(f.Evidence, fmt.Sprintf("NodeReport %s, written %s ago", r.Name, ago(r.Age(v.Now))))
	return f, true
}

// lagging: it has ended, or does not reach the API.
func (v *View) lagging(r *reports.Report) (Finding, bool) {
	if r.Age(v.Now) < reports.Stale {
		return Finding{}, false
	}
	last := r.Status.Updated.Time
	return Finding{
		Code: r.Part + "-behind", Severity: Degraded, Sure: Likely, Object: Ref{"Node", "", r.Node}, Node: r.Node, Since: &last,
		Verdict:  fmt.Sprintf("the %s of node %s has not reported for %s: it does not run, or does not reach the API", cmp.Or(partNames[r.Part], r.Part), r.Node, ago(v.Now.Sub(last))),
		Evidence: []string{fmt.Sprintf("NodeReport %s says %s; parts that run refresh their reports every ten minutes", r.Name, r.Status.State)},
		Fix:      []string{kubectl("", "get nodereport %s -o yaml", r.Name), kubectl("", "describe node %s", r.Node)},
	}, true
}

// partOn is what a part of a node says.
func (v *View) partOn(node, part string) *reports.Report {
	for i := range v.Parts {
		if r := &v.Parts[i]; r.Node == node && r.Part == part {
			return r
		}
	}
	return nil
}
