//go:build e2e

package e2e

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	labs "portal/internal/lab"
	"portal/test/harness"
)

var (
	chosenModes = flag.String("e2e.modes", strings.Join(modes, ","), "modes of the proxy to run with, in turn")
	tryAll      = flag.Bool("e2e.try", false, "run what -e2e.only matches whatever tests.txt says, to see whether it passes")
)

// TestLab runs every test that starts Pods in a lab, with each mode of the proxy, each test in a process of its own.
func TestLab(t *testing.T) {
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range strings.Split(*chosenModes, ",") {
		if !slices.Contains(modes, mode) {
			t.Fatalf("-e2e.modes: %q is none of %v", mode, modes)
		}
		t.Run(mode, func(t *testing.T) {
			from := inMode(all, mode)
			if *tryAll {
				from = all
			}
			wanted := map[int][]test{}
			for _, one := range choose(t, from) {
				wanted[one.size()] = append(wanted[one.size()], one)
			}
			for _, nodes := range slices.Sorted(maps.Keys(wanted)) {
				inLab(t, mode, nodes, wanted[nodes])
			}
		})
	}
}

func inLab(t *testing.T, mode string, nodes int, wanted []test) {
	t.Helper()
	folder := filepath.Join(*reports, mode)
	// kube-proxy's default, which a test looks for.
	nodeArgs := []string{"--conntrack-tcp-timeout-close-wait=1h"}
	if mode == "userspace" {
		// It serves loopback addresses if they are named; iptables does so by itself, and nftables can't.
		nodeArgs = append(nodeArgs, "--nodeport-addresses=all,localhost")
	}
	dir := t.TempDir()
	l, err := labs.Start(t.Context(), labs.Options{
		Name: fmt.Sprintf("e2e-%s-%d", mode, os.Getpid()), Nodes: nodes, Zones: 3, Dir: filepath.Join(dir, "lab"), Portal: harness.Portal(), ProxyMode: mode,
		ImageMap: filepath.Join(harness.Root(), ".cache", "e2e", "images.yaml"),
		// Some tests look at the node from a privileged Pod.
		ServerArgs: []string{"--allow-privileged"},
		NodeArgs:   nodeArgs,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		keepLogs(l, folder)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	// The tests run on the server's machine, which reaches nodes and Pods, as the suite expects of where it runs.
	r := &runner{
		reports: folder,
		flags: []string{"--kubeconfig=" + filepath.Join(labs.NodeDir(l.Dir, l.Server.Name), "admin.kubeconfig"), "--kubectl-path=" + kubectl(t),
			"--num-nodes=" + strconv.Itoa(nodes), "--allowed-not-ready-nodes=0", "--dns-domain=cluster.local"},
		start: l.Server.Run,
	}
	r.run(t, wanted)
	fmt.Printf("%s, %d nodes: %d of %d passed\n", mode, nodes, len(wanted)-len(r.failed), len(wanted))
}

// keepLogs copies what the machines' programs logged to the reports.
func keepLogs(l *labs.Lab, folder string) {
	for _, name := range append(l.NodeNames(), l.Server.Name) {
		if log, err := os.ReadFile(l.Log(name)); err == nil {
			_ = os.WriteFile(filepath.Join(folder, name+".log"), log, 0o644)
		}
	}
}
