package hostnet

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNamespace runs the rest of a test in a network namespace of its own. The thread that is in it ends with the test.
func inNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	ip(t, "link set lo up")
}

func ip(t *testing.T, args string) {
	t.Helper()
	if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v %s", args, err, out)
	}
}

func sysctl(t *testing.T, path, value string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/"+path, []byte(value), 0o644); err != nil {
		t.Fatal(err)
	}
}

func nodeAddrs(t *testing.T) string {
	t.Helper()
	a, err := Interfaces{}.List()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(a.Node)
}

// TestNodeAddresses is a machine whose interface list begins with everything but its own addresses: Portal's temporary
// ones on lo, a bridge, and a second interface.
func TestNodeAddresses(t *testing.T) {
	inNamespace(t)
	ip(t, "address add 10.244.0.53/32 dev lo label lo:portal")
	ip(t, "address add fd00:96::a/128 dev lo nodad valid_lft 2147483647 preferred_lft 0")
	if got := nodeAddrs(t); got != "[]" {
		t.Errorf("a machine with temporary addresses only: %s", got)
	}
	ip(t, "link add br0 type bridge")
	ip(t, "address add 172.17.0.1/16 dev br0")
	ip(t, "link set br0 up")
	ip(t, "link add eth1 type veth peer name eth1-peer")
	ip(t, "link add eth0 type veth peer name eth0-peer")
	for _, name := range []string{"eth0", "eth0-peer", "eth1", "eth1-peer"} {
		ip(t, "link set "+name+" up")
	}
	ip(t, "address add 198.51.100.7/24 dev eth1")
	ip(t, "address add 192.0.2.7/24 dev eth0")
	ip(t, "-6 address add 2001:db8::7/64 dev eth0 nodad")
	ip(t, "route add default via 192.0.2.1")
	ip(t, "route add default via 198.51.100.1 metric 100")
	if got, want := nodeAddrs(t), "[192.0.2.7 198.51.100.7 172.17.0.1 2001:db8::7]"; got != want {
		t.Errorf("node addresses %s, want %s", got, want)
	}
	ip(t, "-6 route add default via 2001:db8::1")
	if got, want := nodeAddrs(t), "[192.0.2.7 198.51.100.7 2001:db8::7 172.17.0.1]"; got != want {
		t.Errorf("with an IPv6 default route %s, want %s", got, want)
	}
	// The address of a router that speaks BGP is on lo, and its default route says so.
	ip(t, "address add 203.0.113.7/32 dev lo")
	if got, want := nodeAddrs(t), "[192.0.2.7 198.51.100.7 2001:db8::7 172.17.0.1 203.0.113.7]"; got != want {
		t.Errorf("with an address on lo %s, want %s", got, want)
	}
	ip(t, "route replace default via 192.0.2.1 src 203.0.113.7")
	if got, want := nodeAddrs(t), "[203.0.113.7 198.51.100.7 2001:db8::7 172.17.0.1 192.0.2.7]"; got != want {
		t.Errorf("with a route that says its source %s, want %s", got, want)
	}
	// Cluster IPs that IPVS needs on a device are Services', not the machine's.
	for i, name := range []string{"portal-ipvs0", "kube-ipvs0", "nodelocaldns"} {
		ip(t, "link add "+name+" type bridge")
		ip(t, fmt.Sprintf("address add 10.96.0.%d/32 dev %s", i+1, name))
	}
	if got, want := nodeAddrs(t), "[203.0.113.7 198.51.100.7 2001:db8::7 172.17.0.1 192.0.2.7]"; got != want {
		t.Errorf("beside IPVS %s, want %s", got, want)
	}
	local, err := Interfaces{}.List()
	for a, want := range map[string]bool{"10.96.0.1": false, "10.96.0.2": false, "10.96.0.3": true} {
		if got := slices.Contains(local.Local, netip.MustParseAddr(a)); got != want {
			t.Errorf("%s is local: %v, want %v", a, got, want)
		}
	}
	if err != nil || !slices.Contains(local.Local, netip.MustParseAddr("10.244.0.53")) || !slices.Contains(local.Local, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("local addresses %v (%v): the temporary and loopback ones are local too", local.Local, err)
	}
	if got := fmt.Sprint(local.Temporary); got != "[10.244.0.53 fd00:96::a]" {
		t.Errorf("temporary addresses %s", got)
	}
}

// TestChanges notices a new address and a new default route, and no other route. What changed before the kernel sends notices is
// not missed either: the first notice says so.
func TestChanges(t *testing.T) {
	inNamespace(t)
	ip(t, "link add eth0 type veth peer name eth0-peer")
	ip(t, "link set eth0 up")
	ip(t, "address add 192.0.2.7/24 dev eth0")
	for _, step := range []string{"address add 192.0.2.8/24 dev eth0", "route add default via 192.0.2.1"} {
		ctx, cancel := context.WithCancel(t.Context())
		out := make(chan struct{}, 1)
		ready, err := os.Create(filepath.Join(t.TempDir(), "ready"))
		if err != nil {
			t.Fatal(err)
		}
		ready.Close()
		changes := exec.Command("sh", "-c", "while [ -e "+ready.Name()+" ]; do sleep 0.02; done; ip "+step)
		if err := changes.Start(); err != nil {
			t.Fatal(err)
		}
		go func() {
			defer cancel()
			for _, what := range []string{"the beginning", "ip " + step} {
				select {
				case <-out:
					_ = os.Remove(ready.Name())
				case <-time.After(20 * time.Second):
					t.Errorf("%s: no change noticed", what)
				}
			}
		}()
		ofAddresses.Follow(ctx, out) // in this thread, which is in the namespace
		_ = changes.Wait()
	}
}

