package test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
)

// exitStatus is that of a program that was run to its end.
func exitStatus(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		return -1
	}
	return 0
}

// TestOneProxyForEachNamespace: whoever would be the second proxy in a network namespace says in one line which process is in the way.
func TestOneProxyForEachNamespace(t *testing.T) {
	t.Parallel()
	need(t, harness.Portal(), "build")
	if !inNamespace(t, "-test.timeout=5m") {
		return
	}
	network(t)
	dir, nobody := t.TempDir(), fmt.Sprintf("127.0.0.1:%d", harness.FreePort())
	kubeconfig := filepath.Join(dir, "kubeconfig") // the lock is taken whether or not there is an API server
	if err := os.WriteFile(kubeconfig, []byte(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], `+
		`clusters: [{name: c, cluster: {server: "http://`+nobody+`"}}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	proxy := func(mode string) []string {
		return []string{"proxy", "--kubeconfig", kubeconfig, "--proxy-mode", mode}
	}
	up := func(name string, more ...string) []string {
		return append([]string{
			"up", "--data-dir", filepath.Join(dir, name), "--listen", fmt.Sprintf("127.0.0.1:%d", harness.FreePort()), "--run-pods", "none", "--dns", "none",
		}, more...)
	}
	first := func(name, ready string, args ...string) *harness.Process {
		t.Helper()
		p, err := harness.Start(dir, name, harness.Portal(), args...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
		eventually(t, time.Minute, name+" says "+ready, func() string {
			if out := p.Tail(); !strings.Contains(out, ready) {
				return "it says " + out
			}
			return ""
		})
		return p
	}
	refused := func(by *harness.Process, command string, status int, args ...string) {
		t.Helper()
		out, err := harness.Run(t.Context(), nil, harness.Portal(), args...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		want := fmt.Sprintf("another portal proxy already runs in this network namespace: pid %d (%s %s); stop it first", by.Pid(), harness.Portal(), command)
		if last := lines[len(lines)-1]; exitStatus(err) != status || !strings.HasPrefix(last, "portal: ") || !strings.HasSuffix(last, want) {
			t.Errorf("portal %s: exit status %d, want %d, and a last line with %q:\n%s", args[0], exitStatus(err), status, want, out)
		}
		if len(lines) > 2 { // one before says for whom it waits
			t.Errorf("portal %s has more to say:\n%s", args[0], out)
		}
	}

	holder := first("proxy", nobody, proxy("nftables")...)
	refused(holder, "proxy", 1, proxy("nftables")...)
	refused(holder, "proxy", 1, proxy("iptables")...)
	refused(holder, "proxy", 2, up("named", "--proxy-mode", "nftables")...)
	// Who leaves the choice to portal up has the rest, and is told why there is no proxy.
	without := first("without", "Ctrl-C stops it", up("without")...)
	if want := fmt.Sprintf("none: pid %d (%s proxy) has it in this network namespace", holder.Pid(), harness.Portal()); !strings.Contains(without.Tail(), want) {
		t.Errorf("portal up does not say %q:\n%s", want, without.Tail())
	}
	for _, p := range []*harness.Process{without, holder} {
		if err := p.Stop(20 * time.Second); err != nil {
			t.Fatalf("%v\n%s", err, p.Tail())
		}
	}
	// A portal up holds it as a portal proxy does.
	holder = first("up", "Ctrl-C stops it", up("up", "--proxy-mode", "nftables")...)
	refused(holder, "up", 1, proxy("nftables")...)
	refused(holder, "up", 2, up("again", "--proxy-mode", "nftables")...)
	if err := holder.Stop(20 * time.Second); err != nil {
		t.Fatalf("%v\n%s", err, holder.Tail())
	}
}
