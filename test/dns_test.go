package test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// TestDNSConformance asks `portal dns` what was asked of CoreDNS, over UDP and over TCP: as it reads Portal's API, and
// Kubernetes' own where that is built.
func TestDNSConformance(t *testing.T) {
	folder := shared(t, "conformance", "dns")
	for name, start := range map[string]func(*testing.T) *harness.API{
		"Portal":         func(t *testing.T) *harness.API { return startPortal(t, "--controllers", "none") },
		"kube-apiserver": startKubernetes,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			api := start(t)
			dns := startDNS(t, api.Kubeconfig)
			golden := filepath.Join(folder, "golden.json")
			env := []string{"KUBECONFIG=" + api.Kubeconfig, "DNS=" + dns, "PYTHONDONTWRITEBYTECODE=1"}
			checkDNS(t, folder, golden, append(env, "KEEP=1"))
			checkDNS(t, folder, casesOverTCP(t, golden), append(env, "SETUP=0"))
		})
	}
}

// startKubernetes runs Kubernetes' own API server until the test ends.
func startKubernetes(t *testing.T) *harness.API {
	t.Helper()
	if _, err := os.Stat(harness.Peer("kube-apiserver")); err != nil {
		t.Skip("kube-apiserver is not built: `make peers` does it")
	}
	api, err := harness.StartKubeAPIServer(t.TempDir(), startEtcd(t, 1)[0].ClientURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Kill)
	return api
}

// startDNS runs `portal dns` until the test ends, and returns its address.
func startDNS(t *testing.T, kubeconfig string) string {
	t.Helper()
	need(t, harness.Portal(), "build")
	addr := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	status := fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	p, err := harness.Start(t.TempDir(), "portal-dns", harness.Portal(), "dns", "--kubeconfig", kubeconfig, "--listen", addr,
		"--upstream", "none", "--metrics-bind-address", status)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	if err := harness.WaitURL("http://"+status+"/ready", time.Minute); err != nil {
		t.Fatalf("%v\n%s", err, p.Tail())
	}
	return addr
}

func checkDNS(t *testing.T, folder, cases string, env []string) {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Fatal("python3 is needed for the checker of the recorded answers: ", err)
	}
	out, err := harness.Run(context.Background(), env, "python3", filepath.Join(folder, "check.py"), "check", cases)
	failed, passed := harness.Failures(out)
	for _, f := range failed {
		t.Errorf("%s\n  %s", f.Name, strings.Join(f.Lines, "\n  "))
	}
	if passed == 0 {
		t.Fatalf("nothing passed: %v\n%s", err, out)
	}
	t.Logf("%d cases of %s passed", passed, filepath.Base(cases))
}

// casesOverTCP writes a copy of the cases in which each comes by TCP; those about the size of a datagram are left out.
func casesOverTCP(t *testing.T, golden string) string {
	t.Helper()
	raw, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	var cases, out []map[string]any
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		if c["raw"] == nil && c["part_of"] == nil {
			c["tcp"] = true
			out = append(out, c)
		}
	}
	raw, err = json.Marshal(out)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tcp.json")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
