package l2

import (
	"errors"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func names(links []*link) string {
	var out []string
	for _, l := range links {
		out = append(out, l.name)
	}
	return strings.Join(out, " ")
}

// TestLinksFor: an address is announced where its network is, or else where the default route is. That a proxy has put the address on this
// machine makes no difference.
func TestLinksFor(t *testing.T) {
	prefixes := func(text ...string) (out []netip.Prefix) {
		for _, p := range text {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	all := []*link{
		{name: "held", prefixes: prefixes("203.0.113.7/32", "192.168.1.200/32", "2001:db8::7/128")},
		{name: "lan", prefixes: prefixes("192.168.1.10/24", "fd00:1::10/64")},
		{name: "wan", prefixes: prefixes("198.51.100.10/24", "203.0.113.8/32"), gateway4: true, gateway6: true},
	}
	for address, want := range map[string]string{
		"192.168.1.200": "lan", "fd00:1::200": "lan", "203.0.113.7": "wan", "203.0.113.8": "wan", "2001:db8::7": "wan", "203.0.113.9": "wan",
	} {
		if got := names(linksFor(all, false, netip.MustParseAddr(address))); got != want {
			t.Errorf("%s is announced on %q, want %q", address, got, want)
		}
	}
	if got := names(linksFor(all[1:2], true, netip.MustParseAddr("203.0.113.7"))); got != "lan" {
		t.Errorf("on a chosen interface: %q", got)
	}
}

// inNamespace moves the test into a network namespace of its own. The thread is never given back.
func inNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); errors.Is(err, unix.EPERM) && os.Geteuid() != 0 {
		t.Skip("a network namespace needs root")
	} else if err != nil {
		t.Fatal(err)
	}
}

// add makes an interface that is up and has addresses.
func add(t *testing.T, l netlink.Link, addrs ...string) {
	t.Helper()
	err := netlink.LinkAdd(l)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	for _, a := range addrs {
		if err == nil {
			var parsed *netlink.Addr
			if parsed, err = netlink.ParseAddr(a); err == nil {
				err = netlink.AddrAdd(l, parsed)
			}
		}
	}
	if err != nil {
		t.Fatalf("%s: %v", l.Attrs().Name, err)
	}
}

func named(name string) netlink.LinkAttrs {
	out := netlink.NewLinkAttrs()
	out.Name = name
	return out
}

// TestUsable: a dummy has no neighbours, also one that is set to use ARP. Not every kernel that runs the tests can make one.
func TestUsable(t *testing.T) {
	const up = unix.IFF_UP | unix.IFF_BROADCAST | unix.IFF_RUNNING
	attrs := func(flags uint32) netlink.LinkAttrs {
		return netlink.LinkAttrs{Name: "test", RawFlags: flags, HardwareAddr: own[:]}
	}
	for _, c := range []struct {
		link netlink.Link
		want bool
	}{
		{&netlink.Device{LinkAttrs: attrs(up)}, true},
		{&netlink.Veth{LinkAttrs: attrs(up | unix.IFF_MULTICAST)}, true},
		{&netlink.Dummy{LinkAttrs: attrs(up | unix.IFF_NOARP)}, false},
		{&netlink.Dummy{LinkAttrs: attrs(up)}, false},
		{&netlink.Device{LinkAttrs: attrs(up | unix.IFF_NOARP)}, false},
		{&netlink.Device{LinkAttrs: attrs(up | unix.IFF_LOOPBACK)}, false},
		{&netlink.Device{LinkAttrs: attrs(up &^ unix.IFF_UP)}, false},
		{&netlink.Device{LinkAttrs: attrs(up &^ unix.IFF_BROADCAST)}, false},
		{&netlink.Device{LinkAttrs: netlink.LinkAttrs{RawFlags: up}}, false},
	} {
		if got := usable(c.link); got != c.want {
			t.Errorf("%s with flags %#x: %v", c.link.Type(), c.link.Attrs().RawFlags, got)
		}
	}
}

// TestListLinks: interfaces with neighbours, and each with its own addresses.
func TestListLinks(t *testing.T) {
	inNamespace(t)
	add(t, &netlink.Veth{LinkAttrs: named("node"), PeerName: "switch"}, "192.168.1.10/24", "192.168.2.10/16")
	add(t, &netlink.Bridge{LinkAttrs: named("down")}, "10.0.0.1/8")
	add(t, &netlink.Veth{LinkAttrs: named("noarp"), PeerName: "noarp-peer"}, "192.168.3.10/24")
	for name, change := range map[string]func(netlink.Link) error{"noarp": netlink.LinkSetARPOff, "down": netlink.LinkSetDown} {
		l, err := netlink.LinkByName(name)
		if err == nil {
			err = change(l)
		}
		if err != nil {
			t.Fatal(name, err)
		}
	}
	links, err := listLinks()
	if err != nil {
		t.Fatal(err)
	}
	if got := names(links); got != "node" {
		t.Fatalf("links %q, want only node", got)
	}
	var v4 []string
	for _, p := range links[0].prefixes {
		if p.Addr().Is4() {
			v4 = append(v4, p.String())
		}
	}
	if got := strings.Join(v4, " "); got != "192.168.1.10/24 192.168.2.10/16" {
		t.Errorf("addresses %q", got)
	}
	if got := names(choose(links, []string{"other"})); got != "" {
		t.Errorf("other interfaces: %q", got)
	}
}
