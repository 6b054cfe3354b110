package explain

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// kubectl is a command as a person would type it.
func kubectl(namespace, format string, args ...any) string {
	out := "kubectl " + fmt.Sprintf(format, args...)
	if namespace != "" {
		out += " -n " + namespace
	}
	return out
}

// mergePatch is the command that changes fields of an object.
func mergePatch(r Ref, patch any) string {
	return kubectl(r.Namespace, "patch %s %s --type=merge -p '%s'", strings.ToLower(r.Kind), r.Name, compact(patch))
}

type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// jsonPatch is the command that changes elements of lists.
func jsonPatch(r Ref, ops ...operation) string {
	return kubectl(r.Namespace, "patch %s %s --type=json -p '%s'", strings.ToLower(r.Kind), r.Name, compact(ops))
}

// compact is a value in JSON, for a shell.
func compact(value any) string {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(value); err != nil {
		return "{}"
	}
	// It stands between apostrophes.
	return strings.ReplaceAll(strings.TrimSpace(out.String()), "'", `\u0027`)
}

// pairs writes labels as kubectl does.
func pairs(labels map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, ",")
}

func count(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}

// some lists a few names of many.
func some(names []string) string {
	const most = 5
	if len(names) > most {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", len(names)-most)
	}
	return strings.Join(names, ", ")
}

// ago is how long something has been so.
func ago(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// near says whether one text could be a typo of the other: one edit for short ones, two for those of six characters and more. Two
// neighbours that changed places are one edit.
func near(a, b string) bool {
	if a == b || a == "" || b == "" {
		return false
	}
	limit := 1
	if min(len(a), len(b)) >= 6 {
		limit = 2
	}
	if d := len(a) - len(b); d > limit || d < -limit {
		return false
	}
	return strings.EqualFold(a, b) || !farApart(a, b, limit) && edits(a, b) <= limit
}

// farApart says for many texts at a glance that they are not near: each edit changes the number of at most two characters.
func farApart(a, b string, limit int) bool {
	var counts [32]int8
	for i := range len(a) {
		counts[a[i]&31]++
	}
	for i := range len(b) {
		counts[b[i]&31]--
	}
	n := 0
	for _, c := range counts {
		n += int(max(c, -c))
	}
	return n > 2*limit
}

// edits is the number of insertions, deletions, replacements and swaps of neighbours that make one text of the other.
func edits(a, b string) int {
	const longest = 63 // of a label's value
	if d := len(a) - len(b); d > 2 || d < -2 || len(b) > longest {
		return 3 // more than anybody asks for
	}
	var rows [3][longest + 1]int
	before, last, next := &rows[0], &rows[1], &rows[2]
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		next[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			next[j] = min(last[j]+1, next[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				next[j] = min(next[j], before[j-2]+1)
			}
		}
		before, last, next = last, next, before
	}
	return last[len(b)]
}

func since(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
