package network_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"portal/internal/node/network"
	"portal/internal/node/network/nat"
	"portal/internal/node/network/peers"
)

// machine is a network namespace that stands for a machine.
type machine struct{ *network.Namespace }

func newMachine(t *testing.T) machine {
	m := machine{network.NewNamespace(t)}
	m.Do(func() {
		// Links are used immediately.
		for _, name := range []string{"all", "default"} {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/accept_dad", []byte("0"), 0); err != nil {
				t.Fatal(err)
			}
		}
	})
	m.ip(t, "link set lo up")
	return m
}

// ip runs the ip command, which must succeed.
func (m machine) ip(t *testing.T, args string) string {
	t.Helper()
	out := m.Run(t, append([]string{"ip"}, strings.Fields(args)...)...)
	if strings.Contains(out, "rror") || strings.Contains(out, "RTNETLINK") || strings.Contains(out, "Cannot") {
		t.Fatalf("ip %s: %s", args, out)
	}
	return out
}

// router has the machine forward.
func (m machine) router(t *testing.T) {
	m.Do(func() {
		for _, path := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+path, []byte("1"), 0); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// connect puts a cable between two machines.
func connect(t *testing.T, a machine, nameA string, b machine, nameB string) {
	t.Helper()
	a.Do(func() {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = nameA
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: nameB, PeerNamespace: netlink.NsFd(b.Handle)}); err != nil {
			t.Fatal(err)
		}
	})
	a.ip(t, "link set "+nameA+" up")
	b.ip(t, "link set "+nameB+" up")
}

func (m machine) address(t *testing.T, link string, list ...string) {
	t.Helper()
	for _, a := range list {
		option := ""
		if strings.Contains(a, ":") {
			option = " nodad"
		}
		m.ip(t, "addr add "+a+" dev "+link+option)
	}
}

// node is a machine with Pods.
type node struct {
	machine
	peers.Node
	dir    string
	bridge *network.Bridge
	nat    *nat.NAT
	state  nat.State
	plan   *peers.Plan
	tunnel peers.Tunnels
	lan    machine // the router of its link
	pods   map[string]*pod
}

type pod struct {
	machine
	addrs []netip.Addr
}

func newNode(t *testing.T, name string, number int, addresses ...string) *node {
	n := &node{
		machine: newMachine(t), dir: t.TempDir(), pods: map[string]*pod{}, tunnel: peers.Auto,
		Node: peers.Node{Name: name, PodCIDRs: []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", number)), netip.MustParsePrefix(fmt.Sprintf("fd00:244:0:%d::/64", number)),
		}},
		state: nat.State{Masquerade: true, Ports: map[string][]nat.Port{}},
	}
	for _, a := range addresses {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
	}
	n.restart(t)
	return n
}

// restart is what a new process begins with: nothing but the folder.
func (n *node) restart(t *testing.T) {
	t.Helper()
	var err error
	if n.bridge, err = network.NewBridge(network.BridgeOptions{Dir: filepath.Join(n.dir, "addresses"), CIDRs: n.PodCIDRs}); err != nil {
		t.Fatal(err)
	}
	n.nat = nat.New()
}

// sync does what an agent does when something has changed.
func (n *node) sync(t *testing.T, all ...*node) {
	t.Helper()
	n.Do(func() {
		if err := n.bridge.Setup(); err != nil {
			t.Fatal(err)
		}
		links, err := peers.Links(n.bridge.Bridge)
		if err != nil {
			t.Fatal(err)
		}
		in := peers.Input{Self: n.Node, Links: links, Tunnels: n.tunnel}
		for _, other := range all {
			in.Peers = append(in.Peers, other.Node)
		}
		n.plan = peers.Make(in)
		if len(n.plan.Problems) > 0 {
			t.Errorf("node %s: %q", n.Name, n.plan.Problems)
		}
		if err := peers.Apply(n.plan); err != nil {
			t.Fatal(err)
		}
		n.bridge.SetMTU(n.plan.MTU)
		n.state.Pods, n.state.Bridge, n.state.Inside = n.PodCIDRs, n.bridge.Bridge, slices.Clone(n.PodCIDRs)
		for to := range n.plan.Ways {
			n.state.Inside = append(n.state.Inside, to)
		}
		for _, a := range n.plan.Neighbours() {
			n.state.Inside = append(n.state.Inside, netip.PrefixFrom(a, a.BitLen()))
		}
		if err := n.nat.Sync(n.state); err != nil {
			t.Fatal(err)
		}
	})
}

