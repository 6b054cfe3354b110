package live

import (
	"fmt"
	"slices"

	"portal/internal/intent"
	"portal/internal/trace"
)

// Compare notes in what the result differs from what was worked out. relays: the node's proxy carries connections itself, and the kernel
// does not know their endpoints.
func (r *Result) Compare(plan *trace.Report, p intent.Protocol, relays bool) {
	differ := func(format string, args ...any) { r.Differences = append(r.Differences, fmt.Sprintf(format, args...)) }
	got := map[Outcome]string{
		Connected: "was answered", Sent: "was sent, and nothing came back", Refused: "was refused", NoAnswer: "was not answered", Unreachable: "found no way",
	}[r.Outcome]
	switch plan.Verdict {
	case trace.Arrives, trace.Leaves:
		switch {
		case r.Outcome == Unreachable, r.Outcome == NoAnswer && plan.Verdict == trace.Arrives:
			differ("the packet should arrive, but %s", got)
		case r.Outcome == Refused && !r.led(plan):
			differ("the packet should arrive, but %s, and not by an endpoint: conntrack knows nothing of it", got)
		case r.Outcome == Refused:
			differ("the packet arrives, but %s there: nobody listens", got)
		}
	case trace.Rejected:
		if r.Outcome != Refused && !(p == intent.UDP && r.Outcome == Sent && !r.Endpoint.IsValid()) {
			differ("the packet should be rejected, but %s", got)
		}
	default:
		if r.Outcome == Connected || r.Outcome == Refused {
			differ("the packet should not be answered (%s), but %s", plan.Verdict, got)
		}
	}
	switch {
	case r.missed(plan):
		differ("node %s saw nothing of the packet, which %s: it came in at another one (--via NODE says at which)", plan.Node, got)
	case r.Looked && r.Endpoint.IsValid() && !relays && len(plan.Ends) > 0:
		r.compareEnd(plan, differ)
	}
}

// missed says whether the packet did not come to the node that was looked at, though it should have met the Service there. What comes from
// another node may have that one's address by then, and is not recognised.
func (r *Result) missed(plan *trace.Report) bool {
	for _, s := range plan.Steps {
		if s.Node == plan.Node {
			break
		}
		if s.Node != "" {
			return false
		}
	}
	reached := plan.Verdict == trace.Arrives && (r.Outcome == Connected || r.Outcome == Sent)
	return r.Looked && reached && plan.Service != "" && !r.Endpoint.IsValid() && len(r.Rules) == 0
}

// led says whether the kernel sent the packet on to where it should arrive.
func (r *Result) led(plan *trace.Report) bool {
	return !r.Looked || plan.Service == "" || r.Endpoint.IsValid()
}

func (r *Result) compareEnd(plan *trace.Report, differ func(string, ...any)) {
	// What goes on through another node shows here as that node's port.
	if plan.Service == "" && r.Endpoint == plan.Target {
		return
	}
	at := slices.IndexFunc(plan.Ends, func(e trace.End) bool { return e.Address == r.Endpoint })
	if at < 0 {
		if r.Endpoint == plan.Target {
			differ("the kernel of node %s does not know the Service: it left the destination as it was", plan.Node)
			return
		}
		differ("the kernel of node %s sent it to %s, which is none of the endpoints", plan.Node, r.Endpoint)
		return
	}
	end := plan.Ends[at]
	rewritten := r.Seen.Addr() != r.Source.Addr()
	own := end.SourceNode == plan.Node || !end.Masqueraded // else another node rewrites it
	if own && end.Masqueraded != rewritten && !(end.Masqueraded && r.Source.Addr() == plan.Source && plan.Source == r.Seen.Addr() && nodeSends(plan)) {
		if rewritten {
			differ("the source became %s, and should stay", r.Seen.Addr())
		} else {
			differ("the source stayed %s, and should become an address of node %s", r.Seen.Addr(), end.SourceNode)
		}
	}
}

// nodeSends says whether the sender is the node itself: rewriting its source to its own address changes nothing.
func nodeSends(plan *trace.Report) bool { return plan.From == "node "+plan.Node }
