//go:build vm

package vm_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
	"portal/test/vm"
)

var kills = flag.Int("vm.kills", 100, "how often the proxy is killed under load")

// TestRestarts kills and starts the proxy in nftables mode under load on the kernel that Debian ships: before Linux 6.17 a
// look-up that meets a commit half-way can miss an element that is rewritten, so a restart must not rewrite what is right.
func TestRestarts(t *testing.T) {
	vm.Need(t)
	program := built(t, "test", "portal/test")
	r := vm.Run(t, vm.Spec{Timeout: 40 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
set -e
cp %s /tmp/portal
uname -r
PORTAL_VM=brief PORTAL_BINARY=/tmp/portal %s -test.v -test.count=1 -test.timeout 35m -test.run '^TestFaultsKill$/^nftables$' -faults.kills=%d
`, vm.Host+harness.Portal(), program, *kills)})
	if r.Exit != 0 || !strings.Contains(r.Output, "--- PASS: TestFaultsKill/nftables") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
}
