//go:build vm

package vm_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"portal/test/vm"
)

// TestUML: the user-mode machine has what the tests want it for, sees the host's files and can't change them, has registers
// of its own in every process, and leaves no process behind.
func TestUML(t *testing.T) {
	mark := t.TempDir() + "/mark"
	r := vm.RunUML(t, vm.Spec{Timeout: 5 * time.Minute, Command: `
set -e
ip link add d0 type dummy
ip netns add n1
ip netns exec n1 nft add table ip t
ip netns exec n1 nft add table ip6 t
ls /proc/net/ip_vs /proc/net/sctp/eps
python3 -c 'import math; print("python", sum(math.sqrt(i) for i in range(100000)))' >a &
python3 -c 'import math; print("python", sum(math.sqrt(i) for i in range(100000)))' >b
wait
cmp a b
cat a
touch /etc/from-the-guest 2>/dev/null && echo "the host's files can be changed"
touch ` + vm.Host + mark + ` 2>/dev/null && echo "the host's files can be changed"
sleep 1000 &
exit 7
`})
	// Its processes have the arguments of the kernel.
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(lines) == 0 {
		t.Fatalf("no processes found: %v", err)
	}
	for _, line := range lines {
		if args, err := os.ReadFile(line); err == nil && strings.Contains(string(args), "uml_dir="+filepath.Dir(filepath.Dir(mark))) {
			t.Errorf("%s is left: %q", line, args)
		}
	}
	if _, err := os.Stat(mark); err == nil || r.Exit != 7 || !strings.Contains(r.Output, "python 21081692.7") || strings.Contains(r.Output, "changed") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.1f s", r.Took.Seconds())
}
