package trace

import (
	"fmt"
	"io"
	"strings"
)

// Print writes a packet's way for people: first how it ends, then how it comes there.
func (r *Report) Print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\n", strings.ToUpper(string(r.Verdict)), r.Reason)
	fmt.Fprintf(&b, "  %-9s %s", "from", r.From)
	if r.Source.IsValid() {
		fmt.Fprintf(&b, ", %s", r.Source)
	}
	fmt.Fprintf(&b, "\n  %-9s %s", "to", r.To)
	if !strings.Contains(r.To, "/") {
		fmt.Fprintf(&b, "/%s", r.Protocol)
	}
	b.WriteByte('\n')
	node := ""
	for _, s := range r.Steps {
		if s.Kind == "end" {
			continue // the first line has said it
		}
		if s.Node != node && s.Node != "" {
			fmt.Fprintf(&b, "on node %s\n", s.Node)
		}
		node = s.Node
		fmt.Fprintf(&b, "  %-9s %s\n", s.Kind, s.Text)
	}
	if len(r.Ends) > 0 {
		b.WriteString("arrives at\n")
	}
	for i, e := range r.Ends {
		if i == 20 && len(r.Ends) > 25 {
			fmt.Fprintf(&b, "  and %d more (-o json shows all)\n", len(r.Ends)-i)
			break
		}
		fmt.Fprintf(&b, "  %-9s %s\n", e.Percent(), e)
	}
	if len(r.Assumptions) > 0 {
		b.WriteString("assumed\n")
	}
	for _, a := range r.Assumptions {
		fmt.Fprintf(&b, "  %s\n", a)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Percent is how likely the end is.
func (e End) Percent() string { return fmt.Sprintf("%.4g %%", 100*e.Odds) }

// String says where it is, and whom it sees.
func (e End) String() string {
	who := "outside of the cluster"
	switch {
	case e.Pod != "":
		who = fmt.Sprintf("Pod %s on node %s", e.Pod, e.Node)
	case e.Node != "":
		who = "node " + e.Node
	}
	sees := "sees the sender's address"
	if e.Masqueraded {
		sees = "sees an address of node " + e.SourceNode
	}
	return fmt.Sprintf("%s, %s, %s", e.Address, who, sees)
}
