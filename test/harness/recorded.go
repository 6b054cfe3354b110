package harness

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Failure is a recorded case whose answer differs.
type Failure struct {
	Name  string
	Lines []string
}

var sum = regexp.MustCompile(`^(\d+) passed, \d+ failed$`)

// Failures reads a checker's report: FAIL and a name, what differs below it, and the sum at the end.
func Failures(report string) (out []Failure, passed int) {
	for line := range strings.Lines(report) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "FAIL "):
			out = append(out, Failure{Name: strings.TrimPrefix(line, "FAIL ")})
		case strings.HasPrefix(line, "     ") && len(out) > 0:
			last := &out[len(out)-1]
			last.Lines = append(last.Lines, strings.TrimSpace(line))
		case sum.MatchString(line):
			passed, _ = strconv.Atoi(sum.FindStringSubmatch(line)[1])
		}
	}
	return out, passed
}

// Probes reads the report of the data plane lab. The probes in otherwise, by scenario and number, may end otherwise than
// recorded, for the reason given there.
func Probes(t testing.TB, report string, otherwise map[string]string) (passed int, ok bool) {
	t.Helper()
	failed, passed := Failures(report)
	ok = passed > 0
	for _, f := range failed {
		probe := strings.Join(strings.Fields(f.Name)[:2], " ")
		if why := otherwise[probe]; why != "" {
			t.Logf("%s: differs from kube-proxy: %s", f.Name, why)
			continue
		}
		ok = false
		t.Errorf("%s\n  %s", f.Name, strings.Join(f.Lines, "\n  "))
	}
	return passed, ok
}
