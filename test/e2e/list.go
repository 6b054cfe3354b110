// Package e2e runs Kubernetes' own end-to-end tests against Portal: `make test-e2e-api` and `make test-e2e`. It knows which of them apply
// (tests.txt, of which README.md has a table) and nothing of what they do.
package e2e

import (
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// fate is what is done with a test.
type fate string

const (
	run   fate = "run"   // it starts no container, and must pass
	lab   fate = "lab"   // it starts Pods on the nodes of a lab, and must pass
	later fate = "later" // it does not pass yet
	skip  fate = "skip"  // it is about something that is not Portal's, or that the machine has not
)

var fates = []fate{run, lab, later, skip}

// test is a test of Kubernetes.
type test struct {
	name string
	fate fate
	why  string // it does not run
	// except has the modes of the proxy, and the ways to announce addresses, with which it does not run, and why.
	except map[string]string
	// nodes is how many nodes the lab must have; 0: three.
	nodes int
}

// labNodes is how many nodes a lab has unless a test needs more.
const labNodes = 3

// size is how many nodes the test needs.
func (t *test) size() int { return max(t.nodes, labNodes) }

// outside says whether the test is a client of load balancers, which is outside of the nodes' network.
func (t *test) outside() bool { return strings.Contains(t.name, "[Feature:LoadBalancer]") }

//go:embed tests.txt
var list string

// tests reads the list.
func tests() ([]test, error) {
	var out []test
	known := map[string]bool{}
	number := 0
	for line := range strings.Lines(list) {
		number++
		line = strings.TrimRight(line, "\n")
		word, rest, _ := strings.Cut(line, " ")
		rest = strings.TrimSpace(rest)
		switch {
		case strings.HasPrefix(line, "#") || line == "":
		case word == "" && strings.HasPrefix(rest, "# not ") && len(out) > 0:
			mode, why, found := strings.Cut(strings.TrimPrefix(rest, "# not "), ": ")
			if !found || !slices.Contains(modes, mode) && !slices.Contains(announcements, mode) {
				return nil, fmt.Errorf("tests.txt:%d: want a mode or a way to announce addresses and a reason, as in `# not userspace: why`: %q", number, line)
			}
			last := &out[len(out)-1]
			if last.except == nil {
				last.except = map[string]string{}
			}
			last.except[mode] = why
		case word == "" && strings.HasPrefix(rest, "# nodes: ") && len(out) > 0:
			nodes, err := strconv.Atoi(strings.TrimPrefix(rest, "# nodes: "))
			if err != nil {
				return nil, fmt.Errorf("tests.txt:%d: want a number of nodes: %q", number, line)
			}
			out[len(out)-1].nodes = nodes
		case word == "" && strings.HasPrefix(rest, "# ") && len(out) > 0:
			out[len(out)-1].why = strings.TrimPrefix(rest, "# ")
		case slices.Contains(fates, fate(word)):
			if known[rest] {
				return nil, fmt.Errorf("tests.txt:%d: %q is there twice", number, rest)
			}
			known[rest] = true
			out = append(out, test{name: rest, fate: fate(word)})
		default:
			return nil, fmt.Errorf("tests.txt:%d: want run, lab, later or skip and a test, or a reason behind #: %q", number, line)
		}
	}
	for _, one := range out {
		if runs := one.fate == run || one.fate == lab; (one.why == "") != runs {
			return nil, fmt.Errorf("tests.txt: %q: what does not run, and only that, has a reason", one.name)
		}
		if (one.except != nil || one.nodes != 0) && one.fate != lab {
			return nil, fmt.Errorf("tests.txt: %q: only what runs in a lab has a number of nodes, and modes in which it does not", one.name)
		}
		for _, way := range announcements {
			if one.except[way] != "" && (!one.outside() || len(one.announced()) == 0) {
				return nil, fmt.Errorf("tests.txt: %q: a test of load balancers, and no other, runs with one way to announce addresses at least", one.name)
			}
		}
	}
	return out, nil
}

// modes are those of the nodes' proxies that the tests run with, in turn.
var modes = []string{"nftables", "iptables", "userspace"}

// announcements are the ways in which nodes of a lab announce the addresses of load balancers. Tests that are about these run with each, the others in
// the first lab that there is.
var announcements = []string{"l2", "bgp"}

// announced are the ways to announce addresses that the test runs with.
func (t *test) announced() []string {
	if !t.outside() {
		return announcements[:1]
	}
	return slices.DeleteFunc(slices.Clone(announcements), func(way string) bool { return t.except[way] != "" })
}

// only is the tests with a fate.
func only(all []test, wanted fate) []test {
	var out []test
	for _, one := range all {
		if one.fate == wanted {
			out = append(out, one)
		}
	}
	return out
}

// inMode is the tests that run in a mode: all in the first, then those about the network.
func inMode(all []test, mode string) []test {
	var out []test
	for _, one := range only(all, lab) {
		if _, excepted := one.except[mode]; !excepted && (mode == modes[0] || strings.HasPrefix(one.name, "[sig-network]")) {
			out = append(out, one)
		}
	}
	return out
}

// table is the list as README.md shows it.
func table(all []test) string {
	var b strings.Builder
	b.WriteString("| test | |\n|---|---|\n")
	for _, one := range all {
		name := strings.NewReplacer("|", `\|`, "<", "&lt;", ">", "&gt;", "[", `\[`, "]", `\]`).Replace(one.name)
		var result string
		switch one.fate {
		case run:
			result = "passes"
		case lab:
			result = "passes in a lab"
			if one.nodes != 0 {
				result += fmt.Sprintf(" of %d nodes", one.nodes)
			}
			for _, mode := range modes {
				if why := one.except[mode]; why != "" {
					result += "; not in the mode " + mode + ": " + why
				}
			}
			for _, way := range announcements {
				if why := one.except[way]; why != "" {
					result += "; not where addresses are announced by " + way + ": " + why
				}
			}
		case later:
			result = "does not pass yet: " + one.why
		case skip:
			result = "skipped: " + one.why
		}
		fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(strings.Fields(name), " "), result)
	}
	return b.String()
}
