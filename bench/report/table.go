package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// row is a line of a table: one figure of every subject, ratios, and what was promised about it.
type row struct {
	cells []string
	// missed marks a row with a target that was not met.
	missed bool
}

// places are those of the report, in the order in which they came up.
func (r *Report) places() []Place {
	var out []Place
	for _, m := range r.Measures {
		if !slices.Contains(out, m.Place) {
			out = append(out, m.Place)
		}
	}
	for _, t := range r.Targets {
		if !slices.Contains(out, t.Place) {
			out = append(out, t.Place)
		}
	}
	return out
}

// table returns a place's header and rows.
func (r *Report) table(p Place) (header []string, rows []row) {
	peers, own := r.present(p, r.Peers), r.present(p, r.Own)
	var names []string
	units := map[string]string{}
	for _, m := range r.Measures {
		if m.Place == p && !slices.Contains(names, m.Name) {
			names = append(names, m.Name)
			units[m.Name] = m.Unit
		}
	}
	for _, t := range r.Targets {
		if t.Place == p && !slices.Contains(names, t.Name) {
			names = append(names, t.Name)
		}
	}
	header = append([]string{""}, slices.Concat(peers, own)...)
	for _, o := range own {
		for _, peer := range peers {
			header = append(header, ratioTitle(o, peer, len(own)))
		}
	}
	header = append(header, "target")
	for _, name := range names {
		rows = append(rows, r.row(p, name, units[name], peers, own))
	}
	return header, rows
}

// ratioTitle names both sides only where it must.
func ratioTitle(own, peer string, owns int) string {
	if owns == 1 {
		return "vs " + peer
	}
	return own + " vs " + peer
}

func (r *Report) row(p Place, name, u string, peers, own []string) row {
	out := row{cells: []string{name}}
	if u != "" {
		out.cells[0] += ", " + u
	}
	for _, subject := range slices.Concat(peers, own) {
		cell := ""
		if m, ok := r.Find(p, name, subject); ok {
			cell = number(m.Value)
		}
		out.cells = append(out.cells, cell)
	}
	for _, o := range own {
		for _, peer := range peers {
			cell := ""
			if ratio, ok := r.Ratio(p, name, o, peer); ok {
				cell = number(ratio) + "×"
			}
			out.cells = append(out.cells, cell)
		}
	}
	var targets []string
	for _, t := range r.Targets {
		if t.Place != p || t.Name != name {
			continue
		}
		text := t.Text + ": " + t.verdict()
		if len(own) > 1 {
			text = t.Subject + " " + text
		}
		targets = append(targets, text)
		out.missed = out.missed || !t.Met
	}
	out.cells = append(out.cells, strings.Join(targets, "; "))
	return out
}

func (t Target) verdict() string {
	switch {
	case t.Met:
		return "met"
	case t.Missing:
		return "MISSED (not measured)"
	}
	return "MISSED"
}

// present keeps those subjects that have a figure at a place.
func (r *Report) present(p Place, subjects []string) []string {
	var out []string
	for _, s := range subjects {
		if slices.ContainsFunc(r.Measures, func(m Measure) bool { return m.Place == p && m.Subject == s }) {
			out = append(out, s)
		}
	}
	return out
}

// WriteTable prints a table for each place, and what was missed.
func (r *Report) WriteTable(out io.Writer) {
	fmt.Fprintf(out, "\n%s (ratios: how many times better than the peer; below 1 it is worse)\n", r.Title)
	for _, p := range r.places() {
		header, rows := r.table(p)
		header[0] = p.String()
		widths := make([]int, len(header))
		for _, cells := range append([][]string{header}, cellsOf(rows)...) {
			for i, c := range cells {
				widths[i] = max(widths[i], utf8.RuneCountInString(c))
			}
		}
		fmt.Fprintln(out)
		for _, cells := range append([][]string{header}, cellsOf(rows)...) {
			fmt.Fprintln(out, align(cells, widths))
		}
	}
	fmt.Fprintln(out)
	for _, note := range r.Notes {
		fmt.Fprintf(out, "Note: %s\n", note)
	}
	missed := 0
	for _, t := range r.Targets {
		if !t.Met {
			missed++
			fmt.Fprintln(out, "MISSED:", t)
		}
	}
	if missed == 0 && len(r.Targets) > 0 {
		fmt.Fprintf(out, "All %d targets met.\n", len(r.Targets))
	}
}

// String is a target with what became of it.
func (t Target) String() string {
	got := number(t.Got)
	switch {
	case t.Missing:
		got = "not measured"
	case t.Peer != "":
		got += "×"
	}
	return fmt.Sprintf("%s: %s of %s is %s, wanted %s", t.Place, t.Name, t.Subject, got, t.Text)
}

func cellsOf(rows []row) [][]string {
	var out [][]string
	for _, r := range rows {
		out = append(out, r.cells)
	}
	return out
}

// align puts the first and the last cell left and the others right.
func align(cells []string, widths []int) string {
	var b strings.Builder
	for i, c := range cells {
		space := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
		switch i {
		case 0:
			b.WriteString(c + space)
		case len(cells) - 1:
			b.WriteString("  " + c)
		default:
			b.WriteString("  " + space + c)
		}
	}
	return strings.TrimRight(b.String(), " ")
}

// WriteMarkdown writes the report as a section of a page.
func (r *Report) WriteMarkdown(out io.Writer) {
	fmt.Fprintf(out, "## %s\n\n", r.Title)
	fmt.Fprintf(out, "`%s`, %s, %s long, commit %s, on %s.\n\n", r.Command, r.Started.UTC().Format("2006-01-02 15:04 UTC"),
		r.Took.Round(1e9), r.Commit, r.Machine)
	var names []string
	for name := range r.Versions {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		names[i] = fmt.Sprintf("%s: %s", name, r.Versions[name])
	}
	if len(names) > 0 {
		fmt.Fprintf(out, "Versions: %s.\n\n", strings.Join(names, "; "))
	}
	for _, note := range r.Notes {
		fmt.Fprintf(out, "- %s\n", note)
	}
	if len(r.Notes) > 0 {
		fmt.Fprintln(out)
	}
	for _, p := range r.places() {
		header, rows := r.table(p)
		fmt.Fprintf(out, "### %s\n\n", p)
		header[0] = "measure"
		fmt.Fprintln(out, "| "+strings.Join(header, " | ")+" |")
		fmt.Fprintln(out, "|---|"+strings.Repeat("---:|", len(header)-2)+"---|")
		for _, row := range rows {
			fmt.Fprintln(out, "| "+strings.Join(row.cells, " | ")+" |")
		}
		fmt.Fprintln(out)
	}
}

// number has three significant digits at most, but never fewer than the whole part has.
func number(v float64) string {
	switch a := math.Abs(v); {
	case v == math.Trunc(v) && a < 1e4:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 1e4:
		return thousands(int(math.Round(v)))
	case a >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 0.1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'g', 2, 64)
}

// thousands puts a comma before every third digit.
func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func unit(u string) string {
	if u == "" || u == "×" {
		return u
	}
	return " " + u
}
