package test

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// live has the program send real packets: they do what was worked out, a difference is found, and nothing is left behind.
func (l *traceLab) live(t *testing.T, mode string) {
	t.Helper()
	port := l.services["node-port"].Spec.Ports[0].NodePort
	for _, one := range []struct {
		from, to string
		exit     int
		has      string
	}{
		{"p1a", "all:80", 0, "ARRIVES"},
		{"node1", "all:80", 0, "ARRIVES"},
		{"p1a", "all:53/UDP", 0, "ARRIVES"},
		{"client", fmt.Sprintf("192.168.100.12:%d", port), 0, "ARRIVES"},
		{"p1a", fmt.Sprintf("192.168.100.13:%d", port), 0, "ARRIVES"},
		{"p3a", "single:80", 0, "ARRIVES"}, // its own endpoint
		{"p1a", "none:80", 1, "REJECTED"},
		{"node3", "inner-local:80", 1, "DROPPED"},
		{"p2a", l.places["p1a"].addrs[0].String() + fmt.Sprintf(":%d", tracePort), 0, "ARRIVES"},
	} {
		patience := "30s"
		if one.has == "DROPPED" {
			patience = "1s"
		}
		out, exit := l.portalTrace(t, mode, "--from", one.from, "--to", one.to, "--live", "--lab", l.Name, "--patience", patience)
		if exit != one.exit || !strings.Contains(out, one.has) || !strings.Contains(out, "did what was worked out") {
			t.Errorf("live from %s to %s: exit status %d, want %d with %s and no difference:\n%s", one.from, one.to, exit, one.exit, one.has, out)
		}
		if mode == "nftables" && one.to == "all:80" && !strings.Contains(out, "nftables  table portal") {
			t.Errorf("live from %s to %s: no rule of the proxy in the kernel's trace:\n%s", one.from, one.to, out)
		}
	}
	l.tampered(t, mode)
	l.killed(t, mode)
	for _, name := range l.NodeNames() {
		if left := on(t, l.Node(name), "nft", "list", "tables"); strings.Contains(left, "portal-trace") {
			t.Errorf("on %s is left: %s", name, left)
		}
	}
}

// tampered: somebody's rule drops packets to a Service.
func (l *traceLab) tampered(t *testing.T, mode string) {
	t.Helper()
	node := l.Node("node1")
	ip := l.services["single"].Spec.ClusterIP
	for _, words := range []string{"add table ip tampered", "add chain ip tampered c { type filter hook prerouting priority -200; }", "add rule ip tampered c ip daddr " + ip + " drop"} {
		on(t, node, append([]string{"nft"}, strings.Fields(words)...)...)
	}
	defer on(t, node, "nft", "delete", "table", "ip", "tampered")
	out, exit := l.portalTrace(t, mode, "--from", "p1a", "--to", "single:80", "--live", "--lab", l.Name, "--patience", "1s")
	if exit != 1 || !strings.Contains(out, "DIFFERENT: the packet should arrive, but was not answered") || !strings.Contains(out, "table tampered chain c rule") {
		t.Errorf("with a rule in the way: exit status %d\n%s", exit, out)
	}
}

// killed: the table goes with a process that is killed while it waits.
func (l *traceLab) killed(t *testing.T, mode string) {
	t.Helper()
	cmd := exec.Command(harness.Portal(), "trace", "--kubeconfig", l.Kubeconfig, "--proxy-mode", mode, "--from", "node3", "--to", "inner-local:80", "--live", "--lab", l.Name, "--patience", "60s")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	name := fmt.Sprintf("portal-trace-%d", cmd.Process.Pid)
	tables := func() string { return on(t, l.Node("node3"), "nft", "list", "tables") }
	eventually(t, 30*time.Second, "the table of a trace", func() string {
		if !strings.Contains(tables(), name) {
			return "it is not there"
		}
		return ""
	})
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	eventually(t, 30*time.Second, "the end of the table", func() string {
		if strings.Contains(tables(), name) {
			return "it is still there"
		}
		return ""
	})
}
