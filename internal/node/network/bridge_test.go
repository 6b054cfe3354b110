package network

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var cidrs = []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24"), netip.MustParsePrefix("fd00:244:3::/64")}

func newNetwork(t *testing.T, dir string) *Bridge {
	t.Helper()
	n, err := NewBridge(BridgeOptions{Dir: dir, CIDRs: cidrs})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestPods: Pods reach each other, the node reaches them and they reach the node, with their own addresses, in both families.
func TestPods(t *testing.T) {
	node, dir := NewNamespace(t), t.TempDir()
	n := newNetwork(t, dir)
	pods := map[string]*Namespace{}
	addrs := map[string][]netip.Addr{}
	for _, name := range []string{"a", "b"} {
		pods[name] = NewNamespace(t)
		pods[name].Sysctls(t)
	}
	node.Do(func() {
		lo, _ := netlink.LinkByName("lo")
		_ = netlink.LinkSetUp(lo)
		for range 2 { // all of it can be repeated
			if err := n.Setup(); err != nil {
				t.Fatal(err)
			}
			for name, pod := range pods {
				got, err := n.Attach(t.Context(), Pod{UID: name}, pod.Path)
				if err != nil {
					t.Fatal(err)
				}
				if before := addrs[name]; before != nil && !slices.Equal(before, got) {
					t.Errorf("%s had %v and has %v", name, before, got)
				}
				addrs[name] = got
			}
		}
	})
	for name, pod := range pods {
		pod.Serve(t, ":8080")
		for family, a := range addrs[name] {
			if !cidrs[family].Contains(a) {
				t.Errorf("%s has %s", name, a)
			}
			at := net.JoinHostPort(a.String(), "8080")
			for other, from := range pods {
				got, err := from.Ask(at)
				if err != nil || got != addrs[other][family].String() {
					t.Errorf("%s to %s at %s: %q, %v", other, name, at, got, err)
				}
			}
			if got, err := node.Ask(at); err != nil || got != Gateway(cidrs[family]).String() {
				t.Errorf("the node to %s at %s: %q, %v", name, at, got, err)
			}
		}
	}
	node.Serve(t, ":9090")
	for family, p := range cidrs {
		if got, err := pods["a"].Ask(net.JoinHostPort(Gateway(p).String(), "9090")); err != nil || got != addrs["a"][family].String() {
			t.Errorf("to the node: %q, %v", got, err)
		}
	}
	stolen(t, node, pods["b"], addrs["a"][0])
	if got, err := node.Ask(net.JoinHostPort(addrs["a"][0].String(), "8080")); err != nil || got == "" {
		t.Errorf("after an attempt to take its address: %q, %v", got, err)
	}

	node.Do(func() {
		for name := range pods {
			if err := n.Detach(t.Context(), name); err != nil {
				t.Error(err)
			}
			if err := n.Detach(t.Context(), name); err != nil {
				t.Errorf("again: %v", err)
			}
		}
		if err := n.Remove(); err != nil {
			t.Error(err)
		}
	})
	if links := node.Run(t, "ip", "-br", "link"); strings.Contains(links, "pod") || strings.Contains(links, DefaultBridge) {
		t.Errorf("left:\n%s", links)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "[0-9f]*"))
	if len(files) != 0 {
		t.Errorf("left %v", files)
	}
}

// TestBridgeTakesNothing: Pods can't tell the node about addresses and routes, also if the cluster has no IPv6.
func TestBridgeTakesNothing(t *testing.T) {
	n, err := NewBridge(BridgeOptions{Dir: t.TempDir(), CIDRs: cidrs[:1]})
	if err != nil {
		t.Fatal(err)
	}
	node := NewNamespace(t)
	node.Do(func() {
		if err := n.Setup(); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"ipv4/conf/portal0/accept_redirects", "ipv6/conf/portal0/accept_ra", "ipv6/conf/portal0/autoconf", "ipv6/conf/portal0/accept_redirects"} {
			if data, err := os.ReadFile("/proc/sys/net/" + name); err != nil || string(data) != "0\n" {
				t.Errorf("%s: %q, %v", name, data, err)
			}
		}
	})
}

// TestBridgeKeepsItsHardwareAddress: Pods that come and go don't change where the others send to.
func TestBridgeKeepsItsHardwareAddress(t *testing.T) {
	n := newNetwork(t, t.TempDir())
	node := NewNamespace(t)
	node.Do(func() {
		if err := n.Setup(); err != nil {
			t.Fatal(err)
		}
		before, err := netlink.LinkByName(DefaultBridge)
		if err != nil {
			t.Fatal(err)
		}
		low := netlink.NewLinkAttrs()
		low.Name, low.MasterIndex, low.HardwareAddr = "low", before.Attrs().Index, net.HardwareAddr{2, 0, 0, 0, 0, 1}
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: low, PeerName: "peer"}); err != nil {
			t.Fatal(err)
		}
		after, err := netlink.LinkByName(DefaultBridge)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := after.Attrs().HardwareAddr.String(), before.Attrs().HardwareAddr.String(); got != want {
			t.Errorf("it was %s and is %s", want, got)
		}
	})
}

