package vm_test

import (
	"strings"
	"testing"

	"portal/test/vm"
)

// TestMachine: the guest has what the tests want it for, sees the host's files and can't change them.
func TestMachine(t *testing.T) {
	r := vm.Run(t, vm.Spec{Command: `
set -e
ip link add d0 type dummy
ip netns add n1
ip netns exec n1 nft add table ip t
ls /proc/net/ip_vs /proc/net/sctp/eps
python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print("python", s.getsockname()[0])'
touch /etc/from-the-guest 2>/dev/null && echo "the host's files can be changed"
exit 7
`})
	if r.Exit != 7 || !strings.Contains(r.Output, "python 127.0.0.1\n") || strings.Contains(r.Output, "changed") {
		t.Fatalf("exit %d after %v:\n%s", r.Exit, r.Took, r.Output)
	}
	t.Logf("%.1f s", r.Took.Seconds())
}