// pod starts a Pod that tells who asks, at port 8080 of TCP and UDP.
func (n *node) pod(t *testing.T, name string) *pod {
	t.Helper()
	p := &pod{machine: machine{network.NewNamespace(t)}}
	p.Sysctls(t)
	n.Do(func() {
		var err error
		if p.addrs, err = n.bridge.Attach(t.Context(), network.Pod{UID: name}, p.Path); err != nil {
			t.Fatal(err)
		}
	})
	p.Serve(t, ":8080")
	p.ServeUDP(t, ":8080")
	n.pods[name] = p
	return p
}

// remove takes everything away again.
func (n *node) remove(t *testing.T) {
	t.Helper()
	n.Do(func() {
		for _, f := range []func() error{peers.Remove, n.nat.Remove, n.bridge.Remove} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	})
}

// traces are what Portal has in a machine's network.
func (n *node) traces(t *testing.T) string {
	return n.Run(t, "ip", "route", "show", "proto", "112") + n.Run(t, "ip", "-6", "route", "show", "proto", "112") + n.Run(t, "nft", "list", "tables") +
		n.Run(t, "sh", "-c", "ip -br link | grep -e portal -e ^pod")
}

func at(a netip.Addr, port int) string { return net.JoinHostPort(a.String(), fmt.Sprint(port)) }

// expect asks and demands who is seen to ask.
func expect(t *testing.T, what string, from machine, address string, want netip.Addr) {
	t.Helper()
	got, err := from.Ask(address)
	if err != nil || got != want.String() {
		t.Errorf("%s at %s: seen as %q, want %s (%v)", what, address, got, want, err)
	}
}

// eachOther: Pods of two nodes reach each other, and the other's node reaches them.
func eachOther(t *testing.T, a, b *node) {
	t.Helper()
	podsReach(t, a, b)
	for _, pair := range [][2]*node{{a, b}, {b, a}} {
		from, to := pair[0], pair[1]
		for other, q := range to.pods {
			for _, addr := range q.addrs {
				if got, err := from.Ask(at(addr, 8080)); err != nil {
					t.Errorf("node %s to %s at %s: %q, %v", from.Name, other, addr, got, err)
				}
			}
		}
	}
}

// podsReach: Pods of two nodes reach each other in both families with their own addresses.
func podsReach(t *testing.T, a, b *node) {
	t.Helper()
	for _, pair := range [][2]*node{{a, b}, {b, a}} {
		from, to := pair[0], pair[1]
		for name, p := range from.pods {
			for other, q := range to.pods {
				for family := range p.addrs {
					expect(t, name+" to "+other, p.machine, at(q.addrs[family], 8080), p.addrs[family])
					s := p.DialUDP(t, at(q.addrs[family], 8080))
					if got, err := s.Ask(); err != nil || got != p.addrs[family].String() {
						t.Errorf("%s to %s by UDP: %q, %v", name, other, got, err)
					}
				}
			}
		}
	}
}

