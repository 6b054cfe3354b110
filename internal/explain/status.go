package explain

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"portal/internal/clusterdns"
	"portal/internal/reports"
)

// Status is one look at a cluster.
type Status struct {
	Version string `json:"version,omitempty"`
	// Servers are where the API is served.
	Servers     []string         `json:"servers,omitempty"`
	Controllers ControllerStatus `json:"controllers"`
	Nodes       []NodeStatus     `json:"nodes"`
	Services    int              `json:"services"`
	Pods        int              `json:"pods"`
	// Ranges say how full the ranges of cluster IPs are.
	Ranges    []Fill `json:"ranges,omitempty"`
	NodePorts int    `json:"nodePorts"`
	// Certificates are those that could be seen.
	Certificates []CertificateStatus `json:"certificates,omitempty"`
	// Findings is what `portal explain` says.
	Findings []Finding `json:"findings"`
	Unseen   []string  `json:"unseen,omitempty"`
}

// ControllerStatus says who leads.
type ControllerStatus struct {
	Leader  string     `json:"leader,omitempty"`
	Renewed *time.Time `json:"renewed,omitempty"`
	// Running: the Lease has not run out.
	Running bool `json:"running"`
}

// NodeStatus is a node with its parts.
type NodeStatus struct {
	Name  string `json:"name"`
	Ready bool   `json:"ready"`
	// Heartbeat is when the node last reported.
	Heartbeat *time.Time `json:"heartbeat,omitempty"`
	// Proxy is its mode, or what is wrong with it; InSync says that it has carried out what it knows.
	Proxy    string     `json:"proxy"`
	InSync   bool       `json:"inSync"`
	LastSync *time.Time `json:"lastSync,omitempty"`
	// DNS: it serves names.
	DNS  bool `json:"dns"`
	Pods int  `json:"pods"`
	// Conntrack is how full the table of connections is, in percent.
	Conntrack *int `json:"conntrackPercent,omitempty"`
}

// CertificateStatus is when a certificate ends.
type CertificateStatus struct {
	Object Ref       `json:"object"`
	Ends   time.Time `json:"ends"`
}

