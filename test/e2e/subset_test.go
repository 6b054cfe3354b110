package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	labs "portal/internal/lab"
	"portal/test/harness"
)

// subset are tests from which a change that breaks Services for Pods can hardly hide, and that take a few minutes together: the way from a
// selector to what a Pod is answered, by address, name and variable, while Pods and Services change.
var subset = []string{
	"[sig-network] Services should serve a basic endpoint from pods [Conformance]",
	"[sig-network] Services should serve multiport endpoints from pods [Conformance]",
	"[sig-network] Services should be able to change the type from ExternalName to NodePort [Conformance]",
	"[sig-network] Services should have session affinity work for service with type clusterIP [LinuxOnly] [Conformance]",
	"[sig-network] Services should be able to create a functioning NodePort service [Conformance]",
	"[sig-network] Services should serve endpoints on same port and different protocols [Conformance]",
	"[sig-network] EndpointSlice should create Endpoints and EndpointSlices for Pods matching a Service [Conformance]",
	"[sig-network] DNS should provide DNS for services [Conformance]",
	"[sig-network] DNS should provide DNS for ExternalName services [Conformance]",
	"[sig-network] HostPort validates that there is no conflict between pods with same hostPort but different hostIP and protocol [LinuxOnly] [Conformance]",
	"[sig-network] Services should be able to switch session affinity for NodePort service [LinuxOnly] [Conformance]",
	"[sig-network] Services should allow pods to hairpin back to themselves through services",
	"[sig-network] Services should fallback to local terminating endpoints when there are no ready endpoints with internalTrafficPolicy=Local",
	"[sig-network] DNS should provide DNS for pods for Subdomain [Conformance]",
	"[sig-network] Networking Granular Checks: Pods should function for intra-pod communication: http [Conformance] [NodeConformance]",
	"[sig-network] Proxy version v1 A set of valid responses are returned for both pod and service Proxy [Conformance]",
	"[sig-node] Container Lifecycle Hook when create a pod with lifecycle hook should execute prestop http hook properly [Conformance] [NodeConformance]",
	"[sig-apps] Daemon set should run and stop simple daemon [Conformance] [Serial]",
	"[sig-node] Pods should contain environment variables for services [Conformance] [NodeConformance]",
	"[sig-apps] Deployment RollingUpdateDeployment should delete old pods and create new ones [Conformance]",
}

// TestSubset runs the subset in a lab: what `make test` has of `make test-e2e`.
func TestSubset(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("a lab needs root")
	}
	if _, err := os.Stat(suite()); err != nil {
		t.Fatalf("%v: run make %s", err, filepath.Join(".cache", "e2e", "e2e.test"))
	}
	all, err := tests()
	if err != nil {
		t.Fatal(err)
	}
	mode := modes[0]
	all = inMode(all, mode)
	var wanted []test
	for _, name := range subset {
		at := slices.IndexFunc(all, func(one test) bool { return one.name == name })
		if at < 0 || all[at].size() != labNodes {
			t.Errorf("tests.txt has no such test, or it does not run in the mode %s with %d nodes: %s", mode, labNodes, name)
			continue
		}
		wanted = append(wanted, all[at])
	}
	inLab(t, mode, labNodes, wanted)
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
		// The outside network's, of which the machines have the low ones.
		BalancerPools: []string{"192.168.100.200-192.168.100.250,fd00:100::f0-fd00:100::ff"},
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
	// The tests run on the server's machine, which reaches nodes and Pods, as the suite expects of where it runs; those of load balancers
	// run outside, where balancers' clients are.
	r := &runner{
		reports: folder,
		flags: []string{"--kubeconfig=" + filepath.Join(labs.NodeDir(l.Dir, l.Server.Name), "admin.kubeconfig"), "--kubectl-path=" + kubectl(t),
			"--num-nodes=" + strconv.Itoa(nodes), "--allowed-not-ready-nodes=0", "--dns-domain=cluster.local"},
		start: func(one test, cmd *exec.Cmd) error {
			if one.outside() {
				return l.Client.Run(cmd)
			}
			return l.Server.Run(cmd)
		},
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
