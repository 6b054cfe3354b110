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

var pairs = flag.Int("vm.pairs", 100, "how many pairs of source and destination are traced and tried with IPVS")

// TestTrace compares portal trace with packets in a lab whose proxies use IPVS; other modes' labs need no virtual machine (make test-trace).
func TestTrace(t *testing.T) {
	vm.Need(t)
	program := built(t, "test", "portal/test")
	r := vm.Run(t, vm.Spec{Timeout: 40 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cp %s /tmp/portal
uname -r
PORTAL_VM=brief PORTAL_BINARY=/tmp/portal %s -test.v -test.count=1 -test.timeout 35m -test.run '^TestTrace$' -trace.modes=ipvs -trace.pairs=%d
`, vm.Host+harness.Portal(), program, *pairs)})
	if r.Exit != 0 || !strings.Contains(r.Output, "--- PASS: TestTrace/ipvs") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
}
