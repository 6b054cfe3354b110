//go:build vm

package vm_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
	"portal/test/vm"
)

var only = flag.String("vm.only", "*", "scenarios by name, with stars")

// TestConformance runs what kube-proxy was recorded to do against `portal proxy` in the IPVS mode, with the API server in
// the guest too. It takes minutes, so it has a target of its own: make test-vm.
func TestConformance(t *testing.T) {
	folder := harness.Shared("conformance", "dataplane")
	if folder == "" {
		t.Skip("../shared/conformance/dataplane is not there: a clone that stands alone has nothing to compare with")
	}
	if _, err := os.Stat(harness.Portal()); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	r := vm.Run(t, vm.Spec{Timeout: 40 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
cd /tmp
portal=%s lab=%s
mkdir api work
echo 'vm-token,admin,1,"system:masters"' >tokens
$portal server --data-dir api --listen 127.0.0.1:6443 --token-auth-file tokens --controllers none >api/log 2>&1 &
PYTHONDONTWRITEBYTECODE=1 python3 $lab/lab.py --check $lab/golden.json --mode any --slow 6 --jobs 2 --only '%s' --work work -v \
	--api https://127.0.0.1:6443 --token vm-token --proxy "$portal proxy --config {config} --proxy-mode ipvs"
status=$?
[ $status = 0 ] || tail -n 20 api/log work/proxy-*.log
exit $status
`, vm.Host+harness.Portal(), vm.Host+folder, *only)})
	if r.Exit != 0 || !strings.Contains(r.Output, " 0 failed\n") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
}
