package trace

import "net/netip"

// Verdict is how a packet's way ends.
type Verdict string

const (
	// Arrives: at an endpoint, a Pod, or a node itself.
	Arrives Verdict = "arrives"
	// Leaves: it goes on to an address outside of the cluster.
	Leaves Verdict = "leaves"
	// Rejected: the sender gets an answer that nobody is there.
	Rejected Verdict = "rejected"
	// Dropped: a node loses it on purpose; the sender hears nothing.
	Dropped Verdict = "dropped"
	// Lost: no node does anything with it, and it leads nowhere.
	Lost Verdict = "lost"
	// Unresolved: the name has no address.
	Unresolved Verdict = "unresolved"
)

// Good says whether nothing stops the packet.
func (v Verdict) Good() bool { return v == Arrives || v == Leaves }

// Report is a packet's way.
type Report struct {
	From     string         `json:"from"`
	To       string         `json:"to"`
	Source   netip.Addr     `json:"source,omitzero"`
	Target   netip.AddrPort `json:"target,omitzero"`
	Protocol string         `json:"protocol"`
	// Mode is the proxy's that was assumed.
	Mode    string  `json:"proxyMode"`
	Verdict Verdict `json:"verdict"`
	// Reason is one sentence.
	Reason string `json:"reason"`
	// Service is the one whose frontend the packet met, as NAMESPACE/NAME.
	Service string `json:"service,omitempty"`
	// Node is the one that decides: where the packet meets the frontend, or else the last that has it.
	Node  string `json:"node,omitempty"`
	Steps []Step `json:"steps"`
	// Ends are where it may arrive; the odds add up to 1.
	Ends []End `json:"ends,omitempty"`
	// Assumptions are what objects don't say and was taken for granted.
	Assumptions []string `json:"assumptions,omitempty"`
}

// Step is one thing that happens on the way.
type Step struct {
	// Node is where it happens; empty: on no node.
	Node string `json:"node,omitempty"`
	// Kind is one of dns, frontend, origin, ranges, policy, pool, affinity, rewrite, route, end.
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// End is a place where a packet may arrive.
type End struct {
	Address netip.AddrPort `json:"address"`
	// Pod is NAMESPACE/NAME; empty: it is none's.
	Pod  string  `json:"pod,omitempty"`
	Node string  `json:"node,omitempty"`
	Odds float64 `json:"odds"`
	// Masqueraded: it sees the address of the node SourceNode instead of the sender's.
	Masqueraded bool   `json:"masqueraded,omitempty"`
	SourceNode  string `json:"sourceNode,omitempty"`
}

func (r *Report) assume(text string) {
	for _, a := range r.Assumptions {
		if a == text {
			return
		}
	}
	r.Assumptions = append(r.Assumptions, text)
}
