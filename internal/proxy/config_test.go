package proxy

import (
	"fmt"
	"net/netip"
	"testing"

	"portal/internal/hostnet"
	"portal/internal/intent"
	"portal/internal/plan"
)

var local = []netip.Addr{
	netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("::1"), netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"),
	netip.MustParseAddr("fe80::1"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2"),
}

// own are the machine's, with a Service's address, which a mode may have put on an interface.
var own = []netip.Addr{
	netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2"),
}

var node = &intent.Node{
	Name: "n1", Addresses: []intent.NodeAddress{
		{Type: "Hostname"}, {Type: "ExternalIP", Addr: netip.MustParseAddr("198.51.100.1")},
		{Type: "InternalIP", Addr: netip.MustParseAddr("192.0.2.1")}, {Type: "InternalIP", Addr: netip.MustParseAddr("2001:db8::1")},
	},
	PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00:244:1::/64")},
}

func TestNodePortAddresses(t *testing.T) {
	for _, c := range []struct {
		mode  string
		words []string
		want  string
	}{
		{"nftables", nil, "[192.0.2.1 2001:db8::1], checks [192.0.2.1 2001:db8::1]"},
		{"iptables", nil, "all 127.0.0.1, checks [0.0.0.0 ::]"},
		{"ipvs", nil, "all, checks [0.0.0.0 ::]"},
		{"userspace", nil, "all, checks [0.0.0.0 ::]"},
		{"nftables", []string{"0.0.0.0/0", "::/0"}, "all, checks [0.0.0.0 ::]"},
		{"nftables", []string{"all"}, "all, checks [0.0.0.0 ::]"},
		{"iptables", []string{"primary"}, "[192.0.2.1 2001:db8::1], checks [192.0.2.1 2001:db8::1]"},
		{"userspace", []string{"primary", "localhost"}, "[192.0.2.1 2001:db8::1] 127.0.0.1 ::1, checks [127.0.0.1 192.0.2.1 ::1 2001:db8::1]"},
		{"iptables", []string{"primary", "localhost"}, "[192.0.2.1 2001:db8::1] 127.0.0.1, checks [127.0.0.1 192.0.2.1 ::1 2001:db8::1]"},
		{"nftables", []string{"192.0.2.0/24"}, "[192.0.2.1 192.0.2.2 2001:db8::1 2001:db8::2 fe80::1], checks [192.0.2.1 192.0.2.2 ::]"},
		{"nftables", []string{"10.0.0.0/8", "2001:db8::/127"}, "[2001:db8::1], checks [2001:db8::1]"},
		{"nftables", []string{"127.0.0.0/8", "::1/128"}, "[], checks [127.0.0.1 ::1]"},
		{"iptables", []string{"127.0.0.0/8", "::1/128"}, "[] 127.0.0.1, checks [127.0.0.1 ::1]"},
		{"userspace", []string{"127.0.0.0/8", "192.0.2.2/32"}, "[192.0.2.2 2001:db8::1 2001:db8::2 fe80::1] 127.0.0.1, checks [127.0.0.1 192.0.2.2 ::]"},
	} {
		t.Run(fmt.Sprint(c.mode, c.words), func(t *testing.T) {
			n, err := plan.ParseNodePortAddresses(c.words)
			if err != nil {
				t.Fatal(err)
			}
			config := Config{Families: []intent.Family{intent.IPv4, intent.IPv6}, NodePorts: n, LocalhostNodePorts: true}
			if got := where(config.facts(node, hostnet.Addresses{Local: local, Node: own}, nil, traits[c.mode].Traits).NodePorts); got != c.want {
				t.Errorf("served at %s, want %s", got, c.want)
			}
		})
	}
	if _, err := plan.ParseNodePortAddresses([]string{"everywhere"}); err == nil {
		t.Error("a word that means nothing was taken")
	}
}

func where(n plan.NodePorts) string {
	out := fmt.Sprint(n.Addrs)
	if n.All {
		out = "all"
	}
	if n.Loopback4 {
		out += " 127.0.0.1"
	}
	if n.Loopback6 {
		out += " ::1"
	}
	return out + fmt.Sprint(", checks ", n.Checks)
}

func TestFactsOfNode(t *testing.T) {
	both := []intent.Family{intent.IPv4, intent.IPv6}
	for _, c := range []struct {
		name   string
		config Config
		node   *intent.Node
		want   string
	}{
		{"of the Node", Config{}, node, "[192.0.2.1 2001:db8::1 198.51.100.1] [4 6] {[]  }"},
		{"no Node", Config{}, nil, "[192.0.2.1 192.0.2.2 2001:db8::1 2001:db8::2] [4 6] {[]  }"},
		{"overridden", Config{NodeAddr: netip.MustParseAddr("2001:db8::2")}, node, "[2001:db8::2 192.0.2.1 2001:db8::1 198.51.100.1] [6 4] {[]  }"},
		{"not overridden", Config{NodeAddr: netip.IPv4Unspecified()}, node, "[192.0.2.1 2001:db8::1 198.51.100.1] [4 6] {[]  }"},
		{"cluster CIDR", Config{ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}, nil,
			"[192.0.2.1 192.0.2.2 2001:db8::1 2001:db8::2] [4 6] {[10.244.0.0/16]  }"},
		{"node CIDR", Config{DetectLocal: DetectNodeCIDR}, node, "[192.0.2.1 2001:db8::1 198.51.100.1] [4 6] {[10.244.1.0/24 fd00:244:1::/64]  }"},
		{"bridge", Config{DetectLocal: DetectBridgeInterface, Bridge: "br0"}, node, "[192.0.2.1 2001:db8::1 198.51.100.1] [4 6] {[] br0 }"},
		{"interfaces", Config{DetectLocal: DetectInterfacePrefix, InterfacePrefix: "veth"}, node, "[192.0.2.1 2001:db8::1 198.51.100.1] [4 6] {[]  veth}"},
	} {
		c.config.Families = both
		f := c.config.facts(c.node, hostnet.Addresses{Local: local, Node: own}, []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, traits["nftables"].Traits)
		if got := fmt.Sprint(f.Addrs, f.Families, f.Pods); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, got, c.want)
		}
	}
}
