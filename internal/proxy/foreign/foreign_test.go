package foreign

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"portal/internal/nettest"
	"portal/internal/proxy/virtual"
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

// TestSets: kube-router's, which k3s has too, begin like kube-proxy's and stay. A set that is in use is not called removed.
func TestSets(t *testing.T) {
	nettest.InNamespace(t, func() {
		const used = "KUBE-CLUSTER-IP"
		others := []string{"KUBE-DST-VRIZ5NGAMLYWTKEO", "KUBE-SRC-IAZSKXVFHCKPV5TX", "inet6:KUBE-SRC-IAZSKXVFHCKPV5TX", "kube-router-pod-subnets", "KUBE-MINE"}
		for _, name := range append([]string{
			used, "KUBE-LOOP-BACK", "KUBE-LOAD-BALANCER-SOURCE-CIDR", "KUBE-6-NODE-PORT-TCP", "KUBE-IPVS-IPS",
			"KUBE-6-LOAD-BALANCER-SOURCE-CID", "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS", // cut off
		}, others...) {
			if err := netlink.IpsetCreate(name, "hash:ip", netlink.IpsetCreateOptions{Family: unix.AF_INET}); err != nil {
				t.Fatalf("create %s: %v", name, err)
			}
		}
		rule := []string{"-A", "OUTPUT", "-m", "set", "--match-set", used, "dst", "-j", "ACCEPT"}
		if out, err := exec.Command("iptables-nft", rule...).CombinedOutput(); err != nil {
			t.Fatalf("iptables-nft %v: %v %s", rule, err, out)
		}
		if found, err := sets(false); err != nil || found.Count != 7 {
			t.Errorf("found %v, %v, want 7", found, err)
		}
		if removed, err := sets(true); err == nil || !strings.Contains(err.Error(), used) || removed.Count != 6 {
			t.Errorf("removed %v, %v, want 6 and an error about %s", removed, err, used)
		}
		left, err := netlink.IpsetListAll()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range left {
			names = append(names, s.SetName)
		}
		slices.Sort(names)
		if want := slices.Sorted(slices.Values(append(others, used))); !slices.Equal(names, want) {
			t.Errorf("left: %v, want %v", names, want)
		}
	})
}

// TestServers is run by package test/vm in a machine that has IPVS. Virtual servers at the addresses of kube-proxy's device and on node
// ports go with the device; those of others stay.
func TestServers(t *testing.T) {
	nettest.InNamespace(t, func() {
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil && os.Getenv("PORTAL_VM") == "" {
			t.Skipf("%v; test/vm runs this in a kernel that has IPVS", err)
		}
		table, err := virtual.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer table.Close()
		device := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: ipvsDevice}}
		if err := netlink.LinkAdd(device); err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{"10.96.0.10/32", "fd00:96::a/128"} {
			addr, err := netlink.ParseAddr(text)
			if err == nil {
				err = netlink.AddrAdd(device, addr)
			}
			if err != nil {
				t.Fatal(text, err)
			}
		}
		for _, text := range []string{"10.96.0.10:443", "[fd00:96::a]:53", "192.0.2.10:30080", "192.0.2.10:8080", "10.96.0.11:443"} {
			at := netip.MustParseAddrPort(text)
			s := virtual.Server{Family: unix.AF_INET, Addr: at.Addr(), Port: at.Port(), Protocol: unix.IPPROTO_TCP, Scheduler: "rr"}
			if at.Addr().Is6() {
				s.Family = unix.AF_INET6
			}
			if err := table.AddServer(s); err != nil {
				t.Fatal(text, err)
			}
		}
		servers := func() (out []string) {
			all, err := table.Servers()
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range all {
				out = append(out, netip.AddrPortFrom(s.Addr, s.Port).String())
			}
			slices.Sort(out)
			return out
		}
		const want = "[4 IPVS virtual servers (kube-ipvs0)]" // and the device is one of them
		if found, err := Find(t.Context()); err != nil || fmt.Sprint(found) != want || len(servers()) != 5 {
			t.Errorf("find: %v, %v, want %s; there are %v", found, err, want, servers())
		}
		if removed, err := Remove(t.Context()); err != nil || fmt.Sprint(removed) != want {
			t.Errorf("remove: %v, %v, want %s", removed, err, want)
		}
		if left := servers(); !slices.Equal(left, []string{"10.96.0.11:443", "192.0.2.10:8080"}) {
			t.Errorf("left: %v", left)
		}
		if _, err := netlink.LinkByName(ipvsDevice); err == nil {
			t.Errorf("%s is still there", ipvsDevice)
		}
		if found, err := Find(t.Context()); err != nil || len(found) != 0 {
			t.Errorf("after removing: %v, %v", found, err)
		}
	})
}