func TestForwardingAndRoutes(t *testing.T) {
	inNamespace(t)
	sysctl(t, "ipv4/ip_forward", "0")
	sysctl(t, "ipv6/conf/all/forwarding", "0")
	ip(t, "link add eth0 type veth peer name eth0-peer")
	ip(t, "link set eth0 up")
	ip(t, "link set eth0-peer up")
	ip(t, "address add 192.0.2.7/24 dev eth0")
	sysctl(t, "ipv6/conf/eth0/accept_ra", "1")
	needs := Needs{Forward4: true, Forward6: true, Reach: []netip.Addr{netip.MustParseAddr("10.96.0.1")}}
	names := func() (out []string) {
		for _, p := range Check(needs) {
			out = append(out, p.Name)
			if !p.Lost || p.Fix == "" {
				t.Errorf("%+v: packets are lost, and there is a fix", p)
			}
		}
		return out
	}
	if got, want := fmt.Sprint(names()), "[net.ipv4.ip_forward net.ipv6.conf.all.forwarding route]"; got != want {
		t.Fatalf("found %s, want %s", got, want)
	}
	if got := Check(Needs{}); len(got) != 0 {
		t.Errorf("a machine that needs nothing has problems: %v", got)
	}
	var c Configured
	changed, err := c.Configure(Check(needs))
	if err != nil || !slices.Contains(changed, "net.ipv4.ip_forward=1") {
		t.Fatalf("configured %v: %v", changed, err)
	}
	ip(t, "route add default via 192.0.2.1")
	if got := names(); len(got) != 0 {
		t.Errorf("still found after configuring: %v", got)
	}
	if got := read("net/ipv6/conf/eth0/accept_ra"); got != "2" {
		t.Errorf("accept_ra of a machine that forwards is %s: it loses its default route", got)
	}
	if err := c.Restore(); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"net/ipv4/ip_forward": "0", "net/ipv6/conf/all/forwarding": "0", "net/ipv6/conf/eth0/accept_ra": "1"} {
		if got := read(path); got != want {
			t.Errorf("%s is %s after Restore, want %s", path, got, want)
		}
	}
}

// TestSettingsOfAKilledProcess: the next one restores what was before the first, unless the machine has started since.
func TestSettingsOfAKilledProcess(t *testing.T) {
	inNamespace(t)
	const path = "net/ipv4/ip_forward"
	file := filepath.Join(t.TempDir(), "new", "settings.json")
	remember := func(c *Configured) {
		t.Helper()
		if err := c.RememberIn(file, path); err != nil {
			t.Fatal(err)
		}
	}
	sysctl(t, "ipv4/ip_forward", "0")
	var killed, next Configured
	remember(&killed)
	sysctl(t, "ipv4/ip_forward", "1")
	remember(&next)
	if err := next.Restore(); err != nil || read(path) != "0" {
		t.Errorf("restored %s: %v", read(path), err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("the file is still there")
	}
	if err := os.WriteFile(file, []byte(`{"World":"another boot","Before":{"net/ipv4/ip_forward":"0"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	sysctl(t, "ipv4/ip_forward", "1")
	var booted Configured
	remember(&booted)
	if err := booted.Restore(); err != nil || read(path) != "1" {
		t.Errorf("after another boot, restored %s: %v", read(path), err)
	}
}

func TestStrictReversePathFilter(t *testing.T) {
	inNamespace(t)
	sysctl(t, "ipv4/conf/all/rp_filter", "0")
	for i, name := range []string{"eth0", "eth1"} {
		ip(t, fmt.Sprintf("link add %s type veth peer name %s-peer", name, name))
		ip(t, "link set "+name+" up")
		ip(t, "link set "+name+"-peer up")
		ip(t, fmt.Sprintf("address add %v/24 dev %s", net.IPv4(192, 0, byte(2+i), 7), name))
		sysctl(t, "ipv4/conf/"+name+"/rp_filter", "1")
	}
	got := Check(Needs{Forward4: true})
	var found []Problem
	for _, p := range got {
		if strings.Contains(p.Name, "rp_filter") {
			found = append(found, p)
		}
	}
	if len(found) != 1 || found[0].Lost || !strings.Contains(found[0].Message, "eth0, eth1") {
		t.Fatalf("found %v, want eth0 and eth1 as a risk", got)
	}
	var c Configured
	if _, err := c.Configure(found); err != nil {
		t.Fatal(err)
	}
	if p, strict := strictFilter(); strict {
		t.Errorf("still strict after configuring: %v", p)
	}
}
