//go:build vm

package vm_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"portal/test/harness"
	"portal/test/vm"
)

var (
	only = flag.String("vm.only", "*", "scenarios by name, with stars")
	more = flag.String("vm.more", "etp-local-host-network,externalip-is-pod-ip,restart-udp-*,"+
		"udp-service-deleted,udp-all-removed,udp-ranges-changed,udp-itp-local-lost,udp-policy-local,udp-lb-withdrawn,udp-not-ready,udp-no-longer-serving", "this project's own scenarios by name, with stars")
)

// TestConformance runs what kube-proxy was recorded to do against `portal proxy` in the IPVS mode, with the API server in
// the guest too. It takes minutes, so it has a target of its own: make test-vm.
func TestConformance(t *testing.T) { laboratory(t, "", *only, nil) }

// TestDataplaneMore does the same with those of this project's own scenarios that this mode once failed, and those like them.
func TestDataplaneMore(t *testing.T) {
	folder, err := filepath.Abs("../dataplane")
	if err != nil {
		t.Fatal(err)
	}
	laboratory(t, folder, *more, otherwise)
}

// otherwise are the probes whose answer is not kube-proxy's, and why.
var otherwise = map[string]string{
	"externalip-is-pod-ip: 0.0": "a neighbour's packets go over the bridge, where marks lead nowhere",
}

// laboratory runs recorded scenarios, of a folder of this project's or else of the recorded conformance.
func laboratory(t *testing.T, scenarios, only string, otherwise map[string]string) {
	t.Helper()
	folder := harness.Shared("conformance", "dataplane")
	if folder == "" {
		t.Skip("../shared/conformance/dataplane is not there: a clone that stands alone has nothing to compare with")
	}
	if _, err := os.Stat(harness.Portal()); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	record, which := folder, ""
	if scenarios != "" {
		record, which = scenarios, "--scenarios "+vm.Host+filepath.Join(scenarios, "scenarios.py")
	}
	r := vm.Run(t, vm.Spec{Timeout: 40 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
cd /tmp
portal=%s lab=%s record=%s
mkdir api work
echo 'vm-token,admin,1,"system:masters"' >tokens
$portal server --data-dir api --listen 127.0.0.1:6443 --token-auth-file tokens --controllers none >api/log 2>&1 &
PYTHONDONTWRITEBYTECODE=1 python3 $lab/lab.py --check $record/golden.json %s --mode any --slow 6 --jobs 2 --only '%s' --work work -v \
	--api https://127.0.0.1:6443 --token vm-token --proxy "$portal proxy --config {config} --proxy-mode ipvs"
status=$?
[ $status = 0 ] || tail -n 20 api/log work/proxy-*.log
exit $status
`, vm.Host+harness.Portal(), vm.Host+folder, vm.Host+record, which, only)})
	passed, ok := harness.Probes(t, r.Output, otherwise)
	if !ok || r.Exit != 0 && otherwise == nil {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%d probes answered as recorded, in %.0f s", passed, r.Took.Seconds())
}
