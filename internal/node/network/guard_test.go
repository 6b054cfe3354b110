package network

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestSpoofing: what a Pod sends with its own address arrives, and what it sends with another's does not: not another Pod's, not the node's,
// none of the outside.
func TestSpoofing(t *testing.T) {
	node, dir := NewNamespace(t), t.TempDir()
	n := newNetwork(t, dir)
	pods := map[string]*Namespace{}
	addrs := map[string][]netip.Addr{}
	for _, name := range []string{"victim", "thief", "listener"} {
		pods[name] = NewNamespace(t)
		pods[name].Sysctls(t)
	}
	node.Do(func() {
		if err := n.Setup(); err != nil {
			t.Fatal(err)
		}
		for name, pod := range pods {
			got, err := n.Attach(t.Context(), Pod{UID: name}, pod.Path)
			if err != nil {
				t.Fatal(err)
			}
			addrs[name] = got
		}
	})
	outside := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	for family := range cidrs {
		var conn net.PacketConn
		var err error
		pods["listener"].Do(func() {
			conn, err = net.ListenPacket("udp", net.JoinHostPort(addrs["listener"][family].String(), "0"))
		})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		send := func(name, text string, from netip.Addr) {
			pods[name].Do(func() {
				out, err := net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, conn.LocalAddr().(*net.UDPAddr))
				if err != nil {
					t.Errorf("%s as %s: %v", name, from, err)
					return
				}
				defer out.Close()
				_, _ = fmt.Fprint(out, text)
			})
		}
		for _, as := range []netip.Addr{addrs["victim"][family], Gateway(cidrs[family]), outside[family]} {
			bits := fmt.Sprint("/", as.BitLen())
			flags := []string{"ip", "addr", "add", as.String() + bits, "dev", podInterface}
			if as.Is6() {
				flags = append(flags, "nodad")
			}
			pods["thief"].Run(t, flags...)
			send("thief", "forged "+as.String(), as)
			pods["thief"].Run(t, "ip", "addr", "del", as.String()+bits, "dev", podInterface)
		}
		send("victim", "from the victim", addrs["victim"][family])
		send("thief", "the end", addrs["thief"][family])
		got := map[string]string{}
		for _ = conn.SetReadDeadline(time.Now().Add(10 * time.Second)); got["the end"] == ""; {
			buf := make([]byte, 100)
			k, from, err := conn.ReadFrom(buf)
			if err != nil {
				t.Fatalf("own addresses don't arrive: %v, got %v", err, got)
			}
			got[string(buf[:k])] = from.String()
			if text := string(buf[:k]); strings.HasPrefix(text, "forged") {
				t.Errorf("%s came from %s", text, from)
			}
		}
		if from := got["from the victim"]; !strings.Contains(from, addrs["victim"][family].String()) {
			t.Errorf("the victim's own came from %q", from)
		}
	}
	// A Pod that is gone leaves no rule, and one that has its address later may use it.
	node.Do(func() {
		if err := n.Detach(t.Context(), "victim"); err != nil {
			t.Error(err)
		}
	})
	rules := node.Run(t, "nft", "list", "table", "bridge", "portal-node")
	if strings.Contains(rules, HostInterface("victim")) || !strings.Contains(rules, HostInterface("thief")) {
		t.Errorf("the rules:\n%s", rules)
	}
	node.Do(func() {
		if err := n.Remove(); err != nil {
			t.Error(err)
		}
	})
	if left := node.Run(t, "nft", "list", "ruleset"); strings.Contains(left, "portal-node") {
		t.Errorf("left:\n%s", left)
	}
}
