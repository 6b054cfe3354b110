package peers

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func prefixes(list ...string) (out []netip.Prefix) {
	for _, text := range list {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

func addrs(list ...string) (out []netip.Addr) {
	for _, text := range list {
		out = append(out, netip.MustParseAddr(text))
	}
	return out
}

// describe is a plan as lines that a person can compare.
func (p *Plan) describe() string {
	var lines []string
	for to, w := range p.Ways {
		line := fmt.Sprintf("%s %s %s", to, w.Node, w.Kind)
		if w.Address.IsValid() {
			line += " " + w.Address.String()
		}
		if w.Link != 0 {
			line += fmt.Sprintf(" link %d", w.Link)
		}
		lines = append(lines, line)
	}
	for _, t := range p.Tunnels {
		lines = append(lines, fmt.Sprintf("tunnel from %s mtu %d", t.Local, t.MTU))
	}
	slices.Sort(lines)
	lines = append(lines, fmt.Sprintf("mtu %d", p.MTU))
	return strings.Join(lines, "\n")
}

func TestMake(t *testing.T) {
	self := Node{"a", addrs("192.0.2.1", "2001:db8::1"), prefixes("10.244.0.0/24", "fd00:244::/64")}
	links := []Link{
		{2, "eth0", 1500, prefixes("192.0.2.1/24", "2001:db8::1/64")},
		{3, "eth1", 9000, prefixes("198.51.100.1/25")},
	}
	only4 := Node{"a", addrs("192.0.2.1"), prefixes("10.244.0.0/24", "fd00:244::/64")}
	only6 := Node{"a", addrs("2001:db8::1"), prefixes("10.244.0.0/24", "fd00:244::/64")}
	both := func(name string, n int, addresses ...string) Node {
		return Node{name, addrs(addresses...), prefixes(fmt.Sprintf("10.244.%d.0/24", n), fmt.Sprintf("fd00:244:0:%d::/64", n))}
	}
	for name, c := range map[string]struct {
		in      Input
		want    string
		problem string // part of the only one; empty: none
	}{
		"alone":              {Input{Self: self, Links: links, Peers: []Node{self}}, "mtu 1500", ""},
		"nothing is known":   {Input{Self: self}, "mtu 1500", ""},
		"an uplink of 1400":  {Input{Self: self, Links: []Link{{2, "eth0", 1400, prefixes("192.0.2.1/24")}}}, "mtu 1400", ""},
		"an uplink of 500":   {Input{Self: self, Links: []Link{{2, "eth0", 500, prefixes("192.0.2.1/24")}}}, "mtu 1280", ""},
		"on a link of ours":  {Input{Self: self, Links: links, Peers: []Node{both("b", 1, "192.0.2.2", "2001:db8::2")}}, "10.244.1.0/24 b direct 192.0.2.2 link 2\nfd00:244:0:1::/64 b direct 2001:db8::2 link 2\nmtu 1500", ""},
		"on another link":    {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("198.51.100.9"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b direct 198.51.100.9 link 3\nmtu 1500", ""},
		"behind a router":    {Input{Self: self, Links: links, Peers: []Node{both("b", 1, "203.0.113.2", "2001:db8:1::2")}}, "10.244.1.0/24 b tunnelled 203.0.113.2\nfd00:244:0:1::/64 b tunnelled 203.0.113.2\ntunnel from 192.0.2.1 mtu 1450\nmtu 1450", ""},
		"only its IPv6 here": {Input{Self: self, Links: links, Peers: []Node{both("b", 1, "203.0.113.2", "2001:db8::2")}}, "10.244.1.0/24 b tunnelled 203.0.113.2\nfd00:244:0:1::/64 b direct 2001:db8::2 link 2\ntunnel from 192.0.2.1 mtu 1450\nmtu 1450", ""},
		"IPv6 nodes only":    {Input{Self: only6, Links: links, Peers: []Node{both("b", 1, "2001:db8:1::2")}}, "10.244.1.0/24 b tunnelled 2001:db8:1::2\nfd00:244:0:1::/64 b tunnelled 2001:db8:1::2\ntunnel from 2001:db8::1 mtu 1430\nmtu 1430", ""},
		"two tunnels": {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("203.0.113.2"), prefixes("10.244.1.0/24")}, {"c", addrs("2001:db8:1::3"), prefixes("10.244.2.0/24")}}},
			"10.244.1.0/24 b tunnelled 203.0.113.2\n10.244.2.0/24 c tunnelled 2001:db8:1::3\ntunnel from 192.0.2.1 mtu 1450\ntunnel from 2001:db8::1 mtu 1430\nmtu 1430", ""},
		"always tunnels":     {Input{Self: self, Links: links, Tunnels: Always, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b tunnelled 192.0.2.2\ntunnel from 192.0.2.1 mtu 1450\nmtu 1450", ""},
		"never tunnels":      {Input{Self: self, Links: links, Tunnels: Never, Peers: []Node{{"b", addrs("203.0.113.2"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b unreachable\nmtu 1500", "tunnels are turned off"},
		"no address yet":     {Input{Self: self, Links: links, Peers: []Node{{"b", nil, prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b unreachable\nmtu 1500", "no address of type InternalIP"},
		"another family":     {Input{Self: only4, Links: links[1:], Peers: []Node{{"b", addrs("2001:db8::2"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b unreachable\nmtu 9000", "none of such a family"},
		"our address":        {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("198.51.100.1"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b unreachable\nmtu 1500", "this machine's address 198.51.100.1"},
		"no prefix yet":      {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("192.0.2.2"), nil}}}, "mtu 1500", ""},
		"our prefix":         {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.244.0.128/25")}}}, "mtu 1500", "overlaps 10.244.0.0/24, which is this node's"},
		"the whole world":    {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("0.0.0.0/0")}}}, "mtu 1500", "all addresses there are"},
		"our link":           {Input{Self: self, Links: links, Cluster: prefixes("198.51.0.0/16"), Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("198.51.0.0/16")}}}, "mtu 1500", "this machine's own address 198.51.100.1"},
		"another node":       {Input{Self: self, Links: links, Cluster: prefixes("203.0.113.0/24"), Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("203.0.113.0/24")}, {"c", addrs("203.0.113.3"), nil}}}, "mtu 1500", "the address 203.0.113.3 of node c"},
		"public":             {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("8.8.8.0/24")}}}, "mtu 1500", "not of a private range"},
		"loopback":           {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("127.0.0.0/8")}}}, "mtu 1500", "can't be those of Pods"},
		"not a prefix":       {Input{Self: self, Links: links, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.244.1.5/24")}}}, "mtu 1500", "must be 10.244.1.0/24"},
		"not the cluster's":  {Input{Self: self, Links: links, Cluster: prefixes("10.244.0.0/16", "fd00:244::/48"), Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.9.0.0/24")}}}, "mtu 1500", "outside of the cluster's prefixes"},
		"the cluster's":      {Input{Self: self, Links: links, Cluster: prefixes("10.244.0.0/16"), Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b direct 192.0.2.2 link 2\nmtu 1500", ""},
		"a point-to-point":   {Input{Self: self, Links: []Link{{2, "eth0", 1500, prefixes("192.0.2.1/32")}}, Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b tunnelled 192.0.2.2\ntunnel from 192.0.2.1 mtu 1450\nmtu 1450", ""},
		"the nearer link":    {Input{Self: self, Links: append(links, Link{4, "vpn", 1400, prefixes("192.0.0.1/16")}), Peers: []Node{{"b", addrs("192.0.2.2"), prefixes("10.244.1.0/24")}, {"c", addrs("192.0.3.3"), prefixes("10.244.2.0/24")}}}, "10.244.1.0/24 b direct 192.0.2.2 link 2\n10.244.2.0/24 c direct 192.0.3.3 link 4\nmtu 1400", ""},
		"an address on none": {Input{Self: Node{"a", addrs("203.0.113.200"), nil}, Links: links, Peers: []Node{{"b", addrs("203.0.113.2"), prefixes("10.244.1.0/24")}}}, "10.244.1.0/24 b tunnelled 203.0.113.2\ntunnel from 203.0.113.200 mtu 1450\nmtu 1450", ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := Make(c.in)
			if got := p.describe(); got != c.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, c.want)
			}
			switch {
			case c.problem == "" && len(p.Problems) > 0, c.problem != "" && (len(p.Problems) != 1 || !strings.Contains(p.Problems[0], c.problem)):
				t.Errorf("problems: %q", p.Problems)
			}
		})
	}
}

// TestOverlap: of two nodes with overlapping prefixes, the first by name keeps its own.
func TestOverlap(t *testing.T) {
	p := Make(Input{
		Self:  Node{"a", addrs("192.0.2.1"), prefixes("10.244.0.0/24")},
		Links: []Link{{2, "eth0", 1500, prefixes("192.0.2.1/24")}},
		Peers: []Node{{"c", addrs("192.0.2.3"), prefixes("10.245.0.0/16")}, {"b", addrs("192.0.2.2"), prefixes("10.245.7.0/24")}},
	})
	if got := p.describe(); got != "10.245.7.0/24 b direct 192.0.2.2 link 2\nmtu 1500" {
		t.Error(got)
	}
	if len(p.Problems) != 1 || !strings.Contains(p.Problems[0], "node c (10.245.0.0/16) are not reached: it overlaps 10.245.7.0/24, which is of node b") {
		t.Errorf("%q", p.Problems)
	}
}

// TestNeighbours: only nodes that are reached directly see Pods' own addresses.
func TestNeighbours(t *testing.T) {
	p := Make(Input{
		Self:  Node{"a", addrs("192.0.2.1"), prefixes("10.244.0.0/24")},
		Links: []Link{{2, "eth0", 1500, prefixes("192.0.2.1/24")}},
		Peers: []Node{
			{"b", addrs("192.0.2.3"), prefixes("10.244.1.0/24")}, {"c", addrs("192.0.2.2"), prefixes("10.244.2.0/24")}, {"d", addrs("203.0.113.2"), prefixes("10.244.3.0/24")},
		},
	})
	if got := fmt.Sprint(p.Neighbours()); got != "[192.0.2.2 192.0.2.3]" {
		t.Error(got)
	}
}

// TestHardware: addresses differ, are local and unicast, and the same each time.
func TestHardware(t *testing.T) {
	seen := map[string]bool{}
	for i := range 1000 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		mac := hardware(a)
		if seen[mac.String()] || mac[0]&3 != 2 || mac.String() != hardware(a).String() {
			t.Fatalf("%s: %s", a, mac)
		}
		seen[mac.String()] = true
	}
}
