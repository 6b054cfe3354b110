package vm_test

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	// What is tested inside: a change of it makes the last result old.
	_ "portal/internal/proxy/backend/backendtest"
	_ "portal/internal/proxy/foreign"
	_ "portal/internal/proxy/iptables"
	_ "portal/internal/proxy/ipvs"
	_ "portal/internal/proxy/nftables"

	"portal/test/vm"
)

var long = flag.Bool("vm.long", false, "as many rounds of everything as on a machine that isn't emulated")

// compiled builds the tests of a mode into a program, and returns where the guest finds it.
func compiled(t *testing.T, mode string) string {
	t.Helper()
	// Read so that `go test` sees when a test there has changed.
	if _, err := os.ReadDir("../../internal/proxy/" + mode); err != nil {
		t.Fatal(err)
	}
	return built(t, mode, "portal/internal/proxy/"+mode)
}

// built builds the tests of a package into a program, and returns where the guest finds it.
func built(t *testing.T, name, pkg string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(vm.Dir()) // a link may lead out of what the guest sees
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, name+".test")
	cmd := exec.Command("go", "test", "-c", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the tests of %s: %v\n%s", pkg, err, text)
	}
	return vm.Host + out
}

// TestIPVS runs the suite of all modes, SCTP included, and connections through every scheduler.
func TestIPVS(t *testing.T) {
	inside(t, run{"ipvs", "^(TestSuite|TestSchedulers)$"})
}

// TestForeignIPVS removes what kube-proxy's IPVS mode left.
func TestForeignIPVS(t *testing.T) {
	inside(t, run{"foreign", "^TestServers$"})
}

// TestSCTP runs that part of the suite in the modes whose other parts run everywhere.
func TestSCTP(t *testing.T) {
	inside(t, run{"nftables", "^TestSuite$/^sctp$"}, run{"iptables", "^TestSuite$/.*/^sctp$"})
}

// run is the tests of a mode that match.
type run struct{ mode, tests string }

// inside runs tests in the guest; that they were skipped there is a failure.
func inside(t *testing.T, list ...run) {
	t.Helper()
	vm.Need(t)
	rounds := "brief"
	if *long {
		rounds = "long"
	}
	var script strings.Builder
	fmt.Fprintf(&script, "set -e\nexport PORTAL_VM=%s\n", rounds)
	for _, r := range list {
		fmt.Fprintf(&script, "%s -test.v -test.count=1 -test.run '%s'\n", compiled(t, r.mode), r.tests)
	}
	r := vm.Run(t, vm.Spec{Command: script.String(), Timeout: 20 * time.Minute})
	if r.Exit != 0 || strings.Contains(r.Output, "--- SKIP") || strings.Count(r.Output, "\nPASS\n") != len(list) {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
}
