//go:build vm

package vm_test

import (
	"errors"
	"flag"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"portal/test/harness"
	"portal/test/vm"
)

var kills = flag.Int("vm.kills", 100, "how often the proxy is killed under load")

// TestRestarts kills and starts the proxy in nftables mode under load on the kernel that Debian ships: before Linux 6.17 a
// look-up that meets a commit half-way can miss an element that is rewritten, so a restart must not rewrite what is right.
func TestRestarts(t *testing.T) {
	vm.Need(t)
	program := built(t, "test", "portal/test")
	r := vm.Run(t, vm.Spec{Timeout: 40 * time.Minute, Memory: 3072, Command: fmt.Sprintf(`
set -e
cp %s /tmp/portal
uname -r
PORTAL_VM=brief PORTAL_BINARY=/tmp/portal %s -test.v -test.count=1 -test.timeout 35m -test.run '^TestFaultsKill$/^nftables$' -faults.kills=%d
`, vm.Host+harness.Portal(), program, *kills)})
	if r.Exit != 0 || !strings.Contains(r.Output, "--- PASS: TestFaultsKill/nftables") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	if err := restarted(r.Output, *kills); err != nil {
		t.Errorf("%v:\n%s", err, r.Output)
	}
	t.Logf("%.0f s\n%s", r.Took.Seconds(), r.Output)
}

// restarted says what is wrong with the output of TestRestarts: the kernel is one of those that it is about, the proxy was killed as often
// as it should be, and enough of the starts got as far as rules that are in sync for a restart to have had something to rewrite.
func restarted(output string, kills int) error {
	release := regexp.MustCompile(`(?m)^(\d+)\.(\d+)\.\d+\S*\s*$`).FindStringSubmatch(output)
	if release == nil {
		return errors.New("the output doesn't say which kernel it is")
	}
	if major, minor := number(release[1]), number(release[2]); major > 6 || major == 6 && minor >= 17 {
		return fmt.Errorf("Linux %s has no look-ups that meet a commit half-way", strings.TrimSpace(release[0]))
	}
	counts := regexp.MustCompile(`(\d+) kills; (\d+) starts got as far as a first sync`).FindStringSubmatch(output)
	if counts == nil {
		return errors.New("the output doesn't say how often the proxy was killed")
	}
	// Half of the starts are given the time that the first one took, and more.
	if killed, synced := number(counts[1]), number(counts[2]); killed != kills || synced < 1+kills/4 {
		return fmt.Errorf("%s, of %d", counts[0], kills)
	}
	return nil
}

func number(digits string) int {
	n, _ := strconv.Atoi(digits) // digits only
	return n
}

// TestRestarted: what TestRestarts wants of its output.
func TestRestarted(t *testing.T) {
	const good = "6.12.48+deb13-cloud-amd64\r\n=== RUN   TestFaultsKill\n    proxy_faults_test.go:63: 100 kills; 58 starts got as far as a first sync (the first in 1.2s)\n"
	if err := restarted(good, 100); err != nil {
		t.Error(err)
	}
	for _, bad := range [][2]string{{"6.12.48", "6.17.0"}, {"6.12.48", "7.0.1"}, {"6.12.48+deb13-cloud-amd64", ""}, {"100 kills", "99 kills"}, {"58 starts", "12 starts"}, {"kills;", ""}} {
		if restarted(strings.Replace(good, bad[0], bad[1], 1), 100) == nil {
			t.Errorf("%q instead of %q is accepted", bad[1], bad[0])
		}
	}
}
