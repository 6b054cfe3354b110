//go:build vm

package vm_test

import (
	"flag"
	"fmt"
	"os"
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
	laboratory(t, "more-", *more, otherwise)
}

// otherwise are the probes whose answer is not kube-proxy's, and why.
var otherwise = map[string]string{
	"externalip-is-pod-ip: 0.0": "a neighbour's packets go over the bridge, where marks lead nowhere",
}

// laboratory runs the recorded scenarios in the files whose names begin with prefix.
func laboratory(t *testing.T, prefix, only string, otherwise map[string]string) {
	t.Helper()
	if _, err := os.Stat(harness.Portal()); err != nil {
		t.Fatalf("%v: run `make build` first", err)
	}
	r := vm.Run(t, vm.Spec{Timeout: 40 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
cd /tmp
portal=%[1]s data=%[2]s
mkdir api work
echo 'vm-token,admin,1,"system:masters"' >tokens
$portal server --data-dir api --listen 127.0.0.1:6443 --token-auth-file tokens --controllers none >api/log 2>&1 &
PYTHONDONTWRITEBYTECODE=1 python3 $data/lab.py --check $data/%[3]sgolden.json --scenarios $data/%[3]sscenarios.json --mode any --slow 6 --jobs 2 --only '%[4]s' --work work -v \
	--api https://127.0.0.1:6443 --token vm-token --proxy "$portal proxy --config {config} --proxy-mode ipvs"
status=$?
[ $status = 0 ] || tail -n 20 api/log work/proxy-*.log
exit $status
`, vm.Host+harness.Portal(), vm.Host+harness.Recorded("dataplane"), prefix, only)})
	passed, ok := harness.Probes(t, r.Output, otherwise)
	if !ok || r.Exit != 0 && otherwise == nil {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%d probes answered as recorded, in %.0f s", passed, r.Took.Seconds())
}