// Summary makes a Status.
func Summary(v *View) Status {
	out := Status{
		Version: v.Version, Services: len(v.order), Pods: len(v.pods), NodePorts: v.NodePorts(), Ranges: v.fills(), Nodes: []NodeStatus{}, Findings: []Finding{},
	}
	if s := v.Service(metaDefault, "kubernetes"); s != nil {
		for _, slice := range s.Slices {
			for i := range slice.Endpoints {
				for _, a := range slice.Endpoints[i].Addresses {
					for _, p := range slice.Ports {
						if p.Port != nil {
							out.Servers = append(out.Servers, joined(a, *p.Port))
						}
					}
				}
			}
		}
	}
	if l := v.leader(); l != nil {
		out.Controllers.Running = !v.expired(l)
		if l.Spec.HolderIdentity != nil {
			out.Controllers.Leader = *l.Spec.HolderIdentity
		}
		if l.Spec.RenewTime != nil {
			out.Controllers.Renewed = since(l.Spec.RenewTime.Time)
		}
	}
	running := map[string]int{}
	for _, p := range v.pods {
		if !ended(p) {
			running[p.Spec.NodeName]++
		}
	}
	names := maps.Clone(v.nodes)
	for i := range v.Parts {
		if _, known := names[v.Parts[i].Node]; !known && !v.sees("nodes") {
			names[v.Parts[i].Node] = nil // that it is there is all that can be known
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		out.Nodes = append(out.Nodes, v.nodeStatus(name, running[name]))
	}
	for i := range v.Certificates {
		if c := &v.Certificates[i]; c.Err == "" {
			out.Certificates = append(out.Certificates, CertificateStatus{c.Object, c.NotAfter})
		}
	}
	slices.SortFunc(out.Certificates, func(a, b CertificateStatus) int { return a.Ends.Compare(b.Ends) })
	for _, f := range All(v) {
		if f.Severity > Notice {
			out.Findings = append(out.Findings, f)
		}
	}
	for _, r := range slices.Sorted(maps.Keys(v.Unseen)) {
		out.Unseen = append(out.Unseen, fmt.Sprintf("%s: %s", r, v.Unseen[r]))
	}
	return out
}

func joined(addr string, port int32) string {
	if strings.Contains(addr, ":") {
		return fmt.Sprintf("[%s]:%d", addr, port)
	}
	return fmt.Sprintf("%s:%d", addr, port)
}

func (v *View) nodeStatus(name string, pods int) NodeStatus {
	n := v.nodes[name]
	out := NodeStatus{Name: name, DNS: v.partOn(name, reports.DNS) != nil, Pods: pods, Proxy: "unknown"}
	if n != nil {
		out.Ready, out.DNS = nodeReady(n), out.DNS || len(clusterdns.Announced(n)) > 0
	}
	for i := range v.Leases {
		if l := &v.Leases[i]; l.Namespace == "kube-node-lease" && l.Name == name && l.Spec.RenewTime != nil {
			out.Heartbeat = since(l.Spec.RenewTime.Time)
		}
	}
	r := v.Reports[name]
	part := v.partOn(name, reports.Proxy)
	switch {
	case (r == nil || r.Unsupported) && part != nil:
		out.Proxy, out.InSync = cmp.Or(part.Status.Mode, "unknown"), part.Status.State == reports.Running || part.Status.State == reports.Degraded
		if s := part.Status.Synced; s != nil {
			out.LastSync = since(s.Time.Time)
		}
		if c := part.Status.Conntrack; c != nil {
			out.Conntrack = &c.Percent
		}
	case r == nil:
	case r.Report != nil && r.Proxy != nil:
		p := r.Proxy
		out.Proxy, out.LastSync = p.Mode, since(p.LastSync)
		out.InSync = p.Complete && (p.Failures == 0 || p.LastSync.After(p.LastErrorAt))
	case r.ProxyHealthy():
		out.Proxy, out.InSync = "healthy", true
	case r.Report != nil:
		out.Proxy = "none"
	case r.Err != "":
		out.Proxy = "no answer"
	}
	if r != nil && r.Report != nil && r.Conntrack != nil && r.Conntrack.Max > 0 {
		percent := r.Conntrack.Count * 100 / r.Conntrack.Max
		out.Conntrack = &percent
	}
	return out
}

// PrintStatus writes a Status on one screen.
func PrintStatus(w io.Writer, s Status, now time.Time) error {
	p := &printer{w: w}
	p.line("API          %s, %s", orDash(strings.Join(s.Servers, ", ")), orDash(s.Version))
	leader := "nobody leads"
	if s.Controllers.Leader != "" {
		leader = s.Controllers.Leader
		if s.Controllers.Renewed != nil {
			leader += fmt.Sprintf(", renewed %s ago", ago(now.Sub(*s.Controllers.Renewed)))
		}
		if !s.Controllers.Running {
			leader += ": no longer running"
		}
	}
	p.line("controllers  %s", leader)
	p.line("objects      %s, %s, %s in use", count(s.Services, "Service", "Services"), count(s.Pods, "Pod", "Pods"), count(s.NodePorts, "node port", "node ports"))
	for _, r := range s.Ranges {
		text := fmt.Sprintf("%d taken", r.Used)
		if r.Size > 0 {
			text = fmt.Sprintf("%d of %d taken (%d %%)", r.Used, r.Size, r.percent())
		}
		p.line("range        %s: %s", r.Range, text)
	}
	for _, c := range s.Certificates[:min(3, len(s.Certificates))] {
		p.line("certificate  %s ends in %s", c.Object, ago(c.Ends.Sub(now)))
	}
	p.line("")
	if p.err != nil {
		return p.err
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NODE\tREADY\tHEARTBEAT\tPROXY\tIN SYNC\tLAST SYNC\tDNS\tPODS\tCONNTRACK")
	for _, n := range s.Nodes {
		conntrack := "-"
		if n.Conntrack != nil {
			conntrack = fmt.Sprintf("%d %%", *n.Conntrack)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", n.Name, yes(n.Ready), when(now, n.Heartbeat), n.Proxy, yes(n.InSync), when(now, n.LastSync), yes(n.DNS), n.Pods, conntrack)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	p.line("")
	if len(s.Findings) == 0 {
		p.line("Nothing is wrong.")
	} else {
		p.line("%s; portal explain has the evidence and what to type:", count(len(s.Findings), "finding", "findings"))
	}
	const most = 10
	for _, f := range s.Findings[:min(most, len(s.Findings))] {
		p.line("  %-8s  %s", f.Severity, f.Verdict)
	}
	if more := len(s.Findings) - most; more > 0 {
		p.line("  and %d more", more)
	}
	for _, u := range s.Unseen {
		p.line("could not see %s", u)
	}
	return p.err
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func when(now time.Time, t *time.Time) string {
	if t == nil {
		return "-"
	}
	return ago(now.Sub(*t)) + " ago"
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}
