package network_test

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"portal/internal/node/network"
	"portal/internal/node/network/nat"
)

// TestMasquerade: outside of the cluster Pods are seen as their node, inside as themselves.
func TestMasquerade(t *testing.T) {
	a, b, outside := oneLink(t)
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
		n.pod(t, "pod-of-"+n.Name)
	}
	outside.Serve(t, ":80")
	b.Serve(t, ":80")
	p := a.pods["pod-of-a"]
	servers := []netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8:2::9")}
	for family, server := range servers {
		expect(t, "a Pod to the outside", p.machine, at(server, 80), a.Addresses[family])
		expect(t, "a Pod to another node", p.machine, at(b.Addresses[family], 80), p.addrs[family])
		expect(t, "a Pod to its own node", b.pods["pod-of-b"].machine, at(b.Addresses[family], 80), b.pods["pod-of-b"].addrs[family])
		expect(t, "a node to the outside", a.machine, at(server, 80), a.Addresses[family])
	}
	eachOther(t, a, b)

	// Turned off, everybody sees the Pod.
	a.state.Masquerade = false
	a.sync(t, a, b)
	outside.Serve(t, ":81")
	for family, server := range servers {
		var seen string
		if family == 0 {
			seen = "10.244.1.0/24 via 192.0.2.1"
		} else {
			seen = "fd00:244:0:1::/64 via 2001:db8::1"
		}
		a.lan.ip(t, "route add "+seen)
		expect(t, "a Pod to the outside, not masqueraded", p.machine, at(server, 81), p.addrs[family])
	}
}

// TestTunnelMasquerade: nodes that are reached by a tunnel are asked with the node's address, as the way back is another.
func TestTunnelMasquerade(t *testing.T) {
	a, b, _ := apart(t, []string{"198.51.100.1", "2001:db8:1::1"}, []string{"198.51.101.1", "2001:db8:2::1"})
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
		n.pod(t, "pod-of-"+n.Name)
	}
	b.Serve(t, ":80")
	for family, addr := range b.Addresses {
		expect(t, "a Pod to a distant node", a.pods["pod-of-a"].machine, at(addr, 80), a.Addresses[family])
	}
}

// hostPort has a port of the node lead to a Pod.
func (n *node) hostPort(t *testing.T, name string, port uint16, host string, protocols ...byte) {
	t.Helper()
	n.state.Ports[name] = nil
	for _, protocol := range protocols {
		for _, a := range n.pods[name].addrs {
			p := nat.Port{Protocol: protocol, HostPort: port, Pod: netip.AddrPortFrom(a, 8080), Interface: network.HostInterface(name)}
			if host != "" {
				p.Host = netip.MustParseAddr(host)
				if p.Host.Is4() != a.Is4() {
					continue
				}
			}
			n.state.Ports[name] = append(n.state.Ports[name], p)
		}
	}
	n.Do(func() {
		if err := n.nat.Sync(n.state); err != nil {
			t.Fatal(err)
		}
	})
}

// expectNode asks and demands that one of the node's addresses is seen.
func expectNode(t *testing.T, what string, from machine, address string, n *node, family int) {
	t.Helper()
	got, err := from.Ask(address)
	if err != nil || got != n.Addresses[family].String() && got != network.Gateway(n.PodCIDRs[family]).String() {
		t.Errorf("%s at %s: seen as %q (%v)", what, address, got, err)
	}
}