// oneLink is two nodes on one link, with a router to an outside machine.
func oneLink(t *testing.T) (a, b *node, outside machine) {
	t.Helper()
	lan := newMachine(t)
	lan.router(t)
	lan.ip(t, "link add lan type bridge")
	lan.ip(t, "link set lan up")
	lan.address(t, "lan", "192.0.2.254/24", "2001:db8::fe/64")
	a, b = newNode(t, "a", 1, "192.0.2.1", "2001:db8::1"), newNode(t, "b", 2, "192.0.2.2", "2001:db8::2")
	for _, n := range []*node{a, b} {
		n.lan = lan
		connect(t, n.machine, "eth0", lan, "to-"+n.Name)
		lan.ip(t, "link set to-"+n.Name+" master lan")
		n.address(t, "eth0", n.Addresses[0].String()+"/24", n.Addresses[1].String()+"/64")
		n.ip(t, "route add default via 192.0.2.254")
		n.ip(t, "-6 route add default via 2001:db8::fe")
	}
	outside = newMachine(t)
	connect(t, outside, "eth0", lan, "out")
	lan.address(t, "out", "203.0.113.254/24", "2001:db8:2::fe/64")
	outside.address(t, "eth0", "203.0.113.9/24", "2001:db8:2::9/64")
	outside.ip(t, "route add default via 203.0.113.254")
	outside.ip(t, "-6 route add default via 2001:db8:2::fe")
	return a, b, outside
}

// apart is two nodes with a router between them.
func apart(t *testing.T, addressesA, addressesB []string) (a, b *node, router machine) {
	t.Helper()
	router = newMachine(t)
	router.router(t)
	a, b = newNode(t, "a", 1, addressesA...), newNode(t, "b", 2, addressesB...)
	for i, n := range []*node{a, b} {
		connect(t, n.machine, "eth0", router, "to-"+n.Name)
		net4, net6 := fmt.Sprintf("198.51.%d.", 100+i), fmt.Sprintf("2001:db8:%d::", i+1)
		router.address(t, "to-"+n.Name, net4+"254/24", net6+"fe/64")
		n.address(t, "eth0", net4+"1/24", net6+"1/64")
		n.ip(t, "route add default via "+net4+"254")
		n.ip(t, "-6 route add default via "+net6+"fe")
	}
	return a, b, router
}

func TestDirect(t *testing.T) {
	a, b, _ := oneLink(t)
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
		n.pod(t, "pod-of-"+n.Name)
		n.sync(t, a, b) // changes nothing
	}
	eachOther(t, a, b)
	for family, q := range b.pods["pod-of-b"].addrs {
		expect(t, "the node", a.machine, at(q, 8080), a.Addresses[family])
	}
	if links := a.Run(t, "ip", "-br", "link"); strings.Contains(links, "vxlan") {
		t.Errorf("a tunnel that nobody needs: %s", links)
	}
	if got := a.pods["pod-of-a"].ip(t, "link show eth0"); !strings.Contains(got, "mtu 1500") {
		t.Error(got)
	}
	for _, n := range []*node{a, b} {
		n.remove(t)
		if left := n.traces(t); left != "" {
			t.Errorf("left on %s:\n%s", n.Name, left)
		}
	}
}

func TestTunnel(t *testing.T) {
	for name, c := range map[string]struct {
		a, b []string
		mtu  int
	}{
		"over IPv4": {[]string{"198.51.100.1", "2001:db8:1::1"}, []string{"198.51.101.1", "2001:db8:2::1"}, 1450},
		"over IPv6": {[]string{"2001:db8:1::1"}, []string{"2001:db8:2::1"}, 1430},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, _ := apart(t, c.a, c.b)
			for _, n := range []*node{a, b} {
				n.sync(t, a, b)
				n.pod(t, "pod-of-"+n.Name)
				n.sync(t, a, b)
			}
			eachOther(t, a, b)
			q := b.pods["pod-of-b"]
			for family, addr := range q.addrs {
				expect(t, "the node", a.machine, at(addr, 8080), network.Gateway(a.PodCIDRs[family]))
			}
			if got := q.ip(t, "link show eth0"); !strings.Contains(got, fmt.Sprintf("mtu %d", c.mtu)) {
				t.Error(got)
			}
			bulk(t, a.pods["pod-of-a"], q)
			drift(t, a, b)
			gone(t, a, b)
		})
	}
}

