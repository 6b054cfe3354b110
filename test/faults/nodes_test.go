//go:build faults

package faults

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nodeFault is something wrong with a whole node or with what all Services need: one at a time.
type nodeFault struct {
	name, code, says string
	wrong, right     func() error
	// ask is what explain is asked; default: service s0 of the namespace many.
	ask []string
	// fix: what is printed is typed, and it helps.
	fix bool
	// lasting: it is said for a while afterwards.
	lasting bool
	// again: the agent mends it by itself, so that it is done again until explain is asked in between.
	again bool
}

func (c *cluster) ofNodes() []nodeFault {
	on := func(node, line string) func() error { return func() error { return c.on(node, line) } }
	here := func(line string) func() error {
		return func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if out, err := c.shell(ctx, line); err != nil {
				return fmt.Errorf("%s: %w: %s", line, err, out)
			}
			return nil
		}
	}
	restart := func(before, after func() error) func() error {
		return func() error {
			if err := before(); err != nil {
				return err
			}
			if err := c.Node("node2").Kill(); err != nil {
				return err
			}
			if after != nil {
				if err := after(); err != nil {
					return err
				}
			}
			return c.Node("node2").Start()
		}
	}
	return []nodeFault{
		{name: "no forwarding", code: "host-setting", says: "net.ipv4.ip_forward is 0", wrong: on("node2", "sysctl -w net.ipv4.ip_forward=0"), fix: true, again: true},
		{name: "no forwarding of IPv6", ask: []string{"service", "s4", "-n", "many"}, code: "host-setting", says: "net.ipv6.conf.all.forwarding is 0", wrong: on("node2", "sysctl -w net.ipv6.conf.all.forwarding=0"), fix: true, again: true},
		{name: "a small MTU", code: "mtu", says: "1280", wrong: on("node2", "ip link set eth0 mtu 1280"), fix: true},
		{name: "DNS that is blocked", code: "dns-unreachable", says: "node node2", wrong: c.block("output", "udp dport 53", true), right: c.block("output", "", false)},
		{name: "endpoints that are blocked", code: "endpoint-unreachable", says: "from node node2", wrong: c.block("output", "tcp dport 9376", true), right: c.block("output", "", false)},
		{name: "a network that loses all packets of Pods", code: "endpoint-unreachable", says: "from node node2", wrong: c.block("output", "ip daddr 10.244.0.0/16 tcp dport 9376", true), right: c.block("output", "", false)},
		{name: "an address that another node has", code: "address-taken", says: "192.168.100.11", wrong: on("node2", "ip address add 192.168.100.11/32 dev eth0"), fix: true},
		{name: "rules that somebody removed", code: "proxy-drift", says: "node2", wrong: on("node2", "nft flush ruleset"), lasting: true},
		{name: "rules of another proxy", code: "proxy-foreign", says: "node2", wrong: restart(on("node2", "iptables -t nat -N KUBE-SERVICES; iptables -t nat -A KUBE-SERVICES -d 10.96.0.99/32 -p tcp -j ACCEPT; iptables -t nat -A PREROUTING -j KUBE-SERVICES"), nil), fix: true},
		{name: "rules of another proxy that came later", code: "proxy-foreign", says: "node2", wrong: on("node2", "nft 'add table ip kube-proxy; add chain ip kube-proxy services'"), fix: true},
		{name: "a full table of connections", code: "conntrack-full", says: "node2", wrong: c.fillConntrack, right: on("node2", "conntrack -F")},
		{name: "a leader that is gone", code: "controllers-stopped", says: "portal-controllers", wrong: here(`kubectl patch lease -n kube-system portal-controllers --type=merge -p '{"spec":{"holderIdentity":"ghost","leaseDurationSeconds":3600}}'`), fix: true},
		{name: "nodes that are cordoned", code: "pods-pending", says: "cordoned", ask: []string{"service", "new", "-n", "many"}, wrong: here("kubectl cordon node1 node2 && kubectl create deployment new -n many --image=portal -- /portal echo --listen :80 && kubectl expose deployment new -n many --port=80"), fix: true, right: here("kubectl uncordon node1 node2; kubectl delete deployment,service new -n many")},
		{name: "nodes with a taint", code: "pods-pending", says: "dedicated", ask: []string{"service", "new", "-n", "many"}, wrong: here("kubectl taint nodes node1 node2 dedicated=db:NoSchedule && kubectl create deployment new -n many --image=portal -- /portal echo --listen :80 && kubectl expose deployment new -n many --port=80"), fix: true, right: here("kubectl taint nodes --all dedicated- ; kubectl delete deployment,service new -n many")},
		{name: "a node that is cut off", code: "node-not-ready", says: "node2", wrong: func() error { return c.Cut("node2") }, right: func() error { return c.Heal("node2") }},
		{name: "an agent that was killed", code: "node-not-ready", says: "node2", wrong: c.Node("node2").Kill, right: c.Node("node2").Start},
	}
}

// fillConntrack gives node2 as many connections as its table takes, nearly.
func (c *cluster) fillConntrack() error {
	return c.Node("node2").Do(func() error {
		const most = 262144
		h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer h.Close()
		peer := netip.MustParseAddr("192.0.2.1").AsSlice()
		for i := range most * 95 / 100 {
			self := netip.AddrFrom4([4]byte{198, 18, byte(i >> 16), byte(i >> 8)}).AsSlice()
			flow := &netlink.ConntrackFlow{
				FamilyType: unix.AF_INET, TimeOut: 600,
				Forward: netlink.IPTuple{SrcIP: self, DstIP: peer, SrcPort: uint16(1024 + i&255), DstPort: 80, Protocol: unix.IPPROTO_UDP},
				Reverse: netlink.IPTuple{SrcIP: peer, DstIP: self, SrcPort: 80, DstPort: uint16(1024 + i&255), Protocol: unix.IPPROTO_UDP},
			}
			if err := h.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow); err != nil {
				return fmt.Errorf("connection %d: %w", i, err)
			}
		}
		return nil
	})
}

func (c *cluster) tryNode(t *testing.T, f nodeFault) {
	ask := f.ask
	if ask == nil {
		ask = []string{"service", "s0", "-n", "many"}
	}
	if err := f.wrong(); err != nil {
		t.Fatal(err)
	}
	mended := f.right == nil
	mend := func() {
		if mended {
			return
		}
		mended = true
		if err := f.right(); err != nil {
			t.Error(err)
		}
	}
	defer mend() // the next fault is another
	if complaint := until(t, patience, func(ctx context.Context) string {
		if f.again {
			if err := f.wrong(); err != nil {
				return err.Error()
			}
		}
		a, first, err := c.explain(ctx, ask...)
		if err != nil || len(a.Findings) == 0 || a.Findings[0].Code != f.code || !strings.Contains(first, f.says) {
			return fmt.Sprint(first, err)
		}
		if f.fix {
			c.fix(t, a.Findings[0])
		}
		return ""
	}); complaint != "" {
		t.Fatal(complaint)
	}
	if !f.fix {
		mend()
	}
	c.over(t, f, ask)
}

// over: what was wrong is not said any more.
func (c *cluster) over(t *testing.T, f nodeFault, ask []string) {
	if f.lasting {
		return
	}
	if complaint := until(t, patience, func(ctx context.Context) string {
		a, first, err := c.explain(ctx, ask...)
		if err != nil || len(a.Findings) > 0 && a.Findings[0].Code == f.code {
			return fmt.Sprint(first, err)
		}
		return ""
	}); complaint != "" {
		t.Errorf("afterwards: %s", complaint)
	}
}