func TestHostPort(t *testing.T) {
	a, b, outside := oneLink(t)
	for _, n := range []*node{a, b} {
		n.sync(t, a, b)
		n.pod(t, "pod-of-"+n.Name)
	}
	p, q, beside := a.pods["pod-of-a"], b.pods["pod-of-b"], a.pod(t, "beside")
	if _, err := outside.Ask(at(a.Addresses[0], 8000)); err == nil {
		t.Fatal("somebody answers before there is a port")
	}
	a.hostPort(t, "pod-of-a", 8000, "", unix.IPPROTO_TCP, unix.IPPROTO_UDP)

	clients := []netip.Addr{netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8:2::9")}
	for family, to := range a.Addresses {
		address := at(to, 8000)
		expect(t, "the outside", outside, address, clients[family])
		expect(t, "another node", b.machine, address, b.Addresses[family])
		expect(t, "the node", a.machine, address, to)
		expect(t, "a Pod of another node", q.machine, address, q.addrs[family])
		expect(t, "a Pod beside it", beside.machine, address, beside.addrs[family])
		expectNode(t, "the Pod itself", p.machine, address, a, family)
		expect(t, "the node at its address among Pods", a.machine, at(network.Gateway(a.PodCIDRs[family]), 8000), network.Gateway(a.PodCIDRs[family]))
		for what, from := range map[string]machine{"the outside": outside, "the node": a.machine, "the Pod itself": p.machine} {
			if got, err := from.DialUDP(t, address).Ask(); err != nil {
				t.Errorf("%s by UDP: %q, %v", what, got, err)
			}
		}
		if _, err := outside.Ask(at(to, 8080)); err == nil {
			t.Error("the Pod's own port answers on the node")
		}
		if _, err := outside.Ask(at(b.Addresses[family], 8000)); err == nil {
			t.Error("the port answers on another node")
		}
	}
	expectNode(t, "the node at 127.0.0.1", a.machine, "127.0.0.1:8000", a, 0)
	if got, err := a.DialUDP(t, "127.0.0.1:8000").Ask(); err != nil {
		t.Errorf("127.0.0.1 by UDP: %q, %v", got, err)
	}
	if got, err := a.Ask("[::1]:8000"); err == nil {
		t.Logf("[::1]:8000 answers, too: %s", got)
	}
	// What the kernel lets in for that must not reach the node's own loopback addresses.
	loopback(t, a, p)

	restart(t, a, b, outside)

	delete(a.state.Ports, "pod-of-a")
	a.sync(t, a, b)
	for _, to := range a.Addresses {
		if got, err := outside.Ask(at(to, 8000)); err == nil {
			t.Errorf("after the Pod has gone, %q answers", got)
		}
	}
	if got := a.Run(t, "cat", "/proc/sys/net/ipv4/conf/portal0/route_localnet"); strings.TrimSpace(got) != "0" {
		t.Errorf("route_localnet is %s", got)
	}
}

// TestHostIP: a port at one address is not served at others, and can lead to different Pods.
func TestHostIP(t *testing.T) {
	a, b, outside := oneLink(t)
	a.address(t, "eth0", "192.0.2.11/24")
	a.sync(t, a, b)
	first := a.pod(t, "first")
	a.pod(t, "second")
	a.hostPort(t, "first", 8000, "192.0.2.1", unix.IPPROTO_TCP)
	a.hostPort(t, "second", 8000, "127.0.0.1", unix.IPPROTO_TCP)
	expect(t, "the outside", outside, "192.0.2.1:8000", netip.MustParseAddr("203.0.113.9"))
	if got, err := outside.Ask("192.0.2.11:8000"); err == nil {
		t.Errorf("at another address: %q", got)
	}
	expectNode(t, "the node at 127.0.0.1", a.machine, "127.0.0.1:8000", a, 0)
	// An address that isn't the node's can't be taken.
	a.hostPort(t, "second", 80, "203.0.113.9", unix.IPPROTO_TCP)
	outside.Serve(t, ":80")
	expect(t, "a Pod to the outside", first.machine, "203.0.113.9:80", a.Addresses[0])
	expect(t, "the node to the outside", a.machine, "203.0.113.9:80", a.Addresses[0])
}

// TestUDPFlows: a client that keeps sending reaches the Pod that has the port now, not the one that had it.
func TestUDPFlows(t *testing.T) {
	a, b, outside := oneLink(t)
	a.sync(t, a, b)
	a.pod(t, "old")
	a.pod(t, "new")
	client := outside.DialUDP(t, at(a.Addresses[0], 8000))
	if got, err := client.Ask(); err == nil {
		t.Fatalf("before there is a port, %q answers", got)
	}
	a.hostPort(t, "old", 8000, "", unix.IPPROTO_UDP)
	if got, err := client.Ask(); err != nil {
		t.Errorf("the flow from before there was a port: %q, %v", got, err)
	}
	flows := func() string { return a.Run(t, "conntrack", "-L", "-p", "udp", "--dport", "8000") }
	if got := flows(); !strings.Contains(got, "src="+a.pods["old"].addrs[0].String()) {
		t.Errorf("flows: %s", got)
	}
	delete(a.state.Ports, "old")
	a.hostPort(t, "new", 8000, "", unix.IPPROTO_UDP)
	if got, err := client.Ask(); err != nil {
		t.Errorf("the flow of the Pod that had the port: %q, %v", got, err)
	}
	if got := flows(); !strings.Contains(got, "src="+a.pods["new"].addrs[0].String()) || strings.Contains(got, "src="+a.pods["old"].addrs[0].String()) {
		t.Errorf("flows: %s", got)
	}
}

// restart: another process goes on without touching what is right.
func restart(t *testing.T, a, b *node, outside machine) {
	t.Helper()
	client := outside.DialUDP(t, at(a.Addresses[0], 8000))
	if _, err := client.Ask(); err != nil {
		t.Error(err)
	}
	before := a.Run(t, "nft", "-a", "list", "ruleset") // with handles: a rule that is written again has another
	done, stopped := make(chan struct{}), make(chan int)
	go func() {
		failures := 0
		for {
			select {
			case <-done:
				stopped <- failures
				return
			default:
				if _, err := outside.Ask(at(a.Addresses[0], 8000)); err != nil {
					failures++
				}
			}
		}
	}()
	for range 3 {
		a.restart(t)
		a.sync(t, a, b)
	}
	time.Sleep(50 * time.Millisecond)
	close(done)
	if n := <-stopped; n > 0 {
		t.Errorf("%d requests failed during restarts", n)
	}
	if after := a.Run(t, "nft", "-a", "list", "ruleset"); after != before {
		t.Errorf("a restart changed the rules:\n%s\n%s", before, after)
	}
	// Somebody flushes everything.
	a.Run(t, "nft", "flush", "ruleset")
	a.sync(t, a, b)
	expect(t, "after a flush", outside, at(a.Addresses[0], 8000), netip.MustParseAddr("203.0.113.9"))
}

// loopback: a Pod that sends to 127.0.0.1 by the node reaches nobody, although the kernel would let it.
func loopback(t *testing.T, n *node, p *pod) {
	t.Helper()
	var server net.PacketConn
	n.Do(func() {
		var err error
		if server, err = net.ListenPacket("udp4", "127.0.0.1:5353"); err != nil {
			t.Fatal(err)
		}
	})
	defer server.Close()
	heard := func() bool {
		for range 3 {
			p.Do(func() { sendToLoopback(t, p.addrs[0]) })
		}
		_ = server.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		_, _, err := server.ReadFrom(make([]byte, 100))
		return err == nil
	}
	if heard() {
		t.Error("a Pod reaches the node at 127.0.0.1")
	}
	n.Run(t, "nft", "flush", "chain", "ip", "portal-node", "guard")
	if !heard() {
		t.Error("the attempt does not reach the node even without the guard: it proves nothing")
	}
	n.Do(func() {
		if err := n.nat.Sync(n.state); err != nil {
			t.Fatal(err)
		}
	})
	for end := time.Now().Add(time.Second); heard() && time.Now().Before(end); { // what was on its way
	}
	if heard() {
		t.Error("the guard was not repaired")
	}
}

// sendToLoopback sends a datagram to 127.0.0.1:5353 as it were elsewhere.
func sendToLoopback(t *testing.T, from netip.Addr) {
	eth, err := net.InterfaceByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	src := from.As4()
	packet := []byte{0x45, 0, 0, 32, 0, 1, 0, 0, 64, 17, 0, 0}
	packet = append(packet, src[:]...)
	packet = append(packet, 127, 0, 0, 1)
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(packet[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(packet[10:], ^uint16(sum+sum>>16))
	packet = append(packet, 0x30, 0x39, 0x14, 0xe9, 0, 12, 0, 0, 'e', 'v', 'i', 'l')
	to := &unix.SockaddrLinklayer{Protocol: 0x0008, Ifindex: eth.Index, Halen: 6, Addr: [8]byte{255, 255, 255, 255, 255, 255}}
	if err := unix.Sendto(fd, packet, 0, to); err != nil {
		t.Fatal(err)
	}
}