// bulk sends packets of full size through what is between two Pods.
func bulk(t *testing.T, from, to *pod) {
	t.Helper()
	const size = 4 << 20
	for _, addr := range to.addrs {
		received := make(chan int64, 1)
		to.Do(func() {
			l, err := net.Listen("tcp", at(addr, 9000))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			go func() {
				c, err := l.Accept()
				if err != nil {
					received <- -1
					return
				}
				n, _ := io.Copy(io.Discard, c)
				received <- n
			}()
		})
		from.Do(func() {
			c, err := net.DialTimeout("tcp", at(addr, 9000), 2*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := c.Write(make([]byte, size)); err != nil {
				t.Errorf("%s: %v", addr, err)
			}
		})
		select {
		case n := <-received:
			if n != size {
				t.Errorf("%s: %d bytes arrived", addr, n)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: nothing arrived", addr)
		}
	}
}

// drift: what somebody else changes is made right again.
func drift(t *testing.T, a, b *node) {
	t.Helper()
	device := strings.Fields(a.Run(t, "sh", "-c", "ip -br link | grep portal-vxlan"))[0]
	for _, harm := range []string{
		"ip route del 10.244.2.0/24", "ip -6 route del fd00:244:0:2::/64", "ip route replace unreachable 10.244.2.0/24 proto 112", "ip neigh flush all nud permanent dev DEV",
		"bridge fdb flush dev DEV 2>/dev/null || bridge fdb show dev DEV | awk '{print $1, $3}' | while read mac dst; do bridge fdb del $mac dev DEV dst $dst; done",
		"ip link set DEV down", "ip link del DEV", "ip addr flush dev DEV", "ip link set DEV mtu 1300",
		"ip route add 10.99.0.0/16 via 198.51.100.254 proto 112",
	} {
		if out := a.Run(t, "sh", "-c", strings.ReplaceAll(harm, "DEV", device)); out != "" {
			t.Logf("%s: %s", harm, out)
		}
		a.sync(t, a, b)
		p, q := a.pods["pod-of-a"], b.pods["pod-of-b"]
		for family := range p.addrs {
			expect(t, "after "+harm, p.machine, at(q.addrs[family], 8080), p.addrs[family])
			expect(t, "the other way, after "+harm, q.machine, at(p.addrs[family], 8080), q.addrs[family])
		}
	}
	if got := a.Run(t, "ip", "route", "show", "10.99.0.0/16"); got != "" {
		t.Errorf("a route that nobody wants any more: %s", got)
	}
}

// gone: a node that leaves leaves nothing, and the last one that is tunnelled to takes the tunnel with it.
func gone(t *testing.T, a, b *node) {
	t.Helper()
	third := &node{Node: peers.Node{Name: "c", Addresses: b.Addresses, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}}}
	third.Addresses = nil
	for _, addr := range b.Addresses {
		third.Addresses = append(third.Addresses, addr.Next())
	}
	a.sync(t, a, b, third)
	entries := func() string {
		return a.Run(t, "sh", "-c", "for d in portal-vxlan portal-vxlan6; do ip link show $d >/dev/null 2>&1 || continue; bridge fdb show dev $d; ip neigh show dev $d nud permanent; ip -6 neigh show dev $d nud permanent; done; ip route show proto 112")
	}
	if got := entries(); !strings.Contains(got, "10.244.3.1") || !strings.Contains(got, third.Addresses[0].String()) {
		t.Errorf("a new node is missing:\n%s", got)
	}
	a.sync(t, a, b)
	if got := entries(); strings.Contains(got, "10.244.3.") || strings.Contains(got, third.Addresses[0].String()) || !strings.Contains(got, "10.244.2.1") {
		t.Errorf("after the node has gone:\n%s", got)
	}
	a.sync(t, a)
	if links := a.Run(t, "ip", "-br", "link"); strings.Contains(links, "vxlan") {
		t.Errorf("left:\n%s", links)
	}
	for _, n := range []*node{a, b} {
		n.remove(t)
		if left := n.traces(t); left != "" {
			t.Errorf("left on %s:\n%s", n.Name, left)
		}
	}
}

// TestLinkComes: when nodes get a link to each other, they leave the tunnel, without a packet lost; and the other way round.
func TestLinkComes(t *testing.T) {
	a, b, _ := apart(t, []string{"198.51.100.1", "2001:db8:1::1"}, []string{"198.51.101.1", "2001:db8:2::1"})
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
		n.pod(t, "pod-of-"+n.Name)
	}
	p, q := a.pods["pod-of-a"], b.pods["pod-of-b"]
	kind := func(want peers.Kind) {
		t.Helper()
		for _, n := range []*node{a, b} {
			for to, w := range n.plan.Ways {
				if to.Addr().Is4() && w.Kind != want {
					t.Errorf("node %s to %s: %s", n.Name, to, w.Kind)
				}
			}
		}
	}
	kind(peers.Tunnelled)
	flow := openFlow(t, p, q)
	connect(t, a.machine, "eth1", b.machine, "eth1")
	a.address(t, "eth1", "198.51.101.100/24")
	b.address(t, "eth1", "198.51.100.100/24")
	flow.alive(t, "with a link between the nodes")
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
	}
	kind(peers.Direct)
	flow.alive(t, "by the link")
	podsReach(t, a, b)
	a.ip(t, "link del eth1")
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
	}
	kind(peers.Tunnelled)
	flow.alive(t, "by the tunnel again")
	eachOther(t, a, b)
}

