package vm_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"portal/test/harness"
	"portal/test/vm"
)

// BenchmarkProxy measures the IPVS mode beside kube-proxy's with bench/proxy, both from memory: what the guest reads of the
// host's files would count otherwise. Emulation makes all of it slow, and both alike.
func BenchmarkProxy(b *testing.B) {
	vm.Need(b)
	bench := filepath.Join(vm.Dir(), "bench-proxy")
	cmd := exec.Command("go", "build", "-o", bench, "portal/bench/proxy")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("building bench/proxy: %v\n%s", err, text)
	}
	// Each is started once: kube-proxy takes minutes for it here.
	for b.Loop() {
		r := vm.Run(b, vm.Spec{Timeout: 50 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
set -e
cd /tmp
cp %s portal
cp %s kube-proxy
export PORTAL_BINARY=/tmp/portal
%s -portal /tmp/portal -kube-proxy /tmp/kube-proxy -modes ipvs -services 1000 -mix "" -situations clean,restart -starts 1 -haproxy=false -churn 0 -connections 300 -changes 5 -change-timeout 10m
`, vm.Host+harness.Portal(), vm.Host+resolved(b, harness.Peer("kube-proxy")), vm.Host+bench)})
		if r.Exit != 0 {
			b.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
		}
		b.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
	}
}

// resolved is a path without symbolic links, which may lead out of what the guest sees.
func resolved(b *testing.B, path string) string {
	out, err := filepath.EvalSymlinks(path)
	if err != nil {
		b.Fatalf("%v: run `make peers` first", err)
	}
	return out
}