// TestBridgeOfOthers: only addresses that were given to the bridge are taken away again.
func TestBridgeOfOthers(t *testing.T) {
	dir := t.TempDir()
	node := NewNamespace(t)
	setup := func(p netip.Prefix) {
		n, err := NewBridge(BridgeOptions{Dir: dir, CIDRs: []netip.Prefix{p}})
		if err != nil {
			t.Fatal(err)
		}
		node.Do(func() {
			if err := n.Setup(); err != nil {
				t.Fatal(err)
			}
		})
	}
	node.Run(t, "ip", "link", "add", DefaultBridge, "type", "bridge")
	node.Run(t, "ip", "address", "add", "192.0.2.77/24", "dev", DefaultBridge)
	setup(netip.MustParsePrefix("10.244.3.0/24"))
	setup(netip.MustParsePrefix("10.244.3.0/24"))
	setup(netip.MustParsePrefix("10.244.4.0/24"))
	got := node.Run(t, "ip", "-br", "address", "show", DefaultBridge)
	if !strings.Contains(got, "192.0.2.77/24") || strings.Contains(got, "10.244.3.1/24") || !strings.Contains(got, "10.244.4.1/24") {
		t.Error(got)
	}
}

// stolen: a Pod that takes another's address and announces it gets none of its traffic.
func stolen(t *testing.T, node, thief *Namespace, victim netip.Addr) {
	t.Helper()
	thief.Run(t, "ip", "addr", "add", victim.String()+"/32", "dev", podInterface)
	thief.Do(func() {
		eth, err := net.InterfaceByName(podInterface)
		if err != nil {
			t.Error(err)
			return
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, int(htons(unix.ETH_P_ARP)))
		if err != nil {
			t.Error(err)
			return
		}
		defer unix.Close(fd)
		ip := victim.As4()
		packet := slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, 2}, eth.HardwareAddr, ip[:], []byte{255, 255, 255, 255, 255, 255}, ip[:])
		to := &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ARP), Ifindex: eth.Index, Halen: 6, Addr: [8]byte{255, 255, 255, 255, 255, 255}}
		for range 5 {
			if err := unix.Sendto(fd, packet, 0, to); err != nil {
				t.Error(err)
			}
		}
	})
	time.Sleep(50 * time.Millisecond)
	if got := node.Run(t, "ip", "neigh", "show", victim.String()); !strings.Contains(got, "PERMANENT") {
		t.Errorf("neighbours: %s", got)
	}
	thief.Run(t, "ip", "addr", "del", victim.String()+"/32", "dev", podInterface)
}

func htons(n uint16) uint16 { return n<<8 | n>>8 }

// TestSweep removes what an earlier process left, and nothing else.
func TestSweep(t *testing.T) {
	node, dir := NewNamespace(t), t.TempDir()
	kept, left := NewNamespace(t), NewNamespace(t)
	node.Do(func() {
		n := newNetwork(t, dir)
		if err := n.Setup(); err != nil {
			t.Fatal(err)
		}
		for name, pod := range map[string]*Namespace{"kept": kept, "left": left} {
			if _, err := n.Attach(t.Context(), Pod{UID: name}, pod.Path); err != nil {
				t.Fatal(err)
			}
		}
		n = newNetwork(t, dir)
		if err := n.Setup(); err != nil {
			t.Fatal(err)
		}
		if err := n.Sweep(t.Context(), map[string]bool{"kept": true}); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]int{"kept": 2, "left": 0} {
			if got, err := n.Addresses(name); err != nil || len(got) != want {
				t.Errorf("%s has %v, %v", name, got, err)
			}
			if _, err := netlink.LinkByName(HostInterface(name)); (err == nil) != (want > 0) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

func TestAddresses(t *testing.T) {
	a := addresses{t.TempDir()}
	small := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/29")} // the bridge and five Pods
	var got []string
	for i := range 5 {
		list, err := a.acquire(fmt.Sprint(i), small)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, list[0].String())
	}
	if want := "[10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5 10.0.0.6]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	if _, err := a.acquire("more", small); err == nil || !strings.Contains(err.Error(), "all addresses of 10.0.0.0/29 are in use") {
		t.Error(err)
	}
	// What is given back is used again, last of all.
	for _, owner := range []string{"1", "3"} {
		if err := a.release(owner); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []string{"10.0.0.3", "10.0.0.5"} {
		if list, err := a.acquire(fmt.Sprint("again", i), small); err != nil || list[0].String() != want {
			t.Errorf("%v, %v, want %s", list, err, want)
		}
	}
	// A new prefix of the node's gives new addresses.
	if list, err := a.acquire("0", []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}); err != nil || list[0].String() != "10.9.0.2" {
		t.Errorf("%v, %v", list, err)
	}
}

// TestAddressNotWritten: an address whose owner can't be written down is not taken.
func TestAddressNotWritten(t *testing.T) {
	a := addresses{t.TempDir()}
	if err := os.MkdirAll(filepath.Join(a.dir, "new", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := a.acquire("pod", cidrs); err == nil {
		t.Fatal("an address was given out")
	}
	if all, err := a.all(); err != nil || len(all) != 0 {
		t.Errorf("in use: %v, %v", all, err)
	}
	if err := os.RemoveAll(filepath.Join(a.dir, "new")); err != nil {
		t.Fatal(err)
	}
	if got, err := a.acquire("pod", cidrs); err != nil || len(got) != 2 {
		t.Errorf("%v, %v", got, err)
	}
}
