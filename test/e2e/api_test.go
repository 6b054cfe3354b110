//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// TestComplete demands that tests.txt has every test about the network, every conformance test of four other groups, and no other.
func TestComplete(t *testing.T) {
	out, err := harness.Run(t.Context(), nil, suite(), "--list-tests")
	if err != nil {
		t.Fatal(err)
	}
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	here := map[string]bool{}
	for _, one := range all {
		here[one.name] = true
	}
	ours := regexp.MustCompile(`^\[sig-network\]|^\[sig-(api-machinery|apps|auth|node)\].*\[Conformance\]`)
	found := 0
	for line := range strings.Lines(out) {
		_, name, ok := strings.Cut(strings.TrimSpace(line), ": ") // a file and line, and the name
		if !ok || !strings.HasPrefix(name, "[sig-") {
			continue
		}
		found++
		if ours.MatchString(name) && !here[name] {
			t.Errorf("tests.txt lacks %s", name)
		}
		delete(here, name)
	}
	if found == 0 {
		t.Error("the suite lists no test")
	}
	for name := range here {
		t.Errorf("tests.txt has a test that Kubernetes has not: %s", name)
	}
}

// TestConformance runs every test that starts no container against `portal server` with its controllers, each in a process of its own.
func TestConformance(t *testing.T) {
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	wanted := choose(t, only(all, run))
	// It listens on loopback only. An address to advertise, which no test connects to, makes it an endpoint of the kubernetes Service.
	api, err := harness.StartPortal(t.TempDir(), "--advertise-address", "192.0.2.1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = api.Stop(20 * time.Second)
		if log, err := os.ReadFile(api.Log); err == nil {
			_ = os.WriteFile(filepath.Join(*reports, "portal.log"), log, 0o644)
		}
	})
	r := &runner{
		reports: *reports,
		// There are no nodes, and nobody waits for any.
		flags: []string{"--kubeconfig=" + api.Kubeconfig, "--kubectl-path=" + kubectl(t), "--allowed-not-ready-nodes=-1", "--num-nodes=0"},
		start: func(_ test, cmd *exec.Cmd) error { return cmd.Run() },
	}
	r.run(t, wanted)
	fmt.Printf("%d of %d passed (%d more run in a lab: see test/e2e/README.md)\n", len(wanted)-len(r.failed), len(wanted), len(only(all, lab)))
}
