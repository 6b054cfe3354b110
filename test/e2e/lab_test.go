//go:build e2e

package e2e

import (
	"cmp"
	"flag"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	pattern     = flag.String("e2e.only", "", "a regular expression: run only the tests whose names match")
	chosenModes = flag.String("e2e.modes", strings.Join(modes, ","), "modes of the proxy to run with, in turn")
	chosenWays  = flag.String("e2e.announce", strings.Join(announcements, ","), "ways to announce load balancers' addresses to run their tests with, in turn")
	tryAll      = flag.Bool("e2e.try", false, "run what -e2e.only matches whatever tests.txt says, to see whether it passes")
)

// TestLab runs every test that starts Pods in a lab, with each mode of the proxy, each test in a process of its own.
func TestLab(t *testing.T) {
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range strings.Split(*chosenModes, ",") {
		if !slices.Contains(modes, mode) {
			t.Fatalf("-e2e.modes: %q is none of %v", mode, modes)
		}
		t.Run(mode, func(t *testing.T) {
			from := inMode(all, mode)
			if *tryAll {
				from = all
			}
			wanted := map[laboratory][]test{}
			for _, one := range choose(t, from) {
				for _, way := range one.announced() {
					if !slices.Contains(strings.Split(*chosenWays, ","), way) {
						continue
					}
					at := laboratory{mode, way, one.size()}
					wanted[at] = append(wanted[at], one)
				}
			}
			for _, at := range slices.SortedFunc(maps.Keys(wanted), func(x, y laboratory) int {
				return cmp.Or(x.nodes-y.nodes, slices.Index(announcements, x.announce)-slices.Index(announcements, y.announce))
			}) {
				at.run(t, wanted[at])
			}
		})
	}
}

// choose is the tests whose names match -e2e.only.
func choose(t *testing.T, from []test) []test {
	t.Helper()
	chosen, err := regexp.Compile(*pattern)
	if err != nil {
		t.Fatalf("-e2e.only: %v", err)
	}
	wanted := slices.DeleteFunc(slices.Clone(from), func(one test) bool { return !chosen.MatchString(one.name) })
	if len(wanted) == 0 {
		t.Fatalf("-e2e.only: no test that runs matches %q", *pattern)
	}
	return wanted
}
