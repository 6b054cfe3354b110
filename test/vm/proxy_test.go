//go:build vm

package vm_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/vm"
)

// compiled builds the tests of a package into a program, and returns where the guest finds it.
func compiled(t *testing.T, pkg string) string {
	t.Helper()
	dir, err := filepath.Abs(vm.Dir())
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, filepath.Base(pkg)+".test")
	cmd := exec.Command("go", "test", "-c", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the tests of %s: %v\n%s", pkg, err, text)
	}
	return vm.Host + out
}

// TestIPVS runs the suite of all modes, SCTP included.
func TestIPVS(t *testing.T) {
	inside(t, run{"portal/internal/proxy/ipvs", "^(TestSuite|TestScale)$"})
}

// TestSCTP runs that part of the suite in the modes whose other parts run everywhere.
func TestSCTP(t *testing.T) {
	inside(t, run{"portal/internal/proxy/nftables", "^TestSuite$/^sctp$"}, run{"portal/internal/proxy/iptables", "^TestSuite$/.*/^sctp$"})
}

// run is the tests of a package that match.
type run struct{ pkg, tests string }

// inside runs tests in the guest; that they were skipped there is a failure.
func inside(t *testing.T, list ...run) {
	t.Helper()
	var script strings.Builder
	fmt.Fprintln(&script, "set -e\nexport PORTAL_VM=1")
	for _, r := range list {
		fmt.Fprintf(&script, "%s -test.v -test.count=1 -test.run '%s'\n", compiled(t, r.pkg), r.tests)
	}
	r := vm.Run(t, vm.Spec{Command: script.String(), Timeout: 8 * time.Minute})
	if r.Exit != 0 || strings.Contains(r.Output, "--- SKIP") || strings.Count(r.Output, "\nPASS\n") != len(list) {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
}
