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

var (
	pairs = flag.Int("vm.pairs", 100, "how many pairs of source and destination are traced and tried with IPVS")
	seed  = flag.Uint64("vm.seed", 1, "the seed by which pairs are chosen")
)

// TestTrace compares portal trace with packets in a lab whose proxies use IPVS; labs of other modes need no other kernel. The programs are copied
// first: a page of a file of the host costs the user-mode kernel more than one in memory.
func TestTrace(t *testing.T) {
	vm.NeedUML(t)
	program := built(t, "test", "portal/test")
	r := vm.RunUML(t, vm.Spec{Timeout: 55 * time.Minute, Memory: 4096, Command: fmt.Sprintf(`
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cd /tmp
cp %s portal
cp %s tests
uname -r
PORTAL_BINARY=/tmp/portal ./tests -test.v -test.count=1 -test.timeout 50m -test.run '^TestTrace$' -trace.modes=ipvs -trace.pairs=%d -trace.seed=%d
`, vm.Host+harness.Portal(), program, *pairs, *seed)})
	if r.Exit != 0 || !strings.Contains(r.Output, "--- PASS: TestTrace/ipvs") {
		t.Fatalf("exit %d after %v", r.Exit, r.Took)
	}
	t.Logf("%.0f s", r.Took.Seconds())
}
