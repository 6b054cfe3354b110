package test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"portal/test/harness"
)

// laboratories are the modes of the proxy with how their packets are compared with those that kube-proxy sent. A relay
// in userspace hides the client's address.
var laboratories = []struct {
	mode string
	args []string
}{
	{"nftables", []string{"--mode", "nftables"}},
	{"iptables", []string{"--mode", "iptables"}},
	{"userspace", []string{"--mode", "any", "--any-source"}},
}

// TestDataplaneConformance sends packets through Portal's proxy, in each mode and in namespaces, and demands what became of
// them with kube-proxy.
func TestDataplaneConformance(t *testing.T) {
	for _, l := range laboratories {
		t.Run(l.mode, func(t *testing.T) {
			tokens := filepath.Join(t.TempDir(), "tokens.csv")
			if err := os.WriteFile(tokens, []byte(harness.KubeToken+",admin,1,system:masters\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			api := startPortal(t, "--controllers", "none", "--token-auth-file", tokens)
			experiment(t, l.mode, append(l.args, "--api", api.URL, "--token", harness.KubeToken))
		})
	}
}

// experiment runs the recorded scenarios with Portal's proxy.
func experiment(t *testing.T, mode string, args []string) {
	t.Helper()
	folder := shared(t, "conformance", "dataplane")
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	for _, tool := range []string{"python3", "ip", "nft", "iptables", "iptables-restore"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatal("a tool is missing: ", err)
		}
	}
	work := t.TempDir()
	args = append(args, "--check", filepath.Join(folder, "golden.json"), "--work", work, "--prefix", "pt"+mode[:2],
		"--proxy", harness.Portal()+" proxy --config {config} --proxy-mode "+mode)
	out, err := harness.Run(context.Background(), []string{"PYTHONDONTWRITEBYTECODE=1"}, "python3", append([]string{filepath.Join(folder, "lab.py")}, args...)...)
	passed := 0
	for _, f := range failures(out, &passed) {
		t.Errorf("%s\n  %s", f.name, strings.Join(f.lines, "\n  "))
	}
	if err != nil || passed == 0 || t.Failed() {
		log, _ := os.ReadFile(filepath.Join(work, "proxy-node-a.log"))
		t.Fatalf("%d passed: %v\n%s\nthe proxy of node-a:\n%s", passed, err, out, log)
	}
	t.Logf("%d probes answered as recorded", passed)
}
