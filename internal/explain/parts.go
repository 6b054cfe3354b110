package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"portal/internal/reports"
)

const (
	// slowStart is how long a part may take to start.
	slowStart = 2 * time.Minute
	// behindFor is how much longer than others a part may not have followed the API. Parts refresh what they say within a quarter of an hour.
	behindFor = 30 * time.Minute
)

var partNames = map[string]string{reports.Proxy: "proxy", reports.DNS: "DNS server", reports.LB: "load balancer", reports.Agent: "agent"}

// checkParts looks at what parts of nodes say about themselves in the API. A node that has been asked says the same of its proxy, with details.
func checkParts(v *View) (out []Finding) {
	newest := map[string]*reports.Report{}
	for i := range v.Parts {
		if r := &v.Parts[i]; newest[r.Part] == nil || revision(r) > revision(newest[r.Part]) {
			newest[r.Part] = r
		}
	}
	for i := range v.Parts {
		r := &v.Parts[i]
		n := v.nodes[r.Node]
		if n == nil && v.sees("nodes") || n != nil && !nodeReady(n) || v.detailed(r) {
			continue
		}
		if f, ok := v.partState(r); ok {
			out = append(out, f)
		} else if f, ok := v.lagging(r, newest[r.Part]); ok {
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

// behind: others of the same kind have followed the API since, and this one has not: it has ended, or does not reach the API.
func (v *View) lagging(r, newest *reports.Report) (Finding, bool) {
	if newest == r || revision(r) == 0 || revision(newest) <= revision(r) || newest.Status.Updated.Sub(r.Status.Updated.Time) < behindFor {
		return Finding{}, false
	}
	last := r.Status.Updated.Time
	return Finding{
		Code: r.Part + "-behind", Severity: Degraded, Sure: Likely, Object: Ref{"Node", "", r.Node}, Node: r.Node, Since: &last,
		Verdict: fmt.Sprintf("the %s of node %s has not reported for %s, and others have: it does not run, or does not reach the API", cmp.Or(partNames[r.Part], r.Part), r.Node, ago(v.Now.Sub(last))),
		Evidence: []string{
			fmt.Sprintf("NodeReport %s is at revision %s, that of node %s at %s", r.Name, r.Status.Synced.Revision, newest.Node, newest.Status.Synced.Revision),
		},
		Fix: []string{kubectl("", "get nodereport %s -o yaml", r.Name), kubectl("", "describe node %s", r.Node)},
	}, true
}

// revision is up to where a part has followed the API; 0: it does not say.
func revision(r *reports.Report) uint64 {
	if r.Status.Synced == nil {
		return 0
	}
	n, _ := strconv.ParseUint(r.Status.Synced.Revision, 10, 64) // 0 if it is none
	return n
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
