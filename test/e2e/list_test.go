package e2e

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of README.md")

const begin, end = "<!-- from tests.txt -->\n", "<!-- end -->\n"

// TestReadme demands that README.md says what is done with each test.
func TestReadme(t *testing.T) {
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	counts := fmt.Sprintf("Of the %d tests, %d pass without nodes and %d in a lab; not yet passing: %d, skipped: %d.\n\n",
		len(all), len(only(all, run)), len(only(all, lab)), len(only(all, later)), len(only(all, skip)))
	want := counts + table(all)

	data, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(data), begin)
	got, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("README.md has no place for the table, between %q and %q", begin, end)
	}
	if *update {
		if err := os.WriteFile("README.md", []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got != want {
		t.Errorf("the table of README.md is not that of tests.txt: run `go test ./test/e2e -run Readme -update`")
	}
}

func TestListIsRead(t *testing.T) {
	defer func(before string) { list = before }(list)
	for name, broken := range map[string]string{
		"twice":             "run   a\nrun   a\n",
		"no reason":         "skip  a\n",
		"a reason to run":   "run   a\n      # why\n",
		"no known fate":     "maybe a\n",
		"a reason for none": "      # why\n",
		"no known mode":     "lab   a\n      # not ipvs: why\n",
		"a mode of none":    "run   a\n      # not iptables: why\n",
		"no number":         "lab   a\n      # nodes: many\n",
		"nobody announces":  "lab   a [Feature:LoadBalancer]\n      # not l2: why\n      # not bgp: why\n",
		"no balancer":       "lab   a\n      # not l2: why\n",
		"nodes of none":     "run   a\n      # nodes: 6\n",
	} {
		list = broken
		if all, err := tests(); err == nil {
			t.Errorf("%s: no error, but %v", name, all)
		}
	}
	list = "# comment\n\nrun   a\nlater b\n      # needs c\nlab   [sig-network] d\n      # not userspace: why\nlab   [sig-apps] e\n      # nodes: 6\n"
	all, err := tests()
	want := []test{
		{name: "a", fate: run}, {name: "b", fate: later, why: "needs c"},
		{name: "[sig-network] d", fate: lab, except: map[string]string{"userspace": "why"}}, {name: "[sig-apps] e", fate: lab, nodes: 6},
	}
	if err != nil || !reflect.DeepEqual(all, want) {
		t.Errorf("read %v, %v", all, err)
	}
	for mode, names := range map[string]int{"nftables": 2, "iptables": 1, "userspace": 0} {
		if got := inMode(all, mode); len(got) != names {
			t.Errorf("in the mode %s run %v", mode, got)
		}
	}
}