// flow is a connection that is kept.
type flow struct{ net.Conn }

func openFlow(t *testing.T, from, to *pod) *flow {
	t.Helper()
	to.Do(func() {
		l, err := net.Listen("tcp", ":9100")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			if c, err := l.Accept(); err == nil {
				_, _ = io.Copy(c, c)
			}
		}()
	})
	f := &flow{}
	from.Do(func() {
		c, err := net.DialTimeout("tcp", at(to.addrs[0], 9100), 2*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		f.Conn = c
	})
	t.Cleanup(func() { f.Close() })
	f.alive(t, "at first")
	return f
}

func (f *flow) alive(t *testing.T, when string) {
	t.Helper()
	_ = f.SetDeadline(time.Now().Add(3 * time.Second))
	buf := make([]byte, 5)
	_, err := f.Write([]byte("hello"))
	if err == nil {
		_, err = io.ReadFull(f, buf)
	}
	if err != nil {
		t.Errorf("a connection %s: %v", when, err)
	}
}

// TestForeignRoute: what others made stays, and is named.
func TestForeignRoute(t *testing.T) {
	a, b, _ := oneLink(t)
	a.ip(t, "route add 10.244.2.0/24 via 192.0.2.254")
	a.Do(func() {
		links, err := peers.Links("portal0")
		if err != nil {
			t.Fatal(err)
		}
		err = peers.Apply(peers.Make(peers.Input{Self: a.Node, Links: links, Peers: []peers.Node{b.Node}}))
		if err == nil || !strings.Contains(err.Error(), "10.244.2.0/24: there is a route that Portal did not make") {
			t.Error(err)
		}
	})
	if got := a.ip(t, "route show 10.244.2.0/24"); !strings.Contains(got, "via 192.0.2.254") || strings.Contains(got, "112") {
		t.Error(got)
	}
	if got := a.Run(t, "ip", "-6", "route", "show", "fd00:244:0:2::/64"); !strings.Contains(got, "2001:db8::2") {
		t.Errorf("the other route: %q", got)
	}
}

// TestUnassigned: packets to addresses of Pods that nobody has don't leave by the default route.
func TestUnassigned(t *testing.T) {
	a, b, _ := oneLink(t)
	a.sync(t, a, b)
	a.ip(t, "link del portal0")
	for _, to := range []string{"10.244.1.77", "fd00:244:0:1::77"} {
		if got := a.Run(t, "ip", "route", "get", to); !strings.Contains(got, "No route to host") {
			t.Errorf("%s: %s", to, got)
		}
	}
	silent := &node{Node: peers.Node{Name: "c", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24")}}}
	a.Do(func() {
		links, _ := peers.Links("portal0")
		if err := peers.Apply(peers.Make(peers.Input{Self: a.Node, Links: links, Peers: []peers.Node{silent.Node}})); err != nil {
			t.Fatal(err)
		}
	})
	if got := a.Run(t, "ip", "route", "get", "10.244.3.5"); !strings.Contains(got, "No route to host") {
		t.Errorf("a node without an address: %s", got)
	}
}
