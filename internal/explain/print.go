package explain

import (
	"fmt"
	"io"
	"strings"
)

// Print writes an answer for people: the verdict, then the evidence, then what to type. What is fine is written only if all is wanted.
func Print(w io.Writer, a Answer, all bool) error {
	p := &printer{w: w}
	p.line("%s", a.Verdict)
	for i := range a.Findings {
		f := &a.Findings[i]
		if i > 0 {
			p.line("")
			p.line("%s", f.Verdict)
		}
		p.finding(f, all)
	}
	if all && len(a.Facts) > 0 {
		p.line("")
		p.line("As it should be:")
		for _, fact := range a.Facts {
			p.line("  %s", fact)
		}
	}
	if len(a.Unseen) > 0 {
		p.line("")
		p.line("Could not see:")
		for _, u := range a.Unseen {
			p.line("  %s", u)
		}
	}
	return p.err
}

type printer struct {
	w   io.Writer
	err error
}

func (p *printer) line(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, strings.TrimRight(format, " ")+"\n", args...)
	}
}

func (p *printer) finding(f *Finding, all bool) {
	p.line("  %s, %s [%s]", f.Severity, f.Sure, f.Code)
	where := f.Object.String()
	if f.Field != "" {
		where += ", " + f.Field
	}
	if f.Node != "" && f.Object.Kind != "Node" {
		where += ", on node " + f.Node
	}
	p.line("  where: %s", where)
	if f.Since != nil {
		p.line("  since: %s", f.Since.UTC().Format("2006-01-02 15:04:05 MST"))
	}
	for _, e := range f.Evidence {
		p.line("  seen:  %s", e)
	}
	if len(f.Explains) > 0 && all {
		p.line("  explains: %s", strings.Join(f.Explains, ", "))
	}
	where = "type: "
	if f.On != "" {
		where = "type on node " + f.On + ": "
	}
	for _, fix := range f.Fix {
		p.line("  %s %s", where, fix)
	}
}
