package foreign

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// leftovers are rules as kube-proxy makes them in its modes iptables and nftables, between those of the kubelet and others.
const leftovers = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
:KUBE-SEP-OP4AXEAS4OXHBEQX - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:MINE - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -j MINE
-A MINE -d 192.0.2.1/32 -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m tcp --dport 53 -j KUBE-SVC-ERIFXISQEP7F7OF4
-A KUBE-SVC-ERIFXISQEP7F7OF4 -j KUBE-SEP-OP4AXEAS4OXHBEQX
-A KUBE-SEP-OP4AXEAS4OXHBEQX -p tcp -m tcp -j DNAT --to-destination 10.244.0.5:53
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A FORWARD -j KUBE-FIREWALL
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
COMMIT
`

func TestRemovesWhatKubeProxyLeft(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread() // never unlocked: the thread, which is in another namespace, ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	command := func(stdin string, name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v %s", name, args, err, out)
		}
		return string(out)
	}
	if found, err := Find(t.Context()); err != nil || len(found) != 0 {
		t.Fatalf("in a new namespace: %v, %v", found, err)
	}
	command(leftovers, "iptables-nft-restore")
	command("add table ip kube-proxy\nadd chain ip kube-proxy services\nadd table ip6 kube-proxy\nadd table ip mine\n", "nft", "-f", "-")
	const want = "[5 iptables chains (iptables-nft) 2 nftables tables (nft)]"
	for _, look := range []struct {
		name string
		with func() ([]Leftover, error)
	}{
		{"find", func() ([]Leftover, error) { return Find(t.Context()) }},
		{"remove", func() ([]Leftover, error) { return Remove(t.Context()) }},
	} {
		if found, err := look.with(); err != nil || fmt.Sprint(found) != want {
			t.Fatalf("%s: %v, %v, want %s", look.name, found, err, want)
		}
	}
	if found, err := Find(t.Context()); err != nil || len(found) != 0 {
		t.Errorf("after removing: %v, %v", found, err)
	}
	left := command("", "iptables-nft-save") + command("", "nft", "list", "tables")
	for _, keep := range []string{"KUBE-KUBELET-CANARY", "-A OUTPUT -j MINE", "-A FORWARD -j KUBE-FIREWALL", "table ip mine"} {
		if !strings.Contains(left, keep) {
			t.Errorf("%s is gone:\n%s", keep, left)
		}
	}
}
