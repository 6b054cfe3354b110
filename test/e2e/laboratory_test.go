package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	labs "portal/internal/lab"
	"portal/test/harness"
)

// laboratory is what a lab for tests is like: the mode of its nodes' proxies, how they announce the addresses of load balancers, and how many there are.
type laboratory struct {
	mode, announce string
	nodes          int
}

// String is what the lab is called in reports.
func (o laboratory) String() string {
	if o.announce == announcements[0] {
		return o.mode
	}
	return o.mode + "-" + o.announce
}

// options are those of the lab.
func (o laboratory) options() labs.Options {
	out := labs.Options{
		Name: fmt.Sprintf("e2e-%s-%d", o, os.Getpid()), Nodes: o.nodes, Zones: 3, Portal: harness.Portal(), ProxyMode: o.mode,
		ImageMap: filepath.Join(harness.Root(), ".cache", "e2e", "images.yaml"),
		// Some tests look at the node from a privileged Pod.
		ServerArgs: []string{"--allow-privileged"},
		// kube-proxy's default, which a test looks for.
		NodeArgs: []string{"--conntrack-tcp-timeout-close-wait=1h"},
	}
	if o.mode == "userspace" {
		// It serves loopback addresses if they are named; iptables does so by itself, and nftables can't.
		out.NodeArgs = append(out.NodeArgs, "--nodeport-addresses=all,localhost")
	}
	if o.announce == "bgp" {
		// Addresses of no network that a machine has: the router learns the ways there from the nodes.
		out.BalancerPools = []string{"198.51.100.0/26,fd00:200::/122"}
		out.NodeArgs = append(out.NodeArgs, "--load-balancer-announce", "bgp", "--load-balancer-bgp-peer", fmt.Sprintf("192.168.100.1;as=%d", harness.RouterAS))
	} else {
		// Those of the nodes' network, of which the machines have the low ones.
		out.BalancerPools = []string{"192.168.100.200-192.168.100.250,fd00:100::f0-fd00:100::ff"}
	}
	return out
}

// run runs tests in a lab of their own.
func (o laboratory) run(t *testing.T, wanted []test) {
	t.Helper()
	folder := filepath.Join(*reports, o.String())
	dir := t.TempDir()
	options := o.options()
	options.Dir = filepath.Join(dir, "lab")
	l, err := labs.Start(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		keepLogs(l, folder)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	if o.announce == "bgp" {
		bird, err := harness.StartBird(l, dir, "")
		if err != nil {
			t.Error(err)
			return
		}
		defer func() {
			bird.Close()
			_ = os.WriteFile(filepath.Join(folder, "bird.log"), []byte(bird.Log()), 0o644)
		}()
	}
	// The tests run on the server's machine, which reaches nodes and Pods, as the suite expects of where it runs; those of load balancers
	// run outside, where balancers' clients are.
	r := &runner{
		reports: folder,
		flags: []string{"--kubeconfig=" + filepath.Join(labs.NodeDir(l.Dir, l.Server.Name), "admin.kubeconfig"), "--kubectl-path=" + kubectl(t),
			"--num-nodes=" + strconv.Itoa(o.nodes), "--allowed-not-ready-nodes=0", "--dns-domain=cluster.local"},
		start: func(one test, cmd *exec.Cmd) error {
			if one.outside() {
				return l.Client.Run(cmd)
			}
			return l.Server.Run(cmd)
		},
	}
	r.run(t, wanted)
	fmt.Printf("%s, %d nodes, addresses announced by %s: %d of %d passed\n", o.mode, o.nodes, o.announce, len(wanted)-len(r.failed), len(wanted))
}

// keepLogs copies what the machines' programs logged to the reports.
func keepLogs(l *labs.Lab, folder string) {
	for _, name := range append(l.NodeNames(), l.Server.Name) {
		if log, err := os.ReadFile(l.Log(name)); err == nil {
			_ = os.WriteFile(filepath.Join(folder, name+".log"), log, 0o644)
		}
	}
}
